"""The full and the streaming output of every head in one pass, on CUDA GPUs: for training routes.

One Triton launch computes what two would, at the work of full attention and of the few blocks that
are met twice. Nothing waits for the host. Triton is imported by the first call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elastic_compile.kernels import _gpu, triton_prefill
from elastic_compile.kernels._call import FULL, STREAMING, AttentionCall, new_outputs
from elastic_compile.kernels.triton_prefill import Config


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Whether the kernel can serve ``call``, by its shapes, dtypes and options alone."""
    if sorted(call.modes) != sorted((FULL, STREAMING)):
        return False, f"needs one class of full heads and one of streaming heads, not {call.modes}"
    return triton_prefill.supports(call)


def select_config(head_size: int, dtype: torch.dtype, *, tma: bool) -> Config:
    """The launch configuration: a function of these alone.

    Args:
        head_size: The larger of D and Dv.
        dtype: Of query, key and value.
        tma: Whether chip and strides allow TMA descriptors.
    """
    if dtype == torch.float32:
        size = 32 if head_size <= 128 else 16
        return Config(rows=size, keys=32, warps=4, stages=1, tma=False)
    if head_size <= 64:
        return Config(rows=128, keys=64, warps=4, stages=3, tma=tma, pack=2)
    if head_size <= 128:
        stages = 3 if tma else 2
        return Config(rows=128, keys=128 if tma else 64, warps=8, stages=stages, tma=tma, pack=2)
    return Config(rows=64, keys=32, warps=8, stages=2, tma=tma)


def forward(call: AttentionCall, config: Config | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the op's outputs under the routes and under the opposite routes.

    Args:
        call: Arguments for which :func:`supports` holds.
        config: Overrides :func:`select_config`; ``overlap`` is ignored.

    Returns:
        Output [B, Hq, Sq, Dv] and log-sum-exp [B, Hq, Sq] under ``call.route``, and the output that
        every head would have under the other route; outputs lie in memory as [B, Sq, Hq, Dv].
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
    tma = _gpu.tma_fits(key) and _gpu.tma_fits(value)
    if config is None:
        config = select_config(max(head_size, value_size), query.dtype, tma=tma)
    out, lse = new_outputs(call)
    other, _ = new_outputs(call)
    units, group = batch * kv_heads, heads // kv_heads
    pack = math.gcd(group, config.pack)
    tiles = -(-queries // (config.rows // pack))
    start, kv_len, mask = call.start, call.kv_len, call.key_mask
    if mask is not None:
        mask = mask.view(torch.uint8)
    strides = {
        f"stride_{prefix}{suffix}": stride
        for prefix, tensor in (("q", query), ("k", key), ("v", value))
        for suffix, stride in zip("bhs", tensor.stride(), strict=False)
    }
    from elastic_compile.kernels._triton_dual import dual

    with _gpu.on(query.device):
        dual[(units * (group // pack) * tiles,)](
            query=query,
            key=triton_prefill.descriptor(key, config.keys) if config.tma and tma else key,
            value=triton_prefill.descriptor(value, config.keys) if config.tma and tma else value,
            out=out,
            other=other,
            lse=lse,
            route=call.route,
            start=start,
            kv_len=kv_len,
            key_mask=mask,
            span=None if mask is None else _gpu.find_spans(mask, start, kv_len),
            learned_sinks=call.sinks,
            scale_tensor=call.scale_tensor,
            scale=max(float(scale), _gpu.LEAST_SCALE),
            softcap=call.softcap,
            **strides,
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
            section=_gpu.section(key, value),
            GROUP=group,
            PACK=pack,
            D=head_size,
            DV=value_size,
            BD=_gpu.padded(head_size),
            BDV=_gpu.padded(value_size),
            BM=config.rows,
            BN=config.keys,
            SPARSE_STREAMS=call.sparse_mode == STREAMING,
            TMA=config.tma and tma,
            SPLIT_SUMS=config.split_sums,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return out, lse, other
