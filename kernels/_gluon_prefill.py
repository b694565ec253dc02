"""Device code of the Hopper prefill kernel; ``gluon_prefill`` launches it.

One program for every multiprocessor works through a list of chunks. Its producer, a single warp,
loads queries, keys and values by TMA, some blocks ahead and across chunks. Its consumers, a
warpgroup each, own 64 rows of one query head. The query heads that read the same keys are laid out
position by position, 64 rows of the first head, of the second, ..., then the next 64 rows of the
first; a chunk is as many neighbours of that row as there are consumers. The consumers take turns
to issue their products, so that one's softmax runs beside the others' products. Masks, positions
and units of the scores are those of ``_triton_prefill``.
"""

from __future__ import annotations

import triton
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


@triton.constexpr_function
def _turn_barrier(instruction, which, consumers):
    """PTX on the named barrier that admits consumer ``which``; below 8 they are Triton's."""
    return f"{instruction} {8 + which % consumers}, 256; mov.u32 $0, $1;"


@gluon.jit
def _await_turn(WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """Waits until the consumer before this one has issued its products."""
    asm: gl.constexpr = _turn_barrier("bar.sync", WHICH, CONSUMERS)
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], gl.int32, False, 1)


@gluon.jit
def _end_turn(WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """Admits the next consumer; does not wait."""
    asm: gl.constexpr = _turn_barrier("bar.arrive", WHICH + 1, CONSUMERS)
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], gl.int32, False, 1)


