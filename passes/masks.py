"""Proving what a mask that a graph builds for itself means.

A mask of unknown origin is never dropped. One that the graph computes from index ranges, sizes and
at most a 2-D padding mask is evaluated, apart from the rest of the graph, at several lengths, and
is proven when it equals "causal", or "causal and padding", every time. A window or chunk shows
only at lengths beyond it, so the lengths exceed every number that the computation holds.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

_LONGEST = 1024
"""No proof above this length: the evaluated masks are dense."""


class Unproven(Exception):
    """Why a mask is not known to be causal."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a mask means: causal and, where there is one, the padding mask's columns."""

    padding: fx.Node | None
    """Placeholder of the 2-D padding mask [B, T] (true or 1: real), or None."""
    region: tuple[fx.Node, ...]
    """The nodes that compute the mask, in graph order."""


# Deterministic functions of sizes, indices and truth values, by name. Nothing random, nothing in
# place, and nothing that could hide a number from `_numbers`.
KNOWN = frozenset(
    "arange add sub mul neg unsqueeze expand view reshape _unsafe_view flatten slice getitem index "
    "select narrow le lt ge gt eq ne __and__ and_ bitwise_and logical_and __or__ or_ bitwise_or "
    "logical_or bitwise_not logical_not invert __invert__ to _to_copy type bool int float long "
    "ones zeros full new_ones new_zeros new_full ones_like zeros_like full_like tril triu where "
    "masked_fill cumsum diff cat transpose permute contiguous clone alias detach scalar_tensor "
    "squeeze repeat expand_as broadcast_to size sym_size any all tensor lift_fresh_copy".split()
)
_SHAPE_ONLY = frozenset(
    "new_ones new_zeros new_full ones_like zeros_like full_like size sym_size expand_as".split()
)


def op_name(node: fx.Node) -> str:
    """The operation of a node by its plain name, whatever dialect the graph is in."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    if node.op == "call_method":
        return str(target)
    return str(getattr(target, "__name__", target)) if node.op == "call_function" else ""


def _trusted(node: fx.Node) -> bool:
    if node.op == "call_method":
        return op_name(node) in KNOWN
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and op_name(node) in KNOWN
    module = str(getattr(target, "__module__", "") or "")
    ours = module.split(".")[0] in ("torch", "_operator", "operator") or target is getattr(
        operator, op_name(node), None
    )
    return node.op == "call_function" and ours and op_name(node) in KNOWN


def meaning(mask: fx.Node, query: fx.Node) -> Proof:
    """Prove that ``mask`` says causal, or causal and padding.

    Args:
        mask: The mask operand of an attention, [B or 1, 1 or Hq, S, S].
        query: Its query, [B, Hq, S, D].

    Raises:
        Unproven: It cannot be proven; the text says why.
    """
    region = _region(mask)
    numbers = _numbers(region)
    if numbers > _LONGEST:
        raise Unproven(f"the number {numbers} in its mask is too large to rule out a window")
    query_shape = _value(query).shape
    length = _expression(query_shape[2])
    static = isinstance(query_shape[2], int)
    sizes = [query_shape[2]] if static else [5, 11, 2 * numbers + 7]
    if static and query_shape[2] > _LONGEST:
        raise Unproven("the graph's fixed length is too large to evaluate its mask")
    leaves = [n for n in region if n.op == "placeholder"]
    inputs = [n for n in leaves if isinstance(_value(n), Tensor)]
    for node in inputs:
        value = _value(node)
        if not _shape_only(node, region) and (value.is_floating_point() or value.dim() != 2):
            raise Unproven(_OWN)
    candidates: list[fx.Node | None] = [None, *(n for n in inputs if not _shape_only(n, region))]
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        for trial in range(4):
            values = {
                node: _example(_value(node), length, size, trial, generator) for node in leaves
            }
            with _disable_current_modes(), torch.no_grad():
                try:
                    got = _visible(_evaluate(mask, region, values, length, size))
                except Unproven:
                    raise
                except Exception as error:
                    raise Unproven(f"{_OWN} ({type(error).__name__})") from error
                candidates = [c for c in candidates if _agrees(got, c, values, size)]
            if not candidates:
                raise Unproven(_OWN)
    return Proof(candidates[0], tuple(n for n in region if n.op != "placeholder"))


_OWN = (
    "its mask is not provably causal and padding (a bias, a window, another rule, or made by the "
    "caller)"
)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _expression(size: Any) -> Any:
    return getattr(getattr(size, "node", None), "expr", size)


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values ``node`` needs: of some operands only the shape counts."""
    if op_name(node) in _SHAPE_ONLY and node.args:
        operand = node.args[1] if op_name(node) == "expand_as" else node.args[0]
        return [n for n in node.all_input_nodes if n is not operand]
    return list(node.all_input_nodes)


