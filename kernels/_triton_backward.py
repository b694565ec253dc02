"""Device code of the Triton backward; ``triton_backward`` launches it.

Two kernels besides the row sums that both need: one holds a block of keys and values and meets the
query rows that see it, all query heads of the group in turn; one holds a tile of query rows and
meets the keys that it sees. The scores are computed in both: every gradient has one writer, nothing
is added atomically, and results repeat to the bit. Positions, masks and units of the scores are
those of ``_triton_prefill``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elastic_compile.kernels._triton_common import key_range
from elastic_compile.kernels._triton_prefill import (
    _choose_tile,
    _cut_block,
    _load_block,
    _silence,
    _visible,
    _whole_block,
)

_NO_WINDOW = tl.constexpr(1 << 30)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stride_gl", "queries", "heads"])
def row_sums(
    grad_out,
    out,
    lse,
    grad_lse,
    logs,
    sums,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_ob,
    stride_oh,
    stride_os,
    queries,
    heads,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
):
    """<dO, O> - dL/dlse of every row, and its log-sum-exp in units of log 2.

    float32 [B, Hq, Sq] all of them, ``grad_lse`` and ``lse`` or None; +inf for a row that sees
    nothing, so that its weights are 0.
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    sample = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    columns = tl.arange(0, BDV)
    inside = (rows < queries)[:, None] & (columns < DV)[None, :]
    at = rows.to(tl.int64)[:, None]
    grad_out += sample * stride_gb + head * stride_gh
    out += sample * stride_ob + head * stride_oh
    grad = tl.load(grad_out + at * stride_gs + columns[None, :], mask=inside, other=0.0)
    found = tl.load(out + at * stride_os + columns[None, :], mask=inside, other=0.0)
    total = tl.sum(grad.to(tl.float32) * found.to(tl.float32), 1)
    where = pair.to(tl.int64) * queries + rows
    if grad_lse is not None:
        total -= tl.load(grad_lse + where, mask=rows < queries, other=0.0)
    tl.store(sums + where, total, mask=rows < queries)
    if lse is not None:
        log = tl.load(lse + where, mask=rows < queries, other=0.0)
        log = tl.where(log == -float("inf"), float("inf"), log) * _LOG2E
        tl.store(logs + where, log, mask=rows < queries)


@triton.jit
def _gains(scale, softcap):
    """Factors on q.k inside tanh and outside (as ``_triton_prefill``), without a cap on its own."""
    if softcap is not None:
        rate = scale / softcap * (2.0 * _LOG2E)
        gain = softcap * _LOG2E
    else:
        rate = scale
        gain = scale * _LOG2E
    return rate, gain


@triton.jit
def _weights(products, logs, rate, gain, softcap):
    """Softmax weights, and the derivative of the capped scores by the uncapped ones.

    ``logs``: what ``row_sums`` gives, broadcast; +inf for rows that do not exist.
    """
    slope = products
    if softcap is not None:
        products = 1.0 - 2.0 / (tl.math.exp2(products * rate) + 1.0)
        slope = 1.0 - products * products
    return tl.math.exp2(products * gain - logs), slope


