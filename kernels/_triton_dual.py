"""Device code of the dual forward: the full and the streaming output of every head in one pass.

The keys of a streaming head are a part of those of a full one. A tile meets them first and its
state gives the streaming output; it goes on with the others, and gives the full one. Blocks that
hold both kinds are met twice, under masks that complement each other. Lists of blocks, positions
and units of the scores are those of ``_triton_prefill``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elastic_compile.kernels._triton_common import key_range
from elastic_compile.kernels._triton_prefill import (
    _choose_tile,
    _cut_block,
    _load_block,
    _no_weights,
    _silence,
    _softmax_cut,
    _softmax_whole,
    _visible,
    _whole_block,
)

_LEAST_SCALE = tl.constexpr(1e-37)  # as _gpu.LEAST_SCALE
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _hidden_from_streaming(n, position, keys, reach, sink, mask_row, stride_ms, BN: tl.constexpr):
    """Which pairs [BM, BN] of the block at key n a full head sees and a streaming one does not."""
    j = n + tl.arange(0, BN)
    hidden = (position[:, None] - j[None, :] >= reach) & (j >= sink)[None, :]
    if mask_row is not None:
        real = tl.load(mask_row + j.to(tl.int64) * stride_ms, mask=j < keys, other=0) != 0
        hidden = hidden & real[None, :]
    return hidden


@triton.jit
def _results(acc, top, total, learned_sinks, head, SPLIT_SUMS: tl.constexpr):
    """Output and log-sum-exp of a tile whose state is given."""
    if SPLIT_SUMS:
        total = tl.sum(total, 1)
    empty = top == -float("inf")
    if learned_sinks is not None:
        logit = tl.load(learned_sinks + head).to(tl.float32) * _LOG2E
        new_top = tl.maximum(top, logit)
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink + tl.math.exp2(logit - new_top)
        acc = acc * shrink[:, None]
        top = new_top
    total = tl.where(empty, 1.0, total)
    acc = tl.where(empty[:, None], 0.0, acc / total[:, None])
    return acc, tl.where(empty, -float("inf"), (top + tl.math.log2(total)) * _LN2)


@triton.jit(
    do_not_specialize=[
        "stride_rb",
        "stride_rh",
        "stride_start",
        "stride_len",
        "stride_mb",
        "queries",
        "held",
        "units",
        "kv_heads",
        "sink",
        "local",
        "tiles",
        "section",
    ]
)
def dual(
    query,
    key,
    value,
    out,
    other,
    lse,
    route,
    start,
    kv_len,
    key_mask,
    span,
    learned_sinks,
    scale_tensor,
    scale,
    softcap,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_rb,
    stride_rh,
    stride_start,
    stride_len,
    stride_mb,
    stride_ms,
    queries,
    held,
    units,
    kv_heads,
    sink,
    local,
    tiles,
    section,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPARSE_STREAMS: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row tile of PACK query heads: output and log-sum-exp by the route, and the other output.

    SPARSE_STREAMS: it is the sparse class that streams; otherwise the full class.
    """
    unit, lane, tile, _streams = _choose_tile(
        route, units, kv_heads, stride_rb, stride_rh, tiles, 0, section, GROUP // PACK,
        False, False, 32,
    )  # fmt: skip
    sample = unit // kv_heads
    kv_head = unit % kv_heads
    SPAN: tl.constexpr = BM // PACK
    head = kv_head * GROUP + lane * PACK + tl.arange(0, BM) // SPAN
    rows = tile * SPAN + tl.arange(0, BM) % SPAN
    columns = tl.arange(0, BD)
    value_columns = tl.arange(0, BDV)
    query += sample.to(tl.int64) * stride_qb
    row_starts = head.to(tl.int64) * stride_qh + rows.to(tl.int64) * stride_qs
    q = tl.load(
        query + row_starts[:, None] + columns[None, :],
        mask=(rows < queries)[:, None] & (columns < D)[None, :],
        other=0.0,
    )

    first, filled = key_range(sample, start, kv_len, stride_start, stride_len, held)
    last = filled
    if key_mask is not None:
        last = tl.load(span + sample * 2)
    keys = tl.maximum(last - first, 0)
    shift = filled - queries - first
    lowest = shift + tile * SPAN
    highest = shift + tl.minimum(tile * SPAN + SPAN, queries) - 1
    end = tl.minimum(highest + 1, keys)

    # Blocks: sink [0, sink_whole) whole, [sink_whole, sink_all) cut; between, [sink_all, edge);
    # window [edge, inner) cut, [inner, diagonal) whole, [diagonal, ...) cut.
    diagonal = tl.maximum(tl.minimum(lowest, keys - 1), 0) // BN
    edge = tl.minimum(tl.maximum(lowest - local + 1, 0) // BN, diagonal)
    inner = (tl.maximum(highest - local + 1, 0) + BN - 1) // BN
    inner = tl.minimum(tl.maximum(inner, edge), diagonal)
    sink_all = tl.minimum((sink + BN - 1) // BN, edge)
    sink_whole = tl.minimum(sink // BN, edge)
    past_end = diagonal + (tl.maximum(end - diagonal * BN, 0) + BN - 1) // BN
    between = edge - sink_all
    # Blocks of which a streaming row sees a part: the last of the sink, and the window's edge.
    mixed_sink = sink_all - sink_whole
    mixed_end = tl.where(highest - local >= diagonal * BN, past_end, inner)
    mixed_first = edge
    mask_row = key_mask
    if key_mask is not None:
        mask_row += sample.to(tl.int64) * stride_mb + first.to(tl.int64) * stride_ms
        # With a hole, every block needs its mask.
        broken = tl.load(span + sample * 2 + 1) != 0
        inner = tl.where(broken, diagonal, inner)
        sink_whole = tl.where(broken, 0, sink_whole)
        between = tl.where(broken, 0, between)
        mixed_sink = tl.where(broken, 0, mixed_sink)
        mixed_first = tl.where(broken, 0, mixed_first)
        mixed_end = tl.where(broken, past_end, mixed_end)
    whole = sink_whole + diagonal - inner
    sink_cut = sink_all - sink_whole
    left_cut = sink_cut + inner - edge
    cut = left_cut + past_end - diagonal
    mixed = mixed_sink + tl.maximum(mixed_end - mixed_first, 0)
    mixed = tl.where(end > 0, mixed, 0)

    gain = scale
    if scale_tensor is not None:
        gain = tl.load(scale_tensor).to(tl.float32)
        # The running maximum is taken before the scale, which therefore must not be negative.
        q = (q * tl.where(gain < 0, -1.0, 1.0)).to(q.dtype)
        gain = tl.maximum(tl.abs(gain), _LEAST_SCALE)
    rate = gain
    cap = softcap
    if softcap is not None:
        rate = gain / softcap * (2.0 * _LOG2E)
        cap = softcap * _LOG2E
        gain = 1.0
    else:
        gain = gain * _LOG2E

    place = (sample, kv_head, first)
    key_offsets = tl.arange(0, BN)[:, None] * stride_ks + columns[None, :]
    value_offsets = tl.arange(0, BN)[:, None] * stride_vs + value_columns[None, :]
    UNFILLED: tl.constexpr = TMA and kv_len is not None
    if not TMA:
        key += sample.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        key += first.to(tl.int64) * stride_ks
        value += sample.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
        value += first.to(tl.int64) * stride_vs

    position = lowest + tl.arange(0, BM) % SPAN
    top = tl.full([BM], -float("inf"), tl.float32)
    total = _no_weights(BM, SPLIT_SUMS)
    acc = tl.zeros([BM, BDV], tl.float32)
    # Twice: what a streaming head sees, then what only a full one sees.
    for t in tl.range(0, whole):
        n = _whole_block(t, sink_whole, inner) * BN
        k = _load_block(
            key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=True
        )
        s = tl.dot(q, k.T, input_precision=PRECISION)
        p, top, total, shrink = _softmax_whole(s, top, total, gain, rate, cap)
        v = _load_block(
            value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA, WHOLE=True
        )
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    for t in tl.range(0, cut):
        n = _cut_block(t, sink_cut, left_cut, sink_whole, edge, diagonal) * BN
        k = _load_block(
            key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=False
        )
        s = tl.dot(q, k.T, input_precision=PRECISION)
        visible = _visible(n, position, keys, local, sink, mask_row, stride_ms, BN, True)
        p, top, total, shrink = _softmax_cut(s, visible, top, total, gain, rate, cap)
        v = _load_block(
            value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA, WHOLE=False
        )
        v = _silence(v, n, keys, mask_row, stride_ms, BN, UNFILLED)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    sparse = (tl.load(route + sample * stride_rb + kv_head * stride_rh) != 0).to(tl.int32)
    streams = rows * 0 + (sparse if SPARSE_STREAMS else 1 - sparse)
    heads = kv_heads * GROUP
    written = rows < queries
    log_at = lse + sample.to(tl.int64) * heads * queries + head.to(tl.int64) * queries + rows
    # [B, Sq, Hq, Dv] in memory.
    at = ((sample.to(tl.int64) * queries + rows) * heads + head)[:, None] * DV
    at += value_columns[None, :]
    inside = written[:, None] & (value_columns < DV)[None, :]
    found, log = _results(acc, top, total, learned_sinks, head, SPLIT_SUMS)
    chosen = inside & (streams == 1)[:, None]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=chosen)
    tl.store(other + at, found.to(out.dtype.element_ty), mask=inside & (streams == 0)[:, None])
    tl.store(log_at, log, mask=written & (streams == 1))

    for t in tl.range(0, between):
        n = (sink_all + t) * BN
        k = _load_block(
            key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=True
        )
        s = tl.dot(q, k.T, input_precision=PRECISION)
        p, top, total, shrink = _softmax_whole(s, top, total, gain, rate, cap)
        v = _load_block(
            value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA, WHOLE=True
        )
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    for t in tl.range(0, mixed):
        n = tl.where(t < mixed_sink, sink_whole + t, mixed_first + t - mixed_sink) * BN
        k = _load_block(
            key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=False
        )
        s = tl.dot(q, k.T, input_precision=PRECISION)
        visible = _hidden_from_streaming(n, position, keys, local, sink, mask_row, stride_ms, BN)
        p, top, total, shrink = _softmax_cut(s, visible, top, total, gain, rate, cap)
        v = _load_block(
            value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA, WHOLE=False
        )
        v = _silence(v, n, keys, mask_row, stride_ms, BN, UNFILLED)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    found, log = _results(acc, top, total, learned_sinks, head, SPLIT_SUMS)
    chosen = inside & (streams == 0)[:, None]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=chosen)
    tl.store(other + at, found.to(out.dtype.element_ty), mask=inside & (streams == 1)[:, None])
    tl.store(log_at, log, mask=written & (streams == 0))