def _region(mask: fx.Node) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    stack = [mask]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found[node] = None
        if node.op == "placeholder":
            continue
        if not _trusted(node):
            raise Unproven(_OWN)
        stack.extend(_inputs(node))
        if len(found) > 500:
            raise Unproven(_OWN)
    return [node for node in mask.graph.nodes if node in found]


def _shape_only(leaf: fx.Node, region: list[fx.Node]) -> bool:
    inside = set(region)
    return not any(user in inside and leaf in _inputs(user) for user in leaf.users)


def _numbers(region: list[fx.Node]) -> int:
    """The largest number written into the computation; fill values and open slices apart."""
    # Lowest values and infinities are what masked entries hold, not distances.
    fills = {torch.finfo(t).min for t in (torch.float32, torch.float16, torch.bfloat16)}
    fills |= {torch.finfo(torch.float64).min, float("-inf")}
    largest = 0
    for node in region:
        if node.op == "placeholder":
            continue
        for value in _plain((node.args, node.kwargs)):
            if isinstance(value, bool) or value in fills or value == 2**63 - 1:
                continue
            if value != value or abs(value) == float("inf"):
                raise Unproven(_OWN)
            largest = max(largest, int(abs(value)) + 1)
    return largest


def _plain(value: Any) -> list[int | float]:
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _plain(item)]
    if isinstance(value, dict):
        return [x for item in value.values() for x in _plain(item)]
    if isinstance(value, slice):
        return _plain((value.start, value.stop, value.step))
    return [value] if isinstance(value, (int, float)) else []


def _size(size: Any, length: Any, value: int) -> int:
    if isinstance(size, int):
        return size
    # Any other symbol is a batch.
    expression = _expression(size)
    symbols = {s: value if s == length else 2 for s in expression.free_symbols}
    return int(expression.subs(symbols))


def _example(meta: Any, length: Any, size: int, trial: int, generator: torch.Generator) -> Any:
    if isinstance(meta, (int, torch.SymInt)):
        return _size(meta, length, size)
    if not isinstance(meta, Tensor):
        raise Unproven(_OWN)
    shape = [_size(x, length, size) for x in meta.shape]
    if meta.dim() == 2 and meta.shape[1:] and not isinstance(meta.shape[1], int):
        # A padding mask may be longer than its batch's own symbol says, never of the batch's size.
        shape[1] = shape[1] if _expression(meta.shape[1]) == length else size
    with _disable_current_modes():
        if meta.is_floating_point() or trial == 0:
            return torch.ones(shape, dtype=meta.dtype)
        return torch.randint(0, 2, shape, generator=generator).to(meta.dtype)


def _evaluate(
    mask: fx.Node, region: list[fx.Node], values: dict[fx.Node, Any], length: Any, size: int
) -> Tensor:
    env = dict(values)

    def shaped(node: fx.Node) -> Any:
        meta = _value(node)
        if isinstance(meta, Tensor):
            shape = [_size(x, length, size) for x in meta.shape]
            return torch.empty(shape, dtype=meta.dtype)
        return meta

    def local(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return env[value] if value in env else shaped(value)
        if isinstance(value, torch.device) or (isinstance(value, str) and _is_device(value)):
            return torch.device("cpu")
        if isinstance(value, torch.SymInt):
            return _size(value, length, size)
        if isinstance(value, slice):
            return slice(local(value.start), local(value.stop), local(value.step))
        if isinstance(value, (tuple, list)):
            return (
                type(value)(local(x) for x in value)
                if type(value) in (tuple, list)
                else [local(x) for x in value]
            )
        return value

    for node in region:
        if node.op == "placeholder":
            continue
        args = [local(x) for x in node.args]
        kwargs = {k: local(v) for k, v in node.kwargs.items() if k != "pin_memory"}
        if node.op == "call_method":
            env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env[mask]


def _is_device(text: str) -> bool:
    return text.split(":")[0] in ("cpu", "cuda", "mps", "xpu", "meta")


def _visible(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise Unproven(_OWN)
    hidden = mask <= torch.finfo(mask.dtype).min
    if not bool((hidden | (mask == 0)).all()):
        raise Unproven("its mask adds a bias to the scores")
    return ~hidden


def _agrees(got: Tensor, padding: fx.Node | None, values: dict[fx.Node, Any], size: int) -> bool:
    if got.dim() not in (2, 4) or got.shape[-2:] != (size, size):
        return False
    expected = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
    if padding is not None:
        columns = values[padding].bool()
        if columns.shape[1] != size:
            return False
        expected = expected & columns[:, None, None, :]
    try:
        left, right = torch.broadcast_tensors(got, expected)
    except RuntimeError:
        return False
    return bool(torch.equal(left, right))