@triton.jit
def _load_rows(rows, at, columns, exists, stride, WIDTH: tl.constexpr):
    """Rows ``at`` of a head, zeros where they do not exist and past the head size."""
    where = rows + at.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(where, mask=exists[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _key_step(
    k,
    v,
    query,
    grad_out,
    logs,
    sums,
    sample,
    head,
    m,
    queries,
    shift,
    j,
    reach,
    sink,
    grad_k,
    grad_v,
    rate,
    gain,
    softcap,
    stride_qs,
    stride_gs,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    STREAMS: tl.constexpr,
    CUT: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what BM rows of one head, from row m on, give to the gradients of a block of keys."""
    columns = tl.arange(0, k.shape[1])
    value_columns = tl.arange(0, v.shape[1])
    at = m + tl.arange(0, BM)
    exists = at < queries
    if TMA:
        q = tl.reshape(query.load([sample, head, m, 0]), [BM, k.shape[1]])
    else:
        q = _load_rows(query, at, columns, exists, stride_qs, D)
    products = tl.dot(k, q.T, input_precision=PRECISION)
    log = tl.load(logs + at, mask=exists, other=float("inf"))
    weights, slope = _weights(products, log[None, :], rate, gain, softcap)
    if CUT:
        behind = (shift + at)[None, :] - j[:, None]
        visible = behind >= 0
        if STREAMS:
            visible = visible & ((behind < reach) | (j < sink)[:, None])
        weights = tl.where(visible, weights, 0.0)
    if TMA:
        grad = tl.reshape(grad_out.load([sample, head, m, 0]), [BM, v.shape[1]])
    else:
        grad = _load_rows(grad_out, at, value_columns, exists, stride_gs, DV)
    grad_v = tl.dot(weights.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
    grad_weights = tl.dot(v, grad.T, input_precision=PRECISION)
    total = tl.load(sums + at, mask=exists, other=0.0)
    grad_scores = weights * (grad_weights - total[None, :])
    if softcap is not None:
        grad_scores = grad_scores * slope
    if CUT:
        # The slope or the products of a pair that does not count may be NaN.
        grad_scores = tl.where(visible, grad_scores, 0.0)
    grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(
    do_not_specialize=[
        "stride_rb",
        "stride_rh",
        "stride_start",
        "stride_len",
        "stride_mb",
        "queries",
        "held",
        "kv_heads",
        "sink",
        "local",
        "blocks",
    ]
)
def keys_and_values(
    query,
    key,
    value,
    grad_out,
    logs,
    sums,
    grad_key,
    grad_value,
    route,
    start,
    kv_len,
    key_mask,
    span,
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
    stride_gb,
    stride_gh,
    stride_gs,
    stride_rb,
    stride_rh,
    stride_start,
    stride_len,
    stride_mb,
    stride_ms,
    queries,
    held,
    kv_heads,
    sink,
    local,
    blocks,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FULL_STREAMS: tl.constexpr,
    SPARSE_STREAMS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BN keys and values of one kv head, [B, Hkv, Skv, D or Dv] contiguous.

    First blocks, which most rows see, come first. ``blocks``: of the key tensor. TMA: query and
    grad_out are descriptors.
    """
    STREAMS: tl.constexpr = FULL_STREAMS or SPARSE_STREAMS
    units = tl.num_programs(0) // blocks
    pid = tl.program_id(0)
    unit = pid % units
    number = pid // units
    sample = unit // kv_heads
    kv_head = unit % kv_heads
    first, filled = key_range(sample, start, kv_len, stride_start, stride_len, held)
    last = filled
    if key_mask is not None:
        last = tl.load(span + sample * 2)
    keys = tl.maximum(last - first, 0)
    shift = filled - queries - first
    # Blocks count from the tensor's first key, so that every key is written once.
    column = number * BN + tl.arange(0, BN)
    j = column - first
    real = (j >= 0) & (j < keys)
    if key_mask is not None:
        at = key_mask + sample.to(tl.int64) * stride_mb + column.to(tl.int64) * stride_ms
        real = real & (tl.load(at, mask=real, other=0) != 0)

    columns = tl.arange(0, BD)
    value_columns = tl.arange(0, BDV)
    key += sample.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    value += sample.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    # What is not real may hold anything: it is not read.
    k = _load_rows(key, column, columns, real, stride_ks, D)
    v = _load_rows(value, column, value_columns, real, stride_vs, DV)

    gain = scale
    if scale_tensor is not None:
        gain = tl.load(scale_tensor).to(tl.float32)
    rate, factor = _gains(gain, softcap)

    reach = sample * 0 + _NO_WINDOW
    if STREAMS:
        sparse = tl.load(route + sample * stride_rb + kv_head * stride_rh) != 0
        streams = tl.where(sparse, SPARSE_STREAMS, FULL_STREAMS)
        reach = tl.where(streams, local, _NO_WINDOW)
    # Rows [low, high) see some of the keys; rows [inner, outer) see all of them. What lies past the
    # last row weighs nothing, so the last tile may be incomplete.
    lowest = number * BN - first
    highest = tl.minimum(lowest + BN, keys) - 1
    lowest = tl.maximum(lowest, 0)
    low = tl.minimum(tl.maximum(lowest - shift, 0), queries) // BM * BM
    high = sample * 0 + queries
    outer = high
    if STREAMS:
        far = tl.minimum(tl.maximum(highest + reach - shift, 0), queries)
        high = tl.where(lowest < sink, queries, far)
        near = tl.minimum(tl.maximum(lowest + reach - shift, 0), queries)
        outer = tl.where(highest < sink, queries, near)
    last_tile = (high + BM - 1) // BM * BM
    outer = tl.where(outer == queries, last_tile, outer // BM * BM)
    inner = tl.minimum((tl.maximum(highest - shift, 0) + BM - 1) // BM * BM, last_tile)
    inner = tl.maximum(inner, low)
    # A key that is not real takes its block from those that rows see whole.
    outer = tl.where(tl.min(real.to(tl.int32), 0) != 0, tl.maximum(outer, inner), inner)
    high = tl.where(highest < lowest, low, last_tile)
    inner = tl.minimum(inner, high)
    outer = tl.minimum(outer, high)

    # Keys that are not real are ahead of all rows.
    j = tl.where(real, j, _NO_WINDOW)
    grad_k = tl.zeros([BN, BD], tl.float32)
    grad_v = tl.zeros([BN, BDV], tl.float32)
    own_query = query
    own_grad = grad_out
    pair = (sample * kv_heads + kv_head).to(tl.int64) * GROUP
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        if not TMA:
            own_query = query + sample.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
            own_grad = grad_out + sample.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
        own_logs = logs + (pair + member) * queries
        own_sums = sums + (pair + member) * queries
        for m in tl.range(low, inner, BM):
            grad_k, grad_v = _key_step(
                k, v, own_query, own_grad, own_logs, own_sums, sample, head, m, queries, shift, j,
                reach, sink, grad_k, grad_v, rate, factor, softcap, stride_qs, stride_gs, D, DV, BM,
                STREAMS, True, TMA, PRECISION,
            )  # fmt: skip
        for m in tl.range(inner, outer, BM):
            grad_k, grad_v = _key_step(
                k, v, own_query, own_grad, own_logs, own_sums, sample, head, m, queries, shift, j,
                reach, sink, grad_k, grad_v, rate, factor, softcap, stride_qs, stride_gs, D, DV, BM,
                STREAMS, False, TMA, PRECISION,
            )  # fmt: skip
        for m in tl.range(outer, high, BM):
            grad_k, grad_v = _key_step(
                k, v, own_query, own_grad, own_logs, own_sums, sample, head, m, queries, shift, j,
                reach, sink, grad_k, grad_v, rate, factor, softcap, stride_qs, stride_gs, D, DV, BM,
                STREAMS, True, TMA, PRECISION,
            )  # fmt: skip

    grad_k = grad_k * gain
    row = unit.to(tl.int64) * held + column
    written = (column < held)[:, None]
    tl.store(
        grad_key + row[:, None] * D + columns[None, :],
        grad_k.to(grad_key.dtype.element_ty),
        mask=written & (columns < D)[None, :],
    )
    tl.store(
        grad_value + row[:, None] * DV + value_columns[None, :],
        grad_v.to(grad_value.dtype.element_ty),
        mask=written & (value_columns < DV)[None, :],
    )


@triton.jit
def _query_step(
    q,
    grad,
    k,
    v,
    logs,
    total,
    visible,
    grad_q,
    rate,
    gain,
    softcap,
    CUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what a block of keys gives to the gradient of a tile of rows."""
    products = tl.dot(q, k.T, input_precision=PRECISION)
    weights, slope = _weights(products, logs[:, None], rate, gain, softcap)
    grad_weights = tl.dot(grad, v.T, input_precision=PRECISION)
    grad_scores = weights * (grad_weights - total[:, None])
    if softcap is not None:
        grad_scores = grad_scores * slope
    if CUT:
        grad_scores = tl.where(visible, grad_scores, 0.0)
    return tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=PRECISION)


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
def queries_alone(
    query,
    key,
    value,
    grad_out,
    logs,
    sums,
    grad_query,
    route,
    start,
    kv_len,
    key_mask,
    span,
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
    stride_gb,
    stride_gh,
    stride_gs,
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
    PRECISION: tl.constexpr,
):
    """Gradient of BM rows of one query head, [B, Hq, Sq, D] contiguous.

    TMA: key and value are descriptors.
    """
    unit, lane, tile, streams = _choose_tile(
        route, units, kv_heads, stride_rb, stride_rh, tiles, even_tiles, section, GROUP,
        FULL_STREAMS, SPARSE_STREAMS, SCAN,
    )  # fmt: skip
    STREAMS: tl.constexpr = FULL_STREAMS or SPARSE_STREAMS
    sample = unit // kv_heads
    kv_head = unit % kv_heads
    head = kv_head * GROUP + lane
    rows = tile * BM + tl.arange(0, BM)
    exists = rows < queries
    columns = tl.arange(0, BD)
    value_columns = tl.arange(0, BDV)
    query += sample.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    grad_out += sample.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
    q = _load_rows(query, rows, columns, exists, stride_qs, D)
    grad = _load_rows(grad_out, rows, value_columns, exists, stride_gs, DV)
    first_log = (sample * kv_heads * GROUP + head).to(tl.int64) * queries
    log = tl.load(logs + first_log + rows, mask=exists, other=float("inf"))
    total = tl.load(sums + first_log + rows, mask=exists, other=0.0)

    first, filled = key_range(sample, start, kv_len, stride_start, stride_len, held)
    last = filled
    if key_mask is not None:
        last = tl.load(span + sample * 2)
    keys = tl.maximum(last - first, 0)
    shift = filled - queries - first
    lowest = shift + tile * BM
    highest = shift + tl.minimum(tile * BM + BM, queries) - 1
    end = tl.minimum(highest + 1, keys)
    # Lists of blocks as in _triton_prefill.prefill.
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
    rate, factor = _gains(gain, softcap)

    place = (sample, kv_head, first)
    UNFILLED: tl.constexpr = TMA and kv_len is not None
    if not TMA:
        key += sample.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        key += first.to(tl.int64) * stride_ks
        value += sample.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
        value += first.to(tl.int64) * stride_vs
    key_offsets = tl.arange(0, BN)[:, None] * stride_ks + columns[None, :]
    value_offsets = tl.arange(0, BN)[:, None] * stride_vs + value_columns[None, :]
    position = lowest + tl.arange(0, BM)
    grad_q = tl.zeros([BM, BD], tl.float32)
    for t in tl.range(0, whole):
        n = _whole_block(t, sink_whole, inner) * BN
        k = _load_block(
            key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=True
        )
        v = _load_block(
            value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA,
            WHOLE=True,
        )  # fmt: skip
        grad_q = _query_step(
            q, grad, k, v, log, total, None, grad_q, rate, factor, softcap, False, PRECISION
        )
    for t in tl.range(0, cut):
        n = _cut_block(t, sink_cut, left_cut, sink_whole, edge, diagonal) * BN
        k = _load_block(
            key, place, key_offsets, columns, n, stride_ks, keys, BN, D, TMA, WHOLE=False
        )
        v = _load_block(
            value, place, value_offsets, value_columns, n, stride_vs, keys, BN, DV, TMA,
            WHOLE=False,
        )  # fmt: skip
        # A weight of zero does not silence a NaN.
        k = _silence(k, n, keys, mask_row, stride_ms, BN, UNFILLED)
        v = _silence(v, n, keys, mask_row, stride_ms, BN, UNFILLED)
        visible = _visible(n, position, keys, reach, sink, mask_row, stride_ms, BN, STREAMS)
        grad_q = _query_step(
            q, grad, k, v, log, total, visible, grad_q, rate, factor, softcap, True, PRECISION
        )
    grad_q = grad_q * gain
    tl.store(
        grad_query + (first_log + rows)[:, None] * D + columns[None, :],
        grad_q.to(grad_query.dtype.element_ty),
        mask=exists[:, None] & (columns < D)[None, :],
    )
