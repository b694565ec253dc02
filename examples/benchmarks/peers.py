"""Other ways to compute causal attention of mixed full and streaming heads, for comparison.

Each takes query [B, Hq, S, D], key and value [B, Hkv, S, D], and those for mixed heads ``route``
int32 [B, Hkv] (0 full, 1 streaming), ``sink`` and ``local`` in tokens, and returns what computes
[B, Hq, S, D]. What has to be made before, a block mask, is a function of its own and timed apart.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

Run = Callable[[], Tensor]
Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Routed output of query, key, value and straight-through routes, float [B, Hkv] of 0.0 and 1.0."""
FA3_MODULES = ("fa3_fwd_interface", "flash_attn_interface")
"""Import names of FlashAttention-3's forward, by the wheel that holds it."""


def sdpa(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None = None) -> Run:
    """torch SDPA with every head full; ``backend`` None is torch's own choice."""

    def run() -> Tensor:
        if backend is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return run


def fa3(query: Tensor, key: Tensor, value: Tensor) -> Run | None:
    """FlashAttention-3 with every head full; None where no wheel of it is installed."""
    found = [name for name in FA3_MODULES if importlib.util.find_spec(name) is not None]
    if not found:
        return None
    function = importlib.import_module(found[0]).flash_attn_func
    # Its layout is [B, S, H, D], which is how the benchmark's tensors lie in memory.
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))

    def run() -> Tensor:
        out: Any = function(q, k, v, causal=True)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    return run


def flex(
    query: Tensor, key: Tensor, value: Tensor, route: Tensor, sink: int, local: int
) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
    """FlexAttention under a block mask of its own for every head.

    Returns:
        A function that makes the block mask from the routes, and one that takes the mask and
        attends. Both are compiled where the inputs are on a GPU.
    """
    batch, heads, length, _ = query.shape
    visible, held = _routed(sink, local, heads // key.shape[1])

    def make() -> Any:
        held["route"] = route
        return create_block_mask(
            visible, batch, heads, length, length, device=str(query.device), _compile=query.is_cuda
        )

    attend = _compiled_flex() if query.is_cuda else flex_attention

    def run(mask: Any) -> Tensor:
        held["route"] = route
        out: Tensor = attend(query, key, value, block_mask=mask, enable_gqa=True)
        return out

    return make, run


@functools.cache
def _routed(sink: int, local: int, group: int) -> tuple[Any, dict[str, Tensor]]:
    """Which pairs count, and what holds the routes: one function, compiled once, for all routes."""
    held: dict[str, Tensor] = {}

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i - j < local) | (j < sink)
        return (i >= j) & ((held["route"][b, h // group] == 0) | near)

    return visible, held


@functools.cache
def _streaming(sink: int, local: int) -> Any:
    """Which pairs count where every head streams."""

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i - j < local) | (j < sink))

    return visible


@functools.cache
def _compiled_flex() -> Any:
    # One kernel for all lengths; the limit counts what stays apart.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=True)


def gather(
    query: Tensor, key: Tensor, value: Tensor, route: Tensor, sink: int, local: int
) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
    """Full heads gathered for SDPA, streaming heads for FlexAttention, results scattered.

    What a serial dispatch costs: which heads are full is read on the host, once, before. All
    samples must have the same routes.

    Returns:
        As :func:`flex`; the mask is that of streaming heads, one for all of them.
    """
    heads, length = query.shape[1:3]
    group = heads // key.shape[1]
    if not bool((route == route[:1]).all()):
        raise ValueError("gathering heads needs the same routes in every sample")
    lanes = torch.arange(group, device=query.device)
    kinds = []
    for streaming in (False, True):
        kv = ((route[0] != 0) == streaming).nonzero()[:, 0]
        kinds.append((kv, (kv[:, None] * group + lanes).flatten()))
    (full_kv, full_heads), (sparse_kv, sparse_heads) = kinds
    attend = _compiled_flex() if query.is_cuda else flex_attention

    def make() -> Any:
        if not len(sparse_kv):
            return None
        return create_block_mask(
            _streaming(sink, local),
            None,
            None,
            length,
            length,
            device=str(query.device),
            _compile=query.is_cuda,
        )

    def run(mask: Any) -> Tensor:
        out = torch.empty_like(query)
        if len(full_kv):
            out[:, full_heads] = scaled_dot_product_attention(
                query[:, full_heads],
                key[:, full_kv],
                value[:, full_kv],
                is_causal=True,
                enable_gqa=True,
            )
        if len(sparse_kv):
            out[:, sparse_heads] = attend(
                query[:, sparse_heads],
                key[:, sparse_kv],
                value[:, sparse_kv],
                block_mask=mask,
                enable_gqa=True,
            )
        return out

    return make, run


def mixtures(
    length: int, sink: int, local: int, device: torch.device
) -> dict[str, Callable[[], Mix]]:
    """How others train routes: full and streaming attention of all heads, mixed by the routes.

    Returns:
        ``two_sdpa`` (the streaming half under a mask of all pairs), ``sdpa_flex`` and ``flex``
        (both halves by FlexAttention): what makes the mask and returns the differentiable function.
    """
    compiled = device.type == "cuda"
    attend = _compiled_flex() if compiled else flex_attention

    def block_mask(visible: Any) -> Any:
        return create_block_mask(
            visible, None, None, length, length, device=str(device), _compile=compiled
        )

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def under(mask: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = attend(query, key, value, block_mask=mask, enable_gqa=True)
            return out

        return run

    def two_sdpa() -> Mix:
        place = torch.arange(length, device=device)
        ahead = place[:, None] - place
        mask = (ahead >= 0) & ((ahead < local) | (place < sink))

        def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

        return _mix(causal, masked)

    def sdpa_flex() -> Mix:
        return _mix(causal, under(block_mask(_streaming(sink, local))))

    def flex_twice() -> Mix:
        # A window as long as the row: every earlier key.
        full = block_mask(_streaming(0, length))
        return _mix(under(full), under(block_mask(_streaming(sink, local))))

    return {"two_sdpa": two_sdpa, "sdpa_flex": sdpa_flex, "flex": flex_twice}


def _mix(full: Callable[..., Tensor], sparse: Callable[..., Tensor]) -> Mix:
    def run(query: Tensor, key: Tensor, value: Tensor, route: Tensor) -> Tensor:
        share = route.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None, None]
        one, other = full(query, key, value), sparse(query, key, value)
        return torch.lerp(one, other, share.to(one.dtype))

    return run
