"""From a model to a transformed model: discover, capture, rewrite, install, check.

Everything that changes the model is undone when any step fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from elastic_compile import _carry, _masks, _state
from elastic_compile._forward import (
    DecoderHook,
    ExactForward,
    SiteForward,
    SiteProgram,
    encode_globals,
)
from elastic_compile._report import REWRITTEN, SKIPPED, Report, SiteReport
from elastic_compile._save import SavePretrained
from elastic_compile._site import ElasticSite
from elastic_compile._state import ElasticState
from elastic_compile.config import ElasticConfig
from elastic_compile.kernels import ops
from elastic_compile.passes import capture, discovery
from elastic_compile.passes.capture import CaptureError, SiteGraph, unwrapped_forward
from elastic_compile.passes.discovery import PLAIN_CAUSAL, Discovery, SiteCall
from elastic_compile.passes.rewrite import CACHE, ROUTER, ElasticAttentionPass, SiteResult


class NoSiteError(ValueError):
    """No attention site of a model could be rewritten."""


class SelfCheckError(RuntimeError):
    """The transformed model does not compute what the untouched one computes."""


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
    graph: SiteGraph | None = None
    program: SiteProgram | None = None
    result: SiteResult | None = None
    layer_idx: int | None = None
    checked: bool = False

    @property
    def rewritten(self) -> bool:
        return not self.reason


def transform(
    model: nn.Module,
    config: ElasticConfig,
    example_inputs: Any = None,
    allow_unrewritten: bool = False,
) -> Report:
    """Rewrite every eligible attention site of ``model`` in place. See ``elastic_compile``."""
    configs = discovery.configs_of(model)
    eager = bool(configs) and getattr(
        model, "config", configs[0]
    )._attn_implementation_internal in (None, "eager")
    with discovery.evaluating(model):
        found = discovery.discover(model, eager, example_inputs)
        sites = _sites(model, found)
        _capture_all(sites, found)
        if not any(site.rewritten for site in sites) and not allow_unrewritten:
            raise NoSiteError(_why_nothing(model, sites))
        if not any(site.rewritten for site in sites):
            report = Report(tuple(_site_report(site) for site in sites))
            model.__dict__[_state.ATTRIBUTE] = ElasticState(config, report)
            return report
        with contextlib.ExitStack() as undo:
            _install(model, sites, config, found, undo)
            for site in sites:
                if site.rewritten:
                    _check_site(site, found)
            if not any(site.rewritten for site in sites) and not allow_unrewritten:
                raise NoSiteError(_why_nothing(model, sites))
            report = _number(model, sites)
            model.__dict__[_state.ATTRIBUTE] = dataclasses.replace(
                model.__dict__[_state.ATTRIBUTE], report=report
            )
            _check_model(model, found, sites)
            undo.pop_all()
    return report


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


# ------------------------------------------------------------------ which sites, and why not


def _sites(model: nn.Module, found: Discovery) -> list[Site]:
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
    if len(calls) > 1 or len(calls[0].attention) > 1:
        return "it attends more than once in one forward"
    attention = calls[0].attention[0]
    if attention.mask is not None:
        rule = found.first.masks.get(id(attention.mask))
        given = any(
            x is attention.mask for x in pytree.tree_leaves((calls[0].args, calls[0].kwargs))
        )
        site.causal = rule == PLAIN_CAUSAL and given
        if rule is None or not given:
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


def _capture_all(sites: list[Site], found: Discovery) -> None:
    shared: dict[Any, Site] = {}
    for site in sites:
        if site.reason:
            continue
        assert site.plain is not None
        key = _fingerprint(site)
        twin = shared.get(key)
        try:
            if twin is not None and twin.graph is not None:
                # The same class, geometry and settings: the same code, for another layer.
                site.graph, site.program, site.result = twin.graph, twin.program, twin.result
                site.layer_idx = getattr(site.module, "layer_idx", None)
                site.reason = twin.reason
            else:
                site.graph = capture.capture(site.module, site.first, site.plain)
                site.layer_idx = site.graph.layer_idx
                _rewrite(site)
                if site.layer_idx == getattr(site.module, "layer_idx", None):
                    shared[key] = site
        except CaptureError as error:
            site.reason = str(error)
            shared.pop(key, None)


def _fingerprint(site: Site) -> Any:
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


# ------------------------------------------------------------------ putting it into the model


def _install(
    model: nn.Module,
    sites: list[Site],
    config: ElasticConfig,
    found: Discovery,
    undo: contextlib.ExitStack,
) -> None:
    _carry.install()
    builders = [module for module in found.first.mask_builders if module is not None]
    names = {module: name for name, module in model.named_modules()}
    decoders = tuple(dict.fromkeys(names[m] for m in builders if m in names))
    configs = discovery.configs_of(model)
    undo.callback(remove, model)
    state = ElasticState(
        config=config,
        report=Report(()),
        attention_implementations=[c._attn_implementation_internal for c in configs],
        decoders=decoders,
        base_model_name=str(getattr(getattr(model, "config", None), "_name_or_path", "") or ""),
    )
    model.__dict__[_state.ATTRIBUTE] = state
    index = 0
    for site in sites:
        if not site.rewritten:
            continue
        assert site.graph is not None and site.program is not None and site.result is not None
        site.module.add_module(
            ROUTER,
            ElasticSite(
                config,
                kv_heads=site.result.kv_heads,
                head_dim=site.result.head_dim,
                tap_dim=site.result.tap_dim,
                index=index,
                layer_idx=site.layer_idx,
                attention_dropout=_training_dropout(site),
                interface=site.first.attention[0].dialect == "interface",
                device=_device(site),
            ),
        )
        for name, tensor in site.graph.constants.items():
            site.module.register_buffer(name, tensor.clone(), persistent=False)
        _set_forward(site, SiteForward, site.program, site.layer_idx)
        index += 1
    for site in sites:
        if not site.rewritten and site.causal:
            _wrap_exact(site)
    if isinstance(model, PreTrainedModel):
        model.__dict__["save_pretrained"] = SavePretrained(model)
        for c in configs:
            c._attn_implementation_internal = _masks.implementation_for(
                c._attn_implementation_internal
            )
        for path in decoders:
            decoder = model.get_submodule(path)
            parameters = tuple(inspect.signature(decoder.forward).parameters)
            decoder.register_forward_pre_hook(DecoderHook(parameters), with_kwargs=True)


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
    device = _device(site)
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


def _device(site: Site) -> torch.device:
    hook = getattr(site.module, "_hf_hook", None)
    execution = getattr(hook, "execution_device", None)
    if execution is not None:
        return torch.device(execution)
    for parameter in site.module.parameters():
        return parameter.device
    return (
        site.first.attention[0].mask.device
        if site.first.attention[0].mask is not None
        else (torch.device("cpu"))
    )


def _set_forward(site: Site, kind: Callable[..., Any], *arguments: Any) -> None:
    module = site.module
    # Beneath an accelerate hook: its wrapper moves weights and inputs, then calls _old_forward.
    slot = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    original = module.__dict__.get(slot)
    if kind is SiteForward:
        program, layer_idx = arguments
        module.__dict__[slot] = SiteForward(module, program, original, layer_idx)
    else:
        module.__dict__[slot] = kind(module, original, *arguments)


def _wrap_exact(site: Site) -> None:
    signature = inspect.signature(unwrapped_forward(site.module))
    flat = capture.leaves(capture.bind(signature, site.first))
    mask = next(p for p, x in flat.items() if x is site.first.attention[0].mask)
    cache = next((p for p, x in flat.items() if isinstance(x, Cache)), None)
    hidden = next(
        p for p, x in flat.items() if isinstance(x, Tensor) and x.is_floating_point() and p != mask
    )
    layer_idx = getattr(site.module, "layer_idx", 0)
    own = site.first.attention[0].dialect == "sdpa"
    _set_forward(site, ExactForward, mask, cache, hidden, own, layer_idx)


def _training_dropout(site: Site) -> float:
    """The dropout that the module hands to attention in train mode, from a call in train mode."""
    call = site.plain
    assert call is not None
    recorder = discovery.Recorder(site.module, False)
    recorder.stack.append((site.module, SiteCall((), {})))
    site.module.training = True
    try:
        with discovery.probing(site.module, recorder.attention, recorder.mask):
            with discovery._SdpaMode(recorder):
                unwrapped_original(site.module)(*call.args, **call.kwargs)
    finally:
        site.module.training = False
    return float(recorder.stack[0][1].attention[0].dropout)


def unwrapped_original(module: nn.Module) -> Callable[..., Any]:
    """The forward that a transform replaced, or the module's own."""
    forward = unwrapped_forward(module)
    return forward.original if isinstance(forward, (SiteForward, ExactForward)) else forward


