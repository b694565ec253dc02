"""Finding the attention sites of a model by running it, with no list of architectures.

The model runs a few tokens under two recorders: a probe in place of transformers' ``sdpa``
attention function, and a ``TorchFunctionMode`` that sees ``scaled_dot_product_attention``. A site
is the innermost module that was running when either of them was reached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)

from elastic_compile._masks import exact_interface_attention, honours_every_term
from elastic_compile.passes import _markers

PLAIN_CAUSAL = "causal"


@dataclasses.dataclass
class AttentionCall:
    """One attention computation that a recorder saw."""

    dialect: str
    """``"interface"`` (transformers' AttentionInterface) or ``"sdpa"`` (the torch function)."""
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask: Tensor | None
    is_causal: bool
    dropout: float
    scale: Any
    extras: dict[str, Any]
    """Arguments that change attention beyond mask and scale (softcap, s_aux, …), by name."""


@dataclasses.dataclass
class SiteCall:
    """One recorded call of a module: what went in, what came out, what happened inside."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    attention: list[AttentionCall] = dataclasses.field(default_factory=list)
    children: list[nn.Module] = dataclasses.field(default_factory=list)
    training_dropout: float = 0.0


@dataclasses.dataclass
class Trace:
    """What one run of the model showed."""

    calls: dict[nn.Module, list[SiteCall]]
    masks: dict[int, str]
    """How each mask object (by ``id``) was built: :data:`PLAIN_CAUSAL` or the rule's name."""
    keep: list[Any]
    mask_builders: list[nn.Module]
    output: Any = None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class Recorder:
    """Records one forward of a model. One instance serves one run."""

    def __init__(self, model: nn.Module, implementation: str) -> None:
        self.model = model
        self.implementation = implementation
        self.stack: list[tuple[nn.Module, SiteCall]] = []
        self.trace = Trace({}, {}, [], [])
        self.inside_probe = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.stack:
            children = self.stack[-1][1].children
            if not any(child is module for child in children):
                children.append(module)
        self.stack.append((module, SiteCall(args, dict(kwargs))))

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # A module that raised never got here, so unwind to the one that is returning.
        while self.stack:
            current, call = self.stack.pop()
            if current is module:
                if call.attention:
                    call.output = output
                    self.trace.calls.setdefault(module, []).append(call)
                return

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        try:
            for module in self.model.modules():
                handles.append(
                    module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
                )
                handles.append(
                    module.register_forward_hook(self.after, with_kwargs=True, always_call=True)
                )
            yield
        finally:
            for handle in handles:
                handle.remove()

    def see(self, call: AttentionCall) -> None:
        if self.stack:
            self.stack[-1][1].attention.append(call)

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        self.see(_interface_call(module, query, key, value, attention_mask, kwargs))
        self.inside_probe = True
        try:
            return exact_interface_attention(
                self.implementation, module, query, key, value, attention_mask, **kwargs
            )
        finally:
            self.inside_probe = False

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        # Always a real tensor, so that its identity can be followed into the sites.
        kwargs["allow_is_causal_skip"] = False
        mask = sdpa_mask(*args, **kwargs)
        rule = kwargs.get("mask_function", causal_mask_function)
        plain = rule is causal_mask_function and not kwargs.get("use_vmap")
        self.trace.masks[id(mask)] = PLAIN_CAUSAL if plain else _rule_name(rule)
        self.trace.keep.append(mask)
        if self.stack and plain:
            self.trace.mask_builders.append(self.stack[-1][0])
        return mask


class _SdpaMode(TorchFunctionMode):
    """Sees direct calls of ``scaled_dot_product_attention``."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not self.recorder.inside_probe:
            self.recorder.see(_sdpa_call(*args, **kwargs))
        return func(*args, **kwargs)


def _sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    return AttentionCall(
        "sdpa",
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        attn_mask,
        bool(is_causal),
        dropout_p,
        scale,
        {},
    )


# Arguments of an AttentionInterface call that change what attention computes. The rest that
# arrives there (position_ids, use_cache, what Trainer passes through) does not.
_CHANGES_ATTENTION = ("softcap", "s_aux", "position_bias", "sliding_window", "cu_seq_lens_q")


def _interface_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: Mapping[str, Any],
) -> AttentionCall:
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return AttentionCall(
        "interface",
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        mask,
        bool(is_causal),
        kwargs.get("dropout") or 0.0,
        kwargs.get("scaling"),
        {name: kwargs[name] for name in _CHANGES_ATTENTION if kwargs.get(name) is not None},
    )


def _rule_name(rule: Callable) -> str:
    # transformers' rules are closures: "sliding_window_overlay.<locals>.inner_mask", and their
    # combinations hold the parts in their cells.
    names = [getattr(rule, "__qualname__", repr(rule)).split(".")[0]]
    for cell in getattr(rule, "__closure__", None) or ():
        content = cell.cell_contents
        parts = content if isinstance(content, (tuple, list)) else (content,)
        names += [_rule_name(part) for part in parts if callable(part)]
    return " ".join(dict.fromkeys(names))


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every distinct configuration object that a module of the model holds."""
    found: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found.setdefault(id(config), config)
    return list(found.values())


@contextlib.contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Switch a model's configurations to the attention implementation ``name`` for a while."""
    saved = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    try:
        for config, _ in saved:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, original in saved:
            config._attn_implementation_internal = original


@contextlib.contextmanager
def _this_thread(registry: type, name: str, replacement: Callable) -> Iterator[None]:
    """Replace an entry of a transformers registry for the current thread only."""
    mapping = registry._global_mapping  # type: ignore[attr-defined]
    original, owner = mapping[name], threading.get_ident()

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        function = replacement if threading.get_ident() == owner else original
        return function(*args, **kwargs)

    mapping[name] = dispatch
    try:
        yield
    finally:
        mapping[name] = original


@contextlib.contextmanager
def probing(model: nn.Module, attention: Callable, mask: Callable) -> Iterator[None]:
    """Let ``attention`` and ``mask`` stand for the ``sdpa`` implementation of ``model``.

    The name is kept since some models branch on it (Falcon calls SDPA itself only under it).
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(attention_implementation(model, "sdpa"))
        stack.enter_context(_this_thread(AttentionInterface, "sdpa", attention))
        stack.enter_context(_this_thread(AttentionMaskInterface, "sdpa", mask))
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and the random state and modes as they were afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    # Modules of users' own may write to buffers (caches); those of transformers do not.
    buffers = [] if isinstance(model, PreTrainedModel) else list(model.buffers())
    saved = [(buffer, buffer.clone()) for buffer in buffers]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        model.eval()
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)


def run(
    model: nn.Module, implementation: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """One recorded forward of ``model`` (inside :func:`evaluating`)."""
    recorder = Recorder(model, implementation)
    with probing(model, recorder.attention, recorder.mask), recorder.hooks():
        with _SdpaMode(recorder):
            recorder.trace.output = model(*args, **kwargs)
    recorder.trace.inputs = (args, kwargs)
    return recorder.trace


@dataclasses.dataclass
class Discovery:
    """The recorded runs of a model: with padding and a cache, continued, and without either."""

    first: Trace
    """[2, 13] tokens, row 0 left-padded by 3, filling a cache where the model has one."""
    plain: Trace
    """[3, 11] tokens, no padding, no cache."""
    chunk: Trace | None
    """3 more tokens on the cache of ``first``; None for models without a cache."""
    first_mask: Tensor | None
    chunk_mask: Tensor | None
    plain_mask: Tensor | None = None
    """The 2-D mask of ``plain``: only with example inputs that hold one."""


BATCH, LENGTH, PADDING, CHUNK = 2, 13, 3, 3
PLAIN_BATCH, PLAIN_LENGTH = 3, 11


def input_device(model: nn.Module) -> torch.device:
    """Where a model expects its inputs: the device of its first parameter, offloaded or not."""
    for module in model.modules():
        hook_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if hook_device is not None:
            return torch.device(hook_device)
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def discover(model: nn.Module, implementation: str, example_inputs: Any = None) -> Discovery:
    """Run ``model`` and record every attention site.

    Args:
        model: A Hugging Face model, or any module when ``example_inputs`` is given.
        implementation: What the model's own attention computes, as named by
            :func:`elastic_compile._masks.implementation_for`: the reference of the self-check.
        example_inputs: Keyword (dict) or positional (tuple) inputs of one call. Every tensor must
            have the batch first; batch and sequence are varied by slicing.

    Raises:
        ValueError: The model is not a Hugging Face model and no example inputs were given.
    """
    if example_inputs is not None:
        return _discover_with(model, implementation, example_inputs)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model, so its inputs are unknown: pass "
            "example_inputs, a dict of keyword arguments (or a tuple) of one forward call with at "
            "least 3 rows and 13 tokens"
        )
    device = input_device(model)
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 0) or 100)
    generator = torch.Generator().manual_seed(0)

    def tokens(batch: int, length: int) -> Tensor:
        ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
        return ids.to(device)

    mask = torch.ones(BATCH, LENGTH + CHUNK, dtype=torch.long)
    mask[0, :PADDING] = 0
    first_mask, chunk_mask = mask[:, :LENGTH].to(device), mask.to(device)
    try:
        first = run(
            model,
            implementation,
            (),
            {"input_ids": tokens(BATCH, LENGTH), "attention_mask": first_mask, "use_cache": True},
        )
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on made-up token ids "
            f"({type(error).__name__}: {error}); pass example_inputs, a dict of the keyword "
            "arguments of one forward call with at least 3 rows and 13 tokens"
        ) from error
    plain_kwargs: dict[str, Any] = {"use_cache": False}
    if device.type == "meta":
        # Whether the positions are packed cannot be read from data that does not exist.
        plain_kwargs["attention_mask"] = torch.ones(PLAIN_BATCH, PLAIN_LENGTH, device=device)
    plain = run(
        model, implementation, (), {"input_ids": tokens(PLAIN_BATCH, PLAIN_LENGTH), **plain_kwargs}
    )
    chunk, cache = None, _cache_in(first.output)
    if cache is not None:
        name = "cache" if "cache" in _parameters(model) else "past_key_values"
        # Some models (linear-attention hybrids, ProphetNet) take one token at a time on a cache.
        with contextlib.suppress(Exception):
            chunk = run(
                model,
                implementation,
                (),
                {
                    "input_ids": tokens(BATCH, CHUNK),
                    "attention_mask": chunk_mask,
                    "use_cache": True,
                    name: cache,
                },
            )
    return Discovery(first, plain, chunk, first_mask, chunk_mask)


def _discover_with(model: nn.Module, implementation: str, example_inputs: Any) -> Discovery:
    kwargs = example_inputs if isinstance(example_inputs, Mapping) else {}
    args = () if isinstance(example_inputs, Mapping) else example_inputs
    args = args if isinstance(args, (tuple, list)) else (args,)
    tensors = [x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
    if not tensors or any(x.dim() == 0 or x.shape[0] < PLAIN_BATCH for x in tensors):
        raise ValueError(
            f"example_inputs needs tensors whose first dimension is a batch of at least "
            f"{PLAIN_BATCH} rows"
        )
    length = max((x.shape[1] for x in tensors if x.dim() > 1), default=0)
    if length < LENGTH:
        raise ValueError(f"example_inputs needs at least {LENGTH} tokens, got {length}")

    def cut(batch: int, tokens: int) -> Trace:
        def slice_(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x[:batch]
            # A mask [B, S, S] or [B, 1, S, S] counts tokens in its last two dimensions.
            square = x.dim() > 2 and x.shape[-2:] == (length, length)
            if square and (x.dim() > 3 or x.dtype == torch.bool):
                return x[..., :tokens, :tokens]
            return x[:, :tokens] if x.dim() > 1 and x.shape[1] == length else x

        a, k = pytree.tree_map(slice_, (tuple(args), dict(kwargs)))
        try:
            return run(model, implementation, a, k)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} does not run on example_inputs cut to {batch} rows and "
                f"{tokens} tokens ({type(error).__name__}: {error}). They are a dict of keyword "
                "arguments or a tuple of positional ones; every tensor has the batch first, then "
                "the tokens, and a module that keeps keys from call to call must be empty and off"
            ) from error

    first, plain = cut(BATCH, LENGTH), cut(PLAIN_BATCH, PLAIN_LENGTH)

    def mask_of(trace: Trace) -> Tensor | None:
        assert trace.inputs is not None
        mask = trace.inputs[1].get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    return Discovery(first, plain, None, mask_of(first), None, mask_of(plain))


def _parameters(model: nn.Module) -> list[str]:
    import inspect

    return list(inspect.signature(model.forward).parameters)


def _cache_in(output: Any) -> Cache | None:
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(values, (Tensor, type(None))):
        return None
    return next((x for x in values if isinstance(x, Cache)), None)


def site_marker(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The probe's form while a site is captured: leaves one marker op in the graph."""
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    every_term = honours_every_term(implementation)
    sinks, softcap = (kwargs.get("s_aux"), kwargs.get("softcap")) if every_term else (None, None)
    out = _markers.attention_site(query, key, value, attention_mask, sinks, scale, softcap)
    return out, None
