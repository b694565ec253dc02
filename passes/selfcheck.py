"""Comparing a transformed model with the untouched one, site by site and as a whole."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from elastic_compile._forward import SiteForward
from elastic_compile._masks import causal_mask_4d
from elastic_compile._site import ASK_ROUTER, ElasticSite
from elastic_compile.passes import discovery
from elastic_compile.passes.capture import original_forward, unwrapped_forward
from elastic_compile.passes.discovery import Discovery, SiteCall
from elastic_compile.passes.sites import Site, rearranged


class SelfCheckError(RuntimeError):
    """The transformed model does not compute what the untouched one computes."""


_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_CHECK_SINK, _CHECK_LOCAL = 2, 3


def check_site(site: Site, found: Discovery) -> str:
    """Compare an installed site with what its module computed.

    Returns:
        Why it must not stay installed; empty when it agrees (``site.checked`` is then set) or
        when there is nothing to compare (meta weights).
    """
    if pytree.tree_leaves(site.first.output)[0].is_meta:
        return ""
    router = site.module.get_submodule("elastic_router")
    assert isinstance(router, ElasticSite)
    try:
        # All heads full, whatever a route bias says.
        router.forced.zero_()
        worst = max(_differences(site, found))
    except Exception as error:  # whatever a site raises, it must not stay installed
        text = str(error).strip().splitlines()
        return f"self-check failed: {type(error).__name__}: {text[0] if text else ''}"
    finally:
        router.forced.fill_(ASK_ROUTER)
    if worst > 1:
        return f"self-check failed: error {worst:.3g} × the tolerance"
    site.checked = True
    return ""


def _differences(site: Site, found: Discovery) -> list[float]:
    """Errors, in tolerances, of every replayed call."""
    forward = unwrapped_forward(site.module)
    assert isinstance(forward, SiteForward) and site.plain is not None
    cache = DynamicCache() if site.graph is not None and site.graph.cache is not None else None
    out = [_replay(site, site.first, found.first_mask, cache)]
    if site.chunk is not None:
        out.append(_replay(site, site.chunk, found.chunk_mask, cache))
    out.append(_replay(site, site.plain, found.plain_mask, None))
    # An export takes it that no size is 1: a branch for one row or one token leaves no trace.
    out += [_single(site, 0, discovery.PLAIN_BATCH), _single(site, 1, discovery.PLAIN_LENGTH)]
    if site.program is not None and site.program.mask is not None and found.first_mask is not None:
        out.append(_streaming_difference(site, found))
    return out


def _replay(site: Site, call: SiteCall, mask: Tensor | None, cache: Cache | None) -> float:
    args, kwargs = rearranged(call, mask, cache)
    got = unwrapped_forward(site.module)(*args, **kwargs)
    return _error(call.output, got, mask)


def _single(site: Site, dim: int, size: int) -> float:
    """Error of the plain call cut to one row (dim 0) or one token (dim 1); 0 where the original
    does not run on that."""
    assert site.plain is not None

    def cut(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == size
        return x.narrow(dim, 0, 1) if fits else x

    assert site.program is not None
    dense = None
    if site.program.mask is not None:
        # The module may leave causality to the mask.
        length = 1 if dim else discovery.PLAIN_LENGTH
        device = pytree.tree_leaves(site.plain.output)[0].device
        dense = causal_mask_4d(None, 0, length, length, device)
    own = site.first.attention[0].dialect == "sdpa"
    switch = discovery.attention_implementation(site.module, "sdpa")
    try:
        given, named = pytree.tree_map(cut, rearranged(site.plain, dense, None))
        with switch if own else contextlib.nullcontext():
            expected = original_forward(site.module)(*given, **named)
    except Exception:
        return 0.0
    args, kwargs = pytree.tree_map(cut, rearranged(site.plain, None, None))
    return _error(expected, unwrapped_forward(site.module)(*args, **kwargs), None)


def _streaming_difference(site: Site, found: Discovery) -> float:
    """A left-padded streaming call against the original module under the explicit mask."""
    assert found.first_mask is not None and site.program is not None
    router = site.module.elastic_router
    assert isinstance(router, ElasticSite)
    real = found.first_mask.bool()
    length = real.shape[1]
    i = torch.arange(length, device=real.device)
    start = real.int().argmax(1)
    near = (i[:, None] - i[None, :] < _CHECK_LOCAL)[None]
    sink = (i[None, :] < start[:, None] + _CHECK_SINK)[:, None, :]
    visible = (i[None, :] <= i[:, None])[None] & (near | sink) & real[:, None, :]
    dense = visible[:, None]
    has_cache = site.graph is not None and site.graph.cache is not None
    own = site.first.attention[0].dialect == "sdpa"
    args, kwargs = rearranged(site.first, dense, DynamicCache() if has_cache else None)
    # A module that attends by itself may branch on the name; for the others it is set already.
    switch = discovery.attention_implementation(site.module, "sdpa")
    with switch if own else contextlib.nullcontext():
        expected = original_forward(site.module)(*args, **kwargs)
    saved = router.sink, router.local
    forced = router.forced.clone()
    try:
        router.sink, router.local = _CHECK_SINK, _CHECK_LOCAL
        router.forced.fill_(1)
        args, kwargs = rearranged(
            site.first, found.first_mask, DynamicCache() if has_cache else None
        )
        got = unwrapped_forward(site.module)(*args, **kwargs)
    finally:
        router.sink, router.local = saved
        router.forced.copy_(forced)
    return _error(expected, got, found.first_mask)


def _error(expected: Any, got: Any, mask: Tensor | None) -> float:
    """Largest difference of the first output, in tolerances, at real tokens."""
    a, b = pytree.tree_leaves(expected)[0], pytree.tree_leaves(got)[0]
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"output {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}")
    a, b = a.double(), b.double()
    if mask is not None:
        real = mask[:, -a.shape[1] :].bool()
        a, b = a[real], b[real]
    if not torch.isfinite(b).all() and torch.isfinite(a).all():
        return float("inf")
    tolerance = _TOLERANCE[pytree.tree_leaves(expected)[0].dtype]
    scale = max(float(a.abs().max()), 1e-6) if a.numel() else 1.0
    return float((a - b).abs().max()) / (tolerance * scale) if a.numel() else 0.0


def outputs(model: nn.Module, found: Discovery, loaded: str | None) -> list[Any] | None:
    """What the untouched model, no probe anywhere, computes for the recorded inputs.

    None where that cannot be had: on meta weights, for modules that are no transformers models,
    and for Flash and Flex attention, which differ from SDPA by more than a rewrite may and whose
    recorded outputs are the reference instead.
    """
    if not isinstance(model, PreTrainedModel) or any(p.is_meta for p in model.parameters()):
        return None
    if loaded not in (None, "eager", "sdpa"):
        return [trace.output for trace in (found.first, found.plain)]
    return [_call(model, trace.inputs) for trace in (found.first, found.plain)]


def _call(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None) -> Any:
    assert inputs is not None
    return model(*inputs[0], **inputs[1])


def check_model(
    model: nn.Module, found: Discovery, untouched: list[Any] | None, sites: list[Site]
) -> None:
    """Compare the whole model, all heads full, with the untouched one.

    Catches what no site shows: something else that depends on the causal mask, or an
    implementation of attention that the recorders do not know.

    Raises:
        SelfCheckError: They differ, or the transformed model does not run.
    """
    if untouched is None:
        return
    routers = [m for m in model.modules() if isinstance(m, ElasticSite)]
    for router in routers:
        router.forced.zero_()
    try:
        _compare(model, found, untouched, len(sites))
    finally:
        for router in routers:
            router.forced.fill_(ASK_ROUTER)


def _compare(model: nn.Module, found: Discovery, untouched: list[Any], sites: int) -> None:
    masks = (found.first_mask, found.plain_mask)
    for trace, expected, mask in zip((found.first, found.plain), untouched, masks, strict=True):
        try:
            got = _call(model, trace.inputs)
        except Exception as error:  # whatever the model's own code makes of our masks
            raise SelfCheckError(
                f"the transformed {type(model).__name__} does not run "
                f"({type(error).__name__}: {error}): something other than its attention sites "
                "works on the causal mask. Nothing was changed"
            ) from error
        for name, value in expected.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if mask is not None and value.shape[:2] != mask.shape:
                continue
            worst = _error(value, got[name], mask)
            # The errors of the sites add up over the layers.
            if worst > max(4, sites):
                raise SelfCheckError(
                    f"the transformed {type(model).__name__} differs from the untouched one in "
                    f"{name!r} (error {worst:.3g} × the tolerance of one site): something other "
                    "than its attention sites depends on the causal mask or on the attention "
                    "implementation. Nothing was changed"
                )