def remove(model: nn.Module) -> None:
    """Undo :func:`_install`, also a partial one. Leaves nothing behind."""
    state: ElasticState = model.__dict__.pop(_state.ATTRIBUTE)
    if isinstance(model.__dict__.get("save_pretrained"), SavePretrained):
        del model.__dict__["save_pretrained"]
    for module in model.modules():
        for slot in ("forward", "_old_forward"):
            forward = module.__dict__.get(slot)
            if isinstance(forward, (SiteForward, ExactForward)):
                _uninstall(module, slot, forward)
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, DecoderHook):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    if state.attention_implementations:
        configs = discovery.configs_of(model)
        for config, original in zip(configs, state.attention_implementations, strict=True):
            config._attn_implementation_internal = original
    if state.ignored_keys and isinstance(model, PreTrainedModel):
        kept = set(model._keys_to_ignore_on_save or ()) - set(state.ignored_keys)
        model._keys_to_ignore_on_save = kept


def _uninstall(module: nn.Module, slot: str, forward: SiteForward | ExactForward) -> None:
    if forward._original is not None:
        module.__dict__[slot] = forward._original
    else:
        del module.__dict__[slot]
    module._modules.pop(ROUTER, None)
    for name in [n for n in module._buffers if n.startswith("elastic_constant_")]:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)


