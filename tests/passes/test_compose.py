"""``ElasticAttentionPass`` used directly on whole-model graphs, beside Optimum's own passes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from optimum.fx.optimization import FuseBiasInLinear, MergeLinears, compose
from torch import fx
from torch.fx.passes.shape_prop import ShapeProp

from elastic_compile import ElasticConfig, _runtime
from elastic_compile._site import ElasticSite
from elastic_compile.passes import matching
from elastic_compile.passes.rewrite import ElasticAttentionPass
from tests.own_models import NanoLike, TuneLike, build, tokens

from .graphs import SIZE
from .graphs import Attention as SplitGraph
from .graphs import inputs as graph_inputs

CONFIG = ElasticConfig(sink=2, local=3, pool_tokens=4)


def exported(model, *arguments):
    return torch.export.export(model, arguments, strict=False).module()


def routers(module):
    return {n for n, m in module.named_modules() if isinstance(m, ElasticSite)}


def targets(module):
    return [node.target for node in module.graph.nodes]


@torch.no_grad()
def run(module, *arguments):
    return module(*arguments)


@pytest.mark.parametrize("kind", [NanoLike, TuneLike], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "deepcopy"])
def test_a_whole_model_and_back(kind, copied):
    model, ids = build(kind), tokens()
    module = exported(model, ids)
    keys, expected = set(module.state_dict()), run(model, ids)
    elastic = ElasticAttentionPass(config=CONFIG)
    elastic(module)
    assert module.meta["elastic_compile"].rewritten == 2
    assert len(routers(module)) == 2 and targets(module).count(_runtime.attention) == 2
    torch.testing.assert_close(run(module, ids), expected, atol=2e-5, rtol=0)
    for router in module.modules():
        if isinstance(router, ElasticSite):
            router.forced.fill_(1)
    assert (run(module, ids) - expected).abs().max() > 1e-3
    if copied:
        # Copies lose Optimum's marks on nodes, and the pass may be another object by now.
        module, elastic = copy.deepcopy(module), ElasticAttentionPass(config=CONFIG)
    elastic(module, reverse=True)
    assert not routers(module) and set(module.state_dict()) == keys
    assert _runtime.attention not in targets(module)
    assert sum(target in matching.SDPA_TARGETS for target in targets(module)) == 2
    torch.testing.assert_close(run(module, ids), expected, atol=2e-5, rtol=0)
    # And forth again.
    elastic(module)
    assert module.meta["elastic_compile"].rewritten == 2


class Traceable(SplitGraph):
    """As symbolic tracing wants it: linears stay ``call_module`` nodes, which Optimum looks for."""

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], -1, SIZE).transpose(1, 2)

    def attend(self, q, k, v, **kwargs):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Traceable()

    def forward(self, x):
        return self.inner(x)


def module_graph():
    """The module, an input, and its graph with shapes."""
    module, (x,) = Outer().eval(), graph_inputs(SplitGraph)
    # The passes change the linears in place.
    traced = fx.symbolic_trace(copy.deepcopy(module))
    ShapeProp(traced).propagate(x)
    for node in traced.graph.nodes:
        value = node.meta.get("tensor_meta")
        if value is not None and hasattr(value, "shape"):
            node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return module, x, traced


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "theirs first"])
@pytest.mark.parametrize("other", [MergeLinears, FuseBiasInLinear], ids=lambda t: t.__name__)
def test_composed_with_optimum_and_reversed(other, first):
    module, x, graph = module_graph()
    expected = run(module, x)
    ours = ElasticAttentionPass()
    graph.add_module(
        "elastic_router",
        ElasticSite(
            CONFIG,
            kv_heads=2,
            head_dim=8,
            tap_dim=8,
            index=0,
            layer_idx=None,
            attention_dropout=0.0,
            interface=False,
        ),
    )
    passes = (ours, other()) if first else (other(), ours)
    composed = compose(*passes)
    graph = composed(graph)
    torch.testing.assert_close(run(graph, x), expected)
    assert graph.meta["elastic_compile"].rewritten == 1
    assert targets(graph).count(_runtime.attention) == 1
    graph.get_submodule("elastic_router").forced.fill_(1)
    assert (run(graph, x) - expected).abs().max() > 1e-3
    graph = composed(graph, reverse=True)
    torch.testing.assert_close(run(graph, x), expected)
    assert _runtime.attention not in targets(graph) and _runtime.route not in targets(graph)


def test_an_error_leaves_no_router_behind(monkeypatch):
    module = exported(build(NanoLike), tokens())
    before, keys = str(module.graph), set(module.state_dict())

    def fail(graph, computed):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(ElasticAttentionPass, "_sweep_orphans", staticmethod(fail))
    with pytest.raises(RuntimeError, match="on purpose"):
        ElasticAttentionPass(config=CONFIG)(module)
    assert str(module.graph) == before and set(module.state_dict()) == keys
