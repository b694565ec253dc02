"""Device code of the Triton prefill kernel; ``triton_prefill`` launches it.

A program computes BM query rows, of one query head or of PACK heads that read the same keys, over
a list of key blocks of BN keys: those that all its rows see whole, for which no mask is computed,
and the few that the diagonal, the left edge of the window or the end of the sink cuts. Positions
are relative to the sample's first real key (``start``), so left padding costs nothing and the sink
begins with block 0. Nor does a key mask that only says where a sample begins and ends: ``spans``
finds that out on the device, and only a sample with a hole has masks computed for all its blocks.
Scores are kept in units of log 2, so that a softmax weight is one fused multiply-add and one exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elastic_compile.kernels._triton_common import key_range, sparse_units

_NO_WINDOW = tl.constexpr(1 << 30)
_LEAST_SCALE = tl.constexpr(1e-37)  # as _gpu.LEAST_SCALE
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _choose_tile(
    route,
    units,
    kv_heads,
    stride_rb,
    stride_rh,
    tiles,
    even_tiles,
    section,
    LANES: tl.constexpr,
    FULL_STREAMS: tl.constexpr,
    SPARSE_STREAMS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """What a program computes: unit, lane of its group, row tile, and whether it streams.

    A lane is a query head of the group, or PACK of them.

    Programs start in the order of their ids, so this order is the schedule, heaviest first: the
    tiles of full heads that see more than sink + local keys, last rows first, in sections of units
    whose keys and values share the L2 cache; then those of streaming heads, all heads of a row tile
    together, since their queries are neighbours in memory; then the first ``even_tiles`` of all
    heads, which see the same keys in both modes. Query heads of a group are neighbours throughout,
    since they read the same keys.
    """
    pid = tl.program_id(0)
    per_unit = LANES * (tiles - even_tiles)
    MIXED: tl.constexpr = FULL_STREAMS != SPARSE_STREAMS
    full_units = units
    if FULL_STREAMS and SPARSE_STREAMS:
        full_units = units * 0
    if MIXED:
        sparse, full = sparse_units(route, 0, units, kv_heads, stride_rb, stride_rh, SCAN)
        if FULL_STREAMS:
            sparse, full = full, sparse
        full_units = tl.sum(full, 0)
        for first in range(SCAN, units, SCAN):
            more_sparse, more_full = sparse_units(
                route, first, units, kv_heads, stride_rb, stride_rh, SCAN
            )
            full_units += tl.sum(more_sparse if FULL_STREAMS else more_full, 0)
    full_tiles = full_units * per_unit
    heavy_tiles = units * per_unit
    in_full = pid < full_tiles
    in_heavy = pid < heavy_tiles

    in_section = pid % tl.maximum(section * per_unit, 1)
    section_first = pid // tl.maximum(section * per_unit, 1) * section
    width = tl.maximum(tl.minimum(section, full_units - section_first) * LANES, 1)
    in_sparse = pid - full_tiles
    in_even = pid - heavy_tiles
    sparse_width = tl.maximum((units - full_units) * LANES, 1)
    rank = tl.where(
        in_full,
        section_first + in_section % width // LANES,
        in_sparse % sparse_width // LANES,
    )
    tile = tl.where(
        in_full,
        tiles - 1 - in_section // width,
        tl.where(
            in_heavy,
            tiles - 1 - in_sparse // sparse_width,
            even_tiles - 1 - in_even // (units * LANES),
        ),
    )
    lane = tl.where(in_full, in_section, tl.where(in_heavy, in_sparse, in_even)) % LANES

    unit = rank
    if MIXED:
        member = tl.where(in_full, full, sparse)
        count = tl.cumsum(member, 0)
        unit = tl.sum(tl.where((count == rank + 1) & (member == 1), tl.arange(0, SCAN), 0), 0)
        seen = tl.sum(member, 0)
        for first in range(SCAN, units, SCAN):
            more_sparse, more_full = sparse_units(
                route, first, units, kv_heads, stride_rb, stride_rh, SCAN
            )
            if FULL_STREAMS:
                more_sparse, more_full = more_full, more_sparse
            member = tl.where(in_full, more_full, more_sparse)
            count = seen + tl.cumsum(member, 0)
            hit = (count == rank + 1) & (member == 1)
            unit += tl.sum(tl.where(hit, first + tl.arange(0, SCAN), 0), 0)
            seen += tl.sum(member, 0)
    unit = tl.where(in_heavy, unit, in_even % (units * LANES) // LANES)
    return unit, lane, tile, in_heavy & (pid >= full_tiles)


@triton.jit
def _whole_block(t, sink_whole, inner):
    """Index of the t-th block that all rows see whole: the sink's, then the window's."""
    return tl.where(t < sink_whole, t, t - sink_whole + inner)


@triton.jit
def _cut_block(t, sink_cut, left_cut, sink_whole, edge, diagonal):
    """Index of the t-th block that needs a mask: end of the sink, left edge, diagonal."""
    window = tl.where(t < left_cut, t - sink_cut + edge, t - left_cut + diagonal)
    return tl.where(t < sink_cut, t + sink_whole, window)


@triton.jit
def _load_block(
    rows,
    place,
    offsets,
    columns,
    n,
    stride,
    keys,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Keys or values n ... n + SIZE - 1 of a sample and kv head, whose first key is at ``place``.

    Zeros past the head size. What lies past the sample's last key is zero by pointers; by TMA only
    where the tensor ends there.
    """
    if TMA:
        sample, kv_head, first = place
        block = tl.reshape(rows.load([sample, kv_head, first + n, 0]), [SIZE, columns.shape[0]])
    else:
        where = rows + n.to(tl.int64) * stride + offsets
        inside = (columns < WIDTH)[None, :]
        if WHOLE and columns.shape[0] == WIDTH:
            block = tl.load(where)
        elif WHOLE:
            block = tl.load(where, mask=inside, other=0.0)
        else:
            exists = (n + tl.arange(0, SIZE) < keys)[:, None]
            block = tl.load(where, mask=exists & inside, other=0.0)
    return block


