"""Device code of the Hopper prefill kernel; ``gluon_prefill`` launches it.

One program for every multiprocessor works through a list of tiles. Its producer, a single warp,
loads queries, keys and values by TMA, some blocks ahead and across tiles. Its two consumers, a
warpgroup each, own 64 rows of the tile: the same positions of two query heads that read the same
keys or, where a kv head has an odd number of query heads, the halves of 128 rows of one. A consumer
multiplies the weights of one block with its values while it waits for the scores of the next, and
one consumer's softmax runs beside the other's products. Masks, positions and units of the scores
are those of ``_triton_prefill``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_PRODUCER_REGISTERS = gl.constexpr(24)
_ROWS = gl.constexpr(64)
_NO_WINDOW = gl.constexpr(1 << 30)
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _tile(
    index,
    order,
    units,
    tiles,
    even_tiles,
    section,
    LANES: gl.constexpr,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Unit, lane, row tile of the tile ``index``, and whether it streams.

    The order is that of ``_triton_prefill._choose_tile``.
    """
    per_unit = LANES * (tiles - even_tiles)
    full_units = units
    if FULL_STREAMS != SPARSE_STREAMS:
        full_units = gl.load(order + units)
    elif FULL_STREAMS:
        full_units = units * 0
    full_tiles = full_units * per_unit
    heavy_tiles = units * per_unit
    in_full = index < full_tiles
    in_heavy = index < heavy_tiles

    in_section = index % gl.maximum(section * per_unit, 1)
    section_first = index // gl.maximum(section * per_unit, 1) * section
    width = gl.maximum(gl.minimum(section, full_units - section_first) * LANES, 1)
    in_sparse = index - full_tiles
    sparse_width = gl.maximum((units - full_units) * LANES, 1)
    in_even = index - heavy_tiles
    rank = gl.where(
        in_full,
        section_first + in_section % width // LANES,
        full_units + in_sparse % sparse_width // LANES,
    )
    tile = gl.where(
        in_full,
        tiles - 1 - in_section // width,
        gl.where(
            in_heavy,
            tiles - 1 - in_sparse // sparse_width,
            even_tiles - 1 - in_even // (units * LANES),
        ),
    )
    lane = gl.where(in_full, in_section, gl.where(in_heavy, in_sparse, in_even)) % LANES
    unit = rank
    if FULL_STREAMS != SPARSE_STREAMS:
        unit = gl.load(order + gl.where(in_heavy, rank, 0))
    unit = gl.where(in_heavy, unit, in_even % (units * LANES) // LANES)
    return unit, lane, tile, in_heavy & (index >= full_tiles)


@gluon.jit
def _blocks(
    sample,
    tile,
    streams,
    start,
    kv_len,
    span,
    queries,
    held,
    sink,
    local,
    SPAN: gl.constexpr,
    BN: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """The key blocks of a tile: how many all rows see whole, how many are cut, and which.

    Returns:
        first, keys: Keys [first, first + keys) of the sample are real.
        lowest: Position of the tile's first row, counted from the first key.
        reach: Keys that a row sees, itself included, beside the sink.
        broken: Whether the mask has a hole.
        whole, cut: Numbers of blocks.
        where: What ``_block`` turns a number into a block with.
    """
    first = sample * 0
    if start is not None:
        first = gl.load(start + sample).to(gl.int32)
        first = gl.minimum(gl.maximum(first, 0), held)
    filled = sample * 0 + held
    if kv_len is not None:
        filled = gl.minimum(gl.load(kv_len + sample).to(gl.int32), held)
    last = filled
    broken = sample < 0
    if span is not None:
        last = gl.load(span + sample * 2)
        broken = gl.load(span + sample * 2 + 1) != 0
    keys = gl.maximum(last - first, 0)
    shift = filled - queries - first
    lowest = shift + tile * SPAN
    highest = shift + gl.minimum(tile * SPAN + SPAN, queries) - 1
    end = gl.minimum(highest + 1, keys)

    diagonal = gl.maximum(gl.minimum(lowest, keys - 1), 0) // BN
    reach = sample * 0 + _NO_WINDOW
    edge = sample * 0
    inner = sample * 0
    sink_all = sample * 0
    sink_whole = sample * 0
    if STREAMS:
        reach = gl.where(streams, local, _NO_WINDOW)
        edge = gl.minimum(gl.maximum(lowest - reach + 1, 0) // BN, diagonal)
        inner = (gl.maximum(highest - reach + 1, 0) + BN - 1) // BN
        inner = gl.minimum(gl.maximum(inner, edge), diagonal)
        sink_all = gl.minimum((sink + BN - 1) // BN, edge)
        sink_whole = gl.minimum(sink // BN, edge)
    # With a hole, every block needs its mask.
    inner = gl.where(broken, diagonal, inner)
    sink_whole = gl.where(broken, 0, sink_whole)
    whole = sink_whole + diagonal - inner
    sink_cut = sink_all - sink_whole
    left_cut = sink_cut + inner - edge
    cut = left_cut + (gl.maximum(end - diagonal * BN, 0) + BN - 1) // BN
    whole = gl.where(end > 0, whole, 0)
    cut = gl.where(end > 0, cut, 0)
    where = (whole, sink_whole, inner, sink_cut, left_cut, edge, diagonal)
    return first, keys, lowest, reach, broken, whole, cut, where


@gluon.jit
def _block(t, where):
    """Index of the t-th block: those seen whole, then the cut ones; of each the sink's first."""
    whole, sink_whole, inner, sink_cut, left_cut, edge, diagonal = where
    seen_whole = gl.where(t < sink_whole, t, t - sink_whole + inner)
    t -= whole
    window = gl.where(t < left_cut, t - sink_cut + edge, t - left_cut + diagonal)
    return gl.where(t < 0, seen_whole, gl.where(t < sink_cut, t + sink_whole, window))


@gluon.jit
def _rows(kv_head, lane, tile, WHICH: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr):
    """Query head and first row of a consumer."""
    head = kv_head * GROUP + lane * PACK
    row = tile * (2 * _ROWS // PACK)
    if PACK == 2:
        head += WHICH
    else:
        row += WHICH * _ROWS
    return head, row


@gluon.jit
def _produce(
    query,
    key,
    value,
    order,
    start,
    kv_len,
    span,
    q_memory,
    k_memory,
    v_memory,
    barriers,
    sizes,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    STAGES: gl.constexpr,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Loads what the consumers ask for, as soon as there is room."""
    BN: gl.constexpr = k_memory.shape[3]
    D: gl.constexpr = k_memory.shape[4]
    WIDTH: gl.constexpr = key.dtype.primitive_bitwidth // 8
    SPAN: gl.constexpr = 2 * _ROWS // PACK
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    queries, held, units, kv_heads, sink, local, tiles, even_tiles, section, work = sizes
    block = 0
    turn = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        unit, lane, tile, streams = _tile(
            index,
            order,
            units,
            tiles,
            even_tiles,
            section,
            GROUP // PACK,
            FULL_STREAMS,
            SPARSE_STREAMS,
        )
        sample = unit // kv_heads
        kv_head = unit % kv_heads
        first, _keys, _lowest, _reach, _broken, whole, cut, where = _blocks(
            sample,
            tile,
            streams,
            start,
            kv_len,
            span,
            queries,
            held,
            sink,
            local,
            SPAN,
            BN,
            FULL_STREAMS or SPARSE_STREAMS,
        )
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, 2 * _ROWS * D * WIDTH)
        for which in gl.static_range(2):
            head, row = _rows(kv_head, lane, tile, which, GROUP, PACK)
            tma.async_copy_global_to_shared(
                query, [sample, head, row, 0], q_full, q_memory.index(which)
            )
        for t in range(whole + cut):
            n = first + _block(t, where) * BN
            stage = block % STAGES
            vacant = (block // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), vacant)
            mbarrier.expect(k_full.index(stage), BN * D * WIDTH)
            tma.async_copy_global_to_shared(
                key, [sample, kv_head, n, 0], k_full.index(stage), k_memory.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), vacant)
            mbarrier.expect(v_full.index(stage), BN * D * WIDTH)
            tma.async_copy_global_to_shared(
                value, [sample, kv_head, n, 0], v_full.index(stage), v_memory.index(stage)
            )
            block += 1
        turn += 1


@gluon.jit
def _real_keys(n, keys, broken, mask_row, stride_ms, SCORES: gl.constexpr, BN: gl.constexpr):
    """Which keys of the block at key n the mask calls real, bool [BN]."""
    j = n + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
    real = j < keys
    if mask_row is not None:
        # Without a hole, what the mask says is where the keys end.
        if broken:
            real = gl.load(mask_row + j.to(gl.int64) * stride_ms, mask=real, other=0) != 0
    return real


@gluon.jit
def _visible(
    n, position, real, reach, sink, SCORES: gl.constexpr, BN: gl.constexpr, STREAMS: gl.constexpr
):
    """Which pairs of the rows at ``position`` and the block at key n count."""
    j = n + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
    behind = position[:, None] - j[None, :]
    visible = (behind >= 0) & real[None, :]
    if STREAMS:
        visible = visible & ((behind < reach) | (j < sink)[None, :])
    return visible


@gluon.jit
def _silence(v, arrived, phase, n, keys, broken, mask_row, stride_ms):
    """Writes zeros over the values of keys that are not real, once they have arrived.

    A weight of zero does not silence a NaN. Both consumers do so, each before it reads: what they
    write is the same.
    """
    BN: gl.constexpr = v.shape[0]
    D: gl.constexpr = v.shape[1]
    STEP: gl.constexpr = 32
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    if (n + BN > keys) | broken:
        mbarrier.wait(arrived, phase)
        for i in gl.static_range(BN // STEP):
            part = v.slice(i * STEP, STEP)
            j = n + i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, LOADS))
            real = j < keys
            if mask_row is not None:
                holes = gl.load(mask_row + j.to(gl.int64) * stride_ms, mask=real & broken, other=1)
                real = real & (holes != 0)
            found = part.load(LOADS)
            part.store(gl.where(real[:, None], found, gl.zeros_like(found)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _online_softmax(scores, visible, top, total, gain, CUT: gl.constexpr):
    """Weights of a block of scores, and the running maximum, sums and factor on what was before.

    ``total`` is [rows, 8], to be added up at the end: no shuffles meanwhile.
    """
    BN: gl.constexpr = scores.shape[1]
    if CUT:
        scores = gl.where(visible, scores, -float("inf"))
    # Row maxima in chains of BN / 8 elements of a thread rather than one.
    found = gl.max(gl.max(gl.reshape(scores, [_ROWS, BN // 8, 8]), 1), 1)
    new_top = gl.maximum(top, gl.convert_layout(found, top.type.layout) * gain)
    anchor = new_top
    if CUT:
        anchor = gl.where(new_top == -float("inf"), 0.0, new_top)
    weights = gl.exp2(scores * gain - anchor[:, None])
    shrink = gl.exp2(top - anchor)
    sums = gl.sum(gl.reshape(weights, [_ROWS, BN // 8, 8]), 1)
    by_row = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
    return weights, new_top, total * by_row[:, None] + sums, shrink


@gluon.jit
def _step(
    q,
    k_memory,
    v_memory,
    barriers,
    block,
    n,
    last_n,
    acc,
    p,
    top,
    total,
    gain,
    position,
    keys,
    reach,
    sink,
    broken,
    mask_row,
    stride_ms,
    SCORES: gl.constexpr,
    STAGES: gl.constexpr,
    STREAMS: gl.constexpr,
    CUT: gl.constexpr,
    GARBAGE: gl.constexpr,
):
    """Scores of a block at key n, beside the products of the last block's weights ``p``."""
    BN: gl.constexpr = k_memory.shape[3]
    D: gl.constexpr = k_memory.shape[4]
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    stage = block % STAGES
    before = (block - 1) % STAGES
    v = v_memory.index(before).reshape([BN, D])
    v_phase = (block - 1) // STAGES & 1
    real = broken
    if CUT:
        real = _real_keys(n, keys, broken, mask_row, stride_ms, SCORES, BN)
        if GARBAGE:
            _silence(v, v_full.index(before), v_phase, last_n, keys, broken, mask_row, stride_ms)
    mbarrier.wait(k_full.index(stage), block // STAGES & 1)
    k = k_memory.index(stage).reshape([BN, D])
    blank = gl.zeros([_ROWS, BN], gl.float32, SCORES)
    scores = warpgroup_mma(q, k.permute((1, 0)), blank, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), v_phase)
    products = warpgroup_mma(p, v, acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage))
    visible = broken
    if CUT:
        visible = _visible(n, position, real, reach, sink, SCORES, BN, STREAMS)
    weights, top, total, shrink = _online_softmax(scores, visible, top, total, gain, CUT)
    acc, p = warpgroup_mma_wait(0, deps=(products, p))
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(weights.to(p.dtype), p.type.layout), top, total


@gluon.jit
def _consume(
    out,
    lse,
    order,
    start,
    kv_len,
    key_mask,
    span,
    q_memory,
    k_memory,
    v_memory,
    barriers,
    scale,
    stride_mb,
    stride_ms,
    sizes,
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    STAGES: gl.constexpr,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Output and log-sum-exp of 64 rows of every tile of the program."""
    BN: gl.constexpr = k_memory.shape[3]
    D: gl.constexpr = k_memory.shape[4]
    SPAN: gl.constexpr = 2 * _ROWS // PACK
    STREAMS: gl.constexpr = FULL_STREAMS or SPARSE_STREAMS
    # What lies past the last key comes by TMA as it is, but past the end of the tensor.
    GARBAGE: gl.constexpr = kv_len is not None or key_mask is not None
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    queries, held, units, kv_heads, sink, local, tiles, even_tiles, section, work = sizes
    gain = scale * _LOG2E
    block = 0
    turn = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        unit, lane, tile, streams = _tile(
            index,
            order,
            units,
            tiles,
            even_tiles,
            section,
            GROUP // PACK,
            FULL_STREAMS,
            SPARSE_STREAMS,
        )
        sample = unit // kv_heads
        kv_head = unit % kv_heads
        first, keys, lowest, reach, broken, whole, cut, where = _blocks(
            sample,
            tile,
            streams,
            start,
            kv_len,
            span,
            queries,
            held,
            sink,
            local,
            SPAN,
            BN,
            STREAMS,
        )
        head, row = _rows(kv_head, lane, tile, WHICH, GROUP, PACK)
        position = lowest + row - tile * SPAN + gl.arange(0, _ROWS, BY_ROW)
        mask_row = key_mask
        if key_mask is not None:
            mask_row += sample.to(gl.int64) * stride_mb + first.to(gl.int64) * stride_ms

        acc = gl.zeros([_ROWS, D], gl.float32, OUTPUT)
        top = gl.full([_ROWS], -float("inf"), gl.float32, BY_ROW)
        blank = gl.zeros([_ROWS, BN], gl.float32, SCORES)
        total = gl.sum(gl.reshape(blank, [_ROWS, BN // 8, 8]), 1)
        q = q_memory.index(WHICH).reshape([_ROWS, D])
        mbarrier.wait(q_full, turn & 1)
        if whole + cut > 0:
            n = _block(0, where) * BN
            stage = block % STAGES
            mbarrier.wait(k_full.index(stage), block // STAGES & 1)
            k = k_memory.index(stage).reshape([BN, D])
            scores = warpgroup_mma(q, k.permute((1, 0)), blank, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_empty.index(stage))
            real = _real_keys(n, keys, broken, mask_row, stride_ms, SCORES, BN)
            visible = _visible(n, position, real, reach, sink, SCORES, BN, STREAMS)
            weights, top, total, _shrink = _online_softmax(scores, visible, top, total, gain, True)
            p = gl.convert_layout(weights.to(out.dtype), WEIGHTS)
            block += 1
            for _t in range(1, whole):
                acc, p, top, total = _step(
                    q,
                    k_memory,
                    v_memory,
                    barriers,
                    block,
                    n,
                    n,
                    acc,
                    p,
                    top,
                    total,
                    gain,
                    position,
                    keys,
                    reach,
                    sink,
                    broken,
                    mask_row,
                    stride_ms,
                    SCORES,
                    STAGES,
                    STREAMS,
                    False,
                    GARBAGE,
                )
                block += 1
            last_n = _block(gl.maximum(whole - 1, 0), where) * BN
            for t in range(gl.maximum(whole, 1), whole + cut):
                n = _block(t, where) * BN
                acc, p, top, total = _step(
                    q,
                    k_memory,
                    v_memory,
                    barriers,
                    block,
                    n,
                    last_n,
                    acc,
                    p,
                    top,
                    total,
                    gain,
                    position,
                    keys,
                    reach,
                    sink,
                    broken,
                    mask_row,
                    stride_ms,
                    SCORES,
                    STAGES,
                    STREAMS,
                    True,
                    GARBAGE,
                )
                block += 1
                last_n = n
            before = (block - 1) % STAGES
            v = v_memory.index(before).reshape([BN, D])
            v_phase = (block - 1) // STAGES & 1
            if GARBAGE:
                _silence(
                    v, v_full.index(before), v_phase, last_n, keys, broken, mask_row, stride_ms
                )
            mbarrier.wait(v_full.index(before), v_phase)
            products = warpgroup_mma(p, v, acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(products, p))
            mbarrier.arrive(v_empty.index(before))

        empty = top == -float("inf")
        sums = gl.where(empty, 1.0, gl.convert_layout(gl.sum(total, 1), BY_ROW))
        rows = row + gl.arange(0, _ROWS, BY_ROW)
        log = gl.where(empty, -float("inf"), (top + gl.log2(sums)) * _LN2)
        first_log = (sample.to(gl.int64) * (kv_heads * GROUP) + head) * queries
        gl.store(lse + first_log + rows, log, mask=rows < queries)
        factor = gl.convert_layout(1.0 / sums, gl.SliceLayout(1, OUTPUT))
        blank_row = gl.convert_layout(empty, gl.SliceLayout(1, OUTPUT))
        # Not the factor alone: an empty row's products may be NaN.
        acc = gl.where(blank_row[:, None], 0.0, acc * factor[:, None])
        # The queries are no longer needed: the output leaves through their memory.
        q.store(acc.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [sample, head, row, 0], q_memory.index(WHICH))
        tma.store_wait(0)
        mbarrier.arrive(q_empty)
        turn += 1


@gluon.jit(
    do_not_specialize=[
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
        "work",
    ]
)
def prefill(
    query,
    key,
    value,
    out,
    lse,
    order,
    start,
    kv_len,
    key_mask,
    span,
    scale,
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
    work,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Every ``num_programs``-th tile of the work list, from ``program_id`` on.

    ``query`` ... ``out`` are TMA descriptors of [B, H, S, D]; ``work`` is the number of tiles. The
    other arguments are those of ``_triton_prefill.prefill``.
    """
    D: gl.constexpr = key.block_type.shape[3]
    q_memory = gl.allocate_shared_memory(query.dtype, [2, 1, 1, _ROWS, D], query.layout)
    k_memory = gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, BN, D], key.layout)
    v_memory = gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, BN, D], value.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (queries, held, units, kv_heads, sink, local, tiles, even_tiles, section, work)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out,
                    lse,
                    order,
                    start,
                    kv_len,
                    key_mask,
                    span,
                    q_memory,
                    k_memory,
                    v_memory,
                    barriers,
                    scale,
                    stride_mb,
                    stride_ms,
                    sizes,
                    0,
                    GROUP,
                    PACK,
                    STAGES,
                    FULL_STREAMS,
                    SPARSE_STREAMS,
                ),
            ),
            (
                _consume,
                (
                    out,
                    lse,
                    order,
                    start,
                    kv_len,
                    key_mask,
                    span,
                    q_memory,
                    k_memory,
                    v_memory,
                    barriers,
                    scale,
                    stride_mb,
                    stride_ms,
                    sizes,
                    1,
                    GROUP,
                    PACK,
                    STAGES,
                    FULL_STREAMS,
                    SPARSE_STREAMS,
                ),
            ),
            (
                _produce,
                (
                    query,
                    key,
                    value,
                    order,
                    start,
                    kv_len,
                    span,
                    q_memory,
                    k_memory,
                    v_memory,
                    barriers,
                    sizes,
                    GROUP,
                    PACK,
                    STAGES,
                    FULL_STREAMS,
                    SPARSE_STREAMS,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, _PRODUCER_REGISTERS],
    )
