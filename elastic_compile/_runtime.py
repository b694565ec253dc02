"""What rewritten graphs call.

Plain functions of tensors and the site's ``elastic_router``: Dynamo inlines them, so a compiled
model has no call of ours but the attention op. No function reads a tensor's value on the host,
and none branches on one: lengths may be tensors (static caches) or integers.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic_compile import _fused_router, _relaxed, _state
from elastic_compile._masks import causal_mask_4d, fit_mask, unpadded_marker
from elastic_compile._site import ElasticSite
from elastic_compile.kernels import ops
from elastic_compile.router import PoolState, boundary_pool, decide, pool_read, pool_start
from elastic_compile.router import pool_update as pool_add

logger = logging.getLogger("elastic_compile")

Length = int | Tensor

ROUTE = "elastic_route"
"""Attribute of a cache layer that holds its routes, int32 [B, kv heads]."""
POOL = ("elastic_pool_sum", "elastic_pool_count", "elastic_pool_tail", "elastic_pool_mask")
"""Attributes of a cache layer that hold the running pool of ``reroute="each_call"``."""

POOL_BEFORE = "elastic_pool_before"
"""Attribute of a cache layer: (cached tokens, pool) where the last call of several tokens began."""

PADS = "elastic_pads"
"""Attribute of a cache layer: tokens of each sample that are padding, int32 [B]; None: none."""
WINDOW = "elastic_window"
"""Attribute of a cache layer: (sink, local) of the site that fills it."""

_DENSE_MASK = "a 4-D mask that is not causal and padding alone"
_SAID: set[str] = set()


def _self_attention(cache: Any) -> Any:
    # Encoder-decoder caches hold one cache a side; decoders cache in the first.
    return getattr(cache, "self_attention_cache", cache)


def _layer(site: ElasticSite, cache: Any) -> Any:
    """The site's layer of the cache, or None before the cache has one."""
    layers = _self_attention(cache).layers
    index = site.layer_idx
    if site.reroute == "each_call" and index is not None:
        # The running pool starts with the first token, before `update` would make the layer.
        make = getattr(_self_attention(cache), "layer_class_to_replicate", None)
        while make is not None and len(layers) <= index:
            layers.append(make())
    return layers[index] if index is not None and index < len(layers) else None


def unpadded(inputs: Tensor) -> Tensor:
    """The mask that says of ``inputs`` [B, S, …] that nothing is padded, bool [B, S]."""
    return unpadded_marker(inputs.shape[0], inputs.shape[1], inputs.device)


def dense_mask(query: Tensor, mask: Tensor) -> Tensor:
    """Causal and padding as a dense bool mask [B, 1, S, S], for a query [B, Hq, S, D]."""
    length = query.shape[2]
    return causal_mask_4d(mask, 0, length, length, query.device)


def past_length(site: ElasticSite, cache: Any) -> Length:
    """Tokens in the cache before this call: an int, or a 0-d tensor for static caches."""
    if cache is None:
        return 0
    past = _self_attention(cache).get_seq_length(site.layer_idx)
    # A static layer hands out its live counter, which the update moves.
    return past.clone() if isinstance(past, Tensor) else past


def all_full(site: ElasticSite, hidden: Tensor, cache: Any) -> None:
    """Remember a call of ``hidden`` [B, S, …] that ran every head full, for ``last_routes``."""
    full = torch.zeros(hidden.shape[0], site.kv_heads, dtype=torch.int32, device=hidden.device)
    _state.remember(site, full, past_length(site, cache) + hidden.shape[1], None)


def route(site: ElasticSite, tap: Tensor, mask: Tensor | None, cache: Any, past: Length) -> Tensor:
    """Routes of a call: stored with the cache, decided by the router, or forced.

    Args:
        site: The site's router.
        tap: Key hidden states before rotary embedding, [B, H, S, D].
        mask: 2-D padding mask [B, T] (True = real), a caller's 4-D mask (routes then see every
            token), or None.
        cache: The KV cache or None.
        past: Tokens in the cache before this call.

    Returns:
        int32 [B, H]: 0 full, 1 sparse. While training with a relaxation: float [B, H].
    """
    batch, length = tap.shape[0], tap.shape[2]
    layer = None if cache is None else _layer(site, cache)
    stored = None if layer is None else getattr(layer, ROUTE, None)
    fresh = not isinstance(past, Tensor) and past == 0
    if stored is not None and stored.shape[0] != batch and not fresh:
        raise ValueError(
            f"the cache holds the routes of {stored.shape[0]} sequences but the call has {batch}: "
            "expand or select the cache with its own methods before calling the model"
        )
    if site.forced.shape[0] != 1 and site.forced.shape[0] != batch:
        raise ValueError(
            f"routes are forced for {site.forced.shape[0]} samples but the call has {batch}"
        )
    if cache is not None and length == 1:
        # One token never decides: it has the stored routes, or is full. It may count later.
        if site.reroute == "each_call" and layer is not None:
            _pooled(site, tap, *_seen(site, tap, mask, past), layer, past)
        decided = torch.zeros(batch, site.kv_heads, dtype=torch.int32, device=tap.device)
        if stored is not None:
            decided = (
                torch.where(past == 0, decided, stored) if isinstance(past, Tensor) else stored
            )
    elif (
        stored is not None and site.reroute == "first" and not isinstance(past, Tensor) and past > 0
    ):
        decided = stored
    else:
        key_mask, end = _seen(site, tap, mask, past)
        fused = _fused_router.serves(site, tap, key_mask, end)
        if fused:
            decided = _fused_router.decide(site, tap, key_mask, end)
        else:
            logits = site(_pooled(site, tap, key_mask, end, layer, past))
            if site.relaxation is not None:
                return site.relaxation(site, logits)
            decided = decide(logits, site.route_bias)
        if stored is not None and site.reroute == "first" and isinstance(past, Tensor):
            # A reset static cache starts a new sequence; otherwise the first call has decided.
            decided = torch.where(past == 0, decided, stored)
        elif fused:
            return decided  # forced routes are in it
    return torch.where(site.forced >= 0, site.forced, decided)