@triton.jit
def _visible(
    n,
    position,
    keys,
    reach,
    sink,
    mask_row,
    stride_ms,
    BN: tl.constexpr,
    STREAMS: tl.constexpr,
):
    """Which pairs [BM, BN] of the block at key n count."""
    j = n + tl.arange(0, BN)
    behind = position[:, None] - j[None, :]
    visible = behind >= 0
    if STREAMS:
        visible = visible & ((behind < reach) | (j < sink)[None, :])
    if mask_row is not None:
        real = tl.load(mask_row + j.to(tl.int64) * stride_ms, mask=j < keys, other=0) != 0
        visible = visible & real[None, :]
    return visible


@triton.jit
def _silence(block, n, keys, mask_row, stride_ms, BN: tl.constexpr, UNFILLED: tl.constexpr):
    """Zeros where a key is not real: a weight of zero does not silence a NaN.

    UNFILLED: the block may hold what lies past the last key.
    """
    if mask_row is not None or UNFILLED:
        j = n + tl.arange(0, BN)
        real = j < keys
        if mask_row is not None:
            real = tl.load(mask_row + j.to(tl.int64) * stride_ms, mask=real, other=0) != 0
        block = tl.where(real[:, None], block, tl.zeros_like(block))
    return block


@triton.jit
def _softcap(products, rate, cap):
    """``cap * tanh``, as ``1 - 2 / (exp(2x) + 1)``, which is right at both infinities."""
    return cap * (1.0 - 2.0 / (tl.math.exp2(products * rate) + 1.0))


