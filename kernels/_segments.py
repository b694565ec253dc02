"""Splits a call on the CPU into dense problems: same keys, same mode, nothing padded.

The tensors that describe padding and routes live on the host here, so their values may be read.
Documents and samples with equal bounds and routes, and neighbouring kv heads of one mode, stay
together; everything is a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from elastic_compile.kernels._call import FULL, STREAMING, AttentionCall


@dataclass(frozen=True)
class Segment:
    """Query rows that share their keys and their mode.

    Relative to ``keys``, row i sits at position ``offset + i`` and the last row at the last key.

    Attributes:
        batch: Samples.
        kv_heads: Kv heads.
        heads: Query heads that read them.
        rows: Query rows.
        keys: Keys, from the first real one of the document up to the last row's own.
        mode: ``"full"``, also where streaming would see every key, or ``"streaming"``.
    """

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice
    keys: slice
    mode: str

    @property
    def offset(self) -> int:
        """Position of the first row, counted from the first key."""
        return self.keys.stop - self.keys.start - (self.rows.stop - self.rows.start)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The part of a [B, Hq, Sq, ...] tensor."""
        return _narrow(tensor, self.batch, self.heads, self.rows)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The part of a [B, Hkv, Skv, ...] tensor."""
        return _narrow(tensor, self.batch, self.kv_heads, self.keys)


def _narrow(tensor: Tensor, *parts: slice) -> Tensor:
    # Decoding spends more time on indexing than on arithmetic: leave whole dimensions alone.
    for dim, part in enumerate(parts):
        if part.stop - part.start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, part.start, part.stop - part.start)
    return tensor


class _Document(NamedTuple):
    start: int  # first real key
    end: int  # end of its keys
    position: int  # key position of query row 0 of the sample
    route: tuple[int, ...]


def segments(call: AttentionCall) -> Iterator[Segment]:
    """Yields the segments of a call whose modes are full or streaming; rows left out see nothing.

    Raises:
        ValueError: ``kv_len``, ``start`` or ``cu_seqlens`` reach outside the keys.
    """
    documents = _documents(call)
    if call.cu_seqlens is not None:
        for document in documents:
            yield from _of_document(call, slice(0, 1), document)
        return
    first = 0
    for document, alike in groupby(documents):
        count = len(list(alike))
        yield from _of_document(call, slice(first, first + count), document)
        first += count


def _documents(call: AttentionCall) -> list[_Document]:
    batch, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    routes = [tuple(row) for row in call.route.tolist()]
    if call.cu_seqlens is not None:
        bounds = call.cu_seqlens.tolist()
        starts, ends, positions = bounds[:-1], bounds[1:], [keys - queries] * len(routes)
    else:
        starts = [0] * batch if call.start is None else call.start.tolist()
        ends = [keys] * batch if call.kv_len is None else call.kv_len.expand(batch).tolist()
        positions = [end - queries for end in ends]
    if min(starts) < 0 or max(ends) > keys:
        raise ValueError(
            f"start, kv_len and cu_seqlens must stay within the {keys} keys, "
            f"got documents from {min(starts)} to {max(ends)}"
        )
    return [_Document(*bound) for bound in zip(starts, ends, positions, routes, strict=True)]


def _of_document(call: AttentionCall, batch: slice, document: _Document) -> Iterator[Segment]:
    first = max(document.start - document.position, 0)
    last = min(document.end - document.position, call.query.shape[2])
    if first >= last:
        return
    rows = slice(first, last)
    keys = slice(document.start, document.position + last)
    all_seen = keys.stop - keys.start <= call.sink + call.local
    modes = [call.modes[route != 0] for route in document.route]
    modes = [FULL if mode == STREAMING and all_seen else mode for mode in modes]
    group = call.query.shape[1] // len(modes)
    head = 0
    for mode, run in groupby(modes):
        end = head + len(list(run))
        heads = slice(head * group, end * group)
        yield Segment(batch, slice(head, end), heads, rows, keys, mode)
        head = end
