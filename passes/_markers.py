"""Opaque marker ops that stand for what must not be traced while a site is captured.

They exist in captured graphs only: the rewrite replaces every one of them, so none of them ever
computes. Their fake kernels say which shapes the real thing would have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


class _Calls(threading.local):
    """Fake kernels of the child calls of the capture that this thread is running."""

    def __init__(self) -> None:
        self.kernels: dict[int, Callable[[list[Tensor], list[int]], list[Tensor]]] = {}


CALLS = _Calls()


def _never(name: str) -> RuntimeError:
    return RuntimeError(
        f"elastic_compile::{name} is a marker in captured graphs and cannot run; the graph was "
        "executed before elastic_compile.passes rewrote it"
    )


@torch.library.custom_op("elastic_compile::child", mutates_args=())
def child(tensors: list[Tensor], ints: list[int], token: int) -> list[Tensor]:
    """A call of a child module (``q_proj``, ``k_norm``, …), turned into ``call_module`` later."""
    raise _never("child")


@child.register_fake
def _(tensors: list[Tensor], ints: list[int], token: int) -> list[Tensor]:
    return CALLS.kernels[token](tensors, ints)


@torch.library.custom_op("elastic_compile::cache_update", mutates_args=())
def cache_update(key: Tensor, value: Tensor, past: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """``cache.update(key, value, layer_idx)``; ``past`` [P] only carries the cached length."""
    raise _never("cache_update")


@cache_update.register_fake
def _(key: Tensor, value: Tensor, past: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    total = past.shape[0] + key.shape[-2]
    return (
        key.new_empty(*key.shape[:-2], total, key.shape[-1]),
        value.new_empty(*value.shape[:-2], total, value.shape[-1]),
    )


@torch.library.custom_op("elastic_compile::attention_site", mutates_args=())
def attention_site(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """What a model asked of ``AttentionInterface``: [B, Hq, S, D] … -> [B, S, Hq, Dv]."""
    raise _never("attention_site")


@attention_site.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])
