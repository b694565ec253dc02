"""From a model to a transformed model: discover, capture, rewrite, install, check.

Everything that changes the model is undone when any step fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel

from elastic_compile import _masks, _state
from elastic_compile._forward import SiteProgram, encode_globals
from elastic_compile._report import REWRITTEN, SKIPPED, Report, SiteReport
from elastic_compile._site import ElasticSite
from elastic_compile._state import ElasticState
from elastic_compile.config import ElasticConfig
from elastic_compile.kernels import ops
from elastic_compile.passes import capture, discovery, install, selfcheck
from elastic_compile.passes.capture import CaptureError, SiteGraph
from elastic_compile.passes.install import remove, wrapped_forwards
from elastic_compile.passes.rewrite import CACHE, ROUTER, ElasticAttentionPass
from elastic_compile.passes.sites import Site, find, fingerprint

__all__ = ["NoSiteError", "remove", "transform", "wrapped_forwards"]


class NoSiteError(ValueError):
    """No attention site of a model could be rewritten."""


def transform(
    model: nn.Module,
    config: ElasticConfig,
    example_inputs: Any = None,
    allow_unrewritten: bool = False,
) -> Report:
    """Rewrite every eligible attention site of ``model`` in place. See ``elastic_compile``."""
    loaded = getattr(getattr(model, "config", None), "_attn_implementation_internal", "sdpa")
    if loaded in _masks.NAMES:
        raise ValueError(
            f"the configuration of this {type(model).__name__} was taken from a transformed model "
            f"(its attention implementation is {loaded!r}); call "
            'model.set_attn_implementation("sdpa") first'
        )
    if any(getattr(c, "output_attentions", False) for c in discovery.configs_of(model)):
        raise ValueError(
            f"the configuration of this {type(model).__name__} asks for attention weights in every "
            "call (output_attentions=True), which only the original attention code computes. Set "
            "config.output_attentions = False and pass output_attentions=True to the calls that "
            "need them: those run exact, with every head full"
        )
    # Tracing is one at a time in a process. Routers made in inference mode could not be trained.
    with _ONE_AT_A_TIME, torch.inference_mode(False):
        return _transform(model, config, example_inputs, allow_unrewritten, loaded)


_ONE_AT_A_TIME = threading.Lock()


def _transform(
    model: nn.Module,
    config: ElasticConfig,
    example_inputs: Any,
    allow_unrewritten: bool,
    loaded: str | None,
) -> Report:
    implementation = _masks.implementation_for(loaded)
    with discovery.evaluating(model):
        found = discovery.discover(model, implementation, example_inputs)
        untouched = selfcheck.outputs(model, found, loaded)
        alone: set[Any] = set()
        while True:
            sites = find(model, found)
            _refuse_loops(sites)
            _capture_all(sites, implementation, alone)
            _require(model, sites, allow_unrewritten)
            if not any(site.rewritten for site in sites):
                report = Report(tuple(_site_report(site) for site in sites))
                model.__dict__[_state.ATTRIBUTE] = ElasticState(config, report)
                return report
            with contextlib.ExitStack() as undo:
                install.install(model, sites, config, found, undo)
                failed = set()
                for site in sites:
                    if site.rewritten and (reason := selfcheck.check_site(site, found)):
                        failed.add(site.path)
                        install.skip(site, reason)
                # What one layer's code does may depend on its index after all: once more, with a
                # capture for each of these layers.
                shared = {s.shares for s in sites if s.shares is not None and s.path in failed}
                if shared - alone:
                    alone |= shared
                    continue
                _require(model, sites, allow_unrewritten)
                report = _number(model, sites)
                state = model.__dict__[_state.ATTRIBUTE]
                model.__dict__[_state.ATTRIBUTE] = dataclasses.replace(state, report=report)
                selfcheck.check_model(model, found, untouched, sites)
                for _, router in _state.rewritten_sites(model):
                    _state.forget(router)
                undo.pop_all()
                return report


def _require(model: nn.Module, sites: list[Site], allow_unrewritten: bool) -> None:
    if not allow_unrewritten and not any(site.rewritten for site in sites):
        raise NoSiteError(_why_nothing(model, sites))


def _why_nothing(model: nn.Module, sites: list[Site]) -> str:
    name = type(model).__name__
    if not sites:
        return (
            f"no attention site found in {name}: no module called AttentionInterface's functions "
            "or torch's scaled_dot_product_attention (state-space models have none; attention "
            "written out as matrix products is not recognised). Nothing was changed; "
            "allow_unrewritten=True returns the model as it is"
        )
    reasons = dict.fromkeys(f"{site.path}: {site.reason}" for site in sites)
    listed = "\n  ".join(list(reasons)[:8])
    return (
        f"0 of {len(sites)} attention sites of {name} can be rewritten. Nothing was changed; "
        f"allow_unrewritten=True returns the model as it is. Reasons:\n  {listed}"
    )


def _refuse_loops(sites: list[Site]) -> None:
    """Refuse all sites beside one that runs several times in a forward and needs the causal mask.

    In a transformed model a skipped site builds its mask from what its layer has cached, which is
    not one number where the same module fills several layers.
    """
    loop = next((site for site in sites if site.repeated and site.causal), None)
    for site in sites:
        if loop is not None and not site.reason:
            site.reason = f"{loop.path} beside it attends more than once in one forward"


def _capture_all(sites: list[Site], implementation: str, alone: Collection[Any] = ()) -> None:
    """Capture and rewrite; layers of one class, geometry and settings share what the first gives.

    They may differ in their index, which is more than a place in the cache where the code computes
    with it. So the second layer is captured too, and only where both give the same code do the
    others share it. Those whose fingerprint is in ``alone`` share nothing.
    """
    first: dict[Any, Site] = {}
    agreed: set[Any] = set()
    alone = set(alone)
    for site in sites:
        if site.reason:
            continue
        assert site.plain is not None
        key = fingerprint(site)
        twin = None if key in alone else first.get(key)
        index = getattr(site.module, "layer_idx", None)
        try:
            if twin is None or key not in agreed:
                site.graph = capture.capture(site.module, site.first, site.plain, implementation)
                site.layer_idx = site.graph.layer_idx
                _rewrite(site)
            if twin is not None:
                if key not in agreed and not _same_code(site, twin):
                    alone.add(key)
                    continue
                agreed.add(key)
                site.graph, site.program, site.result = twin.graph, twin.program, twin.result
                site.layer_idx, site.shares = index, key
            elif site.layer_idx == index:
                first[key] = site
                if index is None:
                    agreed.add(key)
        except CaptureError as error:
            site.reason = str(error)
            first.pop(key, None)


def _same_code(site: Site, twin: Site) -> bool:
    """Whether two captures are the same, the place in the cache apart."""
    assert site.graph is not None and twin.graph is not None
    mine, other = site.graph.constants, twin.graph.constants
    return (
        site.program == twin.program
        and site.result == twin.result
        and mine.keys() == other.keys()
        and all(torch.equal(mine[name], other[name]) for name in mine)
    )


def _rewrite(site: Site) -> None:
    graph = site.graph
    assert graph is not None
    mask_names = tuple(n for n, path in graph.inputs.items() if path == graph.mask)
    variadic = next(
        (n for n, p in graph.signature.parameters.items() if p.kind is p.VAR_KEYWORD), None
    )
    module = _graph_module(site, graph)
    elastic = ElasticAttentionPass(
        causal_masks=mask_names,
        hidden=graph.hidden,
        kwargs_input=variadic if graph.passes_kwargs else None,
    )
    try:
        elastic(module)
    except Exception as error:
        raise CaptureError(f"the rewrite failed ({type(error).__name__})") from error
    results = module.meta["elastic_compile"].sites
    if len(results) != 1:
        raise CaptureError(f"its graph has {len(results)} attentions")
    site.result = results[0]
    if not results[0].rewritten:
        raise CaptureError(results[0].reason)
    code = module.graph.python_code("self")
    paths = dict(graph.inputs)
    if graph.cache is not None:
        paths[CACHE] = graph.cache
    if variadic is not None:
        paths[variadic] = (variadic,)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        if node.target not in paths:
            raise CaptureError(f"its graph needs {node.target!r}, which is not an argument")
        inputs.append(paths[node.target])
    site.program = SiteProgram(
        source=code.src,
        globals=encode_globals(code.globals),
        inputs=tuple(inputs),
        optional=graph.optional,
        conditions=graph.conditions,
        hidden=graph.inputs[graph.hidden],
        mask=graph.mask,
        cache=graph.cache,
        additive_mask=site.first.attention[0].dialect == "sdpa",
    )


def _graph_module(site: Site, graph: SiteGraph) -> fx.GraphModule:
    """The site's graph with what it refers to, for the pass and its lint."""
    root: dict[str, Any] = {"training": False}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            root[node.target] = site.module.get_submodule(node.target)
        elif node.op == "get_attr" and node.target not in root:
            constant = graph.constants.get(node.target)
            root[node.target] = constant if constant is not None else _attribute(site, node.target)
    module = fx.GraphModule(root, graph.graph, class_name=type(site.module).__name__)
    module.add_module(ROUTER, nn.Identity())
    return module


