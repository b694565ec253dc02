"""Random calls of the prefill kernels: drawn, made, and compared with the float64 oracle.

A kind is what a kernel is compiled for (dtype, head sizes, memory layout, which arguments there
are); the cases of a kind differ in everything else, so that more cases cost no more compilation.
All follow from one seed: case ``n`` is one of kind ``n % KINDS``, whatever was drawn before it.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from elastic_compile.kernels import ops, triton_prefill
from elastic_compile.kernels._call import AttentionCall
from elastic_compile.kernels.triton_prefill import Config
from tests import oracle

T = TypeVar("T")
KINDS = 60
SEED = int(os.environ.get("ELASTIC_COMPILE_FUZZ_SEED", "1"))
CASES = int(os.environ.get("ELASTIC_COMPILE_FUZZ", "0")) or KINDS
ONLY = os.environ.get("ELASTIC_COMPILE_FUZZ_CASE")

# Norm over norm, of the whole output and of its worst row. A row that lost one key of 1,500 is
# off by 1 / sqrt(1500); among thousands of rows the whole norm would not show it.
TOLERANCE = {
    torch.float32: (3e-6, 3e-5),
    torch.float16: (1e-3, 3e-3),
    torch.bfloat16: (5e-3, 2e-2),
}
FLOOR = 1e-4
"""Of an element, in these norms: float16 has no better than 3e-8 for what learned sinks shrink."""
LSE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-4, torch.bfloat16: 3e-4}
MANY = 0
"""Stands for more than 64 query rows."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What stays the same in all cases of a kind."""

    number: int
    kernel: str
    config: Config | None
    """Overrides the one that the Triton kernel chooses."""
    dtype: torch.dtype
    size: int
    value_size: int
    group: int
    rows: int
    """At most so many query rows, and more than half of them; or ``MANY``."""
    modes: tuple[str, str]
    covered: bool
    """Sink and window hold all keys, so that all heads are computed as full ones."""
    layout: str
    start: torch.dtype | None
    kv_len: str
    mask: str
    softcap: bool
    sinks: torch.dtype | None
    scale: str


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large cases get."""

    rows: int = 700
    keys: int = 1500
    batch: int = 4
    kv_heads: int = 8


def kinds(seed: int = SEED) -> list[Kind]:
    """Every third kind is one that the Hopper kernel takes."""
    draw = random.Random(seed)
    triton = _kinds(draw, "triton", KINDS - KINDS // 3)
    gluon = _kinds(draw, "gluon", KINDS // 3)
    order = [gluon.pop() if n % 3 == 2 else triton.pop() for n in range(KINDS)]
    return [dataclasses.replace(kind, number=n) for n, kind in enumerate(order)]


def _kinds(draw: random.Random, kernel: str, count: int) -> list[Kind]:
    """Kinds in which every option occurs, in proportion to how often it is listed."""
    hopper = kernel == "gluon"
    half = [torch.bfloat16, torch.bfloat16, torch.float16]
    axes: dict[str, Sequence[Any]] = {
        "dtype": half if hopper else [*half, torch.float16, torch.float32],
        "size": [40, 64, 64, 80, 112, 128, 128]
        if hopper
        else [16, 24, 64, 64, 80, 96, 128, 128, 256],
        "other": [0] if hopper else [0, 0, 0, 16, 40, 128],
        "group": [1, 2, 3, 4, 7, 8],
        "rows": [MANY] if hopper else [MANY] * 6 + [1, 4, 16, 64],
        "modes": [("full", "streaming")] * 4
        + [("streaming", "full"), ("full", "full"), ("streaming", "streaming")],
        "covered": [False] * 5 + [True],
        "layout": ["bshd", "bshd", "bhsd", "gaps"] + ["odd", "expanded", "spread"] * (not hopper),
        "start": [None, torch.int32, torch.int64],
        "kv_len": ["none", "none", "scalar", "each"],
        "mask": ["none", "plain", "plain", "strided"],
        "softcap": [False] if hopper else [False, False, True],
        "sinks": [None] if hopper else [None, None, "own", "other"],
        "scale": ["none", "none", "number", "negative", "zero"] + ["tensor"] * (not hopper),
        "forced": [False] if hopper else [False, False, True],
    }
    drawn = {name: _dealt(draw, options, count) for name, options in axes.items()}
    found = []
    for number in range(count):
        of = {name: values[number] for name, values in drawn.items()}
        dtype, other, forced = of["dtype"], of.pop("other"), of.pop("forced")
        of["value_size"] = other or of["size"]
        if of["sinks"] == "own":
            of["sinks"] = dtype
        elif of["sinks"] == "other":
            of["sinks"] = torch.float16 if dtype == torch.float32 else torch.float32
        config = _config(draw, dtype, max(of["size"], of["value_size"])) if forced else None
        found.append(Kind(number=number, kernel=kernel, config=config, **of))
    return found


def _dealt(draw: random.Random, options: Sequence[T], count: int) -> list[T]:
    """``count`` options, each as often as the next, shuffled."""
    dealt = [options[i % len(options)] for i in range(count)]
    draw.shuffle(dealt)
    return dealt


def _config(draw: random.Random, dtype: torch.dtype, size: int) -> Config:
    """A configuration that fits shared memory and registers."""
    width = max(16, 1 << (size - 1).bit_length())
    while True:
        config = Config(
            rows=draw.choice([16, 32, 64, 128]),
            keys=draw.choice([16, 32, 64, 128]),
            warps=draw.choice([4, 8]),
            stages=draw.choice([1, 2, 3]),
            overlap=draw.random() < 0.5,
            tma=draw.random() < 0.7,
            split_sums=draw.random() < 0.5,
            pack=draw.choice([1, 2, 4]),
        )
        blocks = config.rows + 2 * (config.stages + 1) * config.keys
        accumulators = config.rows * (width + config.keys) // (32 * config.warps)
        small = config.rows * width <= 4096 and config.keys <= 32 and config.stages == 1
        # Products in true float32 take no tensor cores, and long to compile.
        fits = small if dtype == torch.float32 else blocks * width * 2 <= 180 << 10
        if fits and accumulators <= 128 and config.rows >= 8 * config.warps:
            return config


def case(
    number: int, device: str, *, seed: int = SEED, limits: Limits | None = None
) -> tuple[Kind, AttentionCall]:
    """Kind and call of a case; keys and values that must not be read are NaN."""
    kind = kinds(seed)[number % KINDS]
    return kind, call(kind, random.Random(f"{seed} {number}"), device, limits or Limits())


def call(kind: Kind, draw: random.Random, device: str, limits: Limits) -> AttentionCall:
    """A call of a kind."""
    batch, kv_heads = draw.randint(1, limits.batch), draw.randint(1, limits.kv_heads)
    rows, filled = _lengths(kind, draw, limits)
    held = filled + (draw.randint(0, 200) if kind.kv_len != "none" else 0)
    if not kind.covered:
        # There is a key outside of sink and window.
        held = max(held, 2)
        filled = held if kind.kv_len == "none" else filled
    sink, local = _windows(kind, draw, held)

    options: dict[str, Any] = {}
    lengths = torch.full((batch,), filled)
    if kind.kv_len == "scalar":
        options["kv_len"] = torch.tensor(filled)
    elif kind.kv_len == "each":
        least = draw.choice([1, 1, 1, 0])
        lengths = torch.tensor([draw.randint(least, filled) for _ in range(batch)])
        options["kv_len"] = lengths.to(torch.int32)
    starts = torch.zeros(batch, dtype=torch.int64)
    if kind.start is not None:
        starts = torch.tensor([draw.choice([0, draw.randint(0, filled)]) for _ in range(batch)])
        options["start"] = starts.to(kind.start)
    column = torch.arange(held)
    real = (column >= starts[:, None]) & (column < lengths[:, None])
    if kind.mask != "none":
        mask = torch.stack([_mask(draw, held) for _ in range(batch)])
        real &= mask
        if kind.mask == "strided":
            # Of memory in which every other element says the opposite.
            mask = torch.stack([mask, ~mask], dim=2).to(device).flatten(1)[:, ::2]
        options["key_mask"] = mask
    heads = kv_heads * kind.group
    if kind.softcap:
        options["softcap"] = draw.choice([0.7, 5.0, 20.0])
    if kind.sinks is not None:
        logits = [draw.choice([draw.uniform(-5, 5)] * 8 + [-30.0, 30.0]) for _ in range(heads)]
        options["sinks"] = torch.tensor(logits, dtype=kind.sinks)
    unit = kind.size**-0.5
    if kind.scale == "tensor":
        scale = unit * draw.choice([0.0, -1.5, draw.uniform(-2, 2), draw.uniform(0, 2)])
        options["scale_tensor"] = torch.tensor(scale)
    elif kind.scale != "none":
        factor = {"number": draw.uniform(0.3, 2), "negative": draw.uniform(-2, -0.3), "zero": 0.0}
        options["scale"] = unit * factor[kind.scale]
    route = [[draw.randint(0, 1) for _ in range(kv_heads)] for _ in range(batch)]

    generator = torch.Generator(device).manual_seed(draw.randrange(2**31))
    sizes = {"generator": generator, "device": device, "batch": batch}
    query = tensor(kind, heads=heads, length=rows, size=kind.size, **sizes)
    key = tensor(kind, heads=kv_heads, length=held, size=kind.size, hidden=~real, **sizes)
    value = tensor(kind, heads=kv_heads, length=held, size=kind.value_size, hidden=~real, **sizes)
    return AttentionCall(
        query,
        key,
        value,
        torch.tensor(route, dtype=torch.int32).to(device),
        sink,
        local,
        *kind.modes,
        implementation=kind.kernel,
        **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()},
    )


def _lengths(kind: Kind, draw: random.Random, limits: Limits) -> tuple[int, int]:
    """Query rows, and filled keys: as many, more (a chunk behind others), or fewer."""
    if kind.rows == MANY:
        least = 128 if kind.kernel == "gluon" else 65
        rows = draw.choice([least, *(draw.randint(least, max(limits.rows, least)) for _ in "123")])
    else:
        rows = draw.randint(kind.rows // 2 + 1, kind.rows)
    most = max(limits.keys, rows)
    if kind.covered:
        most = max(min(most, 900), 1)
    filled = draw.choice([rows, rows, draw.randint(rows, most), most, draw.randint(1, rows)])
    return rows, min(filled, most)


def _windows(kind: Kind, draw: random.Random, held: int) -> tuple[int, int]:
    """Sink 0 … 300 and window 1 … 600, which hold all keys or do not, as the kind says."""
    sink = draw.choice([0, 1, draw.randint(0, 20), draw.randint(0, 300)])
    local = draw.choice([1, draw.randint(1, 20), draw.randint(1, 600), draw.randint(1, 600)])
    if kind.covered:
        return sink, max(local, held - sink, 1)
    sink = min(sink, held - 2)
    return sink, min(local, held - 1 - sink)


def _mask(draw: random.Random, length: int) -> Tensor:
    """All real, padded on a side or on both, with holes, or nothing real."""
    column = torch.arange(length)
    low, high = sorted((draw.randint(0, length), draw.randint(0, length)))
    what = draw.choice(["ones", "left", "right", "both", "holes", "holes", "nothing"])
    if what == "holes":
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        return torch.rand(length, generator=generator) < draw.choice([0.1, 0.7, 0.99])
    mask = torch.ones(length, dtype=torch.bool)
    if what in ("left", "both"):
        mask &= column >= low
    if what in ("right", "both"):
        mask &= column < high
    return mask & (what != "nothing")


def tensor(
    kind: Kind,
    generator: torch.Generator,
    device: str,
    batch: int,
    heads: int,
    length: int,
    size: int,
    hidden: Tensor | None = None,
) -> Tensor:
    """Random [B, H, S, D] in the kind's layout; NaN between rows and where bool [B, S] hides.

    Strides of a kind agree in what Triton compiles for, whether they are multiples of 16.
    """
    even = size % 16 > 0
    stored = 1 if kind.layout == "expanded" else batch
    rows, lanes, width = length, heads, size
    if kind.layout == "bhsd" or kind.layout == "spread":
        rows += even and length % 2
    elif kind.layout == "odd":
        rows, lanes, width = rows + 1 - rows % 2, lanes + 1 - lanes % 2, size + 1
    elif kind.layout == "gaps":
        rows, lanes = rows + 3, lanes + 2 + (even and lanes % 2)
    else:
        lanes += even and lanes % 2
    if kind.layout == "spread":
        width *= 2
    shape = (stored, lanes, rows, width)
    if kind.layout not in ("bhsd", "spread"):
        shape = (stored, rows, lanes, width)
    memory = torch.full(shape, torch.nan, dtype=kind.dtype, device=device)
    view = memory if kind.layout in ("bhsd", "spread") else memory.transpose(1, 2)
    if kind.layout == "spread":
        view = view[..., ::2]
    first = 1 if kind.layout == "odd" else 0
    skipped = 2 if kind.layout == "gaps" else 0
    view = view[:, skipped : skipped + heads, :length, first : first + size]
    view.copy_(torch.randn(view.shape, generator=generator, device=device))
    if hidden is not None:
        hidden = hidden.all(0, keepdim=True) if kind.layout == "expanded" else hidden
        view.masked_fill_(hidden[:, None, :, None].to(device), torch.nan)
    return view.expand(batch, -1, -1, -1)


def run(call: AttentionCall, kernel: str, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """The operator's results, or those of the Triton kernel under a configuration."""
    if config is not None:
        return triton_prefill.forward(call, config)
    tensors, options = _arguments(call)
    return ops.attention(*tensors, kernel=kernel, **options)


