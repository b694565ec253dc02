"""Device code that the Triton kernels share: spans of key masks, and the order of routed heads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sparse_units(route, first, units, kv_heads, stride_rb, stride_rh, SCAN: tl.constexpr):
    """For SCAN units (sample, kv head): 1 where the class is sparse, and 1 where it is full."""
    unit = first + tl.arange(0, SCAN)
    exists = unit < units
    where = (unit // kv_heads) * stride_rb + (unit % kv_heads) * stride_rh
    sparse = tl.load(route + where, mask=exists, other=0) != 0
    return sparse.to(tl.int32), (exists & (sparse == 0)).to(tl.int32)


@triton.jit
def key_range(sample, start, kv_len, stride_start, stride_len, held):
    """First real column of a sample, and the column after the last filled one."""
    first = sample * 0
    if start is not None:
        first = tl.load(start + sample * stride_start).to(tl.int32)
        first = tl.minimum(tl.maximum(first, 0), held)
    filled = sample * 0 + held
    if kv_len is not None:
        filled = tl.minimum(tl.load(kv_len + sample * stride_len).to(tl.int32), held)
    return first, filled


@triton.jit(do_not_specialize=["stride_mb", "stride_start", "stride_len", "held"])
def spans(
    key_mask,
    start,
    kv_len,
    span,
    stride_mb,
    stride_ms,
    stride_start,
    stride_len,
    held,
    BLOCK: tl.constexpr,
):
    """What the mask of a sample says, int32 [B, 2]: the column after its last real key, and whether
    a key before that is not real."""
    sample = tl.program_id(0)
    first, filled = key_range(sample, start, kv_len, stride_start, stride_len, held)
    row = key_mask + sample.to(tl.int64) * stride_mb
    count = sample * 0
    last = first
    for begin in range(first, filled, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        real = tl.load(row + column.to(tl.int64) * stride_ms, mask=column < filled, other=0) != 0
        count += tl.sum(real.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(real, column + 1, 0), 0))
    tl.store(span + sample * 2, last)
    tl.store(span + sample * 2 + 1, (count != last - first).to(tl.int32))


@triton.jit(do_not_specialize=["units", "kv_heads", "stride_rb", "stride_rh"])
def schedule(
    route,
    order,
    units,
    kv_heads,
    stride_rb,
    stride_rh,
    FULL_STREAMS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Units (sample, kv head) that see all keys, then those that stream, int32 [units + 1].

    The last entry is the number of the former.
    """
    count = units * 0
    for first in range(0, units, SCAN):
        sparse, full = sparse_units(route, first, units, kv_heads, stride_rb, stride_rh, SCAN)
        count += tl.sum(sparse if FULL_STREAMS else full, 0)
    tl.store(order + units, count)
    seen = units * 0
    streaming = count
    for first in range(0, units, SCAN):
        sparse, full = sparse_units(route, first, units, kv_heads, stride_rb, stride_rh, SCAN)
        if FULL_STREAMS:
            sparse, full = full, sparse
        unit = first + tl.arange(0, SCAN)
        tl.store(order + seen + tl.cumsum(full, 0) - 1, unit, mask=full == 1)
        tl.store(order + streaming + tl.cumsum(sparse, 0) - 1, unit, mask=sparse == 1)
        seen += tl.sum(full, 0)
        streaming += tl.sum(sparse, 0)
