"""Callable objects that stand for the ``forward`` of attention modules in a transformed model.

They are objects, not bound methods: a bound method set on an instance pickles as the class's own
and would come back silently untransformed. They hold the module itself, so the children that the
generated code calls are whatever is installed there now.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from elastic_compile import _runtime, _state
from elastic_compile._masks import additive, causal_mask_4d
from elastic_compile.kernels import _counters

Path = tuple[Any, ...]

# Keyword arguments that change what attention computes or returns. Anything else that reaches an
# attention module through **kwargs (Trainer's pass-through, positions) does not.
_ORIGINAL = "arguments or sizes that only the original attention code knows"
_CHANGES = ("output_attentions", "softcap", "position_bias", "is_causal")


@dataclasses.dataclass(frozen=True)
class SiteProgram:
    """The generated code of a site: everything that is needed to build its forward again."""

    source: str
    """Python source of the rewritten graph: ``def forward(self, …)``."""
    globals: tuple[tuple[str, Any], ...]
    """Names the source uses; modules by name, as ``("<module>", name)``."""
    inputs: tuple[Path, ...]
    """For every parameter after ``self``: its place in the original forward's arguments."""
    optional: tuple[str, ...]
    """Arguments that must be None for this code to apply."""
    conditions: tuple[str, ...]
    """Expressions in ``rows`` and ``tokens`` that must hold for this code to apply."""
    hidden: Path
    mask: Path | None
    cache: Path | None
    additive_mask: bool
    """Whether the original code wants an additive dense mask (it attends by itself)."""


