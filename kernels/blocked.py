"""The reference in blocks of query rows: every argument of the op, in linear memory.

What a GPU runs where its own kernel declines a call, and for the backward. Rows of a block meet all
keys up to the last that any of them could see, so the work is that of full attention. Nothing waits
for the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from elastic_compile.kernels import reference
from elastic_compile.kernels._call import AttentionCall, compute_dtype, new_outputs

_BLOCK_SCORES = 1 << 26
"""Most scores a block holds at once, unless a single row has more."""


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Serves every call."""
    return True, ""


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns output [B, Hq, Sq, Dv] and log-sum-exp [B, Hq, Sq]."""
    out, lse = new_outputs(call)
    for rows, part in _blocks(call):
        out[:, :, rows], lse[:, :, rows] = reference.forward(part)
    return out, lse


def backward(
    call: AttentionCall, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of query, key, value and learned sinks (None without)."""
    dtype = compute_dtype(call.query.dtype)
    query = torch.empty_like(call.query)
    key = torch.zeros_like(call.key, dtype=dtype)
    value = torch.zeros_like(call.value, dtype=dtype)
    sinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=dtype)
    for rows, part in _blocks(call):
        grads = reference.backward(
            part,
            grad_out[:, :, rows],
            None if grad_lse is None else grad_lse[:, :, rows],
            out[:, :, rows],
            lse[:, :, rows],
            dtype,
        )
        keys = part.key.shape[2]
        query[:, :, rows] = grads[0].to(query.dtype)
        key[:, :, :keys] += grads[1]
        value[:, :, :keys] += grads[2]
        if sinks is not None and grads[3] is not None:
            sinks += grads[3]
    if sinks is not None and call.sinks is not None:
        sinks = sinks.to(call.sinks.dtype)
    return query, key.to(call.key.dtype), value.to(call.value.dtype), sinks


def _blocks(call: AttentionCall) -> Iterator[tuple[slice, AttentionCall]]:
    """Blocks of rows, each as a call of its own that ends at the block's last row."""
    batch, heads, queries, _ = call.query.shape
    held = call.key.shape[2]
    size = max(_BLOCK_SCORES // (batch * heads * max(held, 1)), 1)
    for begin in range(0, queries, size):
        rows = slice(begin, min(begin + size, queries))
        after = queries - rows.stop
        keys = max(held - after, 1)
        kv_len = call.kv_len
        if kv_len is not None:
            kv_len = kv_len - after
        elif keys != held - after:
            # The block ends before the first key; the one key it is given is out of its reach.
            kv_len = call.query.new_full((), held - after, dtype=torch.int64)
        mask = call.key_mask
        yield (
            rows,
            replace(
                call,
                query=call.query[:, :, rows],
                key=call.key[:, :, :keys],
                value=call.value[:, :, :keys],
                kv_len=kv_len,
                key_mask=None if mask is None else mask[:, :keys],
            ),
        )