def _attribute(site: Site, target: str) -> Any:
    value: Any = site.module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _number(model: nn.Module, sites: list[Site]) -> Report:
    """Final numbering, ignored keys and report, once the self-checks have spoken."""
    base = [site for site in sites if site.rewritten]
    for index, site in enumerate(base):
        router = site.module.get_submodule(ROUTER)
        assert isinstance(router, ElasticSite)
        router.index = index
    keys = [
        f"{site.path}.{ROUTER}.{name}" if site.path else f"{ROUTER}.{name}"
        for site in base
        for name in site.module.get_submodule(ROUTER).state_dict()
    ]
    if isinstance(model, PreTrainedModel):
        ignored = set(model._keys_to_ignore_on_save or ())
        state = model.__dict__[_state.ATTRIBUTE]
        state.ignored_keys = tuple(key for key in keys if key not in ignored)
        model._keys_to_ignore_on_save = ignored | set(keys)
    return Report(tuple(_site_report(site) for site in sites))


def _site_report(site: Site) -> SiteReport:
    attention = site.first.attention[0]
    device = install.device_of(site)
    return SiteReport(
        path=site.path,
        cls=type(site.module).__name__,
        status=REWRITTEN if site.rewritten else SKIPPED,
        checked=site.checked,
        reason=site.reason,
        kv_heads=site.result.kv_heads if site.result else attention.key_shape[1],
        head_dim=site.result.head_dim if site.result else attention.key_shape[3],
        implementation=ops.default_implementation(device.type) if site.rewritten else "as loaded",
    )
