"""Device code of the Triton prefill kernel; ``triton_prefill`` launches it.

Positions here are relative to the sample's first real key (``start``), so left padding costs
nothing and the sink begins at block 0. A program computes BM query rows of one query head over a
list of key blocks: first those that all its rows see whole (no mask is applied), then the few cut
by the diagonal, by the left edge of the window or by the end of the sink.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NO_WINDOW = tl.constexpr(1 << 30)
_SCAN = tl.constexpr(128)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _streams(route, FULL_STREAMS: tl.constexpr, SPARSE_STREAMS: tl.constexpr):
    """Whether the class of a route value is in mode ``streaming``."""
    return tl.where(route == 0, FULL_STREAMS, SPARSE_STREAMS)


@triton.jit
def _scan_routes(
    route_ptr,
    first,
    units,
    kv_heads,
    stride_rb,
    stride_rh,
    FULL_STREAMS: tl.constexpr,
    SPARSE_STREAMS: tl.constexpr,
):
    """1 for each of the _SCAN units from ``first`` on that streams, and 1 for each that exists."""
    unit = first + tl.arange(0, _SCAN)
    exists = unit < units
    offset = (unit // kv_heads) * stride_rb + (unit % kv_heads) * stride_rh
    route = tl.load(route_ptr + offset, mask=exists, other=0)
    streams = _streams(route, FULL_STREAMS, SPARSE_STREAMS) & exists
    return streams.to(tl.int32), exists.to(tl.int32)


@triton.jit
def _choose_tile(
    route_ptr,
    units,
    kv_heads,
    stride_rb,
    stride_rh,
    tiles,
    even_tiles,
    section,
    GROUP: tl.constexpr,
    FULL_STREAMS: tl.constexpr,
    SPARSE_STREAMS: tl.constexpr,
):
    """Which unit (sample and kv head), query head of its group and row tile a program computes.

    Programs start in the order of their ids, so the order here is a schedule, heaviest first: the
    tiles of full heads that see more than a window, last rows first and in sections of kv heads
    whose keys and values fit the L2 cache together; then those of streaming heads; then the first
    ``even_tiles`` of all heads, which see equally much in both modes.
    """
    pid = tl.program_id(0)
    heavy = tiles - even_tiles
    per_unit = GROUP * heavy
    full_units = units
    if FULL_STREAMS != SPARSE_STREAMS:
        for first in range(0, units, _SCAN):
            streams, _ = _scan_routes(
                route_ptr,
                first,
                units,
                kv_heads,
                stride_rb,
                stride_rh,
                FULL_STREAMS,
                SPARSE_STREAMS,
            )
            full_units -= tl.sum(streams, 0)
    elif FULL_STREAMS:
        full_units = units * 0
    full_tiles = full_units * per_unit
    heavy_tiles = units * per_unit

    in_full = pid < full_tiles
    in_heavy = pid < heavy_tiles

    section_tiles = tl.maximum(section * per_unit, 1)
    section_first = pid // section_tiles * section
    lanes = tl.maximum(tl.minimum(section, full_units - section_first) * GROUP, 1)
    rest = pid % section_tiles
    full_rank = section_first + rest % lanes // GROUP
    full_row = tiles - 1 - rest // lanes

    rest = pid - full_tiles
    slots = tl.maximum(per_unit, 1)
    sparse_rank = rest // slots
    sparse_row = tiles - 1 - rest % slots // GROUP

    rest = pid - heavy_tiles
    lanes = units * GROUP
    even_unit = rest % lanes // GROUP
    even_row = even_tiles - 1 - rest // lanes

    rank = tl.where(in_full, full_rank, sparse_rank)
    row = tl.where(in_full, full_row, tl.where(in_heavy, sparse_row, even_row))
    unit = tl.where(in_heavy, rank, even_unit)
    if FULL_STREAMS != SPARSE_STREAMS:
        seen = units * 0
        found = units * 0
        for first in range(0, units, _SCAN):
            streams, exists = _scan_routes(
                route_ptr,
                first,
                units,
                kv_heads,
                stride_rb,
                stride_rh,
                FULL_STREAMS,
                SPARSE_STREAMS,
            )
            member = tl.where(in_full, exists - streams, streams)
            count = seen + tl.cumsum(member, 0)
            hit = (count == rank + 1) & (member == 1)
            found += tl.sum(tl.where(hit, first + tl.arange(0, _SCAN), 0), 0)
            seen += tl.sum(member, 0)
        unit = tl.where(in_heavy, found, even_unit)
    # In all three phases the query heads of a group are neighbours: they share keys and values.
    lane = tl.where(in_full, pid % section_tiles, tl.where(in_heavy, pid - full_tiles, rest))
    return unit, lane % GROUP, row


@triton.jit
def _load_block(
    descriptor,
    pointer,
    offsets,
    columns,
    n,
    stride,
    keys,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    TMA: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Rows n .. n + SIZE of keys or values as [SIZE, BD]; zeros past ``keys`` and past D."""
    if TMA:
        block = descriptor.load([n, 0])
    else:
        where = pointer + n.to(tl.int64) * stride + offsets
        if WHOLE and D == BD:
            block = tl.load(where)
        elif WHOLE:
            block = tl.load(where, mask=columns[None, :] < D, other=0.0)
        else:
            inside = (n + tl.arange(0, SIZE) < keys)[:, None] & (columns[None, :] < D)
            block = tl.load(where, mask=inside, other=0.0)
    return block


