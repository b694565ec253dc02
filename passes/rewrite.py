"""The pass: attention in an FX graph becomes tap, route and routed attention."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator

import torch
from optimum.fx.optimization import ReversibleTransformation
from torch import fx

from elastic_compile import _runtime as runtime
from elastic_compile._site import ElasticSite
from elastic_compile.config import ElasticConfig
from elastic_compile.passes import masks, matching
from elastic_compile.passes.masks import op_name
from elastic_compile.passes.matching import Match, Skip

ROUTER = "elastic_router"
"""Name of the router submodule that a rewritten attention module has."""
CACHE = "elastic_cache"
"""Name of the placeholder that brings the KV cache into a rewritten site graph."""


@dataclasses.dataclass(frozen=True)
class SiteResult:
    """What the pass did with one attention of a graph."""

    node: str
    rewritten: bool
    reason: str
    kv_heads: int = 0
    head_dim: int = 0
    tap_dim: int = 0
    path: str = ""
    """In a whole-model graph: the module that attends."""
    cls: str = ""


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one application of the pass did, kept in ``graph_module.meta["elastic_compile"]``."""

    sites: tuple[SiteResult, ...]

    @property
    def rewritten(self) -> int:
        """Number of rewritten attentions."""
        return sum(site.rewritten for site in self.sites)


