"""Backward of attention on CUDA GPUs: two Triton kernels, for full and streaming heads together.

The work is that of the visible pairs. Every gradient has one writer, so results repeat to the bit.
Nothing waits for the host and a captured CUDA graph follows new routes; lengths are run-time
arguments. Triton is imported by the first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_compile.kernels import _gpu, triton_prefill
from elastic_compile.kernels._call import STREAMING, AttentionCall

_SUM_ROWS = 64


@dataclass(frozen=True)
class Config:
    """How the launches are cut up and compiled.

    Attributes:
        key_rows: Query rows that a block of keys meets at once.
        keys: Keys of a block whose gradient a program computes.
        key_warps: Of such a program.
        key_stages: Of its loads.
        rows: Query rows of a tile whose gradient a program computes.
        row_keys: Keys that it meets at once.
        row_warps: Of such a program.
        row_stages: Of its loads.
        tma: Blocks that move are loaded through TMA descriptors, where chip and strides allow it.
    """

    key_rows: int
    keys: int
    key_warps: int
    key_stages: int
    rows: int
    row_keys: int
    row_warps: int
    row_stages: int
    tma: bool = False


def select_config(head_size: int, dtype: torch.dtype, *, tma: bool) -> Config:
    """The launch configuration: a function of these alone.

    Args:
        head_size: The larger of D and Dv.
        dtype: Of query, key and value.
        tma: Whether chip and strides allow TMA descriptors.
    """
    if dtype == torch.float32:
        size = 32 if head_size <= 128 else 16
        return Config(size, size, 4, 1, size, size, 4, 1)
    if head_size <= 64:
        return Config(64, 64, 4, 3 if tma else 2, 128, 64, 8, 2, tma)
    if head_size <= 128:
        return Config(64, 128, 8, 2, 128, 64, 8, 3 if tma else 2, tma)
    return Config(32, 64, 8, 1, 64, 32, 8, 1, tma)


def backward(
    call: AttentionCall,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and learned sinks (None without).

    Args:
        call: Arguments for which ``triton_prefill.supports`` holds.
        grad_out: Gradient of the output, [B, Hq, Sq, Dv].
        grad_lse: Gradient of the log-sum-exp, [B, Hq, Sq], or None for zero.
        out: The output, [B, Hq, Sq, Dv].
        lse: Log-sum-exp, float32 [B, Hq, Sq].
        config: Overrides :func:`select_config`.

    Returns:
        In the inputs' dtypes, contiguous.
    """
    query, key, value = (_gpu.unit_stride(x) for x in (call.query, call.key, call.value))
    grad_out = _gpu.unit_stride(grad_out.to(query.dtype))
    batch, heads, queries, head_size = query.shape
    _, kv_heads, held, value_size = value.shape
    tma = all(_gpu.tma_fits(x) for x in (query, key, value, grad_out))
    config = config or select_config(max(head_size, value_size), query.dtype, tma=tma)
    tma = config.tma and tma
    full_streams, sparse_streams = (
        mode == STREAMING and not call.uniform for mode in (call.full_mode, call.sparse_mode)
    )
    grads = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    ]
    lse = lse.contiguous()
    logs = torch.empty_like(lse)
    sums = row_sums(grad_out, out, grad_lse, lse=lse, logs=logs)
    units, group = batch * kv_heads, heads // kv_heads
    start, kv_len, mask = call.start, call.kv_len, call.key_mask
    if mask is not None:
        mask = mask.view(torch.uint8)
    scale = call.resolved_scale
    with _gpu.on(query.device):
        kernels = _kernels()
        shared = dict(
            logs=logs,
            sums=sums,
            route=call.route,
            start=start,
            kv_len=kv_len,
            key_mask=mask,
            span=None if mask is None else _gpu.find_spans(mask, start, kv_len),
            scale_tensor=scale if isinstance(scale, Tensor) else None,
            scale=1.0 if isinstance(scale, Tensor) else float(scale),
            softcap=call.softcap,
            stride_rb=call.route.stride(0),
            stride_rh=call.route.stride(1),
            stride_start=0 if start is None else start.stride(0),
            stride_len=0 if kv_len is None or kv_len.dim() == 0 else kv_len.stride(0),
            stride_mb=0 if mask is None else mask.stride(0),
            stride_ms=0 if mask is None else mask.stride(1),
            queries=queries,
            held=held,
            kv_heads=kv_heads,
            sink=min(call.sink, held),
            local=min(call.local, held),
            GROUP=group,
            D=head_size,
            DV=value_size,
            BD=_gpu.padded(head_size),
            BDV=_gpu.padded(value_size),
            FULL_STREAMS=full_streams,
            SPARSE_STREAMS=sparse_streams,
            TMA=tma,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )
        for prefix, tensor in (("q", query), ("k", key), ("v", value), ("g", grad_out)):
            for suffix, stride in zip("bhs", tensor.stride(), strict=False):
                shared[f"stride_{prefix}{suffix}"] = stride

        def rows_of(tensor: Tensor, rows: int) -> Any:
            return triton_prefill.descriptor(tensor, rows) if tma else tensor

        blocks = -(-held // config.keys)
        kernels.keys_and_values[(units * blocks,)](
            **shared,
            query=rows_of(query, config.key_rows),
            key=key,
            value=value,
            grad_out=rows_of(grad_out, config.key_rows),
            grad_key=grads[1],
            grad_value=grads[2],
            blocks=blocks,
            BM=config.key_rows,
            BN=config.keys,
            num_warps=config.key_warps,
            num_stages=config.key_stages,
        )
        tiles = -(-queries // config.rows)
        even_tiles = 0
        if full_streams or sparse_streams:
            even_tiles = (call.sink + call.local - (held - queries)) // config.rows
            even_tiles = min(max(even_tiles, 0), tiles)
        kernels.queries_alone[(batch * heads * tiles,)](
            **shared,
            query=query,
            key=rows_of(key, config.row_keys),
            value=rows_of(value, config.row_keys),
            grad_out=grad_out,
            grad_query=grads[0],
            units=units,
            tiles=tiles,
            even_tiles=even_tiles,
            section=_gpu.section(key, value),
            SCAN=_gpu.scan_width(units),
            BM=config.rows,
            BN=config.row_keys,
            num_warps=config.row_warps,
            num_stages=config.row_stages,
        )
    sinks = None
    if call.sinks is not None:
        # A sink's weight in a row, times what its score changes in the loss.
        share = torch.exp(call.sinks.float()[:, None] - lse)
        share = share.masked_fill(lse == -torch.inf, 0.0)
        sinks = -(share * sums).sum((0, 2)).to(call.sinks.dtype)
    return grads[0], grads[1], grads[2], sinks


def row_sums(
    grad_out: Tensor,
    out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    lse: Tensor | None = None,
    logs: Tensor | None = None,
) -> Tensor:
    """<dO, O> - dL/dlse of every row.

    Args:
        grad_out: [B, Hq, Sq, Dv].
        out: [B, Hq, Sq, Dv].
        grad_lse: float32 [B, Hq, Sq], or None for zero.
        lse: float32 [B, Hq, Sq], contiguous, if ``logs`` is given.
        logs: As ``lse``; receives it in units of log 2, +inf where a row sees nothing.

    Returns:
        float32 [B, Hq, Sq].
    """
    grad_out, out = _gpu.unit_stride(grad_out), _gpu.unit_stride(out)
    batch, heads, queries, size = out.shape
    sums = out.new_empty((batch, heads, queries), dtype=torch.float32)
    with _gpu.on(out.device):
        _kernels().row_sums[(-(-queries // _SUM_ROWS), batch * heads)](
            grad_out,
            out,
            lse,
            None if grad_lse is None else grad_lse.contiguous(),
            logs,
            sums,
            *grad_out.stride()[:3],
            *out.stride()[:3],
            queries,
            heads,
            DV=size,
            BDV=_gpu.padded(size),
            BM=_SUM_ROWS,
        )
    return sums


def _kernels() -> Any:
    from elastic_compile.kernels import _triton_backward

    return _triton_backward
