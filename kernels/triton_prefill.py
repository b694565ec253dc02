"""Prefill on a GPU through Triton: one launch for full and streaming heads, forward only.

Every program reads the route of its kv head on the device, so nothing waits for the host and a
captured CUDA graph follows new routes. Lengths are run-time arguments: no compilation per length.
Where the chip has a tensor memory accelerator (sm_90 and later) and the strides allow it, keys and
values come through TMA descriptors; elsewhere through pointers.
Triton itself is imported by the first call.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_compile.kernels import _gpu
from elastic_compile.kernels._call import BLOCKS, STREAMING, AttentionCall, new_outputs

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD = 256
_MAX_KEYS = 1 << 30


@dataclass(frozen=True)
class Config:
    """How one launch is cut up and compiled.

    Attributes:
        rows: Query rows of a program, a power of two, at least 16.
        pack: Query heads that share a program and its rows, a power of two; at most as many as
            divide the group. Fewer positions a tile means fewer keys that only some rows see.
        keys: Keys of a block, a power of two, at least 16.
        warps: Warps of a program.
        stages: Blocks of keys and values in flight.
        overlap: Let the products with the values lag one block, beside the next softmax.
        tma: Load keys and values through TMA descriptors where chip and strides allow it.
        split_sums: Leave the row sums spread over threads until the end: fewer shuffles, more
            registers.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    overlap: bool = False
    tma: bool = True
    split_sums: bool = True
    pack: int = 1