class MaskFacts(NamedTuple):
    """What a 2-D padding mask says of the keys of a call."""

    key_mask: Tensor
    """Real keys, bool [B, T]."""
    start: Tensor
    """First real key of each sample, where its sink begins, int32 [B]."""
    real: Tensor
    """Number of real keys, int64 [B]."""


def _facts(mask: Tensor, length: int) -> MaskFacts:
    """The facts of a mask [B, M] over ``length`` keys; layers of one eager call share them."""
    # Compiled code has equal expressions once as it is.
    shared = not torch.compiler.is_compiling() and _is_watched(mask)
    if shared:
        known = _state.recall(mask, length)
        if known is not None:
            return known
    key_mask = fit_mask(mask.to(torch.bool), length)
    # argmax gives the first of equal values.
    start = key_mask.to(torch.uint8).argmax(1).to(torch.int32)
    found = MaskFacts(key_mask, start, key_mask.sum(1))
    if shared:
        _state.keep(mask, length, found)
    return found


def _is_watched(mask: Tensor) -> bool:
    """Whether a change of the mask would be noticed; in a replayed CUDA graph it would not."""
    if mask.is_inference():
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _new_columns(mask: Tensor | None, past: Length, length: int) -> Tensor | None:
    """The part of a padding mask that belongs to the tokens of this call, bool [B, S]."""
    if mask is None or mask.dim() != 2:
        return None
    mask = mask.to(torch.bool)
    if isinstance(past, Tensor):
        columns = past + torch.arange(length, device=mask.device)
        return mask.index_select(1, columns)
    return fit_mask(mask, past + length)[:, past:]


def _seen(
    site: ElasticSite, tap: Tensor, mask: Tensor | None, past: Length
) -> tuple[Tensor | None, Tensor | None]:
    """What of a call's tokens the router may see: a mask [B, S], and an exclusive column [B]."""
    limit = _state.route_length(site)
    end = None if limit is None else (limit.to(tap.device) - past).clamp(min=0)
    return _new_columns(mask, past, tap.shape[2]), end


def _pooled(
    site: ElasticSite,
    tap: Tensor,
    key_mask: Tensor | None,
    end: Tensor | None,
    layer: Any,
    past: Length,
) -> Tensor:
    length = tap.shape[2]
    if site.reroute == "first" or layer is None:
        return boundary_pool(tap, None, end, key_mask, site.pool_tokens)
    state = _stored_pool(layer)
    empty = pool_start(tap, site.pool_tokens)
    if state is None:
        state = empty
    elif isinstance(past, Tensor):
        state = PoolState(*(torch.where(past == 0, empty[i], state[i]) for i in range(len(POOL))))
    elif past == 0:
        state = empty
    if length > 1 and not isinstance(past, Tensor) and not torch.compiler.is_compiling():
        setattr(layer, POOL_BEFORE, (past, tuple(state)))
    state = pool_add(state, tap, None, end, key_mask)
    for index, name in enumerate(POOL):
        setattr(layer, name, state[index])
    return pool_read(state)


def _stored_pool(layer: Any) -> PoolState | None:
    if getattr(layer, POOL[0], None) is None:
        return None
    return PoolState(*(getattr(layer, name) for name in POOL))


