"""Device code of the fused router; ``triton_route`` launches it.

A program decides one kv head of one sample: it pools the two ends of the head's keys, runs both
MLPs and writes the route. Nothing passes through memory in between. Vectors over the head size
hold zeros past it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _real(row, column, low, high, stride_ms):
    """Which of ``column`` are real tokens within [low, high)."""
    real = (column >= low) & (column < high)
    if row is not None:
        real = tl.load(row + column.to(tl.int64) * stride_ms, mask=real, other=0) != 0
    return real


@triton.jit
def _first_real(row, low, high, stride_ms, SCAN: tl.constexpr):
    """Column of the first real token within [low, high), or ``high``."""
    found = high
    while (found == high) & (low < high):
        column = low + tl.arange(0, SCAN)
        real = _real(row, column, low, high, stride_ms)
        found = tl.min(tl.where(real, column, high), 0)
        low += SCAN
    return found


@triton.jit
def _last_real(row, low, high, stride_ms, SCAN: tl.constexpr):
    """Column after the last real token within [low, high), or ``low``."""
    found = low
    while (found == low) & (low < high):
        column = high - SCAN + tl.arange(0, SCAN)
        real = _real(row, column, low, high, stride_ms)
        found = tl.max(tl.where(real, column + 1, low), 0)
        high -= SCAN
    return found


@triton.jit
def _sum_rows(tap, column, taken, d, stride_ts, stride_td, D: tl.constexpr):
    """Sum [BD] of the key rows that are ``taken``; what the others hold is not read."""
    rows = tl.load(
        tap + column.to(tl.int64)[:, None] * stride_ts + d.to(tl.int64)[None, :] * stride_td,
        mask=taken[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return tl.sum(rows.to(tl.float32), 0)


@triton.jit
def _pool(
    tap,
    row,
    limit,
    pool_tokens,
    stride_ts,
    stride_td,
    stride_ms,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Mean key [BD] over the first and the last real tokens before column ``limit``."""
    d = tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)

    # From the left: blocks of columns, and long steps over those without a real token.
    head = limit * 0
    head_end = limit
    begin = limit * 0
    while (head < pool_tokens) & (begin < limit):
        column = begin + tl.arange(0, BLOCK)
        real = _real(row, column, begin, limit, stride_ms)
        count = real.to(tl.int32)
        taken = real & (head + tl.cumsum(count, 0) <= pool_tokens)
        total += _sum_rows(tap, column, taken, d, stride_ts, stride_td, D)
        found = tl.sum(count, 0)
        head += tl.sum(taken.to(tl.int32), 0)
        head_end = tl.where(
            head == pool_tokens, tl.max(tl.where(taken, column + 1, 0), 0), head_end
        )
        begin += BLOCK
        if row is not None:
            if found == 0:
                begin = _first_real(row, begin, limit, stride_ms, SCAN)

    # From the right, down to where the head ended: nothing counts twice.
    tail = limit * 0
    end = limit
    while (tail < pool_tokens) & (head_end < end):
        column = end - BLOCK + tl.arange(0, BLOCK)
        real = _real(row, column, head_end, end, stride_ms)
        count = real.to(tl.int32)
        found = tl.sum(count, 0)
        from_right = found - tl.cumsum(count, 0) + count
        taken = real & (tail + from_right <= pool_tokens)
        total += _sum_rows(tap, column, taken, d, stride_ts, stride_td, D)
        tail += tl.sum(taken.to(tl.int32), 0)
        end -= BLOCK
        if row is not None:
            if found == 0:
                end = _last_real(row, head_end, end, stride_ms, SCAN)

    return total / tl.maximum(head + tail, 1).to(tl.float32)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _mlp(
    x,
    weight_in,
    bias_in,
    weight_out,
    bias_out,
    D: tl.constexpr,
    BD: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Linear(D, HIDDEN), SiLU, Linear(HIDDEN, D) of a vector [BD], CHUNK hidden values at a time.

    The second product stays spread over [BD, CHUNK] until the end: one reduction, not one a chunk.
    """
    d = tl.arange(0, BD)
    spread = tl.zeros([BD, CHUNK], tl.float32)
    for begin in tl.range(0, HIDDEN, CHUNK):
        h = begin + tl.arange(0, CHUNK)
        inside = (h < HIDDEN)[:, None] & (d < D)[None, :]
        first = tl.load(weight_in + h[:, None] * D + d[None, :], mask=inside, other=0.0)
        inside = (d < D)[:, None] & (h < HIDDEN)[None, :]
        second = tl.load(weight_out + d[:, None] * HIDDEN + h[None, :], mask=inside, other=0.0)
        bias = tl.load(bias_in + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
        hidden = _silu(tl.sum(first.to(tl.float32) * x[None, :], 1) + bias)
        # Zero past the end also where x is infinite.
        hidden = tl.where(h < HIDDEN, hidden, 0.0)
        spread += second.to(tl.float32) * hidden[None, :]
    bias = tl.load(bias_out + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.where(d < D, tl.sum(spread, 1) + bias, 0.0)


@triton.jit(
    do_not_specialize=[
        "stride_mb",
        "stride_end",
        "stride_fb",
        "stride_fh",
        "length",
        "heads",
        "pool_tokens",
    ]
)
def route(
    tap,
    key_mask,
    end,
    forced,
    task_weight_in,
    task_bias_in,
    task_weight_out,
    task_bias_out,
    router_weight_in,
    router_bias_in,
    router_weight_out,
    router_bias_out,
    last_weight,
    last_bias,
    out,
    logits,
    route_bias,
    stride_tb,
    stride_th,
    stride_ts,
    stride_td,
    stride_mb,
    stride_ms,
    stride_end,
    stride_fb,
    stride_fh,
    length,
    heads,
    pool_tokens,
    D: tl.constexpr,
    BD: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Route of one kv head of one sample. ``key_mask``, ``end`` and ``logits`` are None if absent.

    BD: head size rounded up to a power of two; BLOCK: columns pooled at once; CHUNK: hidden values
    at once; SCAN: columns of the mask looked at at once where there is no real token.
    """
    unit = tl.program_id(0)
    sample = unit // heads
    head = unit % heads

    limit = sample * 0 + length
    if end is not None:
        given = tl.load(end + sample.to(tl.int64) * stride_end).to(tl.int64)
        limit = tl.minimum(tl.maximum(given, 0), length).to(tl.int32)
    row = key_mask
    if key_mask is not None:
        row += sample.to(tl.int64) * stride_mb
    tap += sample.to(tl.int64) * stride_tb + head.to(tl.int64) * stride_th

    pooled = _pool(
        tap, row, limit, pool_tokens, stride_ts, stride_td, stride_ms, D, BD, BLOCK, SCAN
    )
    task = _mlp(
        pooled,
        task_weight_in,
        task_bias_in,
        task_weight_out,
        task_bias_out,
        D,
        BD,
        HIDDEN,
        CHUNK,
    )
    seen = _silu(
        _mlp(
            task,
            router_weight_in,
            router_bias_in,
            router_weight_out,
            router_bias_out,
            D,
            BD,
            HIDDEN,
            CHUNK,
        )
    )

    d = tl.arange(0, BD)
    to_full = tl.load(last_weight + d, mask=d < D, other=0.0).to(tl.float32)
    to_sparse = tl.load(last_weight + D + d, mask=d < D, other=0.0).to(tl.float32)
    full = tl.sum(to_full * seen, 0) + tl.load(last_bias).to(tl.float32)
    sparse = tl.sum(to_sparse * seen, 0) + tl.load(last_bias + 1).to(tl.float32)
    if logits is not None:
        tl.store(logits + unit * 2, full)
        tl.store(logits + unit * 2 + 1, sparse)

    # A comparison with NaN is false: full, as is a tie.
    decided = (sparse + route_bias > full).to(tl.int32)
    told = tl.load(forced + sample.to(tl.int64) * stride_fb + head.to(tl.int64) * stride_fh)
    tl.store(out + unit, tl.where(told >= 0, told, decided))
