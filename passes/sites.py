"""The attention sites of a model: which there are, and why one may not be rewritten."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from elastic_compile._forward import SiteProgram
from elastic_compile.passes import capture
from elastic_compile.passes.capture import SiteGraph, unwrapped_forward
from elastic_compile.passes.discovery import PLAIN_CAUSAL, Discovery, SiteCall
from elastic_compile.passes.rewrite import SiteResult


@dataclasses.dataclass
class Site:
    """One attention module on its way through the pipeline."""

    path: str
    module: nn.Module
    first: SiteCall
    plain: SiteCall | None
    chunk: SiteCall | None
    reason: str = ""
    causal: bool = False
    """Whether the mask that it receives is the plain causal one."""
    repeated: bool = False
    """Whether the module runs more than once in one forward of the model."""
    graph: SiteGraph | None = None
    program: SiteProgram | None = None
    result: SiteResult | None = None
    layer_idx: int | None = None
    checked: bool = False
    shares: Any = None
    """Its fingerprint, where another layer's capture is used."""

    @property
    def rewritten(self) -> bool:
        return not self.reason


def find(model: nn.Module, found: Discovery) -> list[Site]:
    names = {module: name for name, module in model.named_modules()}
    sites = []
    for module, name in names.items():
        calls = found.first.calls.get(module)
        if not calls:
            continue
        plain = found.plain.calls.get(module)
        chunk = found.chunk.calls.get(module) if found.chunk is not None else None
        site = Site(
            name, module, calls[0], plain[0] if plain else None, chunk[0] if chunk else None
        )
        site.reason = _refusal(site, calls, found)
        sites.append(site)
    return sites


def _refusal(site: Site, calls: list[SiteCall], found: Discovery) -> str:
    """Why a site is not even captured; empty when it may be."""
    given = pytree.tree_leaves((calls[0].args, calls[0].kwargs))
    first = calls[0].attention[0].mask
    # Whatever else is the matter with it: it will be handed a 2-D mask in its place.
    site.causal = (
        first is not None
        and found.first.masks.get(id(first)) == PLAIN_CAUSAL
        and any(x is first for x in given)
    )
    site.repeated = len(calls) > 1
    if site.repeated or len(calls[0].attention) > 1:
        return "it attends more than once in one forward"
    attention = calls[0].attention[0]
    if attention.mask is not None:
        rule = found.first.masks.get(id(attention.mask))
        if rule is None or not any(x is attention.mask for x in given):
            base = attention.mask._base
            if base is not None and found.first.masks.get(id(base)) == PLAIN_CAUSAL:
                return "it changes its causal mask before attending"
            return (
                "its mask is not the plain causal one (a bias such as ALiBi was added, or the "
                "model built its own)"
            )
        if rule != PLAIN_CAUSAL:
            return f"its mask is not the plain causal one: {rule.replace('_', ' ')}"
    elif not attention.is_causal:
        return "it is bidirectional (no mask, not causal)"
    if "sliding_window" in attention.extras:
        return f"sliding window of {attention.extras['sliding_window']} tokens"
    if "position_bias" in attention.extras:
        return "an additive position bias"
    if site.plain is None:
        return "it does not run without a KV cache"
    plain = site.plain.attention[0]
    if plain.query_shape[2] != plain.key_shape[2]:
        return "cross-attention: the keys are not the query's own tokens"
    if attention.scale is not None and not isinstance(attention.scale, (int, float)):
        return "its scale is not a number"
    return ""


def fingerprint(site: Site) -> Any:
    """Equal for modules that run the same code on the same geometry, layer index apart."""

    def plain_value(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            return value
        if isinstance(value, (tuple, list)):
            return tuple(plain_value(x) for x in value)
        return id(value)

    module = site.module
    attributes = tuple(
        (name, plain_value(value))
        for name, value in sorted(vars(module).items())
        if name != "layer_idx" and not name.startswith("_")
    )
    children = tuple((name, type(child)) for name, child in module.named_modules())
    state = tuple(
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    )
    signature = inspect.signature(unwrapped_forward(module))

    def given(call: SiteCall) -> Any:
        flat = capture.leaves(capture.bind(signature, call))
        return tuple(
            (
                path,
                (tuple(x.shape), x.dtype)
                if isinstance(x, Tensor)
                else plain_value(x)
                if not isinstance(x, Cache)
                else type(x),
            )
            for path, x in flat.items()
        )

    assert site.plain is not None
    extras = tuple(sorted(site.first.attention[0].extras))
    code = getattr(unwrapped_forward(module), "__func__", unwrapped_forward(module))
    return type(module), code, attributes, children, state, given(site.first), extras


def rearranged(
    call: SiteCall, mask: Tensor | None, cache: Cache | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The recorded arguments with another mask and cache."""
    recorded = call.attention[0].mask

    def swap(x: Any) -> Any:
        if isinstance(x, Cache):
            return cache
        if x is recorded and x is not None:
            return mask
        return x

    def visit(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(visit(x) for x in value)
        if isinstance(value, dict):
            return {k: visit(x) for k, x in value.items()}
        return swap(value)

    return visit(tuple(call.args)), visit(dict(call.kwargs))
