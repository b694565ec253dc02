"""The CPU implementation: work and memory proportional to the pairs that are visible.

Forward: torch's flash kernel on mask-free pieces (:mod:`._sdpa_cpu`). Calls with masked keys inside
a document, a softcap or dropout, and every backward, run in tiles of a few query rows over just the
keys that they see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_compile.kernels import _sdpa_cpu, _tile
from elastic_compile.kernels._call import (
    BLOCKS,
    STREAMING,
    AttentionCall,
    compute_dtype,
    new_outputs,
)
from elastic_compile.kernels._segments import Segment, segments

_TILE_SCORES = 1 << 21
"""Most scores that a tile holds at once, unless 16 rows have more."""


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Everything but block lists."""
    if BLOCKS in call.modes:
        return False, "block lists are not supported"
    return True, ""


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns output [B, Hq, Sq, Dv] and log-sum-exp [B, Hq, Sq]."""
    out, lse = new_outputs(call)
    out.zero_()
    lse.fill_(-torch.inf)
    for segment in segments(call):
        if _needs_tiles(call, segment):
            for work in _tiles(call, segment):
                part, part_lse = _sdpa_cpu.attend(work.tile)
                segment.of_queries(out)[:, :, work.rows] = part
                segment.of_queries(lse)[:, :, work.rows] = part_lse
        else:
            part, part_lse = _flash_segment(call, segment)
            segment.of_queries(out).copy_(part)
            segment.of_queries(lse).copy_(part_lse)
    return out, lse


def backward(
    call: AttentionCall, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of query, key, value and learned sinks (None without)."""
    dtype = compute_dtype(call.query.dtype)
    query = torch.zeros_like(call.query, memory_format=torch.contiguous_format)
    key = torch.zeros_like(call.key, dtype=dtype, memory_format=torch.contiguous_format)
    value = torch.zeros_like(call.value, dtype=dtype, memory_format=torch.contiguous_format)
    sinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=dtype)
    for segment in segments(call):
        upstream = segment.of_queries(grad_out)
        upstream_lse = None if grad_lse is None else segment.of_queries(grad_lse)
        for work in _tiles(call, segment):
            part_lse = None if upstream_lse is None else upstream_lse[:, :, work.rows]
            saved = (
                segment.of_queries(out)[:, :, work.rows],
                segment.of_queries(lse)[:, :, work.rows],
            )
            grads = _tile.backward(work.tile, upstream[:, :, work.rows], part_lse, saved)
            segment.of_queries(query)[:, :, work.rows] = grads.query
            work.add_to(segment.of_keys(key), grads.key)
            work.add_to(segment.of_keys(value), grads.value)
            if sinks is not None and grads.sinks is not None:
                sinks[segment.heads] += grads.sinks
    if sinks is not None and call.sinks is not None:
        sinks = sinks.to(call.sinks.dtype)
    return query, key.to(call.key.dtype), value.to(call.value.dtype), sinks


class _Work(NamedTuple):
    """A tile of a segment and where in the segment it lies."""

    rows: slice
    keys: tuple[slice, ...]
    tile: _tile.Tile

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """Adds ``part`` [b, h, tile keys, X] to ``total`` [b, h, segment keys, X]."""
        begin = 0
        for keys in self.keys:
            end = begin + keys.stop - keys.start
            total[:, :, keys] += part[:, :, begin:end]
            begin = end


def _needs_tiles(call: AttentionCall, segment: Segment) -> bool:
    return call.softcap is not None or call.dropout_p > 0 or _holes(call, segment) is not None


def _holes(call: AttentionCall, segment: Segment) -> Tensor | None:
    """The key mask of a segment, bool [b, keys], or None where it hides nothing."""
    if call.key_mask is None:
        return None
    mask = call.key_mask[segment.batch, segment.keys]
    return None if bool(mask.all()) else mask


def _flash_segment(call: AttentionCall, segment: Segment) -> tuple[Tensor, Tensor]:
    query = segment.of_queries(call.query)
    # The flash kernel multiplies float16 several times slower than float32.
    upcast = query.dtype == torch.float16 and query.shape[2] >= _sdpa_cpu.BLOCK
    query = _sdpa_cpu.prepare(query, upcast)
    key = _sdpa_cpu.prepare(segment.of_keys(call.key), upcast)
    value = _sdpa_cpu.prepare(segment.of_keys(call.value), upcast)
    scale = float(call.resolved_scale)
    if segment.mode == STREAMING:
        out, lse = _sdpa_cpu.streaming(query, key, value, scale, call.sink, call.local)
    else:
        out, lse = _sdpa_cpu.full(query, key, value, scale)
    if call.sinks is not None:
        out, lse = _sdpa_cpu.with_sinks(out, lse, call.sinks[segment.heads])
    return out, lse


def _tiles(call: AttentionCall, segment: Segment) -> Iterator[_Work]:
    batch, heads, rows, _ = segment.of_queries(call.query).shape
    if segment.mode == STREAMING:
        widest = call.sink + call.local + _sdpa_cpu.BLOCK
    else:
        widest = segment.keys.stop - segment.keys.start
    block = min(max(_TILE_SCORES // (batch * heads * widest), 16), _sdpa_cpu.BLOCK)
    holes = _holes(call, segment)
    for begin in range(0, rows, block):
        end = min(begin + block, rows)
        yield _work(call, segment, slice(begin, end), holes)


def _work(call: AttentionCall, segment: Segment, rows: slice, holes: Tensor | None) -> _Work:
    keys = _keys_of(call, segment, rows)
    column = torch.cat([torch.arange(part.start, part.stop) for part in keys])
    row = torch.arange(segment.offset + rows.start, segment.offset + rows.stop)[:, None]
    visible = column <= row
    if segment.mode == STREAMING:
        visible = visible & ((column < call.sink) | (row - column < call.local))
    real = None
    if holes is not None:
        real = holes[:, column]
        visible = visible & real[:, None, None, None]
    key, value = segment.of_keys(call.key), segment.of_keys(call.value)
    tile = _tile.Tile(
        query=segment.of_queries(call.query)[:, :, rows],
        key=torch.cat([key[:, :, part] for part in keys], 2),
        value=torch.cat([value[:, :, part] for part in keys], 2),
        scale=call.resolved_scale,
        visible=visible,
        real=real,
        softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks[segment.heads],
        dropout=_dropout(call, segment, row, column),
    )
    return _Work(rows, keys, tile)


def _keys_of(call: AttentionCall, segment: Segment, rows: slice) -> tuple[slice, ...]:
    """The keys that some of ``rows`` may see, as runs within the segment."""
    end = segment.offset + rows.stop
    window = segment.offset + rows.start - call.local + 1
    if segment.mode != STREAMING or window <= call.sink:
        return (slice(0, end),)
    return tuple(run for run in (slice(0, call.sink), slice(window, end)) if run.stop > run.start)


def _dropout(
    call: AttentionCall, segment: Segment, row: Tensor, column: Tensor
) -> _tile.Dropout | None:
    if call.dropout_p == 0:
        return None
    assert call.dropout_seed is not None
    batch, heads, _, _ = call.query.shape
    head = torch.arange(batch * heads).reshape(batch, heads)[segment.batch, segment.heads]
    kv_heads = segment.kv_heads.stop - segment.kv_heads.start
    return _tile.Dropout(
        p=call.dropout_p,
        seed=call.dropout_seed,
        head=head.reshape(head.shape[0], kv_heads, -1, 1, 1),
        row=row + segment.keys.start,
        column=column + segment.keys.start,
    )
