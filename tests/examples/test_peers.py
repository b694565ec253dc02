"""What the benchmarks compare with computes the same thing, on small inputs on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

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
