"""The public functions: transform a model, look at it, steer its routes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from elastic_compile import _graph_routers, _runtime, _state
from elastic_compile._report import Report
from elastic_compile._site import ASK_ROUTER, ElasticSite
from elastic_compile.config import ElasticConfig
from elastic_compile.kernels import _counters

logger = logging.getLogger("elastic_compile")

Routes = str | Tensor | Sequence[Tensor]


def transform(
    model: nn.Module,
    config: ElasticConfig | None = None,
    *,
    router: str | os.PathLike[str] | None = None,
    example_inputs: Any = None,
    allow_unrewritten: bool = False,
) -> nn.Module:
    """Give every causal attention site of ``model`` a router and routed attention, in place.

    The model runs on a few tokens, each attention module that it reaches is captured as an FX
    graph, rewritten, installed and compared with the original. Without a trained router every
    head is full and the model computes what it computed before. What an attention module's own
    code reads (its scale, head counts, flags) is fixed from then on; its child modules and
    parameters stay live. For a compiled model use
    ``torch.compile(model)`` (compiles calls of the model) or, for ``generate``,
    ``model.compile()``.

    Args:
        model: A Hugging Face decoder, or any module that calls ``scaled_dot_product_attention``
            causally (then with ``example_inputs``). On the meta device sites are found and
            rewritten but cannot be checked. Or a whole-model graph, such as
            ``torch.export.export(…).module()``: it is compared with the untouched graph where
            ``example_inputs`` are given, and can be exported again.
        config: Sink, window and router settings; None: the defaults, or the router's own.
        router: Folder of a trained router (``save_router``), loaded after the rewrite.
        example_inputs: Inputs of one forward call, a dict of keyword arguments or a tuple of
            positional ones, with at least 3 rows and 13 tokens; None: token ids are made up.
        allow_unrewritten: Return the model although no site could be rewritten.

    Returns:
        The same object.

    Raises:
        ValueError: The model is transformed already; no site can be rewritten (with every
            site's reason); the router is another model's; ``config`` and the router disagree.
        RuntimeError: The transformed model does not compute what the model computed.
        Any error leaves the model as it was.
    """
    from elastic_compile._checkpoint import load_router, read_router_config, require_same_config
    from elastic_compile.passes import frontends, pipeline

    if isinstance(model, torch.export.ExportedProgram):
        raise TypeError(
            "an ExportedProgram is never changed in place: transform program.module(), then export "
            "the result again"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"transform takes a model (an nn.Module), not {type(model).__name__}")
    compiled = isinstance(model, torch._dynamo.eval_frame.OptimizedModule)
    if compiled or any(m._compiled_call_impl is not None for m in model.modules()):
        raise ValueError(
            "this model is compiled already, and a compiled model cannot be traced: transform it "
            "first, then compile it"
        )
    if _state.owner(model) is not None:
        raise ValueError(
            "this model is transformed already; elastic_compile.restore(model) undoes that"
        )
    if config is not None and not isinstance(config, ElasticConfig):
        raise TypeError(f"config must be an ElasticConfig, not {type(config).__name__}")
    if router is not None:
        trained = read_router_config(router)
        if config is not None:
            require_same_config(config, trained, router)
            trained = dataclasses.replace(trained, kernel=config.kernel)
        config = trained
    if isinstance(model, fx.GraphModule):
        rewrite, remove, inner = frontends.transform, frontends.restore, model
    else:
        rewrite, remove = pipeline.transform, pipeline.remove  # type: ignore[assignment]
        inner = _hugging_face_model(model) if example_inputs is None else model  # type: ignore[assignment]
    report_ = rewrite(inner, config or ElasticConfig(), example_inputs, allow_unrewritten)
    if router is not None:
        try:
            load_router(model, router)
        except BaseException:
            remove(inner)
            raise
    logger.info("%s", report_.summary())
    return model


def _hugging_face_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a wrapper (PEFT, DDP), or ``model`` itself."""
    if isinstance(model, PreTrainedModel):
        return model
    found = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    outer = [n for n in found if not any(n.startswith(f"{other}.") for other in found)]
    if len(outer) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(outer)} transformers models "
            f"({', '.join(outer)}); transform the one that is meant"
        )
    return found[outer[0]] if outer else model


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`transform` bit for bit: code, configuration, parameters, hooks.

    Args:
        model: A transformed model (not wrapped by ``torch.compile``).

    Returns:
        The same object. Routers that were not saved are gone.

    Raises:
        ValueError: The model is not transformed, or somebody replaced an attention module's
            forward since.
    """
    from elastic_compile.passes import frontends, pipeline

    _state.get_state(model)
    base = _state.owner(model)
    assert base is not None
    if isinstance(base, fx.GraphModule):
        frontends.restore(base)
        return model
    wrapped = pipeline.wrapped_forwards(base)
    if wrapped:
        raise ValueError(
            f"the forward of {', '.join(wrapped)} was replaced after the transform; put the one "
            "that was there back, then restore. Nothing was changed"
        )
    pipeline.remove(base)
    return model


def is_transformed(model: nn.Module) -> bool:
    """Whether ``model`` (or what ``torch.compile`` or PEFT wrapped in it) is transformed."""
    return _state.owner(model) is not None


def report(model: nn.Module) -> Report:
    """What became of every attention site; prints as a table.

    Args:
        model: A transformed model, one that the backend ``"elastic"`` compiled (after its first
            call), or a :class:`GraphRouters`.

    Returns:
        ``.sites``: one :class:`SiteReport` a site, in module order; under the backend one for
        every distinct outcome of a site in the graphs compiled so far.

    Raises:
        ValueError: The model is neither.
    """
    if _state.owner(model) is None:
        with contextlib.suppress(ValueError):
            return _state.get_state(_graph_routers.graph_routers(model)).report
    return _state.get_state(model).report


def _sites(model: nn.Module) -> list[ElasticSite]:
    return [site for _, site in _state.rewritten_sites(model)]


@contextlib.contextmanager
def force_routes(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Decide the routes by hand for the calls inside the ``with`` block.

    The routes are the model's, for every thread that calls it; where blocks overlap, the one
    entered last decides. One table for all samples is data: a compiled model does not compile
    again. A table per sample has another shape and may. Routes that a call stores with its KV
    cache stay there.

    Args:
        model: A transformed model.
        routes: ``"full"``, ``"sparse"``, an integer tensor [layers, kv heads] or [batch, layers,
            kv heads] (0 full, 1 sparse, -1 ask the router), or, where kv heads differ by layer, a
            list of one tensor [kv heads] or [batch, kv heads] a layer. Layers are the rewritten
            sites in module order.

    Raises:
        ValueError: The model is not transformed, or the shape or a value does not fit.
    """
    sites = _sites(model)
    tables = _tables(sites, routes)
    entry = object()
    with _FORCING:
        for site, table in zip(sites, tables, strict=True):
            site.forcing[entry] = table
            _apply(site)
    try:
        yield
    finally:
        with _FORCING:
            for site in sites:
                del site.forcing[entry]
                _apply(site)


