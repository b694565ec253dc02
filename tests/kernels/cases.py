"""Inputs of the kernel tests; the grid, its pairwise cover, and the tensors of its cases."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

SINK, LOCAL, BLOCK_SIZE, CHUNK = 4, 64, 64, 64

KERNELS = ("cpu", "reference")
"""Implementations that run anywhere."""

AXES: dict[str, tuple[Any, ...]] = {
    "length": (1, 3, 15, 17, 127, 128, 129, 507, 711, 1025),
    "batch": (1, 3),
    "heads": ((8, 8), (8, 2), (12, 2), (28, 4)),
    "size": (64, 96, 128),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "routes": ("full", "streaming", "blocks", "mixed"),
    "phase": ("prefill", "chunk", "decode"),
    "kernel": KERNELS,
}


@dataclass(frozen=True)
class Case:
    """One point of the grid. Batches of 3 are left-padded; caches have unfilled room."""

    length: int
    batch: int
    heads: tuple[int, int]
    size: int
    dtype: torch.dtype
    routes: str
    phase: str
    kernel: str

    @property
    def valid(self) -> bool:
        return not (self.routes == "blocks" and self.kernel == "cpu")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads[0]}q{self.heads[1]}kv"
        return (
            f"{self.kernel}-{self.phase}-{self.routes}-S{self.length}-B{self.batch}-{heads}"
            f"-D{self.size}-{dtype}"
        )


def product() -> list[Case]:
    """Every valid case."""
    return [case for point in itertools.product(*AXES.values()) if (case := Case(*point)).valid]


def pairwise() -> list[Case]:
    """A small set of valid cases in which every pair of values of two axes occurs.

    Greedy and deterministic: the first pair not yet covered is completed, axis by axis, with the
    value that covers most further pairs.
    """
    names = [field.name for field in fields(Case)]
    missing = {pair for case in product() for pair in _pairs(case)}
    order = sorted(missing, key=repr)
    chosen = []
    for pair in order:
        if pair not in missing:
            continue
        point = dict(pair)
        for name in names:
            if name not in point:
                options = [value for value in AXES[name] if _completable(point | {name: value})]
                turn = len(chosen) % len(options)  # so that ties do not always go to the first
                options = options[turn:] + options[:turn]
                point[name] = max(options, key=lambda v: len(_new(point, name, v, missing)))
        case = Case(**point)
        missing -= _pairs(case)
        chosen.append(case)
    return chosen


def _pairs(case: Case) -> set[tuple]:
    values = [(field.name, getattr(case, field.name)) for field in fields(Case)]
    return set(itertools.combinations(values, 2))


def _new(point: dict[str, Any], name: str, value: Any, missing: set[tuple]) -> list[tuple]:
    candidates = [tuple(sorted(((name, value), other), key=_axis)) for other in point.items()]
    return [pair for pair in candidates if pair in missing]


def _axis(item: tuple[str, Any]) -> int:
    return list(AXES).index(item[0])


def _completable(point: dict[str, Any]) -> bool:
    return not (point.get("routes") == "blocks" and point.get("kernel") == "cpu")


def build(case: Case, device: str = "cpu") -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments of the op for a case; what must not be read holds NaN."""
    generator = torch.Generator().manual_seed(case.length * 31 + case.size)

    def normal(heads: int, length: int) -> Tensor:
        shape = (case.batch, length, heads, case.size)
        return torch.randn(shape, generator=generator).to(case.dtype).transpose(1, 2)

    heads, kv_heads = case.heads
    rows = {"prefill": case.length, "chunk": min(CHUNK, case.length), "decode": 1}[case.phase]
    room = 0 if case.phase == "prefill" else 7
    query = normal(heads, rows)
    key, value = normal(kv_heads, case.length + room), normal(kv_heads, case.length + room)
    arguments: dict[str, Any] = {"sink": SINK, "local": LOCAL, "kernel": case.kernel}
    if room:
        arguments["kv_len"] = torch.tensor(case.length)
        key[:, :, case.length :] = value[:, :, case.length :] = torch.nan
    if case.batch > 1:
        arguments["start"] = torch.tensor([0, case.length // 3, case.length - 1])
        for sample, start in enumerate(arguments["start"].tolist()):
            key[sample, :, :start] = value[sample, :, :start] = torch.nan
    route = {"full": 0, "streaming": 1, "blocks": 1}.get(case.routes)
    if route is None:
        routes = torch.arange(case.batch * kv_heads).reshape(case.batch, kv_heads) % 3 % 2
    else:
        routes = torch.full((case.batch, kv_heads), route)
    if case.routes == "blocks":
        arguments["sparse_mode"] = "blocks"
        arguments["block_size"] = BLOCK_SIZE
        arguments |= block_lists(case.batch, kv_heads, key.shape[2], generator)
    tensors = (query, key, value, routes.to(torch.int32))
    return (
        tuple(tensor.to(device) for tensor in tensors),
        {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()},
    )


def inputs(batch, heads, kv_heads, rows, keys, size=32, value_size=None, dtype=torch.float32):
    """Random query [batch, heads, rows, size], key and value [batch, kv_heads, keys, ...]."""
    shapes = (
        (batch, heads, rows, size),
        (batch, kv_heads, keys, size),
        (batch, kv_heads, keys, value_size or size),
    )
    return [torch.randn(shape).to(dtype) for shape in shapes]


def alternating(documents, kv_heads):
    """Routes 0, 1, 0, 1 ..., int32 [documents, kv_heads]."""
    return (torch.arange(documents * kv_heads) % 2).reshape(documents, kv_heads).to(torch.int32)


def block_lists(
    documents: int,
    kv_heads: int,
    keys: int,
    generator: torch.Generator | None = None,
    block_size: int = BLOCK_SIZE,
    keep: float = 0.5,
) -> dict[str, Tensor]:
    """Random lists of key blocks, the diagonal always among them, with garbage behind the last."""
    blocks = -(-keys // block_size)
    listed = torch.rand(documents, kv_heads, blocks, blocks, generator=generator) < keep
    listed = (listed | torch.eye(blocks, dtype=torch.bool)).tril()
    counts = listed.sum(-1)
    ends = counts.flatten().cumsum(0).reshape(counts.shape)
    first = ends[..., :1] - counts[..., :1]
    indices = torch.cat([listed.nonzero()[:, 3], torch.tensor([7, 7])])
    return {
        "block_indptr": torch.cat([first, ends], -1).to(torch.int32),
        "block_indices": indices.to(torch.int32),
    }