@triton.jit
def _row_maxima(scores):
    """Row maxima [BM], in chains of BN / 8 rather than one of BN elements of a thread."""
    BM: tl.constexpr = scores.shape[0]
    BN: tl.constexpr = scores.shape[1]
    return tl.max(tl.max(tl.reshape(scores, [BM, BN // 8, 8]), 1), 1)


@triton.jit
def _no_weights(BM: tl.constexpr, SPLIT_SUMS: tl.constexpr):
    """Zero row sums [BM], or [BM, 8] to be added up at the end: more registers, no shuffles."""
    if SPLIT_SUMS:
        total = tl.zeros([BM, 8], tl.float32)
    else:
        total = tl.zeros([BM], tl.float32)
    return total


@triton.jit
def _add_weights(total, shrink, weights):
    """Running row sums of the weights, as ``_no_weights`` lays them out."""
    BM: tl.constexpr = weights.shape[0]
    BN: tl.constexpr = weights.shape[1]
    if len(total.shape) == 1:
        total = total * shrink + tl.sum(weights, 1)
    else:
        total = total * shrink[:, None] + tl.sum(tl.reshape(weights, [BM, BN // 8, 8]), 1)
    return total


@triton.jit
def _softmax_whole(products, top, total, gain, rate, cap):
    """Online softmax over a block that every row sees whole; ``products`` are q.k."""
    if cap is not None:
        products = _softcap(products, rate, cap)
    new_top = tl.maximum(top, _row_maxima(products) * gain)
    weights = tl.math.exp2(products * gain - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    return weights, new_top, _add_weights(total, shrink, weights), shrink


@triton.jit
def _softmax_cut(products, visible, top, total, gain, rate, cap):
    """Online softmax over a block of which a row may see nothing, now and so far."""
    if cap is not None:
        products = _softcap(products, rate, cap)
    products = tl.where(visible, products, -float("inf"))
    new_top = tl.maximum(top, _row_maxima(products) * gain)
    anchor = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.math.exp2(products * gain - anchor[:, None])
    shrink = tl.math.exp2(top - anchor)
    return weights, new_top, _add_weights(total, shrink, weights), shrink


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
        "even_tiles",
        "section",
    ]
)
def prefill(
    query,
    key,
    value,
    out,
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
    even_tiles,
    section,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FULL_STREAMS: tl.constexpr,
    SPARSE_STREAMS: tl.constexpr,
    SCAN: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr,
    SPLIT_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row tile of PACK query heads. Optional pointers and ``softcap`` are None when absent.

    ``held``: keys that the key tensor has room for; ``tiles``: row tiles of a head; for
    ``even_tiles`` and ``section`` see ``_choose_tile``; BD, BDV: head sizes rounded up to powers
    of two.
    """
    unit, lane, tile, streams = _choose_tile(
        route,
        units,
        kv_heads,
        stride_rb,
        stride_rh,
        tiles,
        even_tiles,
        section,
        GROUP // PACK,
        FULL_STREAMS,
        SPARSE_STREAMS,
        SCAN,
    )
    STREAMS: tl.constexpr = FULL_STREAMS or SPARSE_STREAMS
    sample = unit // kv_heads
    kv_head = unit % kv_heads
    # Row r of the tile: row r % SPAN of head r // SPAN.
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

    # Keys [first, first + keys) of the sample are real; row i sits at shift + i, counted from them.
    # Without a mask no row sits behind the last key: causality alone keeps rows off what was never
    # filled. With one they may (right padding).
    first, filled = key_range(sample, start, kv_len, stride_start, stride_len, held)
    last = filled
    if key_mask is not None:
        last = tl.load(span + sample * 2)
    keys = tl.maximum(last - first, 0)
    shift = filled - queries - first
    lowest = shift + tile * SPAN
    highest = shift + tl.minimum(tile * SPAN + SPAN, queries) - 1
    end = tl.minimum(highest + 1, keys)

    # Block indices: sink [0, sink_whole) whole, [sink_whole, sink_all) cut; window [edge, inner)
    # cut, [inner, diagonal) whole, [diagonal, ...) cut.
    diagonal = tl.maximum(tl.minimum(lowest, keys - 1), 0) // BN
    reach = sample * 0 + _NO_WINDOW
    edge = sample * 0
    inner = sample * 0
    sink_all = sample * 0
    sink_whole = sample * 0
    if STREAMS:
        reach = tl.where(streams, local, _NO_WINDOW)
        edge = tl.minimum(tl.maximum(lowest - reach + 1, 0) // BN, diagonal)
        inner = (tl.maximum(highest - reach + 1, 0) + BN - 1) // BN
        inner = tl.minimum(tl.maximum(inner, edge), diagonal)
        sink_all = tl.minimum((sink + BN - 1) // BN, edge)
        sink_whole = tl.minimum(sink // BN, edge)
    mask_row = key_mask
    if key_mask is not None:
        mask_row += sample.to(tl.int64) * stride_mb + first.to(tl.int64) * stride_ms
        # With a hole, every block needs its mask.
        broken = tl.load(span + sample * 2 + 1) != 0
        inner = tl.where(broken, diagonal, inner)
        sink_whole = tl.where(broken, 0, sink_whole)
    whole = sink_whole + diagonal - inner
    sink_cut = sink_all - sink_whole
    left_cut = sink_cut + inner - edge
    cut = left_cut + (tl.maximum(end - diagonal * BN, 0) + BN - 1) // BN

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
    if OVERLAP:
        # The values lag one block behind, so that their products run on the tensor cores during
        # the next block's softmax.
        ahead = tl.minimum(whole, 1)
        before = tl.where(
            whole > 0,
            _whole_block(0, sink_whole, inner),
            _cut_block(0, sink_cut, left_cut, sink_whole, edge, diagonal),
        )
        before = before * BN
        p = tl.zeros([BM, BN], tl.float32)
        shrink = tl.zeros([BM], tl.float32)
        # The condition also ends the life of this block's shared memory before the loop begins.
        if end > 0:
            k = _load_block(
                key, place, key_offsets, columns, before, stride_ks, keys, BN, D, TMA, WHOLE=False
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            visible = _visible(
                before, position, keys, reach, sink, mask_row, stride_ms, BN, STREAMS
            )
            p, top, total, shrink = _softmax_cut(s, visible, top, total, gain, rate, cap)
        for t in tl.range(1, whole):
            n = _whole_block(t, sink_whole, inner) * BN
            k = _load_block(
                key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=True
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            v = _load_block(
                value,
                place,
                value_offsets,
                value_columns,
                before,
                stride_vs,
                keys,
                BN,
                DV,
                TMA,
                WHOLE=True,
            )
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            p, top, total, shrink = _softmax_whole(s, top, total, gain, rate, cap)
            before = n
        for t in tl.range(1 - ahead, cut):
            n = _cut_block(t, sink_cut, left_cut, sink_whole, edge, diagonal) * BN
            k = _load_block(
                key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=False
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            v = _load_block(
                value,
                place,
                value_offsets,
                value_columns,
                before,
                stride_vs,
                keys,
                BN,
                DV,
                TMA,
                WHOLE=False,
            )
            v = _silence(v, before, keys, mask_row, stride_ms, BN, UNFILLED)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            visible = _visible(n, position, keys, reach, sink, mask_row, stride_ms, BN, STREAMS)
            p, top, total, shrink = _softmax_cut(s, visible, top, total, gain, rate, cap)
            before = n
        acc = acc * shrink[:, None]
        v = _load_block(
            value,
            place,
            value_offsets,
            value_columns,
            before,
            stride_vs,
            keys,
            BN,
            DV,
            TMA,
            WHOLE=False,
        )
        v = _silence(v, before, keys, mask_row, stride_ms, BN, UNFILLED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    else:
        for t in tl.range(0, whole):
            n = _whole_block(t, sink_whole, inner) * BN
            k = _load_block(
                key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=True
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            p, top, total, shrink = _softmax_whole(s, top, total, gain, rate, cap)
            v = _load_block(
                value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA,
                WHOLE=True,
            )  # fmt: skip
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        for t in tl.range(0, cut):
            n = _cut_block(t, sink_cut, left_cut, sink_whole, edge, diagonal) * BN
            k = _load_block(
                key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=False
            )
            s = tl.dot(q, k.T, input_precision=PRECISION)
            visible = _visible(n, position, keys, reach, sink, mask_row, stride_ms, BN, STREAMS)
            p, top, total, shrink = _softmax_cut(s, visible, top, total, gain, rate, cap)
            v = _load_block(
                value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA,
                WHOLE=False,
            )  # fmt: skip
            v = _silence(v, n, keys, mask_row, stride_ms, BN, UNFILLED)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

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
    # Not acc / total alone: a lagging tile multiplies by zero what lies behind its empty rows.
    acc = tl.where(empty[:, None], 0.0, acc / total[:, None])

    written = rows < queries
    heads = kv_heads * GROUP
    log = tl.where(empty, -float("inf"), (top + tl.math.log2(total)) * _LN2)
    first_log = sample.to(tl.int64) * heads * queries
    tl.store(lse + first_log + head.to(tl.int64) * queries + rows, log, mask=written)
    # [B, Sq, Hq, Dv] in memory.
    written_at = (sample.to(tl.int64) * queries + rows) * heads + head
    tl.store(
        out + written_at[:, None] * DV + value_columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=written[:, None] & (value_columns < DV)[None, :],
    )
