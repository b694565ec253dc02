"""The pass: op and match counts, node arguments, parity, reversal, and nothing half-done."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from elastic_compile import ElasticConfig, _runtime
from elastic_compile._site import ElasticSite
from elastic_compile.passes import matching
from elastic_compile.passes.rewrite import ROUTER, ElasticAttentionPass

from . import graphs

SINK, LOCAL = 2, 3
REWRITABLE = [
    (graphs.Attention, ()),
    (graphs.Rotary, ()),
    (graphs.PartialRotary, ()),
    (graphs.NativeGrouped, ()),
]


def site() -> ElasticSite:
    return ElasticSite(
        ElasticConfig(sink=SINK, local=LOCAL),
        kv_heads=graphs.KV_HEADS,
        head_dim=graphs.SIZE,
        tap_dim=graphs.SIZE,
        index=0,
        layer_idx=None,
        attention_dropout=0.0,
        interface=False,
    )


def prepared(kind):
    torch.manual_seed(0)
    module, arguments = kind(), graphs.inputs(kind)
    graph_module = graphs.graph_of(module, arguments)
    graph_module.add_module(ROUTER, site())
    return module, arguments, graph_module


def targets(graph_module):
    return [node.target for node in graph_module.graph.nodes]


@pytest.mark.parametrize(("kind", "masks"), REWRITABLE, ids=lambda x: getattr(x, "__name__", None))
def test_counts_arguments_and_parity(kind, masks):
    module, arguments, graph_module = prepared(kind)
    rewritten = ElasticAttentionPass(masks)(graph_module)
    assert rewritten is graph_module
    result = graph_module.meta["elastic_compile"]
    assert (len(result.sites), result.rewritten) == (1, 1)
    names = targets(graph_module)
    assert names.count(_runtime.route) == names.count(_runtime.attention) == 1
    assert not set(names) & set(matching.SDPA_TARGETS)
    # Grouped keys reach the op: nothing repeats them any more.
    assert torch.ops.aten.expand.default not in names
    (call,) = graph_module.graph.find_nodes(op="call_function", target=_runtime.attention)
    router, _, _, _, route, mask, past, training = call.args
    assert router.target == ROUTER and mask is None and past == 0
    assert training.target == "training"
    assert call.kwargs["scale"] == (0.3 if kind is graphs.NativeGrouped else None)
    assert route.target is _runtime.route
    with torch.no_grad():
        torch.testing.assert_close(graph_module(*arguments), module(*arguments))
        # Other sizes than those that were traced, one row and one token included.
        for batch, length in ((1, 1), (3, 17)):
            other = graphs.inputs(kind, batch, length)
            torch.testing.assert_close(graph_module(*other), module(*other))


def test_sparse_routes_mean_the_explicit_mask():
    module, arguments, graph_module = prepared(graphs.Rotary)
    ElasticAttentionPass()(graph_module)
    x, cos, sin = arguments
    graph_module.get_submodule(ROUTER).forced.copy_(torch.tensor([[0, 1]], dtype=torch.int32))
    i = torch.arange(x.shape[1])
    causal = i[:, None] >= i
    streaming = causal & ((i < SINK) | (i[:, None] - i < LOCAL))
    n = graphs.HEADS // graphs.KV_HEADS
    mask = torch.stack([causal] * n + [streaming] * n)
    q, k, v = module.project(x)
    q, k = graphs.rotate(q, cos, sin), graphs.rotate(k, cos, sin)
    with torch.no_grad():
        expected = module.merge(module.attend(q, k, v, attn_mask=mask))
        got = graph_module(*arguments)
        torch.testing.assert_close(got, expected)
        assert (got - module(*arguments)).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "masks"), REWRITABLE, ids=lambda x: getattr(x, "__name__", None))
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "deepcopy"])
def test_reverse_restores_the_computation(kind, masks, copied):
    module, arguments, graph_module = prepared(kind)
    transformation = ElasticAttentionPass(masks)
    transformation(graph_module)
    if copied:
        # Copies lose optimum's marks on nodes: the reversal may not rest on them.
        graph_module = copy.deepcopy(graph_module)
    transformation(graph_module, reverse=True)
    names = targets(graph_module)
    assert _runtime.attention not in names and _runtime.route not in names
    assert sum(name in matching.SDPA_TARGETS for name in names) == 1
    with torch.no_grad():
        torch.testing.assert_close(graph_module(*arguments), module(*arguments))


@pytest.mark.parametrize(
    "kind",
    [graphs.Alibi, graphs.Sliding, graphs.Bidirectional, graphs.Cross, graphs.Dropped],
    ids=lambda kind: kind.__name__,
)
def test_near_miss_leaves_the_graph_as_it_was(kind):
    _, _, graph_module = prepared(kind)
    before = str(graph_module.graph)
    ElasticAttentionPass(("mask",))(graph_module)
    assert str(graph_module.graph) == before
    result = graph_module.meta["elastic_compile"]
    assert result.rewritten == 0 and result.sites[0].reason


def test_an_error_while_rewriting_rolls_back(monkeypatch):
    _, arguments, graph_module = prepared(graphs.Rotary)
    before = str(graph_module.graph)
    expected = graph_module(*arguments)

    def fail(self, graph):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(ElasticAttentionPass, "_sweep", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        ElasticAttentionPass().transform(graph_module)
    assert str(graph_module.graph) == before
    graph_module.recompile()
    torch.testing.assert_close(graph_module(*arguments), expected)


def test_signature_depends_on_the_settings():
    assert ElasticAttentionPass(("a",)).signature != ElasticAttentionPass(("b",)).signature
    assert ElasticAttentionPass(("a",)).signature == ElasticAttentionPass(("a",)).signature


def test_composes_with_optimum():
    from optimum.fx.optimization import ChangeTrueDivToMulByInverse, compose

    module, arguments, graph_module = prepared(graphs.Rotary)
    composed = compose(ElasticAttentionPass(), ChangeTrueDivToMulByInverse())
    composed(graph_module)
    assert targets(graph_module).count(_runtime.attention) == 1
    with torch.no_grad():
        torch.testing.assert_close(graph_module(*arguments), module(*arguments))


def test_functional_target_is_matched():
    """The plain functional call, as symbolic tracing and Dynamo leave it."""
    module, arguments, graph_module = prepared(graphs.NativeGrouped)
    (node,) = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )
    node.target = F.scaled_dot_product_attention
    ElasticAttentionPass()(graph_module)
    assert graph_module.meta["elastic_compile"].rewritten == 1
    with torch.no_grad():
        torch.testing.assert_close(graph_module(*arguments), module(*arguments))
