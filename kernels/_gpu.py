"""What the GPU kernels' launchers share: facts of the device, and what TMA takes."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

LEAST_SCALE = 1e-37
"""Stands for a scale of 0: scores that are masked are -inf, and 0 times that is NaN."""
_L2_SHARE = 0.6
_DEFAULT_L2 = 40 << 20
_SPAN_BLOCK = 4096


def find_spans(mask: Tensor, start: Tensor | None, kv_len: Tensor | None) -> Tensor:
    """What a key mask says of each sample, int32 [B, 2], found on the device.

    The column after the last real key, and whether a key before it, from ``start`` on, is not real.

    Args:
        mask: uint8 [B, Skv].
        start: int [B], or None for 0.
        kv_len: int [B] or 0-d, or None for Skv.
    """
    from elastic_compile.kernels._triton_common import spans

    batch, held = mask.shape
    span = mask.new_empty((batch, 2), dtype=torch.int32)
    spans[(batch,)](
        mask,
        start,
        kv_len,
        span,
        mask.stride(0),
        mask.stride(1),
        0 if start is None else start.stride(0),
        0 if kv_len is None or kv_len.dim() == 0 else kv_len.stride(0),
        held,
        BLOCK=_SPAN_BLOCK,
    )
    return span


def sort_units(route: Tensor, *, full_streams: bool) -> Tensor:
    """Units (sample, kv head) by route, int32 [units + 1], sorted on the device.

    First those that see all keys, then those that stream; last the number of the former.

    Args:
        route: int [B, Hkv].
        full_streams: Whether it is the full class that streams, and the sparse one that does not.
    """
    from elastic_compile.kernels._triton_common import schedule

    units = route.numel()
    order = route.new_empty(units + 1, dtype=torch.int32)
    schedule[(1,)](
        route,
        order,
        units,
        route.shape[1],
        route.stride(0),
        route.stride(1),
        FULL_STREAMS=full_streams,
        SCAN=scan_width(units),
    )
    return order


def tma_fits(tensor: Tensor) -> bool:
    """Whether TMA can load rows of [B, H, S, D]: sm_90, 16 bits, rows that begin on 16 bytes."""
    size = tensor.element_size()
    if not tensor.is_cuda:
        return True
    if capability(tensor.device)[0] < 9 or size > 2 or tensor.data_ptr() % 16:
        return False
    steps = [
        step for count, step in zip(tensor.shape, tensor.stride()[:3], strict=False) if count > 1
    ]
    return tensor.stride(3) == 1 and all(step > 0 and step * size % 16 == 0 for step in steps)


def tma_strides(tensor: Tensor) -> list[int]:
    """Strides of [B, H, S, D] for a descriptor.

    The stride of a dimension of one element may be anything, and TMA cannot take anything.
    """
    row = tensor.shape[3]
    strides = zip(tensor.shape[:3], tensor.stride(), strict=False)
    return [*(stride if size > 1 else 16 * row for size, stride in strides), 1]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one; launches go to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def unit_stride(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of it where neighbours of its last dimension lie apart."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def padded(size: int) -> int:
    """A head size as a tile's width, a power of two.

    Not 16: Triton 3.6 then stores values that went through registers, as those of masked keys do,
    outside of the shared memory that it reserved (sm_90, 64 keys, no TMA).
    """
    return max(32, 1 << (size - 1).bit_length())


def scan_width(units: int) -> int:
    """Routes that a program reads at once to find its head."""
    return 32 if units <= 32 else 128 if units <= 128 else 1024


def section(key: Tensor, value: Tensor) -> int:
    """How many kv heads are scheduled together so that their keys and values share the L2."""
    size = key.shape[2] * (key.shape[3] + value.shape[3]) * key.element_size()
    cache = _l2_bytes(key.device) if key.is_cuda else _DEFAULT_L2
    return 1 << max(int(cache * _L2_SHARE) // size, 1).bit_length() - 1


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _l2_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _DEFAULT_L2))