def encode_globals(names: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Names for generated code in a form that pickles."""
    return tuple(
        (name, ("<module>", value.__name__) if isinstance(value, types.ModuleType) else value)
        for name, value in names.items()
    )


def _decode_globals(names: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {
        name: importlib.import_module(value[1])
        if isinstance(value, tuple) and value[:1] == ("<module>",)
        else value
        for name, value in names
    }


def _compile(source: str, names: dict[str, Any], label: str, function: str) -> Callable[..., Any]:
    # Registered with linecache, so that tracebacks and debuggers show the generated code.
    filename = f"<elastic_compile {label} {abs(hash(source)):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), names)
    return names[function]


def _access(path: Path, variadic: str | None) -> str:
    head, rest = str(path[0]), list(path[1:])
    if head == variadic and rest:
        head = f"{head}.get({rest.pop(0)!r})"
    return head + "".join(f"[{key!r}]" for key in rest)


class _Forward:
    """Shared: the module, its original forward, and calling it exactly."""

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any] | None,
        mask: Path | None,
        cache: Path | None,
        hidden: Path,
        additive_mask: bool,
        layer_idx: int | None,
    ) -> None:
        self.module = module
        self._original = original
        self.mask_path, self.cache_path, self.hidden_path = mask, cache, hidden
        self.additive_mask = additive_mask
        self.layer_idx = layer_idx
        self.signature = inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that was there before: an instance's own, or the class's."""
        if self._original is not None:
            return self._original
        return types.MethodType(type(self.module).forward, self.module)

    def exact(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, given the dense mask that it was written for."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        # Where the caller asks for bidirectional attention, no causal mask was built: None is none.
        if self.mask_path is not None and kwargs.get("is_causal") is not False:
            self._put(arguments, self.mask_path, self._dense_mask(arguments))
        if self._original is None:  # Dynamo cannot make a bound method
            return type(self.module).forward(self.module, *bound.args, **bound.kwargs)
        return self.original(*bound.args, **bound.kwargs)

    def _get(self, arguments: dict[str, Any], path: Path) -> Any:
        value: Any = arguments
        for key in path:
            value = value.get(key) if isinstance(value, dict) else value[key]
        return value

    def _put(self, arguments: dict[str, Any], path: Path, value: Any) -> None:
        target: Any = arguments
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    def _dense_mask(self, arguments: dict[str, Any]) -> Tensor | None:
        mask = self._get(arguments, self.mask_path)  # type: ignore[arg-type]
        hidden = self._get(arguments, self.hidden_path)
        if mask is None or mask.dim() == 2:
            length, past, total = hidden.shape[1], 0, hidden.shape[1]
            cache = None if self.cache_path is None else self._get(arguments, self.cache_path)
            if cache is not None:
                past, total = self._cached(getattr(cache, "self_attention_cache", cache), length)
            mask = causal_mask_4d(mask, past, length, total, hidden.device)
            mask = mask.expand(hidden.shape[0], -1, -1, -1)
        return additive(mask, hidden.dtype) if self.additive_mask else mask

    def _cached(self, cache: Any, length: int) -> tuple[Any, int]:
        """Tokens cached before this call of ``length`` tokens, and keys that it will see."""
        layers, index = cache.layers, self.layer_idx
        if index is None or (index < len(layers) and hasattr(layers[index], "get_seq_length")):
            return cache.get_seq_length(index), cache.get_mask_sizes(length, index)[0]
        # It attends to the keys of an earlier layer, which has cached this call's tokens; or its
        # own layer does not exist yet, and the earlier ones hold nothing but this call's tokens.
        for layer in reversed(layers[:index]):
            keys = getattr(layer, "keys", None)
            if keys is not None and not getattr(layer, "is_sliding", False):
                return layer.get_seq_length() - length, keys.shape[-2]
        return 0, length


class ExactForward(_Forward):
    """Forward of a skipped site whose mask, in a transformed model, arrives as 2-D or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.exact(*args, **kwargs)

    def _arguments(self, module: nn.Module, original: Any) -> tuple[Any, ...]:
        return (
            module,
            original,
            self.mask_path,
            self.cache_path,
            self.hidden_path,
            self.additive_mask,
            self.layer_idx,
        )

    def __reduce__(self) -> Any:
        return ExactForward, self._arguments(self.module, self._original)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactForward:
        module = copy.deepcopy(self.module, memo)
        return ExactForward(*self._arguments(module, _rebound(self._original, module, memo)))


class SiteForward(_Forward):
    """Forward of a rewritten site: the generated code, behind the original signature."""

    def __init__(
        self,
        module: nn.Module,
        program: SiteProgram,
        original: Callable[..., Any] | None,
        layer_idx: int | None,
    ) -> None:
        super().__init__(
            module,
            original,
            program.mask,
            program.cache,
            program.hidden,
            program.additive_mask,
            layer_idx,
        )
        self.program = program
        label = type(module).__name__
        graph = _compile(program.source, _decode_globals(program.globals), label, "forward")
        source, names = self._entry()
        self.function = _compile(source, {**names, "_graph": graph}, f"{label} entry", "entry")

    def _entry(self) -> tuple[str, dict[str, Any]]:
        """A function with the original's parameters that picks out what the graph wants."""
        names: dict[str, Any] = {"_changes": _changes, "_given": _given}
        parameters: list[str] = []
        passed: list[str] = []
        variadic = None
        for index, (name, parameter) in enumerate(self.signature.parameters.items()):
            default = ""
            if parameter.default is not parameter.empty:
                names[f"_default_{index}"] = parameter.default
                default = f"=_default_{index}"
            star = ""
            if parameter.kind is parameter.VAR_POSITIONAL:
                star = "*"
            elif parameter.kind is parameter.VAR_KEYWORD:
                star = "**"
            if parameter.kind is parameter.VAR_KEYWORD:
                variadic = name
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(parameters):
                parameters.append("*")
            parameters.append(f"{star}{name}{default}")
            keyword = parameter.kind is parameter.KEYWORD_ONLY
            passed.append(f"{star}{name}" if star else f"{name}={name}" if keyword else name)
        tests = [f"_given({name})" for name in self.program.optional]
        named = [n for n in _CHANGES if n in self.signature.parameters]
        extra = "".join(f", {n}={n}" for n in named)
        rest = f"{variadic}" if variadic else "{}"
        tests.append(f"_changes(_self.module, {rest}{extra})")
        sizes = ""
        if self.program.conditions:
            hidden = _access(self.program.hidden, variadic)
            sizes = f"    rows, tokens = {hidden}.shape[:2]\n"
            tests += [f"not ({condition})" for condition in self.program.conditions]
        accesses = "".join(f", {_access(path, variadic)}" for path in self.program.inputs)
        source = (
            f"def entry(_self, {', '.join(parameters)}):\n"
            f"{sizes}"
            f"    if {' or '.join(tests)}:\n"
            f"        return _self.fall_back({', '.join(passed)})\n"
            f"    return _graph(_self.module{accesses})\n"
        )
        return source, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def fall_back(self, *args: Any, **kwargs: Any) -> Any:
        """A call that the generated code does not cover: full attention, by the original code."""
        if not torch.compiler.is_compiling():
            _counters.count_fallback(_ORIGINAL)
            _runtime.say_once(_ORIGINAL)
            self._remember(args, kwargs)
        return self.exact(*args, **kwargs)

    def _remember(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = self.signature.bind(*args, **kwargs).arguments
        hidden = self._get(arguments, self.hidden_path)
        has_cache = self.cache_path is not None and self.cache_path[0] in arguments
        cache = self._get(arguments, self.cache_path) if has_cache else None  # type: ignore[arg-type]
        _runtime.all_full(self.module.elastic_router, hidden, cache)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return SiteForward, (self.module, self.program, self._original, self.layer_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteForward:
        module = copy.deepcopy(self.module, memo)
        original = _rebound(self._original, module, memo)
        return SiteForward(module, self.program, original, self.layer_idx)


def _rebound(original: Any, module: nn.Module, memo: dict[int, Any]) -> Any:
    if isinstance(original, types.MethodType) and isinstance(original.__self__, nn.Module):
        return types.MethodType(original.__func__, module)
    return copy.deepcopy(original, memo)


def _given(value: Any) -> bool:
    return value is not None and not isinstance(value, (bool, int, float, str))


def _changes(module: nn.Module, kwargs: dict[str, Any], **named: Any) -> bool:
    given = {**kwargs, **named}
    if given.get("output_attentions") or given.get("is_causal") is False:
        return True
    if given.get("softcap") is not None or given.get("position_bias") is not None:
        return True
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    # Some models take the argument off before it reaches their attention modules.
    return not torch.compiler.is_compiling() and "attentions" in (_active_collector.get() or ())


class DecoderHook:
    """Forward pre-hook of the module that builds the masks.

    Eagerly it only tells that a call begins. While compiling it may add a mask: with no mask, no
    cache and no positions, transformers would look for packed sequences. While tracing it cannot
    read the positions, so it builds a dense mask in case. An all-ones mask (recognised again by
    :func:`elastic_compile._masks.is_unpadded_marker`) says there are none.
    """

    def __init__(self, parameters: tuple[str, ...]) -> None:
        self.parameters = parameters

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not torch.compiler.is_compiling():
            _state.begin_call()
            return None
        given = {self.parameters[index]: value for index, value in enumerate(args)}
        given.update(kwargs)
        for name in ("attention_mask", "position_ids", "cache", "past_key_values"):
            if given.get(name) is not None:
                return None
        inputs = given.get("input_ids")
        if inputs is None:
            inputs = given.get("inputs_embeds")
        if inputs is None or "attention_mask" not in self.parameters:
            return None
        given["attention_mask"] = _runtime.unpadded(inputs)
        return (), given


__all__ = ["DecoderHook", "ExactForward", "SiteForward", "SiteProgram", "encode_globals"]
