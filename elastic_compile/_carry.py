"""Routes travel with the rows of a KV cache.

transformers reorders, selects and repeats the rows of ``keys`` and ``values`` only, and a cache
class cannot be told of further per-row tensors. So the container's three methods are wrapped
once, process-wide; for layers without routes the wrappers do nothing. So is ``crop``, which the
running pool has to follow.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from elastic_compile._runtime import PADS, POOL, POOL_BEFORE, ROUTE

logger = logging.getLogger("elastic_compile")


def _rows(cache: Cache, pick: Callable[[Tensor], Tensor]) -> None:
    for layer in cache.layers:
        for name in (ROUTE, PADS, *POOL):
            tensor = getattr(layer, name, None)
            if tensor is not None:
                setattr(layer, name, pick(tensor))
        past, state = getattr(layer, POOL_BEFORE, None) or (None, None)
        if state is not None:
            setattr(layer, POOL_BEFORE, (past, tuple(pick(tensor) for tensor in state)))


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


def _crop(self: Cache, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Other layers (linear attention) have no length.
    pooled: list[Any] = [x for x in self.layers if getattr(x, POOL[0], None) is not None]
    before = [layer.get_seq_length() for layer in pooled]
    result = original(self, *args, **kwargs)
    for layer, length in zip(pooled, before, strict=True):
        _crop_pool(layer, length, layer.get_seq_length())
    return result


def _crop_pool(layer: Any, before: Any, after: Any) -> None:
    """Take the dropped tokens out of a running pool, whose sums do not say which they were."""
    if isinstance(before, Tensor) or isinstance(after, Tensor) or after >= before:
        return
    past, state = getattr(layer, POOL_BEFORE, None) or (None, None)
    if state is not None and past == after:
        # Back to where the last call of several tokens began: a document and its next question.
        for name, tensor in zip(POOL, state, strict=True):
            setattr(layer, name, tensor)
        return
    if _CROPPED not in _SAID:
        _SAID.add(_CROPPED)
        logger.warning(_CROPPED)


_CROPPED = (
    "a cache was cropped to a length at which no call of several tokens began, so that with "
    "reroute='each_call' dropped tokens still count in later routes; copy the cache instead "
    "(this is said once)"
)
_SAID: set[str] = set()


def _select(tensor: Tensor, rows: Any) -> Tensor:
    return tensor[rows.to(tensor.device) if isinstance(rows, Tensor) else rows, ...]


def install() -> None:
    """Let ``Cache`` carry routes; a second call changes nothing."""
    _wrap("reorder_cache", lambda t, rows: t.index_select(0, rows.to(t.device)))
    _wrap("batch_select_indices", _select)
    if not getattr(Cache.crop, "_elastic_compile", False):
        original = Cache.crop

        @functools.wraps(original)
        def crop(self: Cache, *args: Any, **kwargs: Any) -> Any:
            return _crop(self, original, *args, **kwargs)

        crop._elastic_compile = True  # type: ignore[attr-defined]
        Cache.crop = crop  # type: ignore[method-assign]
    _wrap("batch_repeat_interleave", lambda t, n: torch.repeat_interleave(t, n, dim=0))