_FORCING = threading.Lock()


def _apply(site: ElasticSite) -> None:
    """Put the newest table in force: the last block entered that has not been left."""
    table = next(reversed(site.forcing.values()), None)
    # In place where the shape is the usual one: graphs (CUDA graphs too) see the change.
    if table is None or table.shape[0] == 1:
        if site.forced.shape[0] != 1:
            site.forced = site.forced.new_empty(1, site.kv_heads)
        site.forced.copy_(site.forced.new_full((), ASK_ROUTER) if table is None else table)
    else:
        site.forced = table


def _tables(sites: list[ElasticSite], routes: Routes) -> list[Tensor]:
    """One int32 table [1 or batch, kv heads] a site, on its device."""
    if isinstance(routes, str):
        if routes not in ("full", "sparse"):
            raise ValueError(f'routes is {routes!r}; allowed words: "full", "sparse"')
        value = int(routes == "sparse")
        return [torch.full_like(site.forced[:1], value) for site in sites]
    if isinstance(routes, Tensor):
        if routes.dim() not in (2, 3) or routes.shape[-2] != len(sites):
            raise ValueError(
                f"routes has shape {list(routes.shape)}, not [layers, kv heads] or [batch, "
                f"layers, kv heads] with {len(sites)} layers (the rewritten sites)"
            )
        rows = list(routes.unbind(-2))
    elif not isinstance(routes, Sequence):
        raise TypeError(
            f'routes must be "full", "sparse", an integer tensor or a list of them, not {routes!r}'
        )
    else:
        rows = [torch.as_tensor(row) for row in routes]
        if len(rows) != len(sites):
            raise ValueError(f"routes has {len(rows)} layers, the model {len(sites)}")
    tables = []
    for layer, (site, row) in enumerate(zip(sites, rows, strict=True)):
        if row.is_floating_point() or row.dtype == torch.bool or row.is_complex():
            raise ValueError(f"routes must be integers, not {row.dtype}")
        if row.shape[-1] != site.kv_heads or row.dim() not in (1, 2):
            raise ValueError(
                f"routes of layer {layer} have shape {list(row.shape)}; it has {site.kv_heads} "
                "kv heads"
            )
        if not bool(((row >= ASK_ROUTER) & (row <= 1)).all()):
            raise ValueError("routes are 0 (full), 1 (sparse) or -1 (ask the router)")
        table = row.to(device=site.forced.device, dtype=torch.int32)
        tables.append(table if table.dim() == 2 else table[None])
    return tables