class ElasticAttentionPass(ReversibleTransformation):
    """Rewrites every provably causal attention of a graph to the routed op.

    Works on graphs with traced shapes in the dialects of a captured site (``attention_site`` and
    ``cache_update`` markers) and of ATen or functional ``scaled_dot_product_attention``. Matches
    everything first and mutates afterwards; an error leaves the graph as it was.

    A captured site has one attention, and the module needs a submodule ``elastic_router``
    (:class:`elastic_compile._site.ElasticSite`) to run. With ``config`` the graph is a whole
    model's: every attention gets a router of its own, ``<path of its module>.elastic_router``,
    which the pass makes unless one is there, and masks that the graph builds are proven or the
    attention stays as it is. ``reverse`` takes those routers out again.

    Args:
        causal_masks: Names of mask placeholders that are proven to mean causal and padding.
            A mask that is not among them is never dropped: the site is skipped.
        hidden: Name of the hidden-states placeholder; None: the first one.
        kwargs_input: Name of a placeholder with the site's ``**kwargs``, handed on to
            ``cache.update``; None when the module has none.
        config: Settings of the routers of a whole-model graph; None for a captured site.
    """

    preserves_computation = True

    def __init__(
        self,
        causal_masks: tuple[str, ...] = (),
        hidden: str | None = None,
        kwargs_input: str | None = None,
        config: ElasticConfig | None = None,
    ) -> None:
        super().__init__()
        self.causal_masks = tuple(causal_masks)
        self.hidden = hidden
        self.kwargs_input = kwargs_input
        self.config = config

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the graph in place; the outcome is in ``meta["elastic_compile"]``."""
        whole = self.config is not None
        found = matching.find(graph_module.graph, self.causal_masks, self.hidden, whole)
        results = tuple(_result(m) for m in found)
        matches = [m for m in found if isinstance(m, Match)]
        if matches:
            backup = copy.deepcopy(graph_module.graph)
            made: list[str] = []
            try:
                for match in matches:
                    self._rewrite(graph_module, match, made)
            except BaseException:
                graph_module.graph = backup
                for name in made:
                    graph_module.delete_submodule(name)
                raise
        graph_module.meta["elastic_compile"] = PassResult(results)
        return graph_module

    def _router(self, module: fx.GraphModule, match: Match, made: list[str]) -> str:
        """Name of the match's router, made if it is not there."""
        place = match.place
        if self.config is None or place is None:
            return ROUTER
        name = f"{place.path}.{ROUTER}" if place.path else ROUTER
        if not _has_submodule(module, name):
            router = ElasticSite(
                self.config,
                kv_heads=match.kv_heads,
                head_dim=match.head_dim,
                tap_dim=int(matching.shape(match.tap)[3]),
                index=len(made),
                layer_idx=None,
                attention_dropout=0.0,
                interface=False,
                device=matching.device(match.key),
            )
            if not module.add_submodule(name, router):
                raise ValueError(f"the graph holds something else than a module at {name!r}")
            made.append(name)
        return name

    def _rewrite(self, module: fx.GraphModule, match: Match, made: list[str]) -> None:
        graph = module.graph
        name = self._router(module, match, made)
        cache = kwargs = None
        computed = set() if match.place is None else set(matching._ancestors(match.node))
        dead = {node for node in computed if not node.users}
        if match.update is not None:
            past_input = match.update.args[2]
            assert isinstance(past_input, fx.Node)
            with graph.inserting_before(past_input):
                cache = graph.placeholder(CACHE)
                if self.kwargs_input is not None:
                    kwargs = graph.placeholder(self.kwargs_input)
        # Everything of ours goes where its inputs are there: the past before the first use of
        # it, the route before the cache is written (a reset static cache is seen by past == 0).
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            router = graph.create_node("get_attr", name)
        past: fx.Node | int = 0
        if cache is not None:
            with graph.inserting_after(router):
                past = graph.call_function(runtime.past_length, (router, cache))
        if match.update is not None:
            self._replace_past(graph, match.update.args[2], past)  # type: ignore[arg-type]

        anchor = match.update if match.update is not None else match.node
        with graph.inserting_before(anchor):
            tap = match.tap
            if match.expanded:
                tap = self._of_new_tokens(graph, match)
            if match.tap_layout == "bshd":
                tap = graph.call_function(torch.ops.aten.transpose.int, (tap, 1, 2))
            route = graph.call_function(
                runtime.route, (router, tap, match.mask, cache, past), name="route"
            )
            if match.update is not None:
                key, value = match.update.args[:2]
                updated = graph.call_function(
                    runtime.cache_update,
                    (router, cache, key, value, route, match.mask, past, kwargs),
                )
                match.update.replace_all_uses_with(updated)
        if match.expanded:
            self._read_length(graph, match, updated)
        with graph.inserting_before(match.node):
            # Dropout follows the module's mode, not its router's. A whole graph's has none.
            training: fx.Node | bool = False
            if match.place is None:
                training = graph.create_node("get_attr", "training")
            out = graph.call_function(
                runtime.attention,
                (router, match.query, match.key, match.value, route, match.mask, past, training),
                {
                    "scale": match.scale,
                    "softcap": match.softcap,
                    "sinks": match.sinks,
                    "heads_last": match.dialect == "interface",
                },
                name="attention",
            )
        out.meta.update(match.node.meta)
        match.node.replace_all_uses_with(out)
        graph.erase_node(match.node)
        if match.update is not None:
            past_input = match.update.args[2]
            graph.erase_node(match.update)
            graph.erase_node(past_input)  # type: ignore[arg-type]
        if match.place is None:
            self._sweep(graph)
        else:
            _any_strides(out)
            self._sweep_orphans(graph, {*computed, *match.region} - dead)

    @staticmethod
    def _sweep_orphans(graph: fx.Graph, computed: set[fx.Node]) -> None:
        """Erase what only the replaced attention used (repeated keys, a dense mask)."""
        for node in reversed(list(graph.nodes)):
            if node not in computed or op_name(node) not in _ORPHANS:
                continue
            # Export's assertions about a value are no use of it.
            if all(op_name(user) == "_assert_tensor_metadata" for user in node.users):
                for user in list(node.users):
                    graph.erase_node(user)
                graph.erase_node(node)

    @staticmethod
    def _replace_past(graph: fx.Graph, past_input: fx.Node, past: fx.Node) -> None:
        for user in list(past_input.users):
            if user.target is torch.ops.aten.sym_size.int:
                user.replace_all_uses_with(past)
                graph.erase_node(user)

    @staticmethod
    def _of_new_tokens(graph: fx.Graph, match: Match) -> fx.Node:
        """The tap of keys that are computed from what is cached, for the call's own tokens.

        The routes are decided before the cache is written, so the few operations between them
        run once more, on the tokens that are about to be cached.
        """
        update = match.update
        assert update is not None
        total = matching.cached_length(update)
        before = set(itertools.takewhile(lambda node: node is not update, graph.nodes))
        length = graph.call_function(torch.ops.aten.sym_size.int, (update.args[0], 2))
        length.meta["val"] = matching.shape(update.args[0])[2]
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            if node in before:
                return node
            if node not in copies:
                value = node.meta.get("val")
                if matching.output_of_update(node) is not None:
                    copies[node] = update.args[node.args[1]]  # type: ignore[index,assignment]
                elif isinstance(value, torch.SymInt) and matching.same(value, total):
                    copies[node] = length
                else:
                    copies[node] = graph.node_copy(node, copied)
            return copies[node]

        return copied(match.tap)

    @staticmethod
    def _read_length(graph: fx.Graph, match: Match, updated: fx.Node) -> None:
        """Read the number of cached tokens from the cache: a static one returns its buffer."""
        assert match.update is not None
        total = matching.cached_length(match.update)
        with graph.inserting_after(updated):
            first = graph.call_function(operator.getitem, (updated, 0))
        with graph.inserting_after(first):
            length = graph.call_function(torch.ops.aten.sym_size.int, (first, 2))
        after = set(itertools.dropwhile(lambda node: node is not length, graph.nodes)) - {length}
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, torch.SymInt):
                continue
            if node is not length and matching.same(value, total):
                node.replace_all_uses_with(length, delete_user_cb=lambda user: user in after)
                if not node.users:
                    graph.erase_node(node)

    def _sweep(self, graph: fx.Graph) -> None:
        # Only what the rewrite orphaned (repeat_kv, mask slices): a general clean-up would
        # delete writes that have no users.
        for node in reversed(list(graph.nodes)):
            pure = node.op == "call_function" and (
                node.target in _SWEPT or node.target is torch.ops.aten.slice.Tensor
            )
            if pure and not node.users:
                graph.erase_node(node)

    def reverse(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Undo :meth:`transform`, from the rewritten nodes' own arguments alone."""
        graph = graph_module.graph
        for node in list(graph.nodes):
            if node.target is runtime.attention:
                self._restore(graph, node)
        used = {node.target for node in graph.find_nodes(op="get_attr")}
        for name, module in list(graph_module.named_modules()):
            # A captured site's router belongs to whoever put it there.
            made = isinstance(module, ElasticSite) and self.config is not None
            if made and name not in used:
                graph_module.delete_submodule(name)
        graph_module.meta.pop("elastic_compile", None)
        return graph_module

    @staticmethod
    def _restore(graph: fx.Graph, node: fx.Node) -> None:
        router, query, key, value, route, mask, past, training = node.args
        assert isinstance(route, fx.Node)
        scale, softcap, sinks = (node.kwargs[k] for k in ("scale", "softcap", "sinks"))
        updates = [u for u in route.users if u.target is runtime.cache_update]
        cache = route.args[3]
        past_input = None
        if updates:
            assert isinstance(cache, fx.Node) and isinstance(past, fx.Node)
            with graph.inserting_before(cache):
                past_input = graph.placeholder("past")
        for update in updates:
            new_key, new_value = update.args[2:4]
            with graph.inserting_before(update):
                marker = graph.call_function(matching.UPDATE, (new_key, new_value, past_input, -1))
            update.replace_all_uses_with(marker)
            graph.erase_node(update)
        with graph.inserting_before(node):
            if node.kwargs["heads_last"]:
                out = graph.call_function(
                    matching.SITE, (query, key, value, mask, sinks, scale, softcap)
                )
            else:
                # A 2-D mask was proven to be what a dense one meant; the dense one is gone.
                dense = isinstance(mask, fx.Node) and not _is_dense(mask)
                if dense:
                    mask = graph.call_function(runtime.dense_mask, (query, mask))
                out = graph.call_function(
                    torch.ops.aten.scaled_dot_product_attention.default,
                    (query, key, value, mask, 0.0, mask is None),
                    {"scale": scale, "enable_gqa": True},
                )
        out.meta.update(node.meta)
        node.replace_all_uses_with(out)
        graph.erase_node(node)
        orphans = [route.args[1]]
        graph.erase_node(route)
        while orphans:
            orphan = orphans.pop()
            if isinstance(orphan, fx.Node) and not orphan.users and orphan.op != "placeholder":
                orphans += orphan.all_input_nodes
                graph.erase_node(orphan)
        if isinstance(past, fx.Node):
            for user in list(past.users):
                with graph.inserting_before(user):
                    size = graph.call_function(torch.ops.aten.sym_size.int, (past_input, 0))
                user.replace_input_with(past, size)
            graph.erase_node(past)
        for leftover in (
            router,
            training,
            cache,
            *graph.find_nodes(op="placeholder", target="kwargs"),
        ):
            if isinstance(leftover, fx.Node) and not leftover.users:
                graph.erase_node(leftover)


_LAYOUT = frozenset(
    "transpose permute view reshape getitem slice select unsqueeze squeeze expand movedim swapaxes "
    "to _to_copy add mul dropout clone alias detach".split()
)


def _any_strides(out: fx.Node) -> None:
    """Let what reads the routed op's output take any strides.

    Its strides need not be those that torch SDPA had when the graph was traced: export drops a
    ``contiguous()`` that those did not need, and a view of them need not fit.
    """
    seen, stack = {out}, [out]
    while stack:
        for user in stack.pop().users:
            if user in seen or op_name(user) not in _LAYOUT:
                continue
            seen.add(user)
            stack.append(user)
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default
            elif user.op == "call_method" and user.target == "view":
                sizes = user.args[1:]
                if not any(isinstance(size, torch.dtype) for size in sizes):
                    user.target = "reshape"


def _has_submodule(module: fx.GraphModule, name: str) -> bool:
    try:
        return isinstance(module.get_submodule(name), ElasticSite)
    except AttributeError:
        return False


def _is_dense(mask: fx.Node) -> bool:
    value = mask.meta.get("val", mask.meta.get("example_value"))
    return not isinstance(value, torch.Tensor) or value.dim() != 2


_SWEPT = {
    torch.ops.aten.expand.default,
    torch.ops.aten.repeat.default,
    torch.ops.aten.repeat_interleave.self_int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.sym_size.int,
    operator.mul,
}


# What repeats keys or builds a mask: no effect but its value.
_ORPHANS = masks.KNOWN | {"repeat_interleave"}


def _result(found: Match | Skip) -> SiteResult:
    place = found.place or matching.Place("", "")
    if isinstance(found, Skip):
        kv_heads, head_dim = matching.geometry(found.node) if found.place is not None else (0, 0)
        return SiteResult(
            found.node.name, False, found.reason, kv_heads, head_dim, 0, place.path, place.cls
        )
    return SiteResult(
        found.node.name,
        True,
        "",
        found.kv_heads,
        found.head_dim,
        int(matching.shape(found.tap)[3]),
        place.path,
        place.cls,
    )
