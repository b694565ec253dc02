"""Random calls of the prefill kernels: drawn, made, and compared with the reference in float64.

A kind is what a kernel is compiled for (dtype, head sizes, which arguments there are); the cases of
a kind differ in everything else. Both follow from one seed.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import torch
from torch import Tensor

from elastic_compile.kernels import ops, reference
from elastic_compile.kernels._call import AttentionCall

SEED = int(os.environ.get("ELASTIC_COMPILE_FUZZ_SEED", "1"))
CASES = int(os.environ.get("ELASTIC_COMPILE_FUZZ", "0"))
KINDS = 48
PER_KIND = max(-(-CASES // KINDS), 1)
# Norm over norm, of the output; absolute, of the log-sum-exp.
TOLERANCE = {
    torch.float32: (3e-6, 1e-4),
    torch.float16: (1e-3, 2e-3),
    torch.bfloat16: (4e-3, 1e-2),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What stays the same in all cases of a kind."""

    number: int
    kernel: str
    dtype: torch.dtype
    size: int
    value_size: int
    group: int
    modes: tuple[str, str]
    layout: str
    start: bool
    kv_len: str
    mask: bool
    softcap: bool
    sinks: bool
    scale: str

    @property
    def random(self) -> random.Random:
        """Draws the kind's cases."""
        return random.Random(f"{SEED} {self.number}")


def kinds(seed: int = SEED) -> list[Kind]:
    """Every second kind is one that the Hopper kernel takes."""
    draw = random.Random(seed)
    found = []
    for number in range(KINDS):
        gluon = number % 2 == 1
        size = draw.choice([80, 96, 112, 128, 128, 128] if gluon else [16, 64, 64, 80, 128, 256])
        halves = [torch.bfloat16, torch.float16]
        found.append(
            Kind(
                number=number,
                kernel="gluon" if gluon else "triton",
                dtype=draw.choice(halves if gluon else [*halves, torch.float32]),
                size=size,
                value_size=size if gluon else draw.choice([size, size, 40]),
                group=draw.choice([1, 2, 3, 4, 7, 8]),
                modes=draw.choice(
                    [("full", "streaming")] * 4
                    + [("streaming", "full"), ("full",) * 2, ("streaming",) * 2]
                ),
                layout=draw.choice(["bshd", "bshd", "bhsd"] + ["odd"] * (not gluon)),
                start=draw.random() < 0.5,
                kv_len=draw.choice(["none", "none", "scalar", "each"]),
                mask=draw.random() < 0.5,
                softcap=not gluon and draw.random() < 0.3,
                sinks=not gluon and draw.random() < 0.3,
                scale=draw.choice(["none", "none", "number", "negative", "zero"])
                if gluon
                else draw.choice(["none", "none", "number", "negative", "zero", "tensor"]),
            )
        )
    return found


def tensor(kind: Kind, draw: random.Random, shape: tuple[int, ...], device: str) -> Tensor:
    """Random [B, H, S, D] in the kind's memory layout."""
    generator = torch.Generator(device).manual_seed(draw.randrange(2**31))
    batch, heads, length, size = shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(kind.dtype)

    if kind.layout == "bhsd":
        return normal(batch, heads, length, size)
    if kind.layout == "odd":
        return normal(batch, length, heads, size + 1).transpose(1, 2)[..., 1:]
    return normal(batch, length, heads, size).transpose(1, 2)