@gluon.jit
def _chunk(
    index,
    order,
    units,
    chunks,
    even_chunks,
    section,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Unit and chunk number ``index`` of the work list, and whether it streams.

    The order is that of ``_triton_prefill._choose_tile``.
    """
    per_unit = chunks - even_chunks
    full_units = units
    if FULL_STREAMS != SPARSE_STREAMS:
        full_units = gl.load(order + units)
    elif FULL_STREAMS:
        full_units = units * 0
    full_chunks = full_units * per_unit
    heavy_chunks = units * per_unit
    in_full = index < full_chunks
    in_heavy = index < heavy_chunks

    in_section = index % gl.maximum(section * per_unit, 1)
    section_first = index // gl.maximum(section * per_unit, 1) * section
    width = gl.maximum(gl.minimum(section, full_units - section_first), 1)
    in_sparse = index - full_chunks
    sparse_width = gl.maximum(units - full_units, 1)
    in_even = index - heavy_chunks
    rank = gl.where(
        in_full, section_first + in_section % width, full_units + in_sparse % sparse_width
    )
    chunk = gl.where(
        in_full,
        chunks - 1 - in_section // width,
        gl.where(
            in_heavy,
            chunks - 1 - in_sparse // sparse_width,
            even_chunks - 1 - in_even // units,
        ),
    )
    unit = rank
    if FULL_STREAMS != SPARSE_STREAMS:
        unit = gl.load(order + gl.where(in_heavy, rank, 0))
    unit = gl.where(in_heavy, unit, in_even % units)
    return unit, chunk, in_heavy & (index >= full_chunks)


@gluon.jit
def _rows(chunk, which, queries, group, CONSUMERS: gl.constexpr):
    """Query head, within its group, and first row of a consumer.

    The last chunk may have fewer neighbours than consumers: then some do the same, to the bit.
    """
    items = (queries + _ROWS - 1) // _ROWS * group
    item = gl.minimum(chunk * CONSUMERS + which, items - 1)
    return item % group, item // group * _ROWS


@gluon.jit
def _blocks(
    sample,
    chunk,
    streams,
    start,
    kv_len,
    span,
    queries,
    held,
    sink,
    local,
    group,
    CONSUMERS: gl.constexpr,
    BN: gl.constexpr,
    HOLES: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """The key blocks of a chunk: how many all rows see whole, how many are cut, and which.

    Returns:
        first, keys: Keys [first, first + keys) of the sample are real.
        shift: Position of the first query, counted from the first key.
        reach: Keys that a row sees, itself included, beside the sink.
        mine: Whether this launch serves the sample.
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
    mine = sample >= 0
    if span is not None:
        last = gl.load(span + sample * 2)
        mine = (gl.load(span + sample * 2 + 1) != 0) == HOLES
    keys = gl.maximum(last - first, 0)
    shift = filled - queries - first
    _head, low_row = _rows(chunk, 0, queries, group, CONSUMERS)
    _head, high_row = _rows(chunk, CONSUMERS - 1, queries, group, CONSUMERS)
    lowest = shift + low_row
    highest = shift + gl.minimum(high_row + _ROWS, queries) - 1
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
    if HOLES:
        # Every block needs its mask.
        inner = diagonal
        sink_whole = sink_whole * 0
    whole = sink_whole + diagonal - inner
    sink_cut = sink_all - sink_whole
    left_cut = sink_cut + inner - edge
    cut = left_cut + (gl.maximum(end - diagonal * BN, 0) + BN - 1) // BN
    whole = gl.where(mine & (end > 0), whole, 0)
    cut = gl.where(mine & (end > 0), cut, 0)
    where = (whole, sink_whole, inner, sink_cut, left_cut, edge, diagonal)
    return first, keys, shift, reach, mine, whole, cut, where


@gluon.jit
def _block(t, where):
    """Index of the t-th block: those seen whole, then the cut ones; of each the sink's first."""
    whole, sink_whole, inner, sink_cut, left_cut, edge, diagonal = where
    seen_whole = gl.where(t < sink_whole, t, t - sink_whole + inner)
    t -= whole
    window = gl.where(t < left_cut, t - sink_cut + edge, t - left_cut + diagonal)
    return gl.where(t < 0, seen_whole, gl.where(t < sink_cut, t + sink_whole, window))


@gluon.jit
def _unreal(n, keys, room, mask_row, BN: gl.constexpr):
    """Whether the block at key n holds keys that are not real, of ``room`` in the tensor.

    What lies past the end of the tensor comes by TMA as zeros.
    """
    found = (n + BN > keys) & (keys < room)
    if mask_row is not None:
        if not found:
            j = n + gl.arange(0, BN, gl.BlockedLayout([1], [32], [1], [0]))
            found = gl.min(gl.load(mask_row + j, mask=j < room, other=1).to(gl.int32), 0) == 0
    return found


@gluon.jit
def _silence(v, n, keys, mask_row):
    """Writes zeros over the values of keys that are not real.

    A weight of zero does not silence a NaN.
    """
    BN: gl.constexpr = v.shape[2]
    D: gl.constexpr = v.shape[3]
    STEP: gl.constexpr = 8
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [1, 1], [1, 0])
    rows = v.reshape([BN, D])
    for i in gl.static_range(BN // STEP):
        part = rows.slice(i * STEP, STEP)
        j = n + i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, LOADS))
        real = j < keys
        if mask_row is not None:
            real = gl.load(mask_row + j, mask=real, other=0) != 0
        found = part.load(LOADS)
        part.store(gl.where(real[:, None], found, gl.zeros_like(found)))
    fence_async_shared()


