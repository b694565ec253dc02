"""Attention under a caller's own mask, in row chunks so that no score matrix exists whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from elastic_compile.kernels import _sdpa_cpu, _tile
from elastic_compile.kernels._call import ExactCall, compute_dtype

_ROWS = 256


def forward(call: ExactCall) -> tuple[Tensor, Tensor]:
    """Returns output [B, Hq, Sq, Dv] in the query's dtype and log-sum-exp [B, Hq, Sq]."""
    one = _sdpa_cpu.attend if call.query.device.type == "cpu" else _tile.forward
    parts = [one(tile) for _, tile in _chunks(call)]
    out = torch.cat([out.to(call.query.dtype) for out, _ in parts], 2)
    return out, torch.cat([lse for _, lse in parts], 2)


def backward(
    call: ExactCall, grad_out: Tensor, grad_lse: Tensor | None, mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key, value, sinks and, where asked, attn_mask."""
    dtype = compute_dtype(call.query.dtype)
    query = torch.empty_like(call.query)
    key = torch.zeros_like(call.key, dtype=dtype)
    value = torch.zeros_like(call.value, dtype=dtype)
    sinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=dtype)
    mask = None
    if mask_grad and call.attn_mask is not None:
        mask = torch.zeros_like(call.attn_mask, dtype=dtype)
    for rows, tile in _chunks(call):
        lse = None if grad_lse is None else grad_lse[:, :, rows]
        grads = _tile.backward(tile, grad_out[:, :, rows], lse)
        query[:, :, rows] = grads.query
        key += grads.key
        value += grads.value
        if sinks is not None and grads.sinks is not None:
            sinks += grads.sinks
        if mask is not None and grads.bias is not None:
            target = mask if mask.shape[2] == 1 else mask[:, :, rows]
            target += grads.bias.flatten(1, 2).sum_to_size(target.shape)
    if sinks is not None and call.sinks is not None:
        sinks = sinks.to(call.sinks.dtype)
    if mask is not None and call.attn_mask is not None:
        mask = mask.to(call.attn_mask.dtype)
    return query, key.to(call.key.dtype), value.to(call.value.dtype), sinks, mask


def _chunks(call: ExactCall) -> Iterator[tuple[slice, _tile.Tile]]:
    queries = call.query.shape[2]
    real = None
    if call.attn_mask is not None and call.attn_mask.dtype == torch.bool:
        real = call.attn_mask.any(1).any(1)
    for begin in range(0, queries, _ROWS):
        rows = slice(begin, min(begin + _ROWS, queries))
        yield rows, _chunk(call, rows, real)


def _chunk(call: ExactCall, rows: slice, real: Tensor | None) -> _tile.Tile:
    batch, heads, _, _ = call.query.shape
    _, kv_heads, keys, _ = call.key.shape
    device = call.query.device
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    column = torch.arange(keys, device=device)
    visible = bias = dropout = None
    if call.attn_mask is not None:
        mask = call.attn_mask if call.attn_mask.shape[2] == 1 else call.attn_mask[:, :, rows]
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (kv_heads, -1))
        visible, bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
    if call.is_causal:
        visible = column <= row if visible is None else visible & (column <= row)
    if call.dropout_p > 0:
        assert call.dropout_seed is not None
        head = torch.arange(batch * heads, device=device).reshape(batch, kv_heads, -1, 1, 1)
        dropout = _tile.Dropout(call.dropout_p, call.dropout_seed, head, row, column)
    return _tile.Tile(
        query=call.query[:, :, rows],
        key=call.key,
        value=call.value,
        scale=call.resolved_scale,
        visible=visible,
        real=real,
        bias=bias,
        softcap=call.softcap,
        sinks=call.sinks,
        dropout=dropout,
    )
