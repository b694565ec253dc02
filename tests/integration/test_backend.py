"""``torch.compile(model, backend="elastic")``: the same pass on the graphs that Dynamo captures."""

from __future__ import annotations

import os

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import elastic_compile
from elastic_compile.passes import backend
from tests.families import build as build_family
from tests.integration.helpers import generate, prompts
from tests.own_models import HEADS, NanoLike, TuneLike, build, tokens

from .test_custom_models import Biased, Bidirectional, Dropped, Twice, explicit, run

CONFIG = {"sink": 2, "local": 3, "pool_tokens": 4}


def compiled(model, inner="eager", dynamic=True, **options):
    options = {"inner": inner, "config": CONFIG, **options}
    if isinstance(options["router"] if "router" in options else None, elastic_compile.GraphRouters):
        options.pop("config")
    return torch.compile(model, backend="elastic", options=options, dynamic=dynamic, fullgraph=True)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def random_weights(routers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in elastic_compile.router_parameters(routers):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_full_is_exact_streaming_is_the_explicit_mask_and_nothing_recompiles(inner):
    model = build(TuneLike)
    fast = compiled(model, inner)
    for length in (20, 33):
        ids = tokens(2, length)
        torch.testing.assert_close(run(fast, ids), run(model, ids), atol=2e-5, rtol=0)
    routers = elastic_compile.graph_routers(fast)
    report = elastic_compile.report(fast)
    assert [(s.path, s.status, s.kv_heads) for s in report.sites] == [
        ("layers.0.attention", "rewritten", 2),
        ("layers.1.attention", "rewritten", 2),
    ]
    with explicit([False, True]):
        expected = run(model, ids)
    with elastic_compile.force_routes(routers, torch.tensor([[0, 1], [0, 1]])):
        torch.testing.assert_close(run(fast, ids), expected, atol=1e-4, rtol=0)
    assert (expected - run(model, ids)).abs().max() > 1e-3
    torch.testing.assert_close(run(fast, ids), run(model, ids), atol=2e-5, rtol=0)
    assert graphs() == 1


def test_router_weights_are_read_at_each_call(tmp_path):
    model, ids = build(NanoLike), tokens(3, 30)
    routers = elastic_compile.GraphRouters(elastic_compile.ElasticConfig(**CONFIG))
    fast = compiled(model, "aot_eager", router=routers)
    full = run(fast, ids)
    random_weights(routers)
    routed = run(fast, ids)
    assert (routed - full).abs().max() > 1e-3 and graphs() == 1
    # The same routers and the same routes as in a transformed model.
    elastic_compile.save_router(routers, tmp_path)
    other = build(NanoLike)
    elastic_compile.transform(other, router=tmp_path, example_inputs=(tokens(),))
    torch.testing.assert_close(run(other, ids), routed, atol=1e-5, rtol=0)
    # And from a folder, in a model of the same kind.
    torch._dynamo.reset()
    again = torch.compile(
        build(NanoLike), backend="elastic", options={"inner": "eager", "router": str(tmp_path)}
    )
    torch.testing.assert_close(run(again, ids), routed, atol=1e-5, rtol=0)
    random_weights(routers, seed=1)
    assert not torch.equal(run(fast, ids), routed)
    elastic_compile.load_router(routers, tmp_path)
    torch.testing.assert_close(run(fast, ids), routed, atol=1e-5, rtol=0)


def test_the_backend_is_pure_and_counts_a_graph_once():
    model, ids = build(NanoLike), tokens(2, 20)
    routers = elastic_compile.GraphRouters()
    options = {"inner": "eager", "router": routers}
    seen = []

    def twice(graph, inputs):
        before = str(graph.graph)
        first = backend.elastic(graph, inputs, options=options)
        seen.append((first, backend.elastic(graph, inputs, options=options)))
        assert str(graph.graph) == before
        return first

    out = run(torch.compile(model, backend=twice, fullgraph=True), ids)
    torch.testing.assert_close(out, run(model, ids), atol=2e-5, rtol=0)
    assert len(routers.graphs) == 1 and len(seen) == 1
    assert len(elastic_compile.report(routers).rewritten) == 2


def test_writes_without_users_stay_in_the_graph():
    class Counts(NanoLike):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(2))

        def forward(self, ids):
            self.calls.index_copy_(0, torch.tensor([0]), self.calls[:1] + 1)
            return super().forward(ids)

    model = build(Counts)
    fast = compiled(model)
    for _ in range(3):
        run(fast, tokens(2, 20))
    assert model.calls.tolist() == [3.0, 0.0]


def test_gradients_reach_the_model():
    model, other, ids = build(NanoLike), build(NanoLike), tokens(2, 20)
    compiled(model, "aot_eager")(ids).square().mean().backward()
    other(ids).square().mean().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


class BuiltMask(Bidirectional):
    """A causal mask made in the graph, of index ranges."""

    def attend(self, q, k, v):
        i = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=i[:, None] >= i)


