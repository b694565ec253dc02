"""Putting rewritten sites into a model, and taking them out again."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from elastic_compile import _carry, _masks, _state
from elastic_compile._forward import DecoderHook, ExactForward, SiteForward
from elastic_compile._report import Report
from elastic_compile._save import SavePretrained
from elastic_compile._site import ElasticSite
from elastic_compile._state import ElasticState
from elastic_compile.config import ElasticConfig
from elastic_compile.passes import capture, discovery
from elastic_compile.passes.capture import original_forward, unwrapped_forward
from elastic_compile.passes.discovery import Discovery, SiteCall
from elastic_compile.passes.rewrite import ROUTER
from elastic_compile.passes.sites import Site, rearranged


def install(
    model: nn.Module,
    sites: list[Site],
    config: ElasticConfig,
    found: Discovery,
    undo: contextlib.ExitStack,
) -> None:
    _carry.install()
    builders = [module for module in found.first.mask_builders if module is not None]
    names = {module: name for name, module in model.named_modules()}
    decoders = tuple(
        dict.fromkeys(p for m in builders if m in names for p in _route(model, names[m]))
    )
    _own_configs(model, undo)
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
                shards=_shards(site.module),
                device=device_of(site),
            ),
        )
        for name, tensor in site.graph.constants.items():
            site.module.register_buffer(name, tensor.clone(), persistent=False)
        _set_forward(site, SiteForward, site.program, site.layer_idx)
        index += 1
    for site in sites:
        if not site.rewritten:
            _keep(site)
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


def _shards(module: nn.Module) -> int:
    """Processes over which the heads of an attention module are spread (tensor parallelism)."""
    for parameter in module.parameters():
        placements = getattr(parameter, "placements", ())
        if any(placement.is_shard() for placement in placements):
            return int(parameter.device_mesh.size())  # type: ignore[attr-defined]
    return 1


def _route(model: nn.Module, path: str) -> list[str]:
    """The module that builds the masks and the models around it, but the outermost.

    A multimodal model hands its text decoder positions of its own making, which only its caller
    can tell from packed ones. The outermost model is left alone: a hook there is one more graph.
    """
    parts = path.split(".")
    outer = [".".join(parts[:i]) for i in range(1, len(parts))]
    return [p for p in outer if isinstance(model.get_submodule(p), PreTrainedModel)] + [path]


def _own_configs(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Give the model copies of its configurations: another model may share the objects."""
    copies: dict[int, Any] = {}
    for config in discovery.configs_of(model):
        copy.deepcopy(config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                module.__dict__[name] = copies[id(value)]
                undo.callback(module.__dict__.__setitem__, name, value)


def device_of(site: Site) -> torch.device:
    """Where a site computes, offloaded or not."""
    mask = site.first.attention[0].mask
    if mask is not None and not any(True for _ in site.module.parameters()):
        return mask.device
    return discovery.input_device(site.module)


def _set_forward(site: Site, kind: Callable[..., Any], *arguments: Any) -> None:
    module = site.module
    slot = _slot(module)
    original = module.__dict__.get(slot)
    if kind is SiteForward:
        program, layer_idx = arguments
        module.__dict__[slot] = SiteForward(module, program, original, layer_idx)
    else:
        module.__dict__[slot] = kind(module, original, *arguments)


def _keep(site: Site) -> None:
    """Let a skipped site compute what it always did in a model that builds no causal mask."""
    if site.causal:
        _wrap_exact(site)
    else:
        site.module.__dict__[_masks.LEFT_ALONE] = True


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
    recorder = discovery.Recorder(site.module, _masks.OTHER)
    recorder.stack.append((site.module, SiteCall((), {})))
    site.module.training = True
    try:
        with discovery.probing(site.module, recorder.attention, recorder.mask):
            with discovery._SdpaMode(recorder):
                args, kwargs = rearranged(call, call.attention[0].mask, None)
                original_forward(site.module)(*args, **kwargs)
    finally:
        site.module.training = False
    return float(recorder.stack[0][1].attention[0].dropout)


def wrapped_forwards(model: nn.Module) -> list[str]:
    """Sites whose forward somebody replaced since the transform."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module._modules.get(ROUTER), ElasticSite)
        and not any(isinstance(module.__dict__.get(s), SiteForward) for s in _SLOTS)
    ]


_SLOTS = ("forward", "_old_forward")


def remove(model: nn.Module) -> None:
    """Undo :func:`install`, also a partial one. Leaves nothing behind."""
    state: ElasticState = model.__dict__.pop(_state.ATTRIBUTE)
    if isinstance(model.__dict__.get("save_pretrained"), SavePretrained):
        del model.__dict__["save_pretrained"]
    for module in model.modules():
        module.__dict__.pop(_masks.LEFT_ALONE, None)
        for slot in _SLOTS:
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


def skip(site: Site, reason: str) -> None:
    """Take one installed site out again; the module computes what it always did."""
    forward = unwrapped_forward(site.module)
    assert isinstance(forward, SiteForward)
    _uninstall(site.module, _slot(site.module), forward)
    site.reason = reason
    _keep(site)


def _slot(module: nn.Module) -> str:
    # Beneath an accelerate hook: its wrapper moves weights and inputs, then calls _old_forward.
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _uninstall(module: nn.Module, slot: str, forward: SiteForward | ExactForward) -> None:
    if forward._original is not None:
        module.__dict__[slot] = forward._original
    elif slot == "_old_forward":
        # A hook added since the transform still calls it.
        module.__dict__[slot] = types.MethodType(type(module).forward, module)
    else:
        del module.__dict__[slot]
    module._modules.pop(ROUTER, None)
    for name in [n for n in module._buffers if n.startswith("elastic_constant_")]:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)