# ------------------------------------------------------------------ self-check

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_CHECK_SINK, _CHECK_LOCAL = 2, 3


def _check_site(site: Site, found: Discovery) -> None:
    """Compare an installed site with what its module computed; skip it when they differ."""
    sample = pytree.tree_leaves(site.first.output)[0]
    if sample.is_meta:
        return
    try:
        worst = max(_differences(site, found))
        reason = "" if worst <= 1 else f"self-check failed: error {worst:.3g} × the tolerance"
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = f"self-check failed: {type(error).__name__}: {text[0] if text else ''}"
    if reason:
        forward = unwrapped_forward(site.module)
        assert isinstance(forward, SiteForward)
        slot = "_old_forward" if hasattr(site.module, "_hf_hook") else "forward"
        _uninstall(site.module, slot, forward)
        site.reason = reason
        if site.causal:
            _wrap_exact(site)
    else:
        site.checked = True


def _differences(site: Site, found: Discovery) -> list[float]:
    """Errors, in tolerances, of every replayed call."""
    forward = unwrapped_forward(site.module)
    assert isinstance(forward, SiteForward) and site.plain is not None
    cache = DynamicCache() if site.graph is not None and site.graph.cache is not None else None
    out = [_replay(site, site.first, found.first_mask, cache)]
    if site.chunk is not None:
        out.append(_replay(site, site.chunk, found.chunk_mask, cache))
    out.append(_replay(site, site.plain, None, None))
    if site.program is not None and site.program.mask is not None:
        out.append(_streaming_difference(site, found))
    return out


def _replay(site: Site, call: SiteCall, mask: Tensor | None, cache: Cache | None) -> float:
    args, kwargs = _with(site, call, mask, cache)
    got = unwrapped_forward(site.module)(*args, **kwargs)
    return _error(call.output, got, mask)


def _with(
    site: Site, call: SiteCall, mask: Tensor | None, cache: Cache | None
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
    args, kwargs = _with(site, site.first, dense, DynamicCache() if has_cache else None)
    name = "sdpa" if own else _masks.SDPA
    with discovery.attention_implementation(site.module, name):
        expected = unwrapped_original(site.module)(*args, **kwargs)
    saved = router.sink, router.local
    forced = router.forced.clone()
    try:
        router.sink, router.local = _CHECK_SINK, _CHECK_LOCAL
        router.forced.fill_(1)
        args, kwargs = _with(
            site, site.first, found.first_mask, DynamicCache() if has_cache else None
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


def _check_model(model: nn.Module, found: Discovery, sites: list[Site]) -> None:
    """The whole model, all heads full, against its recorded outputs.

    Catches what no site shows: a consumer of the causal mask that is no attention site.
    """
    if not any(site.checked for site in sites) or not isinstance(model, PreTrainedModel):
        return
    for trace, mask in ((found.first, found.first_mask), (found.plain, None)):
        assert trace.inputs is not None
        args, kwargs = trace.inputs
        got = model(*args, **kwargs)
        for key, value in trace.output.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            usable = mask if mask is not None and value.shape[:2] == mask.shape else None
            worst = _error(value, got[key], usable)
            if mask is not None and usable is None:
                continue
            # Errors of the sites add up over layers.
            if worst > max(4, len(sites)):
                raise SelfCheckError(
                    f"the transformed {type(model).__name__} differs from the untouched one in "
                    f"{key!r} (error {worst:.3g} × the tolerance of one site): something other "
                    "than its attention sites depends on the causal mask. Nothing was changed"
                )
