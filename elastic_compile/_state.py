"""What a transformed model remembers about its transform, and what its threads saw last."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from elastic_compile._report import Report
from elastic_compile._site import ElasticSite
from elastic_compile.config import ElasticConfig

ATTRIBUTE = "_elastic_state"


@dataclasses.dataclass
class ElasticState:
    """Attribute of a transformed model. Holds names, not modules: copies need no fixing up."""

    config: ElasticConfig
    report: Report
    attention_implementations: list[str | None] = dataclasses.field(default_factory=list)
    """What each configuration had before, in the order of ``discovery.configs_of``."""
    decoders: tuple[str, ...] = ()
    """Paths of the modules that carry the decoder hook."""
    ignored_keys: tuple[str, ...] = ()
    """Names added to ``_keys_to_ignore_on_save``."""
    base_model_name: str = ""


def _unwrapped(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def owner(model: nn.Module) -> nn.Module | None:
    """The transformed model behind ``model`` (itself, or wrapped by torch.compile, PEFT, DDP)."""
    model = _unwrapped(model)
    for module in model.modules():
        if ATTRIBUTE in module.__dict__:
            return module
    return None


def get_state(model: nn.Module) -> ElasticState:
    """The state of a transformed model.

    Raises:
        ValueError: The model is not transformed.
    """
    found = owner(model)
    if found is None:
        raise ValueError(
            f"this {type(_unwrapped(model)).__name__} is not transformed; call "
            "elastic_compile.transform(model) first"
        )
    state: ElasticState = found.__dict__[ATTRIBUTE]
    return state


def rewritten_sites(model: nn.Module) -> list[tuple[str, ElasticSite]]:
    """(path of the attention module, its router) of every rewritten site, in module order."""
    get_state(model)
    base = owner(model)
    assert base is not None
    return [
        (name.rpartition(".")[0], module)
        for name, module in base.named_modules()
        if isinstance(module, ElasticSite)
    ]


@dataclasses.dataclass
class LastCall:
    """What a site did in a thread's last eager call."""

    route: Tensor
    """int32 [B, kv heads]"""
    kv_length: int | Tensor
    real: Tensor | None
    """Real (not padded) tokens of each sample, int [B]; None: all of them."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """What routers may see: nothing from these columns on."""

    lengths: Tensor
    """int [B], exclusive column."""
    sites: frozenset[int] | None = None
    """``id`` of the routers it holds for; None: every model that the thread calls."""


_MASKS = 8
"""Masks of a call that are remembered; a model has one or two."""


class _Threads(threading.local):
    def __init__(self) -> None:
        self.last: weakref.WeakKeyDictionary[nn.Module, LastCall] = weakref.WeakKeyDictionary()
        self.limit: Limit | None = None
        self.masks: dict[tuple[int, Any], tuple[Tensor, int, Any]] = {}


_THREADS = _Threads()


class _Compiled:
    """Stands for the thread-local while Dynamo traces, which cannot read one."""

    def __init__(self) -> None:
        # Of the instance from the start: an attribute that appears later fails a compiled guard.
        self.route_length: Tensor | None = None


_COMPILED = _Compiled()


def remember(site: ElasticSite, route: Tensor, kv_length: Any, real: Tensor | None) -> None:
    """Keep a site's routes for ``last_routes`` (eager calls only)."""
    if type(route) is not Tensor:
        return  # a tracer's: no call of the user's, and not to be kept beyond its trace
    site = getattr(site, "routed_for", site)
    _THREADS.last[site] = LastCall(route.detach(), kv_length, real)


def begin_call() -> None:
    """A decoder's forward begins: what was derived from the masks of the last one is void."""
    _THREADS.masks = {}


def recall(mask: Tensor, length: Any) -> Any:
    """What :func:`keep` has of this very mask, unchanged since, in this thread; else None."""
    known = _THREADS.masks.get((id(mask), length))
    return known[2] if known is not None and known[1] == mask._version else None


def keep(mask: Tensor, length: Any, derived: Any) -> None:
    """Keep what was derived from a mask over ``length`` keys for the other layers of the call."""
    if len(_THREADS.masks) >= _MASKS:
        _THREADS.masks.clear()
    # The mask itself is kept: no other can have its id meanwhile.
    _THREADS.masks[id(mask), length] = mask, mask._version, derived


def last_call(site: ElasticSite) -> LastCall | None:
    """What ``site`` did in this thread's last eager call."""
    return _THREADS.last.get(site)


def forget(site: ElasticSite) -> None:
    """Drop what :func:`remember` kept: the transform's own calls are not the user's."""
    _THREADS.last.pop(site, None)


def set_limit(limit: Limit | None) -> Limit | None:
    """Limit what routers may see in this thread; returns the limit that was in force."""
    previous = _THREADS.limit
    _THREADS.limit = limit
    if limit is None or limit.sites is None:
        _COMPILED.route_length = None if limit is None else limit.lengths
    return previous


def current_limit() -> Limit | None:
    """The limit in force in this thread."""
    return _THREADS.limit


def route_length(site: ElasticSite) -> Tensor | None:
    """Exclusive column up to which a site's router may look, int [B], or None."""
    if torch.compiler.is_compiling():
        own = site.compiled_limit
        return _COMPILED.route_length if own is None else own
    limit = _THREADS.limit
    if limit is None or (limit.sites is not None and id(site) not in limit.sites):
        return None
    return limit.lengths