class Window(Bidirectional):
    """Wider than every length of the test: only the number gives it away."""

    def attend(self, q, k, v):
        i = torch.arange(q.shape[2])
        seen = (i[:, None] >= i) & (i[:, None] - i < 60)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class HugeWindow(Bidirectional):
    def attend(self, q, k, v):
        i = torch.arange(q.shape[2])
        seen = (i[:, None] >= i) & (i[:, None] - i < 4096)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Decaying(Bidirectional):
    def attend(self, q, k, v):
        i = torch.arange(q.shape[2])
        bias = torch.where(i[:, None] >= i, (i - i[:, None]).float(), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (BuiltMask, ""),
        (Window, "not provably causal"),
        (HugeWindow, "too large to rule out a window"),
        (Decaying, "adds a bias"),
        (Biased, "not provably causal"),
        (Bidirectional, "bidirectional"),
        (Twice, "more than once"),
        (Dropped, "dropout"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_masks_are_proven_or_the_site_is_left_alone(attention, reason):
    model, ids = build(NanoLike, layers=1, attention=attention), tokens(2, 20)
    if attention is Dropped:
        model.train()
    fast = compiled(model)
    torch.manual_seed(0)
    got = run(fast, ids)
    torch.manual_seed(0)
    torch.testing.assert_close(got, run(model, ids), atol=2e-5, rtol=0)
    for site in elastic_compile.report(fast).sites:
        assert (site.status == "skipped") == bool(reason) and reason in site.reason
    if not reason:
        assert len(elastic_compile.report(fast).rewritten) == 1
        with elastic_compile.force_routes(elastic_compile.graph_routers(fast), "sparse"):
            assert (run(fast, ids) - got).abs().max() > 1e-3


def test_a_callers_mask_and_attention_outside_modules():
    model, ids = build(TuneLike, layers=1), tokens(2, 20)
    seen = torch.ones(20, 20, dtype=torch.bool).tril() & (torch.arange(20) != 4)
    fast = compiled(model)
    torch.testing.assert_close(run(fast, ids, mask=seen), run(model, ids, mask=seen))
    (site,) = elastic_compile.report(fast).sites
    assert "not provably causal" in site.reason

    q = torch.randn(2, HEADS, 20, 8)

    def twice(x):
        return [F.scaled_dot_product_attention(x, x, x, is_causal=True) for _ in range(2)]

    got = compiled(twice)(q)
    assert all(torch.equal(a, b) for a, b in zip(got, twice(q), strict=True))


def test_generate_equals_the_untouched_model_and_decode_says_why_it_stays():
    model = build_family("llama")
    ids, mask = prompts(2, 24, "left")
    expected = generate(model, ids, mask, new=4)
    routers = elastic_compile.GraphRouters(elastic_compile.ElasticConfig(**CONFIG))
    options = {"inner": "eager", "router": routers}
    model.compile(backend="elastic", options=options, dynamic=True, fullgraph=True)
    assert torch.equal(generate(model, ids, mask, new=4), expected)
    assert graphs() == 2
    report = elastic_compile.report(routers)
    assert [s.path for s in report.rewritten] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert len(report.skipped) == 2
    assert all("elastic_compile.transform(model)" in s.reason for s in report.skipped)
    # The padded prompt's mask was proven: its left padding is not the sink.
    full = run(model, ids, attention_mask=mask).logits
    with elastic_compile.force_routes(routers, "sparse"):
        assert (run(model, ids, attention_mask=mask).logits - full)[mask.bool()].abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ELASTIC_COMPILE_FULL"), reason="set ELASTIC_COMPILE_FULL=1")
def test_inductor_is_the_default():
    model, ids = build(TuneLike, layers=1), tokens(2, 20)
    fast = torch.compile(model, backend="elastic", options={"config": CONFIG}, dynamic=True)
    torch.testing.assert_close(run(fast, ids), run(model, ids), atol=1e-4, rtol=0)
    with explicit([True, True]):
        expected = run(model, ids)
    with elastic_compile.force_routes(elastic_compile.graph_routers(fast), "sparse"):
        torch.testing.assert_close(run(fast, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inder": "eager"}, "unknown option 'inder'"),
        ({"inner": 3}, "backend's name or function"),
        ({"inner": "elastic"}, "cannot be 'elastic' itself"),
        ({"config": {"sinks": 3}}, "sinks"),
        ({"config": 3}, "ElasticConfig or a dict"),
        ({"router": 3}, "router folder or a GraphRouters"),
        ({"router": "no-such-folder"}, "no router folder"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_options_are_errors(options, message):
    fast = torch.compile(build(NanoLike, layers=1), backend="elastic", options=options)
    with pytest.raises(Exception, match=message):
        run(fast, tokens(2, 20))


def test_routers_of_another_model_are_refused():
    routers = elastic_compile.GraphRouters(elastic_compile.ElasticConfig(**CONFIG))
    run(compiled(build(NanoLike), router=routers), tokens(2, 20))
    other = build(NanoLike)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(32, 32)

        def forward(self, x):
            q = self.proj(x).view(*x.shape[:2], 2, 16).transpose(1, 2)
            return (
                F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            )

    for block in other.blocks:
        block.attention = Wide()
    with pytest.raises(Exception, match="of another model"):
        run(compiled(other, router=routers), tokens(2, 20))
    with pytest.raises(ValueError, match="whole|all samples alike"):
        with elastic_compile.force_routes(routers, torch.zeros(2, 2, HEADS, dtype=torch.int32)):
            run(compiled(build(NanoLike), router=routers), tokens(2, 20))


def test_what_is_not_compiled_has_no_routers():
    with pytest.raises(ValueError, match="run it once"):
        elastic_compile.graph_routers(build(NanoLike))
    with pytest.raises(ValueError, match="not transformed"):
        elastic_compile.report(build(NanoLike))


def test_routers_that_are_given_are_found_by_the_model_too():
    model = build(NanoLike)
    routers = elastic_compile.GraphRouters(elastic_compile.ElasticConfig(sink=2, local=3))
    fast = torch.compile(model, backend="elastic", options={"inner": "eager", "router": routers})
    with torch.no_grad():
        fast(tokens(2, 25))
    assert elastic_compile.graph_routers(fast) is routers
    assert elastic_compile.report(fast).sites == elastic_compile.report(routers).sites != ()