@gluon.jit
def _produce(
    inputs,
    memory,
    barriers,
    sizes,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Loads what the consumers ask for, as soon as there is room."""
    query, key, value, order, start, kv_len, key_mask, stride_mb, span = inputs
    q_memory, k_memory, v_memory = memory
    BN: gl.constexpr = k_memory.shape[3]
    D: gl.constexpr = k_memory.shape[4]
    # Keys that are not real come by TMA as they are.
    GARBAGE: gl.constexpr = kv_len is not None or span is not None
    HOLES: gl.constexpr = key_mask is not None
    WIDTH: gl.constexpr = key.dtype.primitive_bitwidth // 8
    q_full, q_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    queries, held, units, kv_heads, group, sink, local, chunks, even_chunks, section, work = sizes
    block = 0
    turn = 0
    silenced = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        unit, chunk, streams = _chunk(
            index, order, units, chunks, even_chunks, section, FULL_STREAMS, SPARSE_STREAMS
        )
        sample = unit // kv_heads
        kv_head = unit % kv_heads
        first, keys, _shift, _reach, _mine, whole, cut, where = _blocks(
            sample,
            chunk,
            streams,
            start,
            kv_len,
            span,
            queries,
            held,
            sink,
            local,
            group,
            CONSUMERS,
            BN,
            HOLES,
            FULL_STREAMS or SPARSE_STREAMS,
        )
        mask_row = key_mask
        if key_mask is not None:
            mask_row += sample.to(gl.int64) * stride_mb + first
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, CONSUMERS * _ROWS * D * WIDTH)
        for which in gl.static_range(CONSUMERS):
            head, row = _rows(chunk, which, queries, group, CONSUMERS)
            tma.async_copy_global_to_shared(
                query, [sample, kv_head * group + head, row, 0], q_full, q_memory.index(which)
            )
        for t in range(whole + cut):
            n = _block(t, where) * BN
            stage = block % STAGES
            vacant = (block // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), vacant)
            mbarrier.expect(k_full.index(stage), BN * D * WIDTH)
            tma.async_copy_global_to_shared(
                key, [sample, kv_head, first + n, 0], k_full.index(stage), k_memory.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), vacant)
            unreal = GARBAGE
            if GARBAGE:
                unreal = _unreal(n, keys, held - first, mask_row, BN)
            if unreal:
                mbarrier.expect(landed, BN * D * WIDTH)
                tma.async_copy_global_to_shared(
                    value, [sample, kv_head, first + n, 0], landed, v_memory.index(stage)
                )
                mbarrier.wait(landed, silenced & 1)
                _silence(v_memory.index(stage), n, keys, mask_row)
                mbarrier.arrive(v_full.index(stage))
                silenced += 1
            else:
                mbarrier.expect(v_full.index(stage), BN * D * WIDTH)
                tma.async_copy_global_to_shared(
                    value,
                    [sample, kv_head, first + n, 0],
                    v_full.index(stage),
                    v_memory.index(stage),
                )
            block += 1
        turn += 1


@gluon.jit
def _hide(
    scores,
    n,
    position,
    keys,
    reach,
    sink,
    mask_row,
    PADDED: gl.constexpr,
    SCORES: gl.constexpr,
    STREAMS: gl.constexpr,
):
    """Scores of the block at key n, -inf where a row at ``position`` does not see the key."""
    BN: gl.constexpr = scores.shape[1]
    j = n + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
    # How far ahead of each key a row may be: one comparison for every score. A row before the key
    # is far ahead without its sign.
    limit = gl.full([BN], _NO_WINDOW, gl.int32, gl.SliceLayout(0, SCORES))
    if STREAMS:
        limit = gl.where(j < sink, limit, reach)
    if PADDED:
        limit = gl.where(j < keys, limit, 0)
    if mask_row is not None:
        limit = gl.where(gl.load(mask_row + j, mask=j < keys, other=0) != 0, limit, 0)
    ahead = (position[:, None] - j[None, :]).to(gl.uint32, bitcast=True)
    visible = ahead < limit.to(gl.uint32, bitcast=True)[None, :]
    return gl.where(visible, scores, -float("inf"))


@gluon.jit
def _online_softmax(scores, top, total, gain, CUT: gl.constexpr):
    """Weights of a block of scores, and the running maximum, sums and factor on what was before.

    ``total`` is [rows, 8], to be added up at the end: no shuffles meanwhile.
    """
    BN: gl.constexpr = scores.shape[1]
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
    acc,
    p,
    top,
    total,
    gain,
    position,
    keys,
    reach,
    sink,
    mask_row,
    PADDED: gl.constexpr,
    SCORES: gl.constexpr,
    STAGES: gl.constexpr,
    STREAMS: gl.constexpr,
    CUT: gl.constexpr,
    WHICH: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Scores of a block at key n, beside the products of the last block's weights ``p``."""
    BN: gl.constexpr = k_memory.shape[3]
    D: gl.constexpr = k_memory.shape[4]
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, _landed = barriers
    stage = block % STAGES
    before = (block - 1) % STAGES
    v = v_memory.index(before).reshape([BN, D])
    v_phase = (block - 1) // STAGES & 1
    mbarrier.wait(k_full.index(stage), block // STAGES & 1)
    k = k_memory.index(stage).reshape([BN, D])
    blank = gl.zeros([_ROWS, BN], gl.float32, SCORES)
    _await_turn(WHICH, CONSUMERS)
    scores = warpgroup_mma(q, k.permute((1, 0)), blank, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), v_phase)
    products = warpgroup_mma(p, v, acc, is_async=True)
    _end_turn(WHICH, CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage))
    if CUT:
        scores = _hide(scores, n, position, keys, reach, sink, mask_row, PADDED, SCORES, STREAMS)
    weights, top, total, shrink = _online_softmax(scores, top, total, gain, CUT)
    next_p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    acc, p, next_p = warpgroup_mma_wait(0, deps=(products, p, next_p))
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, next_p, top, total


