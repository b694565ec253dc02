"""Routes travel with the rows of a KV cache.

transformers reorders, selects and repeats the rows of ``keys`` and ``values`` only, and a cache
class cannot be told of further per-row tensors. So the container's three methods are wrapped
once, process-wide; for layers without routes the wrappers do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from elastic_compile._runtime import PADS, POOL, ROUTE


def _rows(cache: Cache, pick: Callable[[Tensor], Tensor]) -> None:
    for layer in cache.layers:
        for name in (ROUTE, PADS, *POOL):
            tensor = getattr(layer, name, None)
            if tensor is not None:
                setattr(layer, name, pick(tensor))


def _wrap(name: str, pick: Callable[[Tensor, Any], Tensor]) -> None:
    original = getattr(Cache, name)
    if getattr(original, "_elastic_compile", False):
        return

    @functools.wraps(original)
    def method(self: Cache, rows: Any) -> Any:
        result = original(self, rows)
        _rows(self, lambda tensor: pick(tensor, rows))
        return result

    method._elastic_compile = True  # type: ignore[attr-defined]
    setattr(Cache, name, method)


def _select(tensor: Tensor, rows: Any) -> Tensor:
    return tensor[rows.to(tensor.device) if isinstance(rows, Tensor) else rows, ...]


def install() -> None:
    """Let ``Cache`` carry routes; a second call changes nothing."""
    _wrap("reorder_cache", lambda t, rows: t.index_select(0, rows.to(t.device)))
    _wrap("batch_select_indices", _select)
    _wrap("batch_repeat_interleave", lambda t, n: torch.repeat_interleave(t, n, dim=0))