def select_config(
    head_size: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    queries: int,
    *,
    streams: bool = True,
    tma: bool = True,
) -> Config:
    """The launch configuration: a function of these alone, the same in every process.

    Measured on an H200 (bfloat16, 32 query heads, 8 kv heads, D = 64, 128 and 256). For D = 128,
    eight warps with overlap are the fastest where all heads are full; two programs of four warps
    on a multiprocessor, where one computes while the other begins or ends, where heads stream.
    Two heads in a tile of 64 positions halve the keys that only some rows see.

    Args:
        head_size: The larger of D and Dv.
        dtype: Of query, key and value.
        capability: Compute capability of the device.
        queries: Query rows of a head.
        streams: Whether heads may stream.
        tma: Whether chip and strides allow TMA descriptors.
    """
    tma = tma and dtype != torch.float32
    if dtype == torch.float32:
        # Products in true float32 use no tensor cores, and registers are short.
        if 64 < head_size <= 128:
            return Config(rows=32, keys=64, warps=8, stages=1, tma=tma)
        return Config(rows=32 if head_size <= 64 else 16, keys=32, warps=4, stages=1, tma=tma)
    if queries <= 64:
        rows, keys = (16 if queries <= 16 else 64), (64 if head_size <= 128 else 32)
        stages = 3 if head_size <= 128 and capability[0] == 9 else 2
        # Rows that one head leaves empty serve the others of its group.
        pack = rows // _padded_rows(queries)
        return Config(rows, keys, warps=4, stages=stages, tma=tma, pack=pack)
    if tma and capability[0] == 9:
        if head_size <= 64:
            return Config(rows=128, keys=64, warps=4, stages=3, overlap=True, pack=2)
        if head_size <= 128 and streams:
            return Config(rows=128, keys=64, warps=4, stages=2, pack=2)
        if head_size <= 128:
            return Config(rows=128, keys=128, warps=8, stages=3, overlap=True)
        return Config(rows=128, keys=64, warps=8, stages=2, overlap=True, pack=2)
    if head_size <= 64:
        return Config(rows=128, keys=64, warps=4, stages=2, tma=tma)
    if head_size <= 128:
        return Config(rows=128, keys=64, warps=8, stages=2, tma=tma)
    if capability[0] == 9:
        return Config(rows=128, keys=64, warps=8, stages=2, tma=tma)
    return Config(rows=64, keys=32, warps=8, stages=2, tma=tma)


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Whether the kernel can serve ``call``, by its shapes, dtypes and options alone."""
    if not _has_triton():
        return False, "triton is not installed"
    query = call.query
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not query.is_cuda and not interpreted:
        return False, f"needs a GPU, the inputs are on {query.device}"
    if query.is_cuda and _gpu.capability(query.device)[0] < 8:
        return False, "needs compute capability 8.0 or later"
    if query.dtype not in _DTYPES:
        return False, f"dtype {query.dtype} is not supported"
    if interpreted and query.dtype == torch.bfloat16:
        return False, "Triton's interpreter multiplies bfloat16 wrongly"
    if max(query.shape[3], call.value.shape[3]) > _MAX_HEAD:
        return False, f"head sizes above {_MAX_HEAD} are not supported"
    if BLOCKS in call.modes:
        return False, "block lists are not supported"
    if call.cu_seqlens is not None:
        return False, "packed documents are not supported"
    if call.dropout_p > 0:
        return False, "dropout is not supported"
    if call.key.shape[2] >= _MAX_KEYS:
        return False, f"{_MAX_KEYS} keys or more are not supported"
    return True, ""


def forward(call: AttentionCall, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """Computes the op.

    Args:
        call: Arguments for which :func:`supports` holds.
        config: Overrides :func:`select_config`.

    Returns:
        Output [B, Hq, Sq, Dv] in the query's dtype, [B, Sq, Hq, Dv] in memory, and log-sum-exp
        [B, Hq, Sq] in float32.
    """
    query, scale = call.query, call.scale
    if scale is None:
        scale = query.shape[3] ** -0.5
    elif scale < 0:
        # The kernel takes row maxima before the scale.
        query, scale = -query, -scale
    query, key, value = (_gpu.unit_stride(x) for x in (query, call.key, call.value))
    batch, heads, queries, head_size = query.shape
    _, kv_heads, held, value_size = value.shape
    full_streams, sparse_streams = (
        mode == STREAMING and not call.uniform for mode in (call.full_mode, call.sparse_mode)
    )
    tma = _gpu.tma_fits(key) and _gpu.tma_fits(value)
    if config is None:
        config = select_config(
            max(head_size, value_size),
            query.dtype,
            _gpu.capability(query.device) if query.is_cuda else (8, 0),
            queries,
            streams=full_streams or sparse_streams,
            tma=tma,
        )

    out, lse = new_outputs(call)
    units, group = batch * kv_heads, heads // kv_heads
    pack = math.gcd(group, config.pack)
    span = config.rows // pack
    tiles = -(-queries // span)
    even_tiles = 0
    if full_streams or sparse_streams:
        # Tiles whose last row, at its latest position, still sees all keys before it.
        even_tiles = (call.sink + call.local - (held - queries)) // span
        even_tiles = min(max(even_tiles, 0), tiles)
    start, kv_len, mask = call.start, call.kv_len, call.key_mask
    arguments = dict(
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        route=call.route,
        start=start,
        kv_len=kv_len,
        key_mask=None if mask is None else mask.view(torch.uint8),
        span=None,
        learned_sinks=call.sinks,
        scale_tensor=call.scale_tensor,
        scale=max(float(scale), _gpu.LEAST_SCALE),
        softcap=call.softcap,
        stride_rb=call.route.stride(0),
        stride_rh=call.route.stride(1),
        stride_start=0 if start is None else start.stride(0),
        stride_len=0 if kv_len is None or kv_len.dim() == 0 else kv_len.stride(0),
        stride_mb=0 if mask is None else mask.stride(0),
        stride_ms=0 if mask is None else mask.stride(1),
        queries=queries,
        held=held,
        units=units,
        kv_heads=kv_heads,
        sink=min(call.sink, held),
        local=min(call.local, held),
        tiles=tiles,
        even_tiles=even_tiles,
        section=_gpu.section(key, value),
        GROUP=group,
        PACK=pack,
        D=head_size,
        DV=value_size,
        BD=_gpu.padded(head_size),
        BDV=_gpu.padded(value_size),
        BM=config.rows,
        BN=config.keys,
        FULL_STREAMS=full_streams,
        SPARSE_STREAMS=sparse_streams,
        SCAN=_gpu.scan_width(units),
        TMA=config.tma and tma,
        OVERLAP=config.overlap,
        SPLIT_SUMS=config.split_sums,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    for prefix, tensor in (("q", query), ("k", key), ("v", value)):
        for suffix, stride in zip("bhs", tensor.stride(), strict=False):
            arguments[f"stride_{prefix}{suffix}"] = stride
    if arguments["TMA"]:
        arguments["key"] = descriptor(key, config.keys)
        arguments["value"] = descriptor(value, config.keys)
    _launch(units * (group // pack) * tiles, query.device, arguments)
    return out, lse


def _launch(programs: int, device: torch.device, arguments: dict[str, Any]) -> None:
    from elastic_compile.kernels._triton_prefill import prefill

    with _gpu.on(device):
        if arguments["key_mask"] is not None:
            names = ("key_mask", "start", "kv_len")
            arguments["span"] = _gpu.find_spans(*(arguments[name] for name in names))
        prefill[(programs,)](**arguments)


def descriptor(tensor: Tensor, keys: int) -> Any:
    """A TMA descriptor of [B, Hkv, Skv, D], from which blocks of ``keys`` keys are loaded."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, 1, keys, _gpu.padded(tensor.shape[3])]
    return TensorDescriptor(tensor, list(tensor.shape), _gpu.tma_strides(tensor), block)


def _padded_rows(queries: int) -> int:
    return 1 << max(queries - 1, 0).bit_length()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
