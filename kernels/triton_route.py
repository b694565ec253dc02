"""The router on a GPU through Triton: pooling, both MLPs and the decision in one launch.

A few key rows at both ends of the prompt and the router's weights are all that is read, so the
time does not depend on the length; padding is passed over in long steps. Everything is computed in
float32. Nothing waits for the host, and a captured CUDA graph follows new keys, masks and weights.
Triton itself is imported by the first call.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_compile.kernels import _gpu
from elastic_compile.kernels._call import RouteCall

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD = 1024
_MAX_LENGTH = 1 << 30
_TILE = 1 << 14


@dataclass(frozen=True)
class Config:
    """How one launch is cut up and compiled; all sizes are powers of two.

    Attributes:
        block: Columns pooled at once.
        chunk: Hidden values of an MLP at once.
        scan: Columns of the mask looked at at once in padding.
        warps: Warps of a program.
    """

    block: int
    chunk: int
    scan: int = 1 << 15
    warps: int = 16


def select_config(head_size: int, hidden: int, pool_tokens: int) -> Config:
    """The launch configuration: a function of these alone, the same in every process.

    Few programs run, one a head: each asks for much at once, so that it waits seldom.

    Args:
        head_size: D.
        hidden: Hidden size of the MLPs.
        pool_tokens: Tokens pooled at each end.
    """
    width = _TILE // _padded(head_size)
    return Config(
        block=min(_padded(pool_tokens), width, 128), chunk=min(_padded(hidden), width, 128)
    )


def supports(call: RouteCall) -> tuple[bool, str]:
    """Whether the kernel can serve ``call``, by shapes and dtypes alone."""
    tap = call.tap
    ok, reason = runs_on(tap.device)
    if not ok:
        return ok, reason
    if tap.dtype not in _DTYPES:
        return False, f"dtype {tap.dtype} is not supported"
    for weight in call.weights:
        if weight.dtype not in _DTYPES:
            return False, f"weights of dtype {weight.dtype} are not supported"
    if tap.shape[3] > _MAX_HEAD:
        return False, f"head sizes above {_MAX_HEAD} are not supported"
    if tap.shape[2] >= _MAX_LENGTH:
        return False, f"{_MAX_LENGTH} tokens or more are not supported"
    return True, ""


def runs_on(device: torch.device) -> tuple[bool, str]:
    """Whether the kernel runs on a device, and if not, why."""
    if not _has_triton():
        return False, "triton is not installed"
    if device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return True, ""
        return False, f"needs a GPU, the inputs are on {device}"
    if _gpu.capability(device)[0] < 8:
        return False, "needs compute capability 8.0 or later"
    return True, ""


def forward(call: RouteCall, config: Config | None = None, logits: Tensor | None = None) -> Tensor:
    """Computes the op.

    Args:
        call: Arguments for which :func:`supports` holds.
        config: Overrides :func:`select_config`.
        logits: Contiguous float32 [B, H, 2] that is filled with the logits, or None.

    Returns:
        Routes, contiguous int32 [B, H].
    """
    batch, heads, length, head_size = call.tap.shape
    weights = [weight.contiguous() for weight in call.weights]
    hidden = weights[0].shape[0]
    config = config or select_config(head_size, hidden, call.pool_tokens)
    out = torch.empty((batch, heads), dtype=torch.int32, device=call.tap.device)
    if out.numel() == 0:
        return out
    forced = call.forced.expand(batch, heads)
    end = None if call.end is None else call.end.expand(batch)
    mask = None if call.key_mask is None else call.key_mask.expand(batch, length).view(torch.uint8)
    arguments: dict[str, Any] = dict(
        tap=call.tap,
        key_mask=mask,
        end=end,
        forced=forced,
        out=out,
        logits=logits,
        route_bias=float(call.route_bias),
        stride_mb=0 if mask is None else mask.stride(0),
        stride_ms=0 if mask is None else mask.stride(1),
        stride_end=0 if end is None else end.stride(0),
        stride_fb=forced.stride(0),
        stride_fh=forced.stride(1),
        length=length,
        heads=heads,
        pool_tokens=int(call.pool_tokens),
        D=head_size,
        BD=_padded(head_size),
        HIDDEN=hidden,
        BLOCK=config.block,
        CHUNK=config.chunk,
        SCAN=config.scan,
        num_warps=config.warps,
        num_stages=1,
    )
    arguments.update(zip(_WEIGHTS, weights, strict=True))
    for suffix, stride in zip("bhsd", call.tap.stride(), strict=True):
        arguments[f"stride_t{suffix}"] = stride
    _launch(batch * heads, call.tap.device, arguments)
    return out


_WEIGHTS = (
    "task_weight_in",
    "task_bias_in",
    "task_weight_out",
    "task_bias_out",
    "router_weight_in",
    "router_bias_in",
    "router_weight_out",
    "router_bias_out",
    "last_weight",
    "last_bias",
)


def _launch(programs: int, device: torch.device, arguments: dict[str, Any]) -> None:
    from elastic_compile.kernels._triton_route import route

    with _gpu.on(device):
        route[(programs,)](**arguments)


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
