"""Argument checks of the ops: shapes and dtypes only, never the values held by a tensor."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from elastic_compile.kernels._call import BLOCKS, MODES, AttentionCall, ExactCall, RouteCall

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_attention(call: AttentionCall) -> None:
    """Raises ValueError or TypeError, saying what to change, for arguments that mean nothing."""
    _check_tensors(call)
    _check_extras(call)
    _check_modes(call)
    batch, kv_heads, keys, _ = call.key.shape
    _check_documents(call, batch, kv_heads)
    for name, tensor in (("start", call.start), ("kv_len", call.kv_len)):
        if tensor is not None:
            _require_integer(name, tensor)
    if call.start is not None and tuple(call.start.shape) != (batch,):
        _fail(f"start must have shape [B] = [{batch}], got {list(call.start.shape)}")
    if call.kv_len is not None and tuple(call.kv_len.shape) not in ((), (batch,)):
        _fail(f"kv_len must be 0-d or have shape [B] = [{batch}], got {list(call.kv_len.shape)}")
    if call.key_mask is not None:
        if call.key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be bool (True = real key), got {call.key_mask.dtype}")
        if tuple(call.key_mask.shape) != (batch, keys):
            _fail(
                f"key_mask must have shape [B, Skv] = [{batch}, {keys}], "
                f"got {list(call.key_mask.shape)}"
            )


def check_exact(call: ExactCall) -> None:
    """As :func:`check_attention`, for ``exact_attention``."""
    _check_tensors(call)
    _check_extras(call)
    mask = call.attn_mask
    if mask is None:
        return
    if mask.dtype != torch.bool and mask.dtype not in _FLOATS:
        raise TypeError(f"attn_mask must be bool (True = visible) or floating, got {mask.dtype}")
    batch, heads, queries, _ = call.query.shape
    full = (batch, heads, queries, call.key.shape[2])
    if mask.dim() != 4 or any(m not in (1, f) for m, f in zip(mask.shape, full, strict=True)):
        _fail(
            "attn_mask must be 4-D and broadcast to [B, Hq, Sq, Skv] = "
            f"{list(full)}, got {list(mask.shape)}"
        )


def check_route(call: RouteCall) -> None:
    """As :func:`check_attention`, for ``route``."""
    tap, mask, end, forced = call.tap, call.key_mask, call.end, call.forced
    if tap.dim() != 4:
        _fail(f"tap must be 4-D [B, H, S, D], got {list(tap.shape)}")
    batch, heads, length, size = tap.shape
    if call.pool_tokens < 1:
        _fail(f"pool_tokens is {call.pool_tokens}; allowed: 1 or more")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be bool (True = real), got {mask.dtype}")
        if mask.dim() != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != length:
            _fail(f"key_mask must be [B, S] = [{batch}, {length}], got {list(mask.shape)}")
    if end is not None:
        _require_integer("end", end)
        if end.dim() != 1 or end.shape[0] not in (1, batch):
            _fail(f"end must have shape [B] = [{batch}], got {list(end.shape)}")
    if forced.dtype != torch.int32:
        raise TypeError(f"forced must be int32, got {forced.dtype}")
    if forced.dim() != 2 or forced.shape[0] not in (1, batch) or forced.shape[1] != heads:
        _fail(f"forced must be [1 or B, H] = [{batch}, {heads}], got {list(forced.shape)}")
    if len(call.weights) != 10:
        _fail(f"weights must be weight and bias of five linears, got {len(call.weights)} tensors")
    hidden = call.weights[0].shape[0]
    wide, deep = ((hidden, size), (hidden,)), ((size, hidden), (size,))
    shapes = (*wide, *deep, *wide, *deep, (2, size), (2,))
    for index, (weight, shape) in enumerate(zip(call.weights, shapes, strict=True)):
        if tuple(weight.shape) != shape:
            _fail(f"weights[{index}] must have shape {list(shape)}, got {list(weight.shape)}")
    for tensor in (mask, end, forced, *call.weights):
        if tensor is not None and tensor.device != tap.device:
            _fail(f"all inputs must be on the tap's device {tap.device}, got {tensor.device}")


def _check_tensors(call: AttentionCall | ExactCall) -> None:
    query, key, value = call.query, call.key, call.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            _fail(f"{name} must be 4-D [B, H, S, D], got {tensor.dim()}-D")
        if tensor.dtype not in _FLOATS:
            raise TypeError(
                f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}"
            )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must share one dtype, got {query.dtype}, {key.dtype}, "
            f"{value.dtype}; cast them first (under autocast too)"
        )
    if not query.device == key.device == value.device:
        _fail(f"query, key and value lie on {query.device}, {key.device}, {value.device}; use one")
    if key.shape[:3] != value.shape[:3]:
        _fail(
            "key and value must agree in [B, Hkv, Skv], got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        _fail(f"query and key must agree in B and D, got {list(query.shape)} and {list(key.shape)}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        _fail(
            f"the {query.shape[1]} query heads must be a multiple of the {key.shape[1]} kv heads: "
            "query head h reads kv head h // (Hq / Hkv)"
        )


def _check_extras(call: AttentionCall | ExactCall) -> None:
    if call.scale is not None and call.scale_tensor is not None:
        _fail("give scale as a number or as a 0-d tensor, not both")
    if call.scale_tensor is not None and call.scale_tensor.dim() != 0:
        _fail(f"a scale tensor must be 0-d, got {call.scale_tensor.dim()}-D")
    if call.softcap is not None and not call.softcap > 0:
        _fail(f"softcap must be positive, got {call.softcap}; use None for no softcap")
    if call.sinks is not None and tuple(call.sinks.shape) != (call.query.shape[1],):
        _fail(f"sinks must have shape [Hq] = [{call.query.shape[1]}], got {list(call.sinks.shape)}")
    if not 0.0 <= call.dropout_p < 1.0:
        _fail(f"dropout_p must be in [0, 1), got {call.dropout_p}")
    if call.dropout_p > 0:
        if call.dropout_seed is None:
            _fail("dropout_p > 0 needs dropout_seed, a 0-d int64 tensor drawn anew for each call")
        elif call.dropout_seed.dim() != 0 or call.dropout_seed.dtype != torch.int64:
            _fail(
                "dropout_seed must be a 0-d int64 tensor, got "
                f"{call.dropout_seed.dim()}-D {call.dropout_seed.dtype}"
            )


def _check_modes(call: AttentionCall) -> None:
    for name, mode in (("full_mode", call.full_mode), ("sparse_mode", call.sparse_mode)):
        if mode not in MODES:
            _fail(f"{name} must be one of {', '.join(MODES)}, got {mode!r}")
    if call.sink < 0 or call.local < 1:
        _fail(f"need sink >= 0 and local >= 1, got sink={call.sink}, local={call.local}")
    lists = (call.block_indptr, call.block_indices)
    if BLOCKS in call.modes and any(x is None for x in lists):
        _fail("mode 'blocks' needs block_indptr and block_indices")
    if BLOCKS not in call.modes and any(x is not None for x in lists):
        _fail("block lists were given, but neither full_mode nor sparse_mode is 'blocks'")


def _check_documents(call: AttentionCall, batch: int, kv_heads: int) -> None:
    documents = batch
    if call.cu_seqlens is not None:
        _require_integer("cu_seqlens", call.cu_seqlens)
        if batch != 1:
            _fail(f"cu_seqlens describes one packed row and needs B == 1, got B = {batch}")
        if call.cu_seqlens.dim() != 1 or call.cu_seqlens.shape[0] < 2:
            _fail(f"cu_seqlens must be [documents + 1], got {list(call.cu_seqlens.shape)}")
        if call.start is not None or call.kv_len is not None:
            _fail("cu_seqlens already says where documents begin and end: drop start and kv_len")
        documents = call.cu_seqlens.shape[0] - 1
    if call.route.dtype != torch.int32:
        raise TypeError(f"route must be int32 (0 = full class, 1 = sparse), got {call.route.dtype}")
    if tuple(call.route.shape) != (documents, kv_heads):
        _fail(
            f"route must have shape [documents, Hkv] = [{documents}, {kv_heads}], "
            f"got {list(call.route.shape)}"
        )
    if call.block_indptr is None or call.block_indices is None:
        return
    _require_integer("block_indptr", call.block_indptr)
    _require_integer("block_indices", call.block_indices)
    if call.block_size < 1:
        _fail(f"block_size must be at least 1, got {call.block_size}")
    if call.block_indices.dim() != 1:
        _fail(f"block_indices must be [nnz], got {list(call.block_indices.shape)}")
    shape, blocks = call.block_indptr.shape, -(-call.key.shape[2] // call.block_size)
    if len(shape) != 3 or tuple(shape[:2]) != (documents, kv_heads) or shape[2] < blocks + 1:
        _fail(
            "block_indptr must have shape [documents, Hkv, ceil(Skv / block_size) + 1] = "
            f"[{documents}, {kv_heads}, {blocks + 1}] (or more rows), got {list(shape)}"
        )


def _require_integer(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")


def _fail(message: str) -> NoReturn:
    raise ValueError(message)
