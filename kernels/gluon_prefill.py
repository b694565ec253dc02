"""Prefill on a Hopper GPU: a warp-specialised kernel in Gluon, forward only.

One launch serves full and streaming heads. A small kernel before it sorts the (sample, kv head)
pairs by their routes, on the device: nothing waits for the host and a captured CUDA graph follows
new routes. Lengths and head counts are run-time arguments: no
compilation for each. Triton is imported by the
first call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_compile.kernels import _gpu
from elastic_compile.kernels._call import BLOCKS, STREAMING, AttentionCall, new_outputs

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 128
_SMALLEST_HEAD = 33
_FEWEST_QUERIES = 128
_FEWEST_KEYS = {64: 8192, 128: 4096}
"""By the elements of a row in shared memory. With fewer keys the Triton kernel is as fast; a call
that names this one gets it all the same."""
_ROWS = 64


@dataclass(frozen=True)
class Config:
    """How the launch is cut up and compiled.

    Attributes:
        keys: Keys of a block, a power of two.
        stages: Blocks of keys and of values in shared memory.
        consumers: Warpgroups, 2 or 3.
        registers: Of a consumer's thread.
    """

    keys: int = 128
    stages: int = 2
    consumers: int = 2
    registers: int = 240


_CONFIGS = {64: Config(consumers=3, registers=160), 128: Config()}
"""By the elements of a row in shared memory. Half the products for as many exponentials: a third
consumer keeps both units busy."""


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Whether the kernel can serve ``call``, by its shapes, dtypes, strides and options alone."""
    query = call.query
    if not query.is_cuda or _gpu.capability(query.device) != (9, 0):
        return False, "needs a GPU of compute capability 9.0"
    if query.dtype not in _DTYPES:
        return False, f"dtype {query.dtype} is not supported"
    size = query.shape[3]
    if size != call.value.shape[3] or not _SMALLEST_HEAD <= size <= _LARGEST_HEAD:
        return False, f"needs one head size, of {_SMALLEST_HEAD} to {_LARGEST_HEAD}"
    if query.shape[2] < _FEWEST_QUERIES:
        return False, f"fewer than {_FEWEST_QUERIES} queries"
    fewest = _FEWEST_KEYS[_width(size)]
    if call.key.shape[2] < fewest and call.implementation != "gluon":
        return False, f"fewer than {fewest:,} keys"
    given = {
        "block lists": BLOCKS in call.modes or None,
        "packed documents": call.cu_seqlens,
        "dropout": call.dropout_p or None,
        "a softcap": call.softcap,
        "learned sinks": call.sinks,
        "a tensor scale": call.scale_tensor,
    }
    for name, value in given.items():
        if value is not None:
            return False, f"{name} is not supported"
    if not all(_gpu.tma_fits(x) for x in (query, call.key, call.value)):
        return False, "rows of queries, keys or values do not begin on 16 bytes"
    if not _has_gluon():
        return False, "the installed Triton has no Gluon for Hopper"
    return True, ""


def forward(call: AttentionCall, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """Computes the op.

    Args:
        call: Arguments for which :func:`supports` holds.
        config: Overrides the choice by head size.

    Returns:
        Output [B, Hq, Sq, D] in the query's dtype, [B, Sq, Hq, D] in memory, and log-sum-exp
        [B, Hq, Sq] in float32.
    """
    query, key, value, scale = call.query, call.key, call.value, call.scale
    batch, heads, queries, size = query.shape
    config = config or _CONFIGS[_width(size)]
    if scale is None:
        scale = size**-0.5
    elif scale < 0:
        # The kernel takes row maxima before the scale.
        query, scale = -query, -scale
    kv_heads, held = key.shape[1:3]
    full_streams, sparse_streams = (
        mode == STREAMING and not call.uniform for mode in (call.full_mode, call.sparse_mode)
    )
    out, lse = new_outputs(call)
    units, group = batch * kv_heads, heads // kv_heads
    chunks = -(-(-(-queries // _ROWS) * group) // config.consumers)
    even_chunks = 0
    if full_streams or sparse_streams:
        # Chunks whose last row, at its latest position, still sees all keys before it.
        even_rows = max(call.sink + call.local - (held - queries), 0)
        even_chunks = min(even_rows // _ROWS * group // config.consumers, chunks)
    mask = None
    if call.key_mask is not None:
        mask = call.key_mask.view(torch.uint8)
        # Bytes of a row side by side: 32-bit offsets from its beginning.
        mask = mask if mask.stride(1) == 1 else mask.contiguous()
    with torch.cuda.device(query.device):
        order = None
        if full_streams != sparse_streams:
            order = _gpu.sort_units(call.route, full_streams=full_streams)
        start, kv_len = call.start, call.kv_len
        if start is not None:
            start = start.contiguous()
        if kv_len is not None:
            kv_len = kv_len.expand(batch).contiguous()
        span = None if mask is None else _gpu.find_spans(mask, start, kv_len)
        work = units * chunks
        # Samples whose mask has a hole are served by a launch of their own, which ends at once if
        # there are none.
        for holes in (None,) if mask is None else (None, mask):
            _kernels().prefill[(min(_gpu.multiprocessors(query.device), work),)](
                _descriptor(query, _ROWS),
                _descriptor(key, config.keys),
                _descriptor(value, config.keys),
                _descriptor(out, _ROWS),
                lse,
                order,
                start,
                kv_len,
                holes,
                span,
                max(float(scale), _gpu.LEAST_SCALE),
                0 if mask is None else mask.stride(0),
                queries,
                held,
                units,
                kv_heads,
                group,
                min(call.sink, held),
                min(call.local, held),
                chunks,
                even_chunks,
                _gpu.section(key, value),
                work,
                CONSUMERS=config.consumers,
                BN=config.keys,
                STAGES=config.stages,
                REGISTERS=config.registers,
                FULL_STREAMS=full_streams,
                SPARSE_STREAMS=sparse_streams,
                num_warps=4,
            )
    return out, lse


def _descriptor(tensor: Tensor, rows: int) -> Any:
    """A TMA descriptor of [B, H, S, D], through which ``rows`` rows of a head move at once."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    block = [1, 1, rows, _width(tensor.shape[3])]
    return TensorDescriptor(tensor, list(tensor.shape), _gpu.tma_strides(tensor), block, layout)


def _width(size: int) -> int:
    """Elements of a row in shared memory."""
    return 64 if size <= 64 else _LARGEST_HEAD


@functools.cache
def _has_gluon() -> bool:
    try:
        _kernels()
    except ImportError:
        return False
    return True


def _kernels() -> Any:
    from elastic_compile.kernels import _gluon_prefill

    return _gluon_prefill
