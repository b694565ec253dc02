"""The definition of the op: one boolean mask over all pairs, and softmax attention under it.

Serves every argument of the schema and needs O(Sq * Skv) memory. :func:`visible_keys` composes its
mask with ``&`` and ``|`` only, since ONNX Runtime has no boolean ``Where``; exporters decompose
the op into that mask and one scaled_dot_product_attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_compile.kernels import _tile
from elastic_compile.kernels._call import BLOCKS, FULL, AttentionCall


def supports(call: AttentionCall) -> tuple[bool, str]:
    """The reference serves every call."""
    return True, ""


def forward(call: AttentionCall, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Computes the op as defined.

    Args:
        call: The arguments of the op.
        dtype: Computation dtype, and then also that of the results.

    Returns:
        Output [B, Hq, Sq, Dv] in the query's dtype and log-sum-exp [B, Hq, Sq] in float32 (float64
        for float64 inputs), or both in ``dtype``.
    """
    out, lse = _tile.forward(_as_tile(call, dtype))
    return out.to(dtype or call.query.dtype), lse


def backward(
    call: AttentionCall,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and learned sinks, recomputed without ``out`` and ``lse``.

    Args:
        call: The arguments of the forward.
        grad_out: Gradient of the output [B, Hq, Sq, Dv].
        grad_lse: Gradient of the log-sum-exp [B, Hq, Sq], or None for zero.
        out: Unused; part of the interface of implementations.
        lse: Unused; part of the interface of implementations.
        dtype: Computation dtype, and then also that of the results.

    Returns:
        Gradients in the dtypes of their inputs, or in ``dtype``; None for absent sinks.
    """
    del out, lse
    grads = _tile.backward(_as_tile(call, dtype), grad_out, grad_lse)
    sinks = None
    if call.sinks is not None and grads.sinks is not None:
        sinks = grads.sinks.to(dtype or call.sinks.dtype)
    target = dtype or call.query.dtype
    return grads.query.to(target), grads.key.to(target), grads.value.to(target), sinks


def _as_tile(call: AttentionCall, dtype: torch.dtype | None) -> _tile.Tile:
    batch, heads, _, _ = call.query.shape
    _, kv_heads, keys, _ = call.key.shape
    device = call.query.device
    dropout = None
    if call.dropout_p > 0:
        assert call.dropout_seed is not None
        head = torch.arange(batch * heads, device=device)
        dropout = _tile.Dropout(
            p=call.dropout_p,
            seed=call.dropout_seed,
            head=head.reshape(batch, kv_heads, -1, 1, 1),
            row=query_positions(call)[:, None, None, :, None],
            column=torch.arange(keys, device=device),
        )
    return _tile.Tile(
        query=call.query,
        key=call.key,
        value=call.value,
        scale=call.resolved_scale,
        visible=visible_keys(call)[:, :, None],
        real=real_keys(call),
        softcap=call.softcap,
        sinks=call.sinks,
        dropout=dropout,
        dtype=dtype,
    )


def query_positions(call: AttentionCall) -> Tensor:
    """Absolute key position of every query row, int64 [B or 1, Sq]; negative where keys ran out."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    rows = torch.arange(queries, device=call.query.device)
    if call.kv_len is None:
        return (rows + (keys - queries))[None]
    return rows + (call.kv_len.reshape(-1, 1).to(torch.int64) - queries)


def real_keys(call: AttentionCall) -> Tensor:
    """Keys that exist, bool [B or 1, Skv]; whatever the others hold must not be read."""
    columns = torch.arange(call.key.shape[2], device=call.key.device)[None]
    real = columns >= 0
    if call.start is not None:
        real = real & (columns >= call.start.reshape(-1, 1))
    if call.kv_len is not None:
        real = real & (columns < call.kv_len.reshape(-1, 1))
    if call.key_mask is not None:
        real = real & call.key_mask
    if call.cu_seqlens is not None:
        real = real & (columns >= call.cu_seqlens[0]) & (columns < call.cu_seqlens[-1])
    return real


def visible_keys(call: AttentionCall) -> Tensor:
    """Visibility of every query-key pair, bool [B, Hkv, Sq, Skv] (leading sizes may be 1)."""
    position = query_positions(call)[:, None, :, None]
    column = torch.arange(call.key.shape[2], device=call.key.device)[None, None, None]
    causal = (column <= position) & real_keys(call)[:, None, None]
    if call.cu_seqlens is None:
        route = call.route[:, :, None, None]
        start = (
            torch.zeros_like(position) if call.start is None else call.start.reshape(-1, 1, 1, 1)
        )
    else:
        document = _document(call.cu_seqlens, position.reshape(-1))
        start = call.cu_seqlens[document].reshape(1, 1, -1, 1)
        route = call.route[document].T[None, :, :, None]
        causal = causal & (column >= start) & (position < call.cu_seqlens[-1])
    return causal & (
        ((route == 0) & _mode_mask(call, call.full_mode, position, column, start))
        | ((route != 0) & _mode_mask(call, call.sparse_mode, position, column, start))
    )


def _document(cu_seqlens: Tensor, position: Tensor) -> Tensor:
    """Index of the packed document that holds each position; clamped outside all documents."""
    document = torch.searchsorted(
        cu_seqlens[1:].contiguous(), position.to(cu_seqlens.dtype), right=True
    )
    return document.clamp(max=cu_seqlens.shape[0] - 2)


def _mode_mask(
    call: AttentionCall, mode: str, position: Tensor, column: Tensor, start: Tensor
) -> Tensor:
    """What a mode adds to causality, broadcastable to [B, Hkv, Sq, Skv]."""
    if mode == FULL:
        return column >= 0
    if mode == BLOCKS:
        return _listed(call, position, column)
    return (column - start < call.sink) | (position - column < call.local)


def _listed(call: AttentionCall, position: Tensor, column: Tensor) -> Tensor:
    """Pairs whose key block is in the list of the head's query block, bool [B, Hkv, Sq, Skv]."""
    assert call.block_indptr is not None and call.block_indices is not None
    documents, heads, offsets = call.block_indptr.shape
    rows = offsets - 1
    blocks = -(-call.key.shape[2] // call.block_size)
    ends = call.block_indptr[..., 1:].reshape(-1).contiguous()
    entry = torch.arange(call.block_indices.shape[0], device=ends.device, dtype=ends.dtype)
    # Entries behind the last offset, and ids past the last block, land in cells nobody looks up.
    row = torch.searchsorted(ends, entry, right=True)
    table = ends.new_zeros(documents * heads * rows + 1, blocks + 1, dtype=torch.bool)
    table[row, call.block_indices.to(torch.int64).clamp(0, blocks)] = True
    table = table[:-1, :-1].reshape(documents, heads, rows, blocks)

    query_block = (position // call.block_size).clamp(0, rows - 1)[:, 0, :, 0]
    key_block = column.reshape(-1) // call.block_size
    head = torch.arange(heads, device=ends.device)[None, :, None]
    if call.cu_seqlens is None:
        document = torch.arange(documents, device=ends.device)[:, None, None]
    else:
        document = _document(call.cu_seqlens, position.reshape(-1))[None, None]
    return table[document, head, query_block[:, None]][..., key_block]
