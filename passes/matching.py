"""Finding attention in an FX graph and deciding, with a reason, what may be rewritten.

Every form that attention takes in a graph is first brought to one: :class:`Match`. Nothing here
changes a graph.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from elastic_compile.passes import (
    _markers,  # noqa: F401  (registers the marker ops)
    masks,
)
from elastic_compile.passes.masks import op_name

SITE = torch.ops.elastic_compile.attention_site.default
UPDATE = torch.ops.elastic_compile.cache_update.default
SDPA_TARGETS = (
    torch.ops.aten.scaled_dot_product_attention.default,
    F.scaled_dot_product_attention,
    torch._C._nn.scaled_dot_product_attention,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """The module whose code an attention of a whole-model graph belongs to."""

    path: str
    """Qualified name, empty for the model itself."""
    cls: str


@dataclasses.dataclass(frozen=True)
class Skip:
    """An attention that stays as it is, and why."""

    node: fx.Node
    reason: str
    place: Place | None = None


@dataclasses.dataclass(frozen=True)
class Match:
    """An attention that can be rewritten, in canonical form (grouped key and value)."""

    node: fx.Node
    dialect: str
    query: fx.Node
    """[B, Hq, S, D]"""
    key: fx.Node
    """[B, Hkv, T, D], after the cache update, never repeated to the query heads"""
    value: fx.Node
    mask: fx.Node | None
    """The placeholder of a mask proven to mean causal and padding, or None for plain causal."""
    scale: Any
    """A number, a node, or None for D ** -0.5."""
    softcap: Any
    sinks: fx.Node | None
    update: fx.Node | None
    """The cache update, where there is one."""
    expanded: bool
    """Whether key and value are computed from what is cached (multi-head latent attention)."""
    tap: fx.Node
    """The key hidden states before rotary embedding."""
    tap_layout: str
    """``"bhsd"`` or ``"bshd"``."""
    kv_heads: int
    head_dim: int
    place: Place | None = None
    """In a whole-model graph: where the attention is."""
    region: tuple[fx.Node, ...] = ()
    """Nodes that computed a dense mask whose meaning was proven."""


def shape(node: Any) -> tuple[Any, ...]:
    """The traced shape of a node (``meta["val"]``, or Dynamo's ``example_value``)."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        raise KeyError(f"node {node} has no traced shape")
    return tuple(value.shape)


def device(node: fx.Node) -> torch.device:
    """Where a node's tensor was traced to be."""
    value: Any = node.meta.get("val", node.meta.get("example_value"))
    found: torch.device = value.device
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two traced sizes are the same number or the same expression; adds no guard."""
    a = getattr(getattr(a, "node", None), "expr", a)
    b = getattr(getattr(b, "node", None), "expr", b)
    return bool(a == b)


def find(
    graph: fx.Graph,
    causal_masks: tuple[str, ...],
    hidden: str | None,
    whole: bool = False,
) -> list[Match | Skip]:
    """Every attention of ``graph``, in order.

    Args:
        graph: A captured site or another graph with traced shapes.
        causal_masks: Names of placeholders proven to hold causal-and-padding masks.
        hidden: The placeholder of the hidden states; None: the first placeholder.
        whole: The graph is a whole model's: every attention is looked at within the module that
            it belongs to, and masks that the graph builds are proven.
    """
    found: list[Match | Skip] = []
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and (node.target is SITE or node.target in SDPA_TARGETS)
    ]
    places = [_places(node)[0] for node in nodes] if whole else []
    for index, node in enumerate(nodes):
        place = places[index] if whole else None
        try:
            if whole and places.count(places[index]) > 1:
                raise _No("it attends more than once in one forward")
            found.append(_match(node, graph, causal_masks, hidden, place))
        except _No as no:
            found.append(Skip(node, str(no), place))
        except KeyError as error:
            if not whole:
                raise
            found.append(Skip(node, f"its graph is not traced with shapes ({error})", place))
    return found


def geometry(node: fx.Node) -> tuple[int, int]:
    """(kv heads, head size) of an attention that stays as it is; zeros where unknown."""
    try:
        call = _site_arguments(node) if node.target is SITE else _sdpa_arguments(node, dropout=True)
        key, _ = _grouped(call["key"], call["value"], call["query"])
        _, heads, _, size = shape(key)
    except (KeyError, ValueError):
        return 0, 0
    return (heads, size) if isinstance(heads, int) and isinstance(size, int) else (0, 0)


class _No(Exception):
    """Why a node is not rewritten."""


def _match(
    node: fx.Node,
    graph: fx.Graph,
    causal_masks: tuple[str, ...],
    hidden: str | None,
    place: Place | None,
) -> Match:
    call = _site_arguments(node) if node.target is SITE else _sdpa_arguments(node)
    query, key, value = call["query"], call["key"], call["value"]
    for operand in (query, key, value):
        if len(shape(operand)) != 4:
            raise _No("query, key and value are not [batch, heads, length, head size]")
    if node.target is not SITE:
        key, value = _grouped(key, value, query)
    if place is not None:
        _refuse_cached(key, query)
    kv_heads, head_dim = shape(key)[1], shape(key)[3]
    heads = shape(query)[1]
    if not all(isinstance(x, int) for x in (heads, kv_heads, head_dim)):
        raise _No("its head counts or head size are not constant")
    if kv_heads != shape(value)[1] or heads % kv_heads:
        raise _No(f"{heads} query heads do not divide into {kv_heads} key-value heads")

    update, expanded = _update_of(key, value)
    new_key: Any = update.args[0] if update is not None else key
    # A whole graph may have no module's hidden states to start from.
    start = None if place is not None and hidden is None else _placeholder(graph, hidden)
    if start is not None and start not in _ancestors(new_key):
        raise _No(
            "its keys do not come from its hidden states (cross-attention, or another layer's keys)"
        )
    if not same(shape(new_key)[2], shape(query)[2]):
        raise _No("cross-attention, or keys of another length than the query's")
    if update is not None and not same(shape(key)[2], cached_length(update)):
        raise _No("its keys are not one for each cached token")
    region: tuple[fx.Node, ...] = ()
    if place is not None and call["mask"] is not None and not call["is_causal"]:
        try:
            proof = masks.meaning(call["mask"], query)
        except masks.Unproven as unproven:
            raise _No(str(unproven)) from None
        mask, region = proof.padding, proof.region
    else:
        mask = _causal_mask(call, causal_masks, update)

    if start is None:
        tap, layout = _tap_within(_before_empty(new_key), node)
    else:
        tap, layout = _tap(key if expanded else new_key, start)
    return Match(
        node=node,
        dialect="interface" if node.target is SITE else "sdpa",
        query=query,
        key=key,
        value=value,
        mask=mask,
        scale=call["scale"],
        softcap=call["softcap"],
        sinks=call["sinks"],
        update=update,
        expanded=expanded,
        tap=tap,
        tap_layout=layout,
        kv_heads=kv_heads,
        head_dim=head_dim,
        place=place,
        region=region,
    )


_ROUTES_ELSEWHERE = (
    "the routes were decided in the prompt's call, which this graph does not see; it stays full "
    "attention (elastic_compile.transform(model) keeps routes with the cache)"
)


def _refuse_cached(key: fx.Node, query: fx.Node) -> None:
    """A bare graph cannot route what continues a cache: earlier pre-rotary keys are gone."""
    if isinstance(shape(query)[2], int) and shape(query)[2] == 1:
        raise _No(f"it attends from one token (decode): {_ROUTES_ELSEWHERE}")
    if same(shape(key)[2], shape(query)[2]):
        return
    source: Any = key
    while op_name(source) in ("slice", "getitem", "to", "_to_copy", "contiguous", "clone"):
        source = source.args[0]
    written = any(op_name(user) in _WRITES and user.args[0] is source for user in source.users)
    if op_name(source) in ("cat", *_WRITES) or written or source.op == "placeholder":
        raise _No(f"it continues a KV cache: {_ROUTES_ELSEWHERE}")


_WRITES = ("index_copy_", "index_copy", "copy_", "index_put_", "index_put", "setitem")


def _before_empty(key: fx.Node) -> fx.Node:
    """The keys of this call behind a concatenation with an empty cache."""
    while op_name(key) == "cat":
        parts: Any = key.args[0] if key.args else key.kwargs["tensors"]
        filled = [part for part in parts if 0 not in shape(part)]
        if len(filled) != 1 or not same_shape(filled[0], key):
            break
        key = filled[0]
    return key


def _site_arguments(node: fx.Node) -> dict[str, Any]:
    query, key, value, mask, sinks, scale, softcap = node.args
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": mask,
        "sinks": sinks,
        "scale": scale,
        "softcap": softcap,
        # An interface call without a mask is causal; discovery refused the bidirectional ones.
        "is_causal": mask is None,
        "bottom_right": True,
    }


def _sdpa_arguments(node: fx.Node, dropout: bool = False) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    probability = given.get("dropout_p", 0.0)
    if probability != 0.0 and not dropout:
        raise _No(f"its attention dropout ({probability}) is part of the traced call")
    return {
        "query": given["query"],
        "key": given["key"],
        "value": given["value"],
        "mask": given.get("attn_mask"),
        "sinks": None,
        "scale": given.get("scale"),
        "softcap": None,
        "is_causal": given.get("is_causal", False),
        "bottom_right": False,
    }


_VIEWS = {"view", "reshape", "_unsafe_view", "clone", "contiguous", "flatten"}


def _grouped(key: fx.Node, value: fx.Node, query: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Undo ``repeat_kv`` where both operands went through it."""
    k, v = _unrepeated(key), _unrepeated(value)
    if k is None or v is None or shape(k)[1] != shape(v)[1]:
        return key, value
    return k, v


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """[B, Hkv, T, D] behind heads repeated side by side: by views and an expand, or by one op."""
    step: Any = node
    while op_name(step) in _VIEWS and same_shape(step, step.args[0]):
        step = step.args[0]
    if op_name(step) == "repeat_interleave":
        given = dict(zip(("self", "repeats", "dim"), step.args, strict=False)) | step.kwargs
        source = given.get("self", given.get("input"))
        fits = isinstance(given.get("repeats"), int) and given.get("dim") in (1, -3)
        return source if fits and isinstance(source, fx.Node) else None
    if op_name(step) in ("expand", "repeat") and len(shape(step.args[0])) == 4:
        one_head = shape(step.args[0])[1] == 1
        return step.args[0] if one_head and _same_but_heads(step.args[0], step) else None
    while op_name(step) in _VIEWS and len(shape(step.args[0])) != 4:
        step = step.args[0]
        if op_name(step) == "expand":
            break
    if op_name(step) != "expand" or len(shape(step)) != 5:
        return None
    step = _before_whole_slices(step.args[0])
    if op_name(step) == "unsqueeze":
        if step.args[1] != 2:
            return None
    elif not _indexes_new_axis(step):
        return None
    return _before_whole_slices(step.args[0])


def _before_whole_slices(node: Any) -> Any:
    # Not what a cache update returns: its source is no tensor.
    while op_name(node) in ("slice", "getitem") and _is_tensor(node.args[0]):
        if not same_shape(node, node.args[0]):
            break
        node = node.args[0]
    return node


def _indexes_new_axis(node: fx.Node) -> bool:
    """``x[:, :, None]``, and no more, as Dynamo leaves it."""
    index: Any = node.args[1] if op_name(node) == "getitem" else None
    if not isinstance(index, tuple) or len(index) < 3 or index[2] is not None:
        return False
    return all(item == slice(None) for place, item in enumerate(index) if place != 2)


def _same_but_heads(a: Any, b: Any) -> bool:
    x, y = shape(a), shape(b)
    return len(x) == len(y) == 4 and all(same(x[i], y[i]) for i in (0, 2, 3))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val", node.meta.get("example_value")), torch.Tensor)


def same_shape(a: Any, b: Any) -> bool:
    """Whether two nodes were traced with the same shape."""
    x, y = shape(a), shape(b)
    return len(x) == len(y) and all(same(i, j) for i, j in zip(x, y, strict=True))


def output_of_update(node: fx.Node) -> fx.Node | None:
    """The cache update that ``node`` is an output of."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and source.target is UPDATE else None


def cached_length(update: fx.Node) -> Any:
    """The traced number of tokens that a cache update returns."""
    return update.meta["val"][0].shape[2]


def _update_of(key: fx.Node, value: fx.Node) -> tuple[fx.Node | None, bool]:
    """The cache update behind key and value, and whether they are more than its outputs."""
    updates = [
        list(dict.fromkeys(filter(None, map(output_of_update, _ancestors(node)))))
        for node in (key, value)
    ]
    if updates[0] != updates[1] or len(updates[0]) > 1:
        raise _No("key and value do not come from the same cache update")
    if not updates[0]:
        return None, False
    return updates[0][0], output_of_update(key) is None or output_of_update(value) is None


_MASK_VIEWS = (torch.ops.aten.slice.Tensor,)


def _causal_mask(
    call: dict[str, Any], causal_masks: tuple[str, ...], update: fx.Node | None
) -> fx.Node | None:
    mask, is_causal = call["mask"], call["is_causal"]
    if isinstance(is_causal, fx.Node) or not isinstance(is_causal, (bool, int)):
        raise _No("is_causal is not a constant")
    if mask is None:
        if not is_causal:
            raise _No("bidirectional: neither a mask nor is_causal")
        if update is not None and not call["bottom_right"]:
            raise _No("is_causal with a cache: torch aligns it to the first cached key")
        return None
    if is_causal:
        raise _No("both a mask and is_causal")
    source = mask
    while source.op == "call_function" and source.target in _MASK_VIEWS:
        # Older code cuts the mask to the key length; rows are never cut.
        if source.args[1] not in (-1, 3) and not same_shape(source, source.args[0]):
            break
        source = source.args[0]
    if source.op != "placeholder" or source.name not in causal_masks:
        raise _No(
            "its mask is not the plain causal one (a bias such as ALiBi was added, or the model "
            "or the caller built its own)"
        )
    attends = (SITE, *SDPA_TARGETS, *_MASK_VIEWS)
    if any(u.target not in attends and _is_tensor(u) for u in source.users):
        raise _No("it uses its mask for more than attention")
    return source


def _placeholder(graph: fx.Graph, name: str | None) -> fx.Node:
    for node in graph.find_nodes(op="placeholder"):
        if name is None or node.name == name:
            return node
    raise KeyError(f"no placeholder {name!r}")


def _places(node: fx.Node) -> list[Place]:
    """The modules that were running at a node, innermost first; the model itself comes last."""
    found = []
    for path, cls in (node.meta.get("nn_module_stack") or {}).values():
        # Dynamo writes "L['self'].model.layers.0", export "model.layers.0".
        path = re.sub(r"^[LG](\[[^\]]*\])+\.?", "", str(path))
        name = cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2]
        found.append(Place(path, name))
    if not found or found[0].path:
        found.insert(0, Place("", "GraphModule"))
    return found[::-1]


def _is_weight(node: fx.Node) -> bool:
    """A parameter, a buffer or a number of the model: the same at every position."""
    if node.op == "get_attr":
        return True
    value = node.meta.get("val", node.meta.get("example_value"))
    if node.op != "placeholder" or not isinstance(value, torch.Tensor):
        return False
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    name = str(name() if callable(name) else name)
    return value.dim() == 0 or bool(re.search(r"\._(parameters|buffers)\[", name))


def _ancestors(node: fx.Node, inside: set[fx.Node] | None = None) -> dict[fx.Node, None]:
    """What ``node`` comes from; nodes outside of ``inside`` are found but not walked past."""
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen[current] = None
            if inside is None or current in inside:
                stack.extend(_inputs(current))
    return seen


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    """A node's tensor inputs: sizes do not carry key hidden states."""
    update = output_of_update(node)
    if update is not None:
        # Seen from the call's own tokens, the cache returns what it is given.
        new = update.args[node.args[1]]  # type: ignore[index]
        assert isinstance(new, fx.Node)
        yield new
        return
    for source in node.all_input_nodes:
        value = source.meta.get("val", source.meta.get("example_value"))
        if isinstance(value, torch.Size):
            continue
        # Nodes that another pass put in may have no traced value.
        unknown = "val" not in source.meta and "example_value" not in source.meta
        modules = source.op in ("call_module", "get_attr")
        if modules or unknown or isinstance(value, (torch.Tensor, tuple, list)):
            yield source


def _tap_within(key: fx.Node, attention: fx.Node) -> tuple[fx.Node, str]:
    """:func:`_tap` in a whole-model graph, where every later layer depends on positions.

    The hidden states are then what enters the attention's module through the first of its weights
    that the keys pass: the smallest enclosing module in which there is one such tensor.
    """
    nodes = list(attention.graph.nodes)
    belongs = {node: {place.path for place in _places(node)} for node in nodes}
    reason = _No("its keys do not come from its hidden states")
    for place in _places(attention):
        inside = {
            n for n in nodes if place.path in belongs[n] and n.op not in ("placeholder", "get_attr")
        }
        behind = _ancestors(key, inside)
        for node in (n for n in nodes if n in inside and n in behind):
            if not any(_is_weight(source) for source in _inputs(node)):
                continue
            entering = [
                n
                for n in _ancestors(node, inside)
                if n not in inside and not _is_weight(n) and _holds_features(n)
            ]
            if len(entering) == 1:
                try:
                    return _tap(key, entering[0], inside)
                except _No as no:
                    reason = no
            if entering:
                break
    raise reason


def _holds_features(node: fx.Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2


def _tap(key: fx.Node, hidden: fx.Node, inside: set[fx.Node] | None = None) -> tuple[fx.Node, str]:
    """The last node that all of ``key`` passes through before a position enters.

    Positions are whatever does not come from the hidden states: the rotary table's cos and sin,
    position ids, an arange. The node is a dominator of ``key`` below ``hidden``, so partial,
    interleaved, fused and absent rotary embeddings need no cases of their own.
    """
    ancestors = _ancestors(key, inside)
    order = [n for n in hidden.graph.nodes if n in ancestors]
    from_hidden: set[fx.Node] = set()
    positional: set[fx.Node] = set()
    for node in order:
        sources = list(_inputs(node))
        if node is hidden:
            from_hidden.add(node)
        elif node.op == "get_attr" or (inside is not None and _is_weight(node)):
            continue
        elif inside is not None and node not in inside:
            positional.add(node)
        elif not sources or node.op == "placeholder" or any(s in positional for s in sources):
            positional.add(node)
            # A rotary child is given a tensor beside the positions only for its dtype: what it
            # returns is a position. A norm after the rotation passes the keys on.
            rotary = node.op == "call_module" and any(
                s in positional and s not in from_hidden for s in sources
            )
            if not rotary and any(s in from_hidden for s in sources):
                from_hidden.add(node)
        elif any(s in from_hidden for s in sources):
            from_hidden.add(node)
    if key not in from_hidden:
        raise _No("its keys do not come from its hidden states")
    # Dominators of `key` on the paths from `hidden`, walking back: the frontier is one node.
    position = {node: index for index, node in enumerate(order)}
    frontier = {key}
    while True:
        latest = max(frontier, key=lambda n: position[n])
        if len(frontier) == 1 and latest not in positional:
            layout = _layout(latest, key)
            if layout is not None:
                return latest, layout
        if latest is hidden:
            part = _unrotated_part(key, from_hidden - positional)
            if part is not None:
                return part
            raise _No("no single [batch, kv heads, length, head size] of keys before positions")
        frontier.remove(latest)
        frontier |= {s for s in _inputs(latest) if s in from_hidden}


_SAME_VALUES = {*_VIEWS, "transpose"}


def _unrotated_part(key: fx.Node, unrotated: set[fx.Node]) -> tuple[fx.Node, str] | None:
    """The part of concatenated keys that no position enters (multi-head latent attention).

    Only where the rotated part is shared: then nothing that sets one head apart is left out.
    """
    node: Any = key
    while op_name(node) in _SAME_VALUES and len(shape(node.args[0])) == 4:
        node = node.args[0]
    if op_name(node) != "cat":
        return None
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    found = [part for part in parts if part in unrotated]
    if dim not in (-1, 3) or len(found) != 1:
        return None
    layout = _layout(found[0], key)
    if layout is None or not all(_shared(part, layout) for part in parts if part not in found):
        return None
    return found[0], layout


def _shared(part: Any, layout: str) -> bool:
    """Whether a part of the keys is one head's, expanded to all."""
    while op_name(part) in _VIEWS and same_shape(part, part.args[0]):
        part = part.args[0]
    expanded = op_name(part) == "expand" and len(shape(part.args[0])) == 4
    return expanded and same(shape(part.args[0])[layout.index("h")], 1)


def _layout(tap: fx.Node, key: fx.Node) -> str | None:
    batch, heads, length, dim = shape(key)
    value = tap.meta.get("val", tap.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return None
    got = tuple(value.shape)
    for name, want in (("bhsd", (batch, heads, length)), ("bshd", (batch, length, heads))):
        if len(got) == 4 and all(same(a, b) for a, b in zip(got[:3], want, strict=True)):
            # A wider one is a fused projection: queries and values with the keys.
            if isinstance(got[3], int) and got[3] <= dim:
                return name
    return None