@gluon.jit
def _consume(
    tensors,
    memory,
    barriers,
    numbers,
    sizes,
    WHICH: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Output and log-sum-exp of 64 rows of every chunk of the program."""
    out, lse, order, start, kv_len, key_mask, span = tensors
    q_memory, k_memory, v_memory = memory
    scale, stride_mb = numbers
    BN: gl.constexpr = k_memory.shape[3]
    D: gl.constexpr = k_memory.shape[4]
    STREAMS: gl.constexpr = FULL_STREAMS or SPARSE_STREAMS
    PADDED: gl.constexpr = span is not None
    HOLES: gl.constexpr = key_mask is not None
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _landed = barriers
    queries, held, units, kv_heads, group, sink, local, chunks, even_chunks, section, work = sizes
    gain = scale * _LOG2E
    if WHICH == CONSUMERS - 1:
        _end_turn(WHICH, CONSUMERS)
    block = 0
    turn = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        unit, chunk, streams = _chunk(
            index, order, units, chunks, even_chunks, section, FULL_STREAMS, SPARSE_STREAMS
        )
        sample = unit // kv_heads
        kv_head = unit % kv_heads
        first, keys, shift, reach, mine, whole, cut, where = _blocks(
            sample,
            chunk,
            streams,
            start,
            kv_len,
            span,
            queries,
            held,
            sink,
            local,
            group,
            CONSUMERS,
            BN,
            HOLES,
            STREAMS,
        )
        head, row = _rows(chunk, WHICH, queries, group, CONSUMERS)
        head += kv_head * group
        position = shift + row + gl.arange(0, _ROWS, BY_ROW)
        mask_row = key_mask
        if key_mask is not None:
            mask_row += sample.to(gl.int64) * stride_mb + first

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
            if whole == 0:
                scores = _hide(
                    scores, n, position, keys, reach, sink, mask_row, PADDED, SCORES, STREAMS
                )
            weights, top, total, _shrink = _online_softmax(scores, top, total, gain, True)
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
                    acc,
                    p,
                    top,
                    total,
                    gain,
                    position,
                    keys,
                    reach,
                    sink,
                    mask_row,
                    PADDED,
                    SCORES,
                    STAGES,
                    STREAMS,
                    False,
                    WHICH,
                    CONSUMERS,
                )
                block += 1
            for t in range(gl.maximum(whole, 1), whole + cut):
                n = _block(t, where) * BN
                acc, p, top, total = _step(
                    q,
                    k_memory,
                    v_memory,
                    barriers,
                    block,
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
                    mask_row,
                    PADDED,
                    SCORES,
                    STAGES,
                    STREAMS,
                    True,
                    WHICH,
                    CONSUMERS,
                )
                block += 1
            before = (block - 1) % STAGES
            v = v_memory.index(before).reshape([BN, D])
            v_phase = (block - 1) // STAGES & 1
            mbarrier.wait(v_full.index(before), v_phase)
            products = warpgroup_mma(p, v, acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(products, p))
            mbarrier.arrive(v_empty.index(before))

        empty = top == -float("inf")
        sums = gl.where(empty, 1.0, gl.convert_layout(gl.sum(total, 1), BY_ROW))
        rows = row + gl.arange(0, _ROWS, BY_ROW)
        log = gl.where(empty, -float("inf"), (top + gl.log2(sums)) * _LN2)
        first_log = (sample.to(gl.int64) * (kv_heads * group) + head) * queries
        gl.store(lse + first_log + rows, log, mask=mine & (rows < queries))
        factor = gl.convert_layout(1.0 / sums, gl.SliceLayout(1, OUTPUT))
        blank_row = gl.convert_layout(empty, gl.SliceLayout(1, OUTPUT))
        # Not the factor alone: an empty row's products may be NaN.
        acc = gl.where(blank_row[:, None], 0.0, acc * factor[:, None])
        # The queries are no longer needed: the output leaves through their memory.
        q.store(acc.to(out.dtype))
        fence_async_shared()
        if mine:
            tma.async_copy_shared_to_global(out, [sample, head, row, 0], q_memory.index(WHICH))
        tma.store_wait(0)
        mbarrier.arrive(q_empty)
        turn += 1
    if WHICH == 0:
        # Nobody else takes the last turn.
        _await_turn(WHICH, CONSUMERS)


@gluon.jit(
    do_not_specialize=[
        "stride_mb",
        "queries",
        "held",
        "units",
        "kv_heads",
        "group",
        "sink",
        "local",
        "chunks",
        "even_chunks",
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
    queries,
    held,
    units,
    kv_heads,
    group,
    sink,
    local,
    chunks,
    even_chunks,
    section,
    work,
    CONSUMERS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    FULL_STREAMS: gl.constexpr,
    SPARSE_STREAMS: gl.constexpr,
):
    """Every ``num_programs``-th chunk of the work list, from ``program_id`` on.

    ``query`` ... ``out`` are TMA descriptors of [B, H, S, D]; ``work`` is the number of chunks. The
    other arguments are those of ``_triton_prefill.prefill``. Where there is a mask, one launch gets
    its spans alone and serves the samples without a hole; the next gets the mask too and serves the
    others. Together they would need registers that neither has to spare.
    """
    D: gl.constexpr = key.block_type.shape[3]
    if key_mask is not None:
        holes = 0
        for sample in range(units // kv_heads):
            holes |= gl.load(span + sample * 2 + 1)
        work = gl.where(holes != 0, work, 0)
    q_memory = gl.allocate_shared_memory(query.dtype, [CONSUMERS, 1, 1, _ROWS, D], query.layout)
    k_memory = gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, BN, D], key.layout)
    v_memory = gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, BN, D], value.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, landed)
    sizes = (queries, held, units, kv_heads, group, sink, local, chunks, even_chunks, section, work)
    tensors = (out, lse, order, start, kv_len, key_mask, span)
    memory = (q_memory, k_memory, v_memory)
    numbers = (scale, stride_mb)
    inputs = (query, key, value, order, start, kv_len, key_mask, stride_mb, span)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        tensors,
                        memory,
                        barriers,
                        numbers,
                        sizes,
                        0,
                        CONSUMERS,
                        STAGES,
                        FULL_STREAMS,
                        SPARSE_STREAMS,
                    ),
                ),
                (
                    _consume,
                    (
                        tensors,
                        memory,
                        barriers,
                        numbers,
                        sizes,
                        1,
                        CONSUMERS,
                        STAGES,
                        FULL_STREAMS,
                        SPARSE_STREAMS,
                    ),
                ),
                (
                    _produce,
                    (
                        inputs,
                        memory,
                        barriers,
                        sizes,
                        CONSUMERS,
                        STAGES,
                        FULL_STREAMS,
                        SPARSE_STREAMS,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, _PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        tensors,
                        memory,
                        barriers,
                        numbers,
                        sizes,
                        0,
                        CONSUMERS,
                        STAGES,
                        FULL_STREAMS,
                        SPARSE_STREAMS,
                    ),
                ),
                (
                    _consume,
                    (
                        tensors,
                        memory,
                        barriers,
                        numbers,
                        sizes,
                        1,
                        CONSUMERS,
                        STAGES,
                        FULL_STREAMS,
                        SPARSE_STREAMS,
                    ),
                ),
                (
                    _consume,
                    (
                        tensors,
                        memory,
                        barriers,
                        numbers,
                        sizes,
                        2,
                        CONSUMERS,
                        STAGES,
                        FULL_STREAMS,
                        SPARSE_STREAMS,
                    ),
                ),
                (
                    _produce,
                    (
                        inputs,
                        memory,
                        barriers,
                        sizes,
                        CONSUMERS,
                        STAGES,
                        FULL_STREAMS,
                        SPARSE_STREAMS,
                    ),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, _PRODUCER_REGISTERS],
        )
