"""Finding attention in an FX graph and deciding, with a reason, what may be rewritten.

Every form that attention takes in a graph is first brought to one: :class:`Match`. Nothing here
changes a graph.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from elastic_compile.passes import _markers  # noqa: F401  (registers the marker ops)

SITE = torch.ops.elastic_compile.attention_site.default
UPDATE = torch.ops.elastic_compile.cache_update.default
SDPA_TARGETS = (
    torch.ops.aten.scaled_dot_product_attention.default,
    F.scaled_dot_product_attention,
)


@dataclasses.dataclass(frozen=True)
class Skip:
    """An attention that stays as it is, and why."""

    node: fx.Node
    reason: str


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


def shape(node: Any) -> tuple[Any, ...]:
    """The traced shape of a node (``meta["val"]``, or Dynamo's ``example_value``)."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        raise KeyError(f"node {node} has no traced shape")
    return tuple(value.shape)


def same(a: Any, b: Any) -> bool:
    """Whether two traced sizes are the same number or the same expression; adds no guard."""
    a = getattr(getattr(a, "node", None), "expr", a)
    b = getattr(getattr(b, "node", None), "expr", b)
    return bool(a == b)


def find(graph: fx.Graph, causal_masks: tuple[str, ...], hidden: str | None) -> list[Match | Skip]:
    """Every attention of ``graph``, in order.

    Args:
        graph: A captured site or another graph with traced shapes.
        causal_masks: Names of placeholders proven to hold causal-and-padding masks.
        hidden: The placeholder of the hidden states; None: the first placeholder.
    """
    found: list[Match | Skip] = []
    for node in graph.nodes:
        if node.op == "call_function" and (node.target is SITE or node.target in SDPA_TARGETS):
            try:
                found.append(_match(node, graph, causal_masks, hidden))
            except _No as no:
                found.append(Skip(node, str(no)))
    return found


class _No(Exception):
    """Why a node is not rewritten."""


def _match(
    node: fx.Node, graph: fx.Graph, causal_masks: tuple[str, ...], hidden: str | None
) -> Match:
    call = _site_arguments(node) if node.target is SITE else _sdpa_arguments(node)
    query, key, value = call["query"], call["key"], call["value"]
    for operand in (query, key, value):
        if len(shape(operand)) != 4:
            raise _No("query, key and value are not [batch, heads, length, head size]")
    if node.target is not SITE:
        key, value = _grouped(key, value, query)
    kv_heads, head_dim = shape(key)[1], shape(key)[3]
    heads = shape(query)[1]
    if not all(isinstance(x, int) for x in (heads, kv_heads, head_dim)):
        raise _No("its head counts or head size are not constant")
    if kv_heads != shape(value)[1] or heads % kv_heads:
        raise _No(f"{heads} query heads do not divide into {kv_heads} key-value heads")

    update, expanded = _update_of(key, value)
    new_key: Any = update.args[0] if update is not None else key
    start = _placeholder(graph, hidden)
    if start not in _ancestors(new_key):
        raise _No(
            "its keys do not come from its hidden states (cross-attention, or another layer's keys)"
        )
    if not same(shape(new_key)[2], shape(query)[2]):
        raise _No("cross-attention, or keys of another length than the query's")
    if update is not None and not same(shape(key)[2], cached_length(update)):
        raise _No("its keys are not one for each cached token")
    mask = _causal_mask(call, causal_masks, update)
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
    )


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


def _sdpa_arguments(node: fx.Node) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    dropout = given.get("dropout_p", 0.0)
    if dropout != 0.0:
        raise _No(f"its attention dropout ({dropout}) is part of the traced call")
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


_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
}


def _grouped(key: fx.Node, value: fx.Node, query: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Undo ``repeat_kv`` where both operands went through it."""
    k, v = _unrepeated(key), _unrepeated(value)
    if k is None or v is None or shape(k)[1] != shape(v)[1]:
        return key, value
    return k, v


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """[B, Hkv, T, D] behind reshape(expand(x[:, :, None])), heads repeated side by side."""
    step: Any = node
    while step.target in _VIEWS and len(shape(step.args[0])) != 4:
        step = step.args[0]
        if step.target is torch.ops.aten.expand.default:
            break
    if step.target is not torch.ops.aten.expand.default or len(shape(step)) != 5:
        return None
    step = step.args[0]
    while step.target is torch.ops.aten.slice.Tensor and same_shape(step, step.args[0]):
        step = step.args[0]
    if step.target is not torch.ops.aten.unsqueeze.default or step.args[1] != 2:
        return None
    source: Any = step.args[0]
    while source.target is torch.ops.aten.slice.Tensor and same_shape(source, source.args[0]):
        source = source.args[0]
    return source


def same_shape(a: Any, b: Any) -> bool:
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
    while source.op == "call_function" and source.target is torch.ops.aten.slice.Tensor:
        # Older code cuts the mask to the key length; rows are never cut.
        if source.args[1] not in (-1, 3) and not same_shape(source, source.args[0]):
            break
        source = source.args[0]
    if source.op != "placeholder" or source.name not in causal_masks:
        raise _No(
            "its mask is not the plain causal one (a bias such as ALiBi was added, or the model "
            "or the caller built its own)"
        )
    return source


def _placeholder(graph: fx.Graph, name: str | None) -> fx.Node:
    for node in graph.find_nodes(op="placeholder"):
        if name is None or node.name == name:
            return node
    raise KeyError(f"no placeholder {name!r}")


def _ancestors(node: fx.Node) -> dict[fx.Node, None]:
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen[current] = None
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
        if source.op in ("call_module", "get_attr") or isinstance(
            value, (torch.Tensor, tuple, list)
        ):
            yield source


def _tap(key: fx.Node, hidden: fx.Node) -> tuple[fx.Node, str]:
    """The last node that all of ``key`` passes through before a position enters.

    Positions are whatever does not come from the hidden states: the rotary table's cos and sin,
    position ids, an arange. The node is a dominator of ``key`` below ``hidden``, so partial,
    interleaved, fused and absent rotary embeddings need no cases of their own.
    """
    order = [n for n in hidden.graph.nodes if n in _ancestors(key)]
    from_hidden: set[fx.Node] = set()
    positional: set[fx.Node] = set()
    for node in order:
        sources = list(_inputs(node))
        if node is hidden:
            from_hidden.add(node)
        elif node.op == "get_attr":
            continue
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


_SAME_VALUES = {*_VIEWS, torch.ops.aten.transpose.int}


def _unrotated_part(key: fx.Node, unrotated: set[fx.Node]) -> tuple[fx.Node, str] | None:
    """The part of concatenated keys that no position enters (multi-head latent attention).

    Only where the rotated part is shared: then nothing that sets one head apart is left out.
    """
    node: Any = key
    while node.target in _SAME_VALUES and len(shape(node.args[0])) == 4:
        node = node.args[0]
    if node.target is not torch.ops.aten.cat.default:
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
    while part.target in _VIEWS and same_shape(part, part.args[0]):
        part = part.args[0]
    expanded = part.target is torch.ops.aten.expand.default and len(shape(part.args[0])) == 4
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