def case(kind: Kind, draw: random.Random, device: str, largest: int = 700) -> AttentionCall:
    """One call; keys and values that must not be read are NaN."""
    batch, kv_heads = draw.randint(1, 4), draw.randint(1, 8)
    least = 128 if kind.kernel == "gluon" else 1
    rows = draw.choice([least, draw.randint(least, largest), draw.randint(least, largest)])
    filled = draw.choice([rows, rows + draw.randint(0, largest), draw.randint(1, rows)])
    held = filled + (draw.randint(0, 70) if kind.kv_len != "none" else 0)
    query = tensor(kind, draw, (batch, kv_heads * kind.group, rows, kind.size), device)
    key = tensor(kind, draw, (batch, kv_heads, held, kind.size), device)
    value = tensor(kind, draw, (batch, kv_heads, held, kind.value_size), device)
    options: dict[str, Any] = {}
    column = torch.arange(held)
    lengths = torch.full((batch,), filled)
    if kind.kv_len == "scalar":
        options["kv_len"] = torch.tensor(filled)
    elif kind.kv_len == "each":
        lengths = torch.tensor([draw.randint(1, filled) for _ in range(batch)])
        options["kv_len"] = lengths
    starts = torch.zeros(batch, dtype=torch.int64)
    if kind.start:
        starts = torch.tensor([draw.randint(0, filled - 1) for _ in range(batch)])
        options["start"] = starts.to(draw.choice([torch.int32, torch.int64]))
    real = (column >= starts[:, None]) & (column < lengths[:, None])
    if kind.mask:
        mask = torch.stack([_mask(draw, held) for _ in range(batch)])
        options["key_mask"] = mask
        real = real & mask
    for x in (key, value):
        x.masked_fill_(~real[:, None, :, None].to(device), torch.nan)
    if kind.softcap:
        options["softcap"] = draw.choice([0.7, 20.0])
    if kind.sinks:
        sinks = [draw.uniform(-5, 5) for _ in range(query.shape[1])]
        options["sinks"] = torch.tensor(sinks, dtype=kind.dtype)
    factor = {"number": 0.3, "negative": -0.2, "zero": 0.0, "tensor": draw.uniform(-0.3, 0.3)}
    if kind.scale == "tensor":
        options["scale_tensor"] = torch.tensor(factor["tensor"])
    elif kind.scale != "none":
        options["scale"] = factor[kind.scale]
    return AttentionCall(
        query,
        key,
        value,
        torch.tensor(
            [[draw.randint(0, 1) for _ in range(kv_heads)] for _ in range(batch)],
            dtype=torch.int32,
        ).to(device),
        draw.choice([0, draw.randint(0, 300)]),
        draw.choice([1, draw.randint(1, 600)]),
        *kind.modes,
        implementation=kind.kernel,
        **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()},
    )


def _mask(draw: random.Random, length: int) -> Tensor:
    """All real, padded on a side or on both, with holes, or nothing real."""
    column = torch.arange(length)
    low, high = sorted((draw.randint(0, length), draw.randint(0, length)))
    what = draw.choice(["ones", "left", "right", "both", "holes", "nothing"])
    if what == "holes":
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        return torch.rand(length, generator=generator) < 0.7
    mask = torch.ones(length, dtype=torch.bool)
    if what in ("left", "both"):
        mask &= column >= low
    if what in ("right", "both"):
        mask &= column < high
    return mask & (what != "nothing")


def run(call: AttentionCall, kernel: str) -> tuple[Tensor, Tensor]:
    """The operator's results."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    fields.pop("implementation")
    number, scale = fields.pop("scale"), fields.pop("scale_tensor")
    tensors = [fields.pop(name) for name in ("query", "key", "value", "route")]
    return ops.attention(
        *tensors, scale=number if scale is None else scale, kernel=kernel, **fields
    )


def check(call: AttentionCall, out: Tensor, lse: Tensor) -> None:
    """Compares results with the reference in float64."""
    wanted, wanted_lse = reference.forward(call, torch.float64)
    relative, absolute = TOLERANCE[call.query.dtype]
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "which rows see nothing"
    assert torch.all(out[empty] == 0), "rows that see nothing"
    if empty.all():
        return
    error = torch.linalg.norm(out.double() - wanted) / torch.linalg.norm(wanted)
    assert error < relative, f"output: {error:.2e}"
    error = (lse.double() - wanted_lse)[~empty].abs().max()
    assert error < absolute, f"log-sum-exp: {error:.2e}"


def described(call: AttentionCall) -> str:
    """Shapes and numbers of a call, for a message."""
    parts = [f"query {list(call.query.shape)}", f"key {list(call.key.shape)}"]
    parts += [f"sink {call.sink}", f"local {call.local}", f"route {call.route.tolist()}"]
    for name in ("start", "kv_len"):
        value = getattr(call, name)
        if value is not None:
            parts.append(f"{name} {value.tolist()}")
    return ", ".join(parts)
