"""Random shapes, routes and masks against the float64 oracle (CPU implementations).

The suite draws a fixed sample; ``tests/fuzzing.py`` says how to draw 500.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastic_compile.kernels import ops
from tests import oracle
from tests.fuzzing import fuzz
from tests.kernels import cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call of the op; tensors follow from ``seed``."""

    seed: int
    kernel: str
    dtype: torch.dtype
    batch: int
    kv_heads: int
    group: int
    rows: int
    """Query rows; more than the keys' filled length leaves rows that see nothing."""
    filled: int
    """Filled length of the longest sample."""
    room: int
    """Unfilled keys behind it (a static cache), NaN."""
    size: int
    value_size: int
    sink: int
    local: int
    modes: tuple[str, str]
    block_size: int
    scale: float | None
    tensor_scale: bool
    softcap: float | None
    sinks: bool
    start: bool
    holes: bool
    kv_len: str
    documents: tuple[int, ...]
    """Lengths of packed documents, the first behind a gap; empty: batch rows."""
    dropout: float
    layout: str

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    modes = draw(
        st.sampled_from(
            [("full", "streaming")] * 4
            + [("full", "blocks"), ("streaming", "blocks"), ("full", "full"), ("streaming",) * 2]
        )
    )
    packed = draw(st.booleans()) and draw(st.booleans())
    documents: tuple[int, ...] = ()
    if packed:
        documents = tuple(draw(st.lists(st.integers(0, 60), min_size=1, max_size=4)))
        documents = documents if sum(documents) else (7,)
    length = st.one_of(st.integers(1, 24), st.integers(1, 90), st.sampled_from([63, 64, 65, 129]))
    filled = sum(documents) + draw(st.integers(0, 5)) if packed else draw(length)
    rows = draw(st.one_of(st.just(filled), st.just(1), st.integers(1, filled), st.integers(1, 40)))
    rows = min(rows, filled) if packed else rows
    size = draw(st.sampled_from([1, 8, 16, 24, 32, 80]))
    kv_len = "none" if packed else draw(st.sampled_from(["none", "scalar", "each"]))
    return Draw(
        seed=draw(st.integers(0, 2**16)),
        kernel=draw(st.sampled_from(["auto", "reference"] + ["cpu"] * ("blocks" not in modes))),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, *TOLERANCE])),
        batch=1 if packed else draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 1, 2, 3, 7])),
        rows=rows,
        filled=filled,
        room=0 if kv_len == "none" else draw(st.integers(0, 9)),
        size=size,
        value_size=draw(st.sampled_from([size, size, 8, 33])),
        sink=draw(st.one_of(st.integers(0, 5), st.integers(0, 200))),
        local=draw(st.one_of(st.integers(1, 9), st.integers(1, 200))),
        modes=modes,
        block_size=draw(st.sampled_from([1, 8, 16, 64])),
        scale=draw(st.sampled_from([None, None, 0.3, 1.0, -0.5, 0.0])),
        tensor_scale=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, None, 0.7, 20.0])),
        sinks=draw(st.booleans()) and draw(st.booleans()),
        start=not packed and draw(st.booleans()),
        holes=draw(st.booleans()),
        kv_len=kv_len,
        documents=documents,
        dropout=draw(st.sampled_from([0.0, 0.0, 0.0, 0.25])),
        layout=draw(st.sampled_from(["bhsd", "bshd", "strided", "expanded"])),
    )


def tensor(d: Draw, generator: torch.Generator, heads: int, length: int, size: int) -> Tensor:
    """Random [B, heads, length, size] in the draw's memory layout."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(d.dtype)

    if d.layout == "bshd":
        return normal(d.batch, length, heads, size).transpose(1, 2)
    if d.layout == "strided":
        return normal(d.batch, heads, 2 * length, size + 3)[:, :, ::2, 1 : size + 1]
    if d.layout == "expanded":
        return normal(1, heads, length, size).expand(d.batch, -1, -1, -1)
    return normal(d.batch, heads, length, size)


def build(d: Draw) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors [query, key, value, route] and options; what must not be read holds NaN."""
    generator = torch.Generator().manual_seed(d.seed)
    keys = d.filled + d.room

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    query = tensor(d, generator, d.heads, d.rows, d.size)
    key = tensor(d, generator, d.kv_heads, keys, d.size).clone()
    value = tensor(d, generator, d.kv_heads, keys, d.value_size).clone()
    documents = len(d.documents) or d.batch
    route = integers(0, 2, documents, d.kv_heads)
    options: dict[str, Any] = {"sink": d.sink, "local": d.local}
    options["full_mode"], options["sparse_mode"] = d.modes
    lengths = torch.full((d.batch,), d.filled, dtype=torch.int32)
    if d.kv_len == "scalar":
        options["kv_len"] = torch.tensor(d.filled)
    elif d.kv_len == "each":
        # A decoding batch of unequal fills; fewer keys than rows leaves empty rows.
        lengths = integers(1, d.filled + 1, d.batch)
        options["kv_len"] = lengths
    real = torch.arange(keys)[None] < lengths[:, None]
    if d.start:
        options["start"] = integers(0, d.filled, d.batch)
        real = real & (torch.arange(keys)[None] >= options["start"][:, None])
    if d.documents:
        gap = d.filled - sum(d.documents)
        bounds = torch.tensor([0, *d.documents]).cumsum(0) + gap // 2
        options["cu_seqlens"] = bounds.to(torch.int32)
        column = torch.arange(keys)[None]
        real = real & (column >= bounds[0]) & (column < bounds[-1])
    if d.holes:
        options["key_mask"] = torch.rand(d.batch, keys, generator=generator) < 0.8
        real = real & options["key_mask"]
    hidden = ~real[:, None, :, None]
    key.masked_fill_(hidden, torch.nan)
    value.masked_fill_(hidden, torch.nan)
    if "blocks" in d.modes:
        options["block_size"] = d.block_size
        options |= cases.block_lists(documents, d.kv_heads, keys, generator, d.block_size)
    if d.scale is not None:
        options["scale"] = torch.tensor(d.scale) if d.tensor_scale else d.scale
    if d.softcap is not None:
        options["softcap"] = d.softcap
    if d.sinks:
        sinks = torch.randn(d.heads, generator=generator, dtype=torch.float64)
        options["sinks"] = sinks.to(d.dtype)
    if d.dropout:
        options["dropout_p"] = d.dropout
        options["dropout_seed"] = torch.tensor(d.seed * 7919 + 3)
    return [query, key, value, route], options


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=False,
        msg=lambda text: f"{what}: {text}",
    )