def cache_update(
    site: ElasticSite,
    cache: Any,
    key: Tensor,
    value: Tensor,
    route: Tensor,
    mask: Tensor | None,
    past: Length,
    kwargs: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """``cache.update`` as the module calls it; the routes are stored with the layer.

    Args:
        site: The site's router.
        cache: The KV cache, or None: nothing is cached.
        key: New keys [B, H, S, D].
        value: New values [B, H, S, Dv].
        route: Routes of this call, [B, H].
        mask: As in :func:`route`.
        past: Tokens in the cache before this call.
        kwargs: The module's extra keyword arguments, which newer transformers hand on.

    Returns:
        Keys [B, H, T, D] and values [B, H, T, Dv] to attend to.
    """
    if key.dtype != value.dtype:
        # A dtype that the module reads from a tensor is a constant in its graph; the model has
        # been cast since.
        key = key.to(value.dtype)
    if cache is None:
        return key, value
    if torch.compiler.is_compiling():
        # Concatenation keeps a transposed layout, on which Dynamo would guard: one more graph.
        key, value = key.contiguous(), value.contiguous()
    decided = key.shape[2] > 1
    cache = _self_attention(cache)
    if kwargs is None:
        keys, values = cache.update(key, value, site.layer_idx)
    else:
        keys, values = cache.update(key, value, site.layer_idx, kwargs=kwargs)
    layer = cache.layers[site.layer_idx]
    if decided or getattr(layer, ROUTE, None) is not None:
        setattr(layer, ROUTE, route)
    if decided:
        setattr(layer, WINDOW, (site.sink, site.local))
        pads = None
        if mask is not None and mask.dim() == 2:
            pads = (past + key.shape[2] - _facts(mask, keys.shape[2]).real).to(torch.int32)
        setattr(layer, PADS, pads)
    return keys, values


def attention(
    site: ElasticSite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    route: Tensor,
    mask: Tensor | None,
    past: Length,
    training: bool = False,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    heads_last: bool = False,
) -> Tensor:
    """Routed attention of one site.

    Args:
        site: The site's router.
        query: [B, Hq, S, D].
        key: [B, H, T, D] with T >= past + S; what lies beyond is an unfilled static cache.
        value: [B, H, T, Dv].
        route: int32 [B, H].
        mask: None, the 2-D padding mask [B, M], or a caller's 4-D mask (bool or additive), which
            is honoured with every head full and counted as a fallback.
        past: Tokens in the cache before this call.
        training: Whether the attention module is in train mode (attention dropout).
        scale: Factor on the scores; None: D ** -0.5.
        softcap: Scores become c * tanh(score / c).
        sinks: Learned sink logits [Hq].
        heads_last: Return [B, S, Hq, Dv], as attention functions of transformers do.

    Returns:
        [B, Hq, S, Dv] (or as ``heads_last`` says) in the query's dtype.
    """
    out = _attend(site, query, key, value, route, mask, past, training, scale, softcap, sinks)
    return out.transpose(1, 2) if heads_last else out


def _attend(
    site: ElasticSite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    route: Tensor,
    mask: Tensor | None,
    past: Length,
    training: bool,
    scale: float | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    query, key, value = _one_dtype(query, key, value)
    length = query.shape[2]
    dropout = site.attention_dropout if training else 0.0
    seed = None
    if dropout:
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=query.device)
    if mask is not None and mask.dim() == 4:
        # One column is for all keys.
        if mask.shape[-1] not in (1, key.shape[2]):
            key, value = key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]
        if not torch.compiler.is_compiling():
            _state.remember(site, torch.zeros_like(route), past + length, None)
            say_once(_DENSE_MASK)
        return ops.exact_attention(
            query,
            key,
            value,
            mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout,
            dropout_seed=seed,
            reason=_DENSE_MASK,
        )[0]
    kv_len: Tensor | None = None
    if isinstance(past, Tensor):
        kv_len = past + length
    else:
        # A static cache hands back its whole buffer, also on its first call.
        key, value = key[:, :, : past + length], value[:, :, : past + length]
    start = key_mask = real = None
    if mask is not None:
        key_mask, start, real = _facts(mask, key.shape[2])
    if not torch.compiler.is_compiling():
        _state.remember(site, route, past + length, real)

    relaxed = route.is_floating_point()
    # Relaxed routes: training. The op's kernels use no tensor cores in float32: torch SDPA there.
    plain = start is None and kv_len is None and softcap is None and sinks is None and not dropout
    plain = plain and key.shape[2] == length and query.is_cuda and site.kernel == "auto"
    plain = plain and query.dtype == torch.float32
    if relaxed and plain and not isinstance(scale, Tensor):
        return _relaxed.mix_blocked(
            query, key, value, route, sink=site.sink, local=site.local, scale=scale
        )
    attend = ops.attention_train if relaxed else ops.attention
    return attend(
        query,
        key,
        value,
        route,
        sink=site.sink,
        local=site.local,
        scale=scale,
        start=start,
        kv_len=kv_len,
        key_mask=key_mask,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout,
        dropout_seed=seed,
        kernel=site.kernel,
    )[0]


def say_once(reason: str) -> None:
    """Tell the user, the first time, that calls are not routed."""
    if reason not in _SAID:
        _SAID.add(reason)
        logger.warning(
            "a call goes through exact attention with every head full: %s "
            "(elastic_compile.counters() counts them; this is said once)",
            reason,
        )


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Custom ops are not on autocast's lists, torch SDPA is: do what it would do.
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    # See cache_update: a dtype that is a constant of the graph follows the model's.
    return query.to(value.dtype), key.to(value.dtype), value