@contextlib.contextmanager
def route_length(model: nn.Module, lengths: Tensor | None) -> Iterator[None]:
    """Hide everything from ``lengths`` on from the routers, for the calls inside the block.

    In training and evaluation a row holds prompt and answer; the router must see the prompt only.

    Args:
        model: A transformed model.
        lengths: int [B], for every row the exclusive column up to which its router may look,
            counted from the first cached token; None lifts the limit.

    Raises:
        ValueError: The model is not transformed, or ``lengths`` is no integer vector.
    """
    if lengths is not None and not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be an int tensor [B], not {type(lengths).__name__}")
    if lengths is not None and (lengths.dim() != 1 or lengths.is_floating_point()):
        raise ValueError(
            f"lengths must be an int tensor [B], not {lengths.dtype} {list(lengths.shape)}"
        )
    sites = _sites(model)
    limit = None
    if lengths is not None:
        limit = _state.Limit(lengths, frozenset(id(site) for site in sites))
    previous = _state.set_limit(limit)
    compiled = [site.compiled_limit for site in sites]
    try:
        for site in sites:
            site.compiled_limit = lengths
        yield
    finally:
        _state.set_limit(previous)
        for site, before in zip(sites, compiled, strict=True):
            site.compiled_limit = before


def _cache_layers(cache: Any) -> list[Any]:
    layers = [
        layer
        for layer in _runtime._self_attention(cache).layers
        if getattr(layer, _runtime.ROUTE, None) is not None
    ]
    if not layers:
        raise ValueError(
            "this cache holds no routes: no transformed model has filled it with a call of more "
            "than one token"
        )
    return layers


def _stack(routes: list[Tensor]) -> Tensor | list[Tensor]:
    if len({tuple(r.shape) for r in routes}) == 1 and len({r.device for r in routes}) == 1:
        return torch.stack(routes, 1)
    return routes


def last_routes(model_or_cache: Any) -> Tensor | list[Tensor]:
    """The routes of a model's last call in this thread, or those stored with a cache.

    A compiled call, or one in another thread, is seen through its cache only.

    Args:
        model_or_cache: A transformed model, or a KV cache that one has filled.

    Returns:
        int32 [batch, layers, kv heads], 0 full, 1 sparse; a list of [batch, kv heads] where kv
        heads (or devices) differ by layer. Layers are the rewritten sites in module order.

    Raises:
        ValueError: There are none: not transformed, not called yet, or an empty cache.
    """
    if not isinstance(model_or_cache, nn.Module):
        return _stack([getattr(x, _runtime.ROUTE) for x in _cache_layers(model_or_cache)])
    return _stack([call.route for call in _last_calls(model_or_cache)])


