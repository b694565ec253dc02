"""What the benchmarks compare with computes the same thing, on small inputs on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

from elastic_compile.kernels import ops
from tests import oracle

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import peers

SINK, LOCAL = 5, 20
ROUTES = [[0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1]]


def inputs(batch=2, length=150):
    return [torch.randn(batch, length, heads, 16).transpose(1, 2) for heads in (6, 3, 3)]


def expected(tensors, route):
    return oracle.attention(*tensors, route, sink=SINK, local=LOCAL)[0]


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("peer", [peers.flex, peers.gather])
def test_mixed_heads(peer, route):
    tensors = inputs()
    routes = torch.tensor([route, route], dtype=torch.int32)
    make, run = peer(*tensors, routes, SINK, LOCAL)
    torch.testing.assert_close(run(make()).double(), expected(tensors, routes), atol=1e-5, rtol=0)


def test_flex_takes_a_route_for_every_sample():
    tensors = inputs()
    routes = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.int32)
    make, run = peers.flex(*tensors, routes, SINK, LOCAL)
    torch.testing.assert_close(run(make()).double(), expected(tensors, routes), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="same routes"):
        peers.gather(*tensors, routes, SINK, LOCAL)


def test_full_heads():
    tensors = inputs()
    routes = torch.zeros(2, 3, dtype=torch.int32)
    out = peers.sdpa(*tensors)()
    torch.testing.assert_close(out.double(), expected(tensors, routes), atol=1e-5, rtol=0)


def test_fa3_is_left_out_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(peers, "FA3_MODULES", ("no_such_module_at_all",))
    assert peers.fa3(*inputs()) is None


@pytest.mark.parametrize("name", ["two_sdpa", "sdpa_flex", "flex"])
def test_mixtures_and_their_gradients(name):
    tensors = [x.requires_grad_() for x in inputs(length=90)]
    route = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]], requires_grad=True)
    leaves = (*tensors, route)
    made = peers.mixtures(90, SINK, LOCAL, torch.device("cpu"))[name]()
    grad = torch.randn(2, 6, 90, 16)
    if name == "two_sdpa":  # FlexAttention has no backward on the CPU.
        found = torch.autograd.grad(made(*leaves), leaves, grad)
        ours = ops.attention_train(*leaves, sink=SINK, local=LOCAL)[0]
        for one, other in zip(found, torch.autograd.grad(ours, leaves, grad), strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)
    out = made(*(leaf.detach() for leaf in leaves))
    wanted = expected([x.detach() for x in tensors], route.detach().int())
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)