def _arguments(call: AttentionCall) -> tuple[list[Tensor], dict[str, Any]]:
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    fields.pop("implementation")
    number, scale = fields.pop("scale"), fields.pop("scale_tensor")
    fields["scale"] = number if scale is None else scale
    return [fields.pop(name) for name in ("query", "key", "value", "route")], fields


def check(call: AttentionCall, out: Tensor, lse: Tensor) -> None:
    """Compares results with the oracle in float64."""
    tensors, options = _arguments(call)
    wanted, wanted_lse = oracle.attention(*tensors, **options)
    dtype = call.query.dtype
    assert out.shape == wanted.shape and out.dtype == dtype, "shape or dtype of the output"
    assert lse.shape == wanted_lse.shape and lse.dtype == torch.float32, "shape or dtype of lse"
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "which rows see nothing"
    assert torch.all(out[empty] == 0), "rows that see nothing"
    if empty.all():
        return
    whole, worst = TOLERANCE[dtype]
    wrong, wanted = (out.double() - wanted)[~empty], wanted[~empty]
    floor = FLOOR * wanted.shape[1] ** 0.5
    error = wrong.norm(dim=1) / (wanted.norm(dim=1) + floor)
    # Negated, so that NaN fails.
    assert not (~(error < worst)).any(), f"a row of the output: {error.max():.2e}"
    error = wrong.norm() / (wanted.norm() + floor * len(wanted) ** 0.5)
    # The mean over few rows may be that of the worst.
    allowed = whole if len(wanted) >= 64 else worst
    assert error < allowed, f"output: {error:.2e}"
    wanted_lse = wanted_lse[~empty]
    error = (lse.double()[~empty] - wanted_lse).abs() - 1e-5 * wanted_lse.abs()
    assert not (~(error < LSE_TOLERANCE[dtype])).any(), f"log-sum-exp: {error.max():.2e}"


def described(call: AttentionCall) -> str:
    """Shapes and numbers of a call, for a message."""
    parts = [f"{name} {list(getattr(call, name).shape)}" for name in ("query", "key", "value")]
    parts += [f"sink {call.sink}", f"local {call.local}", f"route {call.route.tolist()}"]
    for name in ("start", "kv_len", "scale_tensor"):
        value = getattr(call, name)
        if value is not None:
            parts.append(f"{name} {value.tolist()}")
    return ", ".join([*parts, f"scale {call.scale}", f"softcap {call.softcap}"])