@given(draws())
@fuzz(60)
def test_forward_equals_the_oracle(d):
    tensors, options = build(d)
    before = [t.clone() for t in tensors]
    out, lse = ops.attention(*tensors, kernel=d.kernel, **options)
    expected, expected_lse = oracle.attention(*tensors, **options)
    assert out.shape == (d.batch, d.heads, d.rows, d.value_size) and out.dtype == d.dtype
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    close(out, expected, TOLERANCE[d.dtype], "output")
    close(lse, expected_lse, max(TOLERANCE[d.dtype] / 4, 1e-10), "log-sum-exp")
    for tensor_, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor_.nan_to_num(), copy.nan_to_num())


@given(draws())
@fuzz(25)
def test_gradients_equal_the_oracle(d):
    d = dataclasses.replace(d, dtype=torch.float64, tensor_scale=d.tensor_scale and d.scale != 0)
    tensors, options = build(d)
    generator = torch.Generator().manual_seed(d.seed + 1)
    shape = (d.batch, d.heads, d.rows, d.value_size)
    grad_out = torch.randn(shape, generator=generator, dtype=torch.float64)
    grad_lse = torch.randn(shape[:3], generator=generator, dtype=torch.float64)

    def gradients(attend: Any, **more: Any) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in tensors[:3]]
        given_ = dict(options)
        for name in ("sinks", "scale"):
            if isinstance(given_.get(name), Tensor):
                given_[name] = given_[name].double().clone().requires_grad_()
                leaves.append(given_[name])
        out, lse = attend(*leaves[:3], tensors[3], **given_, **more)
        sees = torch.isfinite(lse)
        loss = (out * grad_out).sum() + torch.where(sees, lse, 0.0).mul(grad_lse).sum()
        return list(torch.autograd.grad(loss, leaves, allow_unused=True))

    actual = gradients(ops.attention, kernel=d.kernel)
    expected = gradients(oracle.attention)
    names = ["query", "key", "value", "extra", "extra"]
    for name, a, b in zip(names, actual, expected, strict=False):
        b = torch.zeros_like(a) if b is None else b
        close(a, b, 1e-8, f"gradient of {name}")


@st.composite
def exact_draws(draw: st.DrawFn) -> tuple[Draw, dict[str, Any]]:
    d = dataclasses.replace(
        draw(draws()), kernel="auto", modes=("full", "full"), documents=(), room=0
    )
    mask = {
        "kind": draw(st.sampled_from(["none", "bool", "additive", "both"])),
        "batch": draw(st.booleans()),
        "heads": draw(st.booleans()),
        "rows": draw(st.integers(0, 3)) > 0,
        "keep": draw(st.sampled_from([0.05, 0.5, 0.95])),
        "causal": draw(st.booleans()),
    }
    return d, mask


@given(exact_draws())
@fuzz(40)
def test_exact_attention_equals_the_oracle(drawn):
    d, wanted = drawn
    generator = torch.Generator().manual_seed(d.seed)
    query = tensor(d, generator, d.heads, d.rows, d.size)
    key = tensor(d, generator, d.kv_heads, d.filled, d.size)
    value = tensor(d, generator, d.kv_heads, d.filled, d.value_size)
    options: dict[str, Any] = {"is_causal": wanted["causal"]}
    mask = None
    if wanted["kind"] != "none":
        whole = (d.batch, d.heads, d.rows, d.filled)
        chosen = (wanted["batch"], wanted["heads"], wanted["rows"], True)
        shape = [size if keep else 1 for size, keep in zip(whole, chosen, strict=True)]
        mask = torch.rand(shape, generator=generator) < wanted["keep"]
        if wanted["kind"] != "bool":
            bias = torch.randn(shape, generator=generator, dtype=torch.float64).to(d.dtype)
            hidden = -torch.inf if wanted["kind"] == "additive" else 0.0
            mask = torch.where(mask, bias, torch.tensor(hidden, dtype=d.dtype))
    if d.scale is not None:
        options["scale"] = d.scale
    if d.softcap is not None:
        options["softcap"] = d.softcap
    if d.sinks:
        options["sinks"] = torch.randn(d.heads, generator=generator).to(d.dtype)
    out, lse = ops.exact_attention(query, key, value, mask, reason="test", **options)
    expected, expected_lse = oracle.exact_attention(query, key, value, mask, **options)
    close(out, expected, TOLERANCE[d.dtype], "output")
    close(lse, expected_lse, max(TOLERANCE[d.dtype] / 4, 1e-10), "log-sum-exp")
