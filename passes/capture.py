"""Capturing one attention module as an FX graph whose child modules stay live.

``torch.export`` (non-strict) traces the module's own code with dynamic batch and sequence. The
children it calls (``q_proj``, ``k_norm``, ``o_proj`` …) become ``call_module`` nodes, so whatever
is installed there later (LoRA, quantised linears, hooks) still counts, and the cache becomes a
marker node: the model itself shows where and with what it caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter
from transformers.cache_utils import Cache

from elastic_compile._forward import ExactForward, SiteForward
from elastic_compile.passes import _markers, discovery
from elastic_compile.passes.discovery import SiteCall

PAST = 5
"""Cached tokens during capture: makes the key length differ from the query length."""

Path = tuple[Any, ...]


class CaptureError(Exception):
    """A site cannot be captured; the text is the reason that the user sees."""


class _TracingCache(Cache):
    """Stands for the KV cache while tracing: every update leaves a marker op."""

    def __init__(self, past: Tensor) -> None:
        super().__init__(layers=[])
        self.past = past
        self.updates: list[int] = []
        self.given_kwargs = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if args or set(kwargs) - {"kwargs"}:
            raise CaptureError("hands the cache arguments that are not known here")
        self.updates.append(layer_idx)
        self.given_kwargs = "kwargs" in kwargs
        return _markers.cache_update(key_states, value_states, self.past, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past.shape[0]

    def __getattribute__(self, name: str) -> Any:
        if name in ("layers", "get_mask_sizes", "crop", "reorder_cache", "is_sliding"):
            if self.__dict__.get("past") is not None:
                raise CaptureError(f"uses the cache's {name!r}, which is not known here")
        return super().__getattribute__(name)


@dataclasses.dataclass
class SiteGraph:
    """A captured site.

    ``graph`` has a placeholder per tensor input that it uses, named as in ``inputs``; children
    are ``call_module`` nodes relative to the site, its own parameters ``get_attr`` nodes.
    """

    graph: fx.Graph
    signature: inspect.Signature
    inputs: dict[str, Path]
    """Placeholder name -> where it comes from in the bound arguments, e.g. ``("cos_sin", 0)``."""
    hidden: str
    """The placeholder of the hidden states [B, S, …]."""
    mask: Path | None
    cache: Path | None
    past: str | None
    """The placeholder that stands for the cached length, where the graph uses it."""
    passes_kwargs: bool
    """Whether the module hands its ``**kwargs`` to ``cache.update``."""
    layer_idx: int | None
    optional: tuple[str, ...]
    """Arguments that were None while capturing: a call that gives one is not this graph's."""
    conditions: tuple[str, ...]
    """Python expressions in the hidden states' ``rows`` and ``tokens`` that this code rests on."""
    constants: dict[str, Tensor]


def unwrapped_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's own forward, beneath an accelerate hook's wrapper."""
    if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward"):
        return module._old_forward  # type: ignore[return-value]
    return module.forward


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a transform replaced, or the module's own."""
    forward = unwrapped_forward(module)
    return forward.original if isinstance(forward, (SiteForward, ExactForward)) else forward


