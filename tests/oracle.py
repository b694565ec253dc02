"""What the attention ops must compute, in float64, one row of the mask and one head at a time.

Imports nothing of the library and shares no code with it. Differentiable by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    route: Tensor,
    *,
    sink: int,
    local: int,
    full_mode: str = "full",
    sparse_mode: str = "streaming",
    scale: float | Tensor | None = None,
    start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_indptr: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int = 64,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    heads: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, len(heads), Sq, Dv] and log-sum-exp [B, len(heads), Sq] of the chosen heads."""
    batch, count, rows, size = query.shape
    group = count // key.shape[1]
    outs, lses = [], []
    masks: dict[tuple, Tensor] = {}
    for b in range(batch):
        length = key.shape[2] if kv_len is None else int(kv_len.expand(batch)[b])
        offset = length - rows
        documents = [(b, 0 if start is None else int(start[b]), length)]
        if cu_seqlens is not None:
            bounds = pairwise(cu_seqlens.tolist())
            documents = [(document, *ends) for document, ends in enumerate(bounds)]
        for h in range(count) if heads is None else heads:
            kv = h // group
            modes = [(full_mode, sparse_mode)[int(route[d, kv])] for d, _, _ in documents]
            kind = (b, *modes, kv if "blocks" in modes else None)
            if kind not in masks:
                mask = np.zeros((rows, key.shape[2]), dtype=bool)
                for i in range(rows):
                    for (d, first, end), mode in zip(documents, modes, strict=True):
                        if first <= offset + i < end:
                            listed = []
                            if mode == "blocks":
                                r = (offset + i) // block_size
                                lo, hi = block_indptr[d, kv, r : r + 2].tolist()
                                listed = block_indices[lo:hi].tolist()
                            _see(mask[i], offset + i, first, mode, sink, local, listed, block_size)
                masks[kind] = torch.from_numpy(mask).to(query.device)
                if key_mask is not None:
                    masks[kind] &= key_mask[b]
            dropped = None
            if dropout_p:
                dropped = _dropped(int(dropout_seed), dropout_p, b * count + h, offset, masks[kind])
            out, lse = _head(
                query[b, h], key[b, kv], value[b, kv], masks[kind], None,
                size**-0.5 if scale is None else scale,
                softcap, None if sinks is None else sinks[h], dropped, dropout_p,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
    shape = (batch, len(outs) // batch, rows)
    return torch.stack(outs).reshape(*shape, -1), torch.stack(lses).reshape(shape)


def _see(row, p, first, mode, sink, local, listed, block_size) -> None:
    """Marks in ``row`` the keys that the query at position p of a document sees."""
    if mode == "full":
        row[first : p + 1] = True
    elif mode == "streaming":
        row[first : min(first + sink, p + 1)] = True
        row[max(first, p + 1 - local) : p + 1] = True
    else:
        for block in listed:
            row[block * block_size : (block + 1) * block_size] = True
        row[:first] = False
        row[p + 1 :] = False


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same for a caller's own mask; causality counted from the first row."""
    batch, count, rows, size = query.shape
    keys = key.shape[2]
    group = count // key.shape[1]
    outs, lses = [], []
    for b in range(batch):
        for h in range(count):
            visible, bias = torch.ones(rows, keys, dtype=torch.bool, device=query.device), None
            if attn_mask is not None:
                mask = attn_mask.expand(batch, count, rows, keys)[b, h]
                visible, bias = (mask, None) if mask.dtype == torch.bool else (visible, mask)
            if is_causal:
                causal = [[j <= i for j in range(keys)] for i in range(rows)]
                visible = visible & torch.tensor(causal, device=query.device)
            out, lse = _head(
                query[b, h], key[b, h // group], value[b, h // group], visible, bias,
                size**-0.5 if scale is None else scale,
                softcap, None if sinks is None else sinks[h], None, 0.0,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
    shape = (batch, count, rows)
    return torch.stack(outs).reshape(*shape, -1), torch.stack(lses).reshape(shape)


def _head(q, k, v, visible, bias, scale, softcap, sink, dropped, p):
    """One head: q [Sq, D], k [Skv, D], v [Skv, Dv], visible [Sq, Skv] -> [Sq, Dv], [Sq]."""
    sees, seen = visible.any(1), visible.any(0)
    q = torch.where(sees[:, None], q.double(), 0.0)
    k = torch.where(seen[:, None], k.double(), 0.0)
    v = torch.where(seen[:, None], v.double(), 0.0)
    score = q @ k.T * (scale.double() if isinstance(scale, Tensor) else scale)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias.double()
    score = torch.where(visible, score, -math.inf)
    top = score.detach().amax(1)
    top = torch.where(top == -math.inf, 0.0, top)
    mass = torch.exp(score - top[:, None])
    total = mass.sum(1)
    sees = total > 0
    if sink is not None:
        total = total + torch.exp(sink.double() - top)
    total = torch.where(sees, total, 1.0)
    weight = mass / total[:, None]
    if dropped is not None:
        weight = torch.where(dropped, 0.0, weight / (1 - p))
    return weight @ v, torch.where(sees, torch.log(total) + top, -math.inf)


def _dropped(seed: int, p: float, head: int, offset: int, visible: Tensor) -> Tensor:
    """The documented hash, in numpy's wrapping 32-bit arithmetic."""

    def mix(x):
        x = np.asarray(x, dtype=np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    rows, keys = visible.shape
    row = (np.arange(rows) + offset).astype(np.int64).astype(np.uint32)[:, None]
    column = np.arange(keys, dtype=np.uint32)[None]
    with np.errstate(over="ignore"):
        stream = mix(mix((seed ^ seed >> 32) & 0xFFFFFFFF) ^ np.uint32(head))
        hashed = mix(mix(stream + row) + column)
    dropped = torch.from_numpy(hashed.astype(np.float64) < round(p * 2**32))
    return dropped.to(visible.device)
