"""Where a site's router runs as one operator, in Triton's interpreter.

``tests/kernels/test_triton_route.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

import elastic_compile
from elastic_compile import ElasticConfig, _fused_router, _state
from elastic_compile.kernels import _dispatch
from tests.families import build, tokens

assert os.environ.get("TRITON_INTERPRET") == "1"
LENGTH = 30


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The interpreter stands for a GPU."""
    monkeypatch.setattr(_dispatch, "FUSED_ROUTER_DEVICES", ("cpu",))


@pytest.fixture(scope="module")
def transformed():
    config = ElasticConfig(sink=4, local=8, pool_tokens=6)
    model = elastic_compile.transform(build("llama", 2).eval(), config)
    generator = torch.Generator().manual_seed(3)
    for parameter in elastic_compile.router_parameters(model):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise / max(parameter.shape[-1], 1) ** 0.5)
    return model


@pytest.fixture
def model(transformed):
    return copy.deepcopy(transformed)


@pytest.fixture
def fused(monkeypatch):
    """Counts the calls that the operator serves."""
    calls = []
    real = _fused_router.decide

    def spy(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(_fused_router, "decide", spy)
    return calls


def prompt():
    ids = tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def routes(model, **more):
    model(**prompt(), **{"use_cache": False} | more)
    return torch.stack([_state.last_call(site).route for _, site in _state.rewritten_sites(model)])


def unfused(model, monkeypatch, **more):
    with monkeypatch.context() as patch:
        patch.setattr(_dispatch, "FUSED_ROUTER_DEVICES", ())
        return routes(model, **more)


def test_it_decides_as_the_modules_do(model, fused, monkeypatch):
    expected = unfused(model, monkeypatch)
    assert not fused and expected.any() and not expected.all()
    assert torch.equal(routes(model), expected)
    assert torch.equal(routes(model, use_cache=True), expected)
    assert len(fused) == 4


def test_a_limit_and_forced_routes_hold(model, fused, monkeypatch):
    table = torch.full((2, 2), -1)
    table[0, 1], table[1, 0] = 1, 0
    with (
        elastic_compile.route_length(model, torch.tensor([20, 25])),
        elastic_compile.force_routes(model, table),
    ):
        expected = unfused(model, monkeypatch)
        found = routes(model)
    assert torch.equal(found, expected) and len(fused) == 2
    assert (found[0, :, 1] == 1).all() and (found[1, :, 0] == 0).all()


def sites(model):
    return [site for _, site in _state.rewritten_sites(model)]


def observe(model):
    for site in sites(model):
        site.router[4].register_forward_hook(lambda module, inputs, output: None)


def observe_site(model):
    for site in sites(model):
        site.register_forward_pre_hook(lambda module, inputs: None)


def double(model):
    for site in sites(model):
        site.double()


def replace(model):
    class Other(nn.Linear):
        pass

    for site in sites(model):
        site.router[4].__class__ = Other


def own_forward(model):
    for site in sites(model):
        site.task[1].forward = torch.tanh


def name_another(model):
    for site in sites(model):
        site.kernel = "reference"


def each_call(model):
    for site in sites(model):
        site.reroute = "each_call"


def tensor_bias(model):
    for site in sites(model):
        site.route_bias = torch.tensor(0.5)


def relax(model):
    for site in sites(model):
        site.relaxation = lambda site, logits: (logits[..., 1] > logits[..., 0]).float()


@pytest.mark.parametrize(
    "change",
    [
        observe,
        observe_site,
        double,
        replace,
        own_forward,
        name_another,
        each_call,
        tensor_bias,
        relax,
    ],
)
def test_whatever_is_not_plain_runs_the_modules(model, fused, change):
    change(model)
    with torch.no_grad():
        model(**prompt(), use_cache=change is each_call)
    assert not fused


def test_a_global_hook_sees_the_modules(model, fused):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.append(module)
    )
    try:
        routes(model)
    finally:
        handle.remove()
    assert not fused and sites(model)[0].router[4] in seen


@torch.no_grad()
def test_one_graph_for_every_length(model, monkeypatch):
    """The operator is in the graph; forcing routes and a padded batch compile nothing."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (20, 33, 47):
        ids = tokens(2, length)
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(
            compiled(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5
        )
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("elastic_compile.route" in target for target in targets) == 2


def test_an_exported_program_keeps_the_modules(model):
    site = sites(model)[0]
    tap = torch.randn(1, 2, 9, site.head_dim)

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.site = site

        def forward(self, tap):
            if _fused_router.serves(self.site, tap, None, None):
                return _fused_router.decide(self.site, tap, None, None)
            return self.site(tap.mean(2)).argmax(-1)

    program = torch.export.export(Probe(), (tap,))
    assert not any("elastic_compile" in str(node.target) for node in program.graph.nodes)