def bind(signature: inspect.Signature, call: SiteCall) -> dict[str, Any]:
    """The call's arguments by parameter name, defaults filled in."""
    bound = signature.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def leaves(arguments: dict[str, Any]) -> dict[Path, Any]:
    """Path -> leaf of nested tuples, lists and mappings; anything else is a leaf."""
    found: dict[Path, Any] = {}

    def visit(path: Path, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                visit((*path, index), item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit((*path, key), item)
        else:
            found[path] = value

    for name, value in arguments.items():
        visit((name,), value)
    return found


def _rebuild(arguments: dict[str, Any], replaced: dict[Path, Any]) -> dict[str, Any]:
    def visit(path: Path, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            items = [visit((*path, index), item) for index, item in enumerate(value)]
            return type(value)(items) if type(value) in (tuple, list) else tuple(items)
        if isinstance(value, Mapping):
            return {key: visit((*path, key), item) for key, item in value.items()}
        return replaced.get(path, value)

    return {name: visit((name,), value) for name, value in arguments.items()}


class _Caller(nn.Module):
    """What is exported: rebuilds the site's arguments from flat tensors and calls its forward."""

    def __init__(self, site: nn.Module, build: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.site = site
        self.build = build
        self.signature = inspect.signature(unwrapped_forward(site))

    def forward(self, tensors: list[Tensor]) -> Any:
        arguments = self.build(tensors)
        positional, keyword = [], {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional.extend(arguments.get(name, ()))
            elif parameter.kind is parameter.VAR_KEYWORD:
                keyword.update(arguments.get(name, {}))
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(arguments[name])
            else:
                keyword[name] = arguments[name]
        return unwrapped_forward(self.site)(*positional, **keyword)


class _Child:
    """A child's forward while its site is traced: an opaque op instead of its own code."""

    def __init__(self, name: str, module: nn.Module, calls: list[_ChildCall]) -> None:
        self.name, self.module, self.calls = name, module, calls
        self.original = unwrapped_forward(module)
        self.state = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self.inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inside:
            return self.original(*args, **kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        ints = [x for x in flat if isinstance(x, torch.SymInt)]
        call = _ChildCall(self.name, flat, spec)
        token = len(self.calls)
        self.calls.append(call)

        def kernel(tensors: list[Tensor], ints: list[int]) -> list[Tensor]:
            return self.fake(call, tensors, ints)

        _markers.CALLS.kernels[token] = kernel
        outputs = _markers.child(tensors, ints, token)
        assert call.out_spec is not None
        return pytree.tree_unflatten(call.fill(outputs), call.out_spec)

    def fake(self, call: _ChildCall, tensors: list[Tensor], ints: list[int]) -> list[Tensor]:
        """Shapes of the child's outputs: its real code on fake tensors."""
        mode = getattr(tensors[0], "fake_mode", None) if tensors else None
        if mode is None:
            raise CaptureError(f"calls {self.name!r} without a tensor")
        device = tensors[0].device
        with mode:
            # An offloaded parameter is on meta until its hook brings it where the input is.
            # Under tensor parallelism a child's hooks hand it its shard: what it computes is local.
            state = {
                k: torch.empty(
                    _local_shape(v), dtype=v.dtype, device=device if v.is_meta else v.device
                )
                for k, v in self.state.items()
            }
        given, integers = iter(tensors), iter(ints)
        flat = [
            next(given)
            if isinstance(x, Tensor)
            else next(integers)
            if isinstance(x, torch.SymInt)
            else x
            for x in call.flat
        ]
        args, kwargs = pytree.tree_unflatten(flat, call.spec)
        self.inside = True
        try:
            output = torch.func.functional_call(self.module, state, args, kwargs)
        finally:
            self.inside = False
        out, call.out_spec = pytree.tree_flatten(output)
        call.constants = [None if isinstance(x, Tensor) else (x,) for x in out]
        # An op's output may not be its input (nn.Identity, dropout in eval).
        return [x.clone() for x in out if isinstance(x, Tensor)]


def _local_shape(tensor: Tensor) -> torch.Size:
    shard = getattr(tensor, "_local_tensor", None)  # a DTensor's
    return tensor.shape if shard is None else shard.shape


@dataclasses.dataclass
class _ChildCall:
    name: str
    flat: list[Any]
    spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec | None = None
    constants: list[tuple[Any] | None] = dataclasses.field(default_factory=list)

    def fill(self, outputs: list[Tensor]) -> list[Any]:
        tensors = iter(outputs)
        return [next(tensors) if c is None else c[0] for c in self.constants]


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextlib.contextmanager
def _opaque_children(
    site: nn.Module, children: list[nn.Module], calls: list[_ChildCall]
) -> Iterator[None]:
    names = {id(child): name for name, child in site.named_modules() if child is not site}
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for child in children:
            if id(child) not in names:
                raise CaptureError(f"calls a {type(child).__name__} that is not its own submodule")
            keep = {k: child.__dict__[k] for k in ("forward", *_HOOKS) if k in child.__dict__}
            opaque = _Child(names[id(child)], child, calls)
            saved.append((child, keep))
            # Hooks run around the live child at run time; they must not be traced in.
            child.__dict__.update({name: OrderedDict() for name in _HOOKS})
            child.__dict__["forward"] = opaque
        yield
    finally:
        for child, keep in saved:
            child.__dict__.pop("forward", None)
            child.__dict__.update(keep)
        _markers.CALLS.kernels.clear()


def _dims(first: Tensor | None, plain: Tensor, batch: int, length: int) -> dict[int, Any]:
    """The dynamic dimensions of an input: those that differ between the two recorded runs."""
    dims: dict[int, Any] = {}
    for index, size in enumerate(plain.shape):
        if first is not None and first.dim() == plain.dim():
            if first.shape[index] != size:
                dims[index] = Dim.DYNAMIC
        elif size in (batch, length):
            dims[index] = Dim.DYNAMIC
    return dims


def capture(site: nn.Module, first: SiteCall, plain: SiteCall, implementation: str) -> SiteGraph:
    """Capture ``site`` from its recorded calls (with cache and mask; plain).

    Args:
        site: An attention module.
        first: Its call with a mask and a cache, where the model has them.
        plain: Its call without either.
        implementation: As for :func:`elastic_compile.passes.discovery.discover`.

    Returns:
        The graph and where its inputs come from.

    Raises:
        CaptureError: With the reason, for the report.
    """
    try:
        graph = _capture(site, first, plain, implementation)
        unread = [
            n for n in graph.optional if _unread(n, graph, site, first, plain, implementation)
        ]
        return dataclasses.replace(
            graph, optional=tuple(name for name in graph.optional if name not in unread)
        )
    except CaptureError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CaptureError(
            f"its code cannot be traced ({type(error).__name__}: {text[0] if text else ''})"
        ) from error


class _Untouchable:
    """Stands for a given argument: what reads it fails, and a test for None takes its branch."""

    def __bool__(self) -> bool:
        raise CaptureError("reads an argument that was None")


def _unread(
    name: str,
    graph: SiteGraph,
    site: nn.Module,
    first: SiteCall,
    plain: SiteCall,
    implementation: str,
) -> bool:
    """Whether the module's code is the same when the argument ``name``, None so far, is given.

    Some modules take positions only to hand them on to Flash attention; generation gives them.
    """
    parameter = graph.signature.parameters[name]
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        return False

    def given(call: SiteCall) -> SiteCall:
        bound = graph.signature.bind(*call.args, **call.kwargs)
        bound.arguments[name] = _Untouchable()
        return dataclasses.replace(call, args=bound.args, kwargs=bound.kwargs)

    try:
        other = _capture(site, given(first), given(plain), implementation)
    except Exception:
        return False
    return str(other.graph) == str(graph.graph) and other.inputs == graph.inputs


def _capture(site: nn.Module, first: SiteCall, plain: SiteCall, implementation: str) -> SiteGraph:
    signature = inspect.signature(unwrapped_forward(site))
    a, b = bind(signature, first), bind(signature, plain)
    in_first, in_plain = leaves(a), leaves(b)
    mask_object = first.attention[0].mask
    mask = next((p for p, x in in_first.items() if x is mask_object and x is not None), None)
    cache = next((p for p, x in in_first.items() if isinstance(x, Cache)), None)

    hidden = next(
        (p for p, x in in_plain.items() if isinstance(x, Tensor) and x.is_floating_point()), None
    )
    if hidden is None:
        raise CaptureError("has no floating-point input")
    sample = in_plain[hidden]
    if sample.dim() < 2:
        raise CaptureError("its first input is not [batch, sequence, …]")
    batch, length = sample.shape[:2]

    paths: list[Path] = []
    values: list[Tensor] = []
    shapes: list[dict[int, Any]] = []
    for path, value in in_plain.items():
        if not isinstance(value, Tensor) or path == mask:
            continue
        other = in_first.get(path)
        paths.append(path)
        values.append(value)
        shapes.append(_dims(other if isinstance(other, Tensor) else None, value, batch, length))
    if mask is not None:
        total = length + (PAST if cache is not None else 0)
        paths.append(mask)
        values.append(torch.ones(batch, 1, length, total, dtype=torch.bool, device=sample.device))
        shapes.append({0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC})
    if cache is not None:
        paths.append(("<past>",))
        values.append(torch.zeros(PAST, device=sample.device))
        shapes.append({0: Dim.DYNAMIC})

    caches: list[_TracingCache] = []
    given: list[tuple[dict[str, Any], dict[Path, Any]]] = []

    def build(tensors: list[Tensor]) -> dict[str, Any]:
        replaced: dict[Path, Any] = dict(zip(paths, tensors, strict=True))
        if cache is not None:
            caches.append(_TracingCache(replaced.pop(("<past>",))))
            replaced[cache] = caches[-1]
        # The plain call has None where the mask and the cache go.
        arguments = _rebuild(b, replaced)
        given.append((arguments, leaves(arguments)))
        return arguments

    calls: list[_ChildCall] = []
    caller = _Caller(site, build).eval()
    with contextlib.ExitStack() as stack:
        marker = functools.partial(discovery.site_marker, implementation)
        stack.enter_context(discovery.probing(site, marker, _no_mask))
        stack.enter_context(_opaque_children(site, plain.children, calls))
        stack.enter_context(torch.no_grad())
        program = torch.export.export(caller, (values,), dynamic_shapes=[shapes], strict=False)
    conditions = _conditions(program, paths.index(hidden))
    for arguments, before in given:
        after = leaves(arguments)
        if after.keys() != before.keys() or any(after[p] is not x for p, x in before.items()):
            raise CaptureError("stores what it computes in an argument, for other layers to read")
    updates = caches[-1].updates if caches else []
    if len(updates) > 1:
        raise CaptureError("updates the cache more than once")
    return _Importer(program, site, calls, paths).site_graph(
        signature=signature,
        hidden=hidden,
        mask=mask,
        cache=cache if updates else None,
        passes_kwargs=bool(caches) and caches[-1].given_kwargs,
        layer_idx=updates[0] if updates else None,
        conditions=conditions,
        optional=tuple(
            name
            for name, value in b.items()
            if value is None and (name,) not in (mask, cache) and not isinstance(a[name], Cache)
        ),
    )


def _conditions(program: torch.export.ExportedProgram, hidden: int) -> tuple[str, ...]:
    """What the code asked about the rows and tokens of input ``hidden``: one branch was captured.

    It is what the shape environment holds beside which of the inputs' sizes are equal: a branch of
    the module's, or the end of a table that it slices.

    Raises:
        CaptureError: A condition on something else than rows and tokens.
    """
    sizes: set[Any] = set()
    names: dict[Any, Any] = {}
    found: dict[str, None] = {}
    environment: Any = None
    for node in program.graph.find_nodes(op="placeholder"):
        value: Any = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                sizes |= size.node.expr.free_symbols
                environment = size.node.shape_env
        if node.name == program.graph_signature.user_inputs[hidden]:
            names = {
                size.node.expr: sympy.Symbol(name, integer=True, positive=True)
                for name, size in zip(("rows", "tokens"), value.shape[:2], strict=True)
                if isinstance(size, torch.SymInt)
            }
    for guard in environment.guards if sizes else ():
        # With sizes that were found equal replaced by one another, their equality is true. Symbols
        # that no input has are of a view's base, say.
        condition = guard.expr.xreplace(environment.replacements)
        if not condition.free_symbols <= sizes or _holds_everywhere(condition):
            continue
        if not condition.free_symbols <= set(names):
            raise CaptureError(f"its code depends on sizes in a way that is not kept: {condition}")
        found[PythonPrinter().doprint(condition.xreplace(names))] = None
    return tuple(found)


_SIZES = (2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31, 32, 64, 100, 127, 128, 1000, 1024, 65536, 1 << 20)


def _holds_everywhere(condition: Any) -> bool:
    """Whether sizes of every kind fulfil a condition, as those do that operations ask about strides
    (tried out: sympy proves few of them)."""
    symbols = sorted(condition.free_symbols, key=str)
    draw = random.Random(0)
    tries = [[size] * len(symbols) for size in _SIZES]
    tries += [[draw.choice(_SIZES) for _ in symbols] for _ in range(80)]
    return all(
        condition.xreplace(dict(zip(symbols, map(sympy.Integer, sizes), strict=True))) is sympy.true
        for sizes in tries
    )


def _no_mask(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError("builds a mask of its own")


class _Importer:
    """Turns an exported program into the site's graph."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        site: nn.Module,
        calls: list[_ChildCall],
        paths: list[Path],
    ) -> None:
        self.program, self.site, self.calls, self.paths = program, site, calls, paths
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.inputs: dict[str, Path] = {}
        self.nodes: dict[Path, fx.Node] = {}
        self.constants: dict[str, Tensor] = {}

    def site_graph(self, *, hidden: Path, **fields: Any) -> SiteGraph:
        self._placeholders()
        for node in self.program.graph.nodes:
            if node.op == "placeholder" or node in self.env:
                continue
            if node.op == "output":
                self._output(node)
            elif node.target is torch.ops.elastic_compile.child.default:
                self._child(node)
            else:
                self.env[node] = self.graph.node_copy(node, self._lookup)
        self._clean(self.nodes[hidden])
        hidden_name = self.nodes[hidden].name
        past = self.nodes.get(("<past>",))
        inputs = {}
        for path, node in list(self.nodes.items()):
            if path == ("<past>",):
                continue
            if node.users or node.name == hidden_name:
                inputs[node.name] = path
            else:
                self.graph.erase_node(node)
        if past is not None and not past.users:
            self.graph.erase_node(past)
            past = None
        return SiteGraph(
            graph=self.graph,
            inputs=inputs,
            hidden=hidden_name,
            past=past.name if past is not None else None,
            constants=self.constants,
            **fields,
        )

    def _lookup(self, node: fx.Node) -> Any:
        return self.env[node]

    def _placeholders(self) -> None:
        user = iter(self.paths)
        values = {node.name: node for node in self.program.graph.find_nodes(op="placeholder")}
        for spec in self.program.graph_signature.input_specs:
            node = values[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                path = next(user)
                name = "_".join(str(part) for part in path).strip("<>")
                new = self.graph.placeholder(name)
                self.nodes[path] = new
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                target = str(spec.target)
                if not node.users:
                    continue
                if not target.startswith("site."):
                    raise CaptureError(f"uses {target!r}, which is not its own")
                new = self.graph.get_attr(target.removeprefix("site."))
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                if not node.users:
                    continue
                name = f"elastic_constant_{len(self.constants)}"
                self.constants[name] = self.program.constants[str(spec.target)].detach()
                new = self.graph.get_attr(name)
            else:
                raise CaptureError(f"its graph has an input of kind {spec.kind.name}")
            new.meta = dict(node.meta)
            self.env[node] = new

    def _child(self, node: fx.Node) -> None:
        tensors, ints, token = node.args
        call = self.calls[token]  # type: ignore[index]
        given, integers = iter(tensors), iter(ints)  # type: ignore[arg-type]
        flat = [
            self.env[next(given)]
            if isinstance(x, Tensor)
            else self._value(next(integers))
            if isinstance(x, torch.SymInt)
            else x
            for x in call.flat
        ]
        args, kwargs = pytree.tree_unflatten(flat, call.spec)
        new = self.graph.call_module(call.name, args, kwargs)
        assert call.out_spec is not None
        outputs = {user.args[1]: user for user in node.users}
        paths = [path for path, _ in pytree.tree_flatten_with_path(_skeleton(call))[0]]
        tensor_paths = [p for p, c in zip(paths, call.constants, strict=True) if c is None]
        new.meta["nn_module"] = call.name
        for index, user in outputs.items():
            out = new
            for key in tensor_paths[index]:  # type: ignore[index]
                step = key.idx if isinstance(key, pytree.SequenceKey) else getattr(key, "key")  # noqa: B009
                out = self.graph.call_function(operator.getitem, (out, step))
            out.meta.update(user.meta)
            self.env[user] = out

    def _value(self, value: Any) -> Any:
        return self.env[value] if isinstance(value, fx.Node) else value

    def _output(self, node: fx.Node) -> None:
        spec = self.program.call_spec.out_spec
        flat = [self._value(x) for x in node.args[0]]  # type: ignore[union-attr]
        self.graph.output(pytree.tree_unflatten(flat, spec))

    def _clean(self, hidden: fx.Node) -> None:
        """Drop export's assertions; read batch and sequence from the hidden states only."""
        checks = {
            torch.ops.aten._assert_tensor_metadata.default,
            torch.ops.aten._assert_scalar.default,
            torch.ops.aten.sym_constrain_range_for_size.default,
        }
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target in checks:
                self.graph.erase_node(node)
        sizes: dict[Any, tuple[int, int]] = {}
        for index, size in enumerate(hidden.meta["val"].shape[:2]):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, (index, index))
        for node in list(self.graph.nodes):
            if node.target is not torch.ops.aten.sym_size.int:
                continue
            source, index = node.args
            known = sizes.get(getattr(getattr(node.meta["val"], "node", None), "expr", None))
            # Export may read them from the rotary table, whose batch at run time is 1.
            if source.op == "placeholder" and source is not hidden and known is not None:
                node.args = (hidden, known[0])
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("get_attr", "call_function") and not node.users:
                if not _has_effect(node):
                    self.graph.erase_node(node)
            elif node.target is torch.ops.aten.view.default:
                # A view that fits the traced strides need not fit those of the routed op, and
                # export drops a `contiguous()` that its own strides did not need.
                node.target = torch.ops.aten.reshape.default
        _concatenate(self.graph)
        _live_dropout(self.graph)


def _skeleton(call: _ChildCall) -> Any:
    assert call.out_spec is not None
    return pytree.tree_unflatten(list(range(len(call.constants))), call.out_spec)


def _has_effect(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _concatenate(graph: fx.Graph) -> None:
    """A new tensor that is filled part by part becomes the concatenation of its parts.

    A write through a view is no edge of the graph: what is read from the tensor afterwards would
    seem not to depend on what was written.
    """
    fresh = (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in fresh:
            continue
        writes = [
            (view, next(iter(view.users)))
            for view in node.users
            if view.target is torch.ops.aten.slice.Tensor and len(view.users) == 1
        ]
        writes = [(v, c) for v, c in writes if c.target is torch.ops.aten.copy_.default]
        writes = [(v, c) for v, c in writes if c.args[0] is v and not c.users]
        if not _covers(node, writes):
            continue
        dim = writes[0][0].args[1]
        last = max((c for _, c in writes), key=list(graph.nodes).index)
        with graph.inserting_after(last):
            whole = graph.call_function(
                torch.ops.aten.cat.default, ([c.args[1] for _, c in writes], dim)
            )
        whole.meta.update(node.meta)
        for view, copy in writes:
            graph.erase_node(copy)
            graph.erase_node(view)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _covers(node: fx.Node, writes: list[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether the writes fill the whole tensor along one dimension, each once and in its dtype."""
    end = 0
    for view, copy in writes:
        dim, low, high = view.args[1], view.args[2], view.args[3]
        part, value = copy.args[1], view.meta["val"]
        if dim != writes[0][0].args[1] or low != end or len(view.args) > 4:
            return False
        if not isinstance(high, int) or not isinstance(part, fx.Node):
            return False
        given = part.meta["val"]
        same = len(given.shape) == len(value.shape) and all(
            str(a) == str(b) for a, b in zip(given.shape, value.shape, strict=True)
        )
        if not same or given.dtype != value.dtype:
            return False
        end += value.shape[dim]
    readers = [user for user in node.users if all(user is not view for view, _ in writes)]
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    later = all(order[r] > order[c] for r in readers for _, c in writes)
    return bool(writes) and later and end == node.meta["val"].shape[writes[0][0].args[1]]


def _live_dropout(graph: fx.Graph) -> None:
    """Dropout of the module's own code follows ``self.training``, not the mode at capture."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.dropout.default:
            with graph.inserting_before(node):
                training = graph.create_node("get_attr", "training")
            node.args = (node.args[0], node.args[1], training)
