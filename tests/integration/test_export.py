"""Whole-model exported programs: ``transform(program.module())``, run, and exported again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import elastic_compile
from tests.families import build as build_family
from tests.integration.helpers import prompts
from tests.own_models import NanoLike, TuneLike, build, tokens

from .test_custom_models import Bidirectional, Twice, config, explicit, run

DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def exported(model, *arguments):
    shapes = tuple(DYNAMIC for _ in arguments)
    return torch.export.export(model, arguments, dynamic_shapes=shapes, strict=False)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask=None):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def test_rewritten_run_and_retraced(tmp_path):
    model, ids = build(TuneLike), tokens(3, 20)
    program = exported(model, ids)
    untouched = str(program.graph)
    module = program.module()
    assert elastic_compile.transform(module, config(), example_inputs=(ids,)) is module
    assert str(program.graph) == untouched
    report = elastic_compile.report(module)
    assert [(s.path, s.cls, s.checked, s.kv_heads) for s in report.sites] == [
        (f"layers.{i}.attention", "SplitAttention", True, 2) for i in (0, 1)
    ]
    other = tokens(2, 31, seed=1)
    torch.testing.assert_close(run(module, other), run(model, other), atol=2e-5, rtol=0)
    with explicit([False, True]):
        expected = run(model, other)
    assert (expected - run(model, other)).abs().max() > 1e-3
    with elastic_compile.force_routes(module, torch.tensor([[0, 1], [0, 1]])):
        torch.testing.assert_close(run(module, other), expected, atol=1e-4, rtol=0)
    # Exported again, with routers that stream: it is in the new program, saved and loaded too.
    with torch.no_grad():
        for parameter in elastic_compile.router_parameters(module):
            parameter.normal_()
    routed = run(module, other)
    assert elastic_compile.last_routes(module).any()
    again = exported(module, ids)
    names = [str(node.target) for node in again.graph.nodes]
    assert names.count("elastic_compile.attention.default") == 2
    torch.export.save(again, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for each in (again.module(), loaded.module()):
        torch.testing.assert_close(run(each, other), routed, atol=1e-5, rtol=0)


def test_restore_and_routers_of_a_transformed_model(tmp_path):
    model, ids = build(TuneLike), tokens(3, 20)
    twin = elastic_compile.transform(build(TuneLike), config(), example_inputs=(ids,))
    with torch.no_grad():
        for parameter in elastic_compile.router_parameters(twin):
            parameter.normal_()
    elastic_compile.save_router(twin, tmp_path)
    module = exported(model, ids).module()
    keys, expected = set(module.state_dict()), run(module, ids)
    elastic_compile.transform(module, router=tmp_path)
    torch.testing.assert_close(run(module, ids), run(twin, ids), atol=1e-5, rtol=0)
    assert not elastic_compile.report(module).sites[0].checked
    with pytest.raises(ValueError, match="transformed already"):
        elastic_compile.transform(module)
    assert elastic_compile.restore(module) is module
    assert torch.equal(run(module, ids), expected) and set(module.state_dict()) == keys


def test_a_transformers_model_with_padding():
    model = build_family("llama")
    ids, mask = prompts(3, 24, "left")
    module = exported(Logits(model), ids, mask).module()
    elastic_compile.transform(module, config(), example_inputs=(ids, mask))
    assert [s.path for s in elastic_compile.report(module).rewritten] == [
        f"model.model.layers.{i}.self_attn" for i in (0, 1)
    ]
    real, expected = mask.bool(), run(Logits(model), ids, mask)
    torch.testing.assert_close(run(module, ids, mask)[real], expected[real], atol=2e-5, rtol=0)
    # No dense mask is left, and a sample's routes and window do not depend on its padding.
    assert not [n for n in module.graph.nodes if "aten.index" in str(n.target)]
    with elastic_compile.force_routes(module, "sparse"):
        padded = run(module, ids, mask)[1, mask[1].bool()]
        alone = ids[1, mask[1].bool()][None]
        other = run(module, alone, torch.ones_like(alone))[0]
    torch.testing.assert_close(padded, other, atol=1e-4, rtol=0)
    elastic_compile.restore(module)
    torch.testing.assert_close(run(module, ids, mask)[real], expected[real], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("attention", "reason"), [(Bidirectional, "bidirectional"), (Twice, "more than once")]
)
def test_near_misses_leave_the_graph_as_it_was(attention, reason):
    module = exported(build(NanoLike, attention=attention), tokens()).module()
    before = str(module.graph)
    with pytest.raises(ValueError, match=reason):
        elastic_compile.transform(module, config())
    assert str(module.graph) == before and not elastic_compile.is_transformed(module)
    elastic_compile.transform(module, config(), allow_unrewritten=True)
    assert not elastic_compile.report(module).rewritten


def test_clear_errors():
    program = exported(build(NanoLike), tokens())
    with pytest.raises(TypeError, match=r"program.module\(\)"):
        elastic_compile.transform(program)
    core = program.run_decompositions({}).module()
    elastic_compile.transform(core, config(), example_inputs=(tokens(),))
    assert len(elastic_compile.report(core).rewritten) == 2
    plain = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="no attention found in the graph"):
        elastic_compile.transform(plain)


def test_a_failed_check_changes_nothing(monkeypatch):
    from elastic_compile import _runtime

    module = exported(build(NanoLike), tokens()).module()
    before, original = run(module, tokens()), _runtime.attention

    def wrong(site, *args, **kwargs):
        return original(site, *args, **kwargs) * 1.1

    monkeypatch.setattr(_runtime, "attention", wrong)
    with pytest.raises(RuntimeError, match="differs from the untouched one"):
        elastic_compile.transform(module, config(), example_inputs=(tokens(),))
    monkeypatch.undo()
    assert torch.equal(run(module, tokens()), before)
    assert not [name for name in module.state_dict() if "elastic_router" in name]