def _last_calls(model: nn.Module) -> list[_state.LastCall]:
    calls = [_state.last_call(site) for site in _sites(model)]
    if not calls or any(call is None for call in calls):
        raise ValueError(
            "this thread has made no eager call of the model yet; routes of compiled calls are "
            "read from the KV cache: last_routes(cache)"
        )
    return [call for call in calls if call is not None]


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """How sparse a call was (paper section 2)."""

    msr: float
    """Ω_MSR: share of (sample, layer, kv head) routed sparse."""
    esr: float
    """Ω_ESR: mean share of causal query-key pairs that heads skip, over the whole sequence."""
    msr_per_layer: tuple[float, ...]
    esr_per_layer: tuple[float, ...]

    def __str__(self) -> str:
        return f"Ω_MSR {self.msr:.3f}, Ω_ESR {self.esr:.3f}"


def pruned_share(length: int, sink: int, local: int) -> float:
    """Share of the causal query-key pairs of ``length`` tokens that a streaming head skips.

    Query p sees min(p + 1, sink + local) keys; a full head sees p + 1.
    """
    pairs = length * (length + 1) // 2
    reach = min(length, sink + local)
    seen = reach * (reach + 1) // 2 + (length - reach) * (sink + local)
    return 1 - seen / pairs if pairs else 0.0


def sparsity(model_or_cache: Any, *, lengths: Tensor | None = None) -> Sparsity:
    """Ω_MSR and Ω_ESR of a model's last call in this thread, or of the sequences in a cache.

    Args:
        model_or_cache: A transformed model, or a KV cache that one has filled.
        lengths: Real tokens of every sample, int [B]; None: those of the call, or in the cache.

    Returns:
        Both ratios per layer and overall. Ω_ESR is counted over the whole sequence: each of its
        real tokens as a query, the causal pairs with real keys; masked tokens between real ones
        count as if they were at the end.

    Raises:
        ValueError: As for :func:`last_routes`.
    """
    if isinstance(model_or_cache, nn.Module):
        calls = _last_calls(model_or_cache)
        config = _state.get_state(model_or_cache).config
        window = (config.sink, config.local)
        routes = [call.route for call in calls]
        total, real = int(calls[0].kv_length), calls[0].real
    else:
        layers = _cache_layers(model_or_cache)
        window = getattr(layers[0], _runtime.WINDOW)
        routes = [getattr(layer, _runtime.ROUTE) for layer in layers]
        total, pads = int(layers[0].get_seq_length()), getattr(layers[0], _runtime.PADS, None)
        real = None if pads is None else total - pads
    if lengths is None:
        lengths = torch.full((routes[0].shape[0],), total) if real is None else real
    pruned = torch.tensor([pruned_share(int(n), *window) for n in lengths], dtype=torch.float64)
    shares = [route.detach().cpu().double() for route in routes]
    msr = tuple(float(share.mean()) for share in shares)
    esr = tuple(float((share * pruned[:, None]).mean()) for share in shares)
    heads = torch.tensor([share.numel() for share in shares], dtype=torch.float64)
    weights = heads / heads.sum()
    return Sparsity(
        float((torch.tensor(msr, dtype=torch.float64) * weights).sum()),
        float((torch.tensor(esr, dtype=torch.float64) * weights).sum()),
        msr,
        esr,
    )


def counters(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """Op calls by implementation and fallbacks by reason, of this process so far.

    Args:
        reset: Start again from zero after reading.

    Returns:
        ``{"calls": {implementation: n}, "backward": {…}, "fallbacks": {reason: n}}``. Compiled
        graphs count too; replays of a CUDA graph do not.
    """
    counts = _counters.snapshot()
    if reset:
        _counters.reset()
    return counts