@triton.jit
def _whole_block(t, whole, sink_whole, inner):
    """Index of the t-th block that is seen whole; the last one again for t = ``whole``."""
    t = tl.minimum(t, whole - 1)
    return tl.where(t < sink_whole, t, t - sink_whole + inner)


@triton.jit
def _cap(scores, gain, softcap, SOFTCAP: tl.constexpr):
    """Raw products to scores that the softmax multiplies by ``gain``, softcapped where asked."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both infinities.
        power = tl.math.exp2(scores * (gain / softcap * 2.0))
        scores = softcap / gain * (1.0 - 2.0 / (power + 1.0))
    return scores


@triton.jit
def _softmax_whole(scores, top, total, gain, softcap, SOFTCAP: tl.constexpr):
    """Online softmax over a block that every row sees whole."""
    scores = _cap(scores, gain, softcap, SOFTCAP)
    new_top = tl.maximum(top, tl.max(scores, 1) * gain)
    weights = tl.math.exp2(scores * gain - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    return weights, new_top, total, shrink


@triton.jit
def _softmax_cut(scores, visible, top, total, gain, softcap, SOFTCAP: tl.constexpr):
    """Online softmax over a block of which rows may see parts, or nothing so far."""
    scores = tl.where(visible, _cap(scores, gain, softcap, SOFTCAP), -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * gain)
    anchor = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.math.exp2(scores * gain - anchor[:, None])
    shrink = tl.math.exp2(top - anchor)
    total = total * shrink + tl.sum(weights, 1)
    return weights, new_top, total, shrink


@triton.jit
def prefill_kernel(
    query,
    key,
    value,
    out,
    lse,
    route,
    start,
    kv_len,
    key_mask,
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
    stride_lb,
    stride_mb,
    stride_ms,
    stride_st,
    queries,
    keys_held,
    units,
    kv_heads,
    sink,
    local,
    tiles,
    even_tiles,
    section,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FULL_STREAMS: tl.constexpr,
    SPARSE_STREAMS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    unit, lane, row_tile = _choose_tile(
        route,
        units,
        kv_heads,
        stride_rb,
        stride_rh,
        tiles,
        even_tiles,
        section,
        GROUP,
        FULL_STREAMS,
        SPARSE_STREAMS,
    )
    sample = unit // kv_heads
    kv_head = unit % kv_heads
    head = kv_head * GROUP + lane
    HOLES: tl.constexpr = key_mask is not None

    # Keys [first, first + keys) of the sample exist; row i sits at position shift + i.
    first = sample * 0
    if start is not None:
        first = tl.minimum(tl.maximum(tl.load(start + sample * stride_st).to(tl.int32), 0), keys_held)
    filled = sample * 0 + keys_held
    if kv_len is not None:
        filled = tl.load(kv_len + sample * stride_lb).to(tl.int32)
    keys = tl.maximum(tl.minimum(filled, keys_held) - first, 0)
    shift = filled - queries - first

    lowest = shift + row_tile * BM
    highest = shift + tl.minimum(row_tile * BM + BM, queries) - 1
    end = tl.minimum(highest + 1, keys)

    # Key blocks in units of BN: [0, sink_whole) and [sink_whole, sink_all) of the sink, then from
    # the window [edge, inner) cut at the left, [inner, diagonal) whole, [diagonal, ...) cut by
    # causality or by the end of the keys.
    diagonal = tl.maximum(tl.minimum(lowest, keys - 1), 0) // BN
    edge = sample * 0
    inner = edge
    sink_all = edge
    sink_whole = edge
    reach = sample * 0 + _NO_WINDOW
    if FULL_STREAMS or SPARSE_STREAMS:
        kind = tl.load(route + sample * stride_rb + kv_head * stride_rh)
        streams = _streams(kind, FULL_STREAMS, SPARSE_STREAMS)
        reach = tl.where(streams, local, reach)
        edge = tl.minimum(tl.maximum(lowest - reach + 1, 0) // BN, diagonal)
        inner = (tl.maximum(highest - reach + 1, 0) + BN - 1) // BN
        inner = tl.minimum(tl.maximum(inner, edge), diagonal)
        sink_all = tl.minimum((sink + BN - 1) // BN, edge)
        sink_whole = tl.minimum(sink // BN, edge)
    if HOLES:
        inner = diagonal
        sink_whole = sample * 0
    whole = sink_whole + diagonal - inner
    sink_cut = sink_all - sink_whole
    left_cut = sink_cut + inner - edge
    cut = left_cut + (tl.maximum(end - diagonal * BN, 0) + BN - 1) // BN

    gain = scale
    if scale_tensor is not None:
        gain = tl.load(scale_tensor).to(tl.float32)
    sign = tl.where(gain < 0, -1.0, 1.0)
    gain = gain * sign * _LOG2E
    cap = softcap * _LOG2E

    rows = row_tile * BM + tl.arange(0, BM)
    columns = tl.arange(0, BD)
    value_columns = tl.arange(0, BDV)
    offs_n = tl.arange(0, BN)
    query += sample.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    key += sample.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    value += sample.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    key += first.to(tl.int64) * stride_ks
    value += first.to(tl.int64) * stride_vs
    inside = (rows < queries)[:, None] & (columns < D)[None, :]
    q = tl.load(query + rows.to(tl.int64)[:, None] * stride_qs + columns[None, :], mask=inside, other=0.0)
    if scale_tensor is not None:
        # The running maximum is taken before the scale, which therefore must not be negative.
        q = (q * sign).to(q.dtype)

    key_offsets = offs_n[:, None] * stride_ks + columns[None, :]
    value_offsets = offs_n[:, None] * stride_vs + value_columns[None, :]
    key_rows = key
    value_rows = value
    if TMA:
        bound = tl.maximum(keys, 1)
        key_rows = tl.make_tensor_descriptor(key, [bound, D], [stride_ks, 1], [BN, BD])
        value_rows = tl.make_tensor_descriptor(value, [bound, DV], [stride_vs, 1], [BN, BDV])

    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)

    position = lowest + tl.arange(0, BM)
    if OVERLAP:
        # The products of the next block run while the softmax of this one is computed: the loop
        # first adds the previous block's values, whose end it has to await anyway.
        if whole > 0:
            n = tl.where(0 < sink_whole, 0, inner) * BN
            k = _load_block(
                key_rows, key, key_offsets, columns, n, stride_ks, keys, BN, D, BD, TMA, True
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            p, top, total, _ = _softmax_whole(s, top, total, gain, cap, SOFTCAP)
            weights = p.to(value.dtype.element_ty)
            n_value = n
            n = _whole_block(1, whole, sink_whole, inner) * BN
            k = _load_block(
                key_rows, key, key_offsets, columns, n, stride_ks, keys, BN, D, BD, TMA, True
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            for t in tl.range(1, whole):
                n_value = _whole_block(t - 1, whole, sink_whole, inner) * BN
                v = _load_block(
                    value_rows, value, value_offsets, value_columns, n_value, stride_vs, keys, BN, DV, BDV, TMA, True
                )
                acc = tl.dot(weights, v, acc, input_precision=PRECISION)
                n = _whole_block(t + 1, whole, sink_whole, inner) * BN
                k = _load_block(
                    key_rows, key, key_offsets, columns, n, stride_ks, keys, BN, D, BD, TMA, True
                )
                ahead = tl.dot(q, k.T, input_precision=PRECISION)
                p, top, total, shrink = _softmax_whole(s, top, total, gain, cap, SOFTCAP)
                acc = acc * shrink[:, None]
                weights = p.to(value.dtype.element_ty)
                s = ahead
            n_value = _whole_block(whole - 1, whole, sink_whole, inner) * BN
            v = _load_block(
                value_rows, value, value_offsets, value_columns, n_value, stride_vs, keys, BN, DV, BDV, TMA, True
            )
            acc = tl.dot(weights, v, acc, input_precision=PRECISION)
    else:
        for t in tl.range(0, whole):
            n = _whole_block(t, whole, sink_whole, inner) * BN
            k = _load_block(
                key_rows, key, key_offsets, columns, n, stride_ks, keys, BN, D, BD, TMA, True
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            p, top, total, shrink = _softmax_whole(s, top, total, gain, cap, SOFTCAP)
            v = _load_block(
                value_rows, value, value_offsets, value_columns, n, stride_vs, keys, BN, DV, BDV, TMA, True
            )
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    for t in tl.range(0, cut):
        n = tl.where(
            t < sink_cut,
            t + sink_whole,
            tl.where(t < left_cut, t - sink_cut + edge, t - left_cut + diagonal),
        )
        n = n * BN
        k = _load_block(
            key_rows, key, key_offsets, columns, n, stride_ks, keys, BN, D, BD, TMA, False
        )
        s = tl.dot(q, k.T, input_precision=PRECISION)
        j = n + offs_n
        real = j < keys
        if HOLES:
            real = real & tl.load(
                key_mask + sample.to(tl.int64) * stride_mb + (first + j).to(tl.int64) * stride_ms,
                mask=real,
                other=0,
            ).to(tl.int1)
        behind = position[:, None] - j[None, :]
        visible = (behind >= 0) & real[None, :]
        if FULL_STREAMS or SPARSE_STREAMS:
            visible = visible & ((behind < reach) | (j < sink)[None, :])
        p, top, total, shrink = _softmax_cut(s, visible, top, total, gain, cap, SOFTCAP)
        v = _load_block(
            value_rows, value, value_offsets, value_columns, n, stride_vs, keys, BN, DV, BDV, TMA, False
        )
        if HOLES:
            v = tl.where(real[:, None], v, tl.zeros_like(v))
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    empty = top == -float("inf")
    if learned_sinks is not None:
        logit = tl.load(learned_sinks + head).to(tl.float32) * _LOG2E
        new_top = tl.maximum(top, logit)
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink + tl.math.exp2(logit - new_top)
        acc = acc * shrink[:, None]
        top = new_top
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]

    rows_out = sample.to(tl.int64) * (kv_heads * GROUP) + head
    rows_out = rows_out * queries
    written = rows < queries
    log = tl.where(empty, -float("inf"), (top + tl.math.log2(total)) * _LN2)
    tl.store(lse + rows_out + rows, log, mask=written)
    out += rows_out * DV
    where = rows.to(tl.int64)[:, None] * DV + value_columns[None, :]
    tl.store(
        out + where,
        acc.to(out.dtype.element_ty),
        mask=written[:, None] & (value_columns < DV)[None, :],
    )
