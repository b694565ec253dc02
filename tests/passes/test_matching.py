"""Detection on small graphs: what matches, in canonical form, and what must not."""

from __future__ import annotations

import pytest
import torch

from elastic_compile.passes import matching
from elastic_compile.passes.matching import Match, Skip

from . import graphs


def found(kind, causal_masks=()):
    torch.manual_seed(0)
    module = kind()
    graph = graphs.graph_of(module, graphs.inputs(kind)).graph
    return matching.find(graph, causal_masks, None)


MATCHES = [
    (graphs.Attention, ()),
    (graphs.Rotary, ()),
    (graphs.PartialRotary, ()),
    (graphs.NativeGrouped, ()),
    (graphs.Masked, ("mask",)),
    (graphs.SlicedMask, ("mask",)),
]


@pytest.mark.parametrize(("kind", "masks"), MATCHES, ids=lambda x: getattr(x, "__name__", None))
def test_match_is_canonical(kind, masks):
    (match,) = found(kind, masks)
    assert isinstance(match, Match), match
    assert (match.kv_heads, match.head_dim) == (graphs.KV_HEADS, graphs.SIZE)
    # repeat_kv is unwrapped: the operands are grouped.
    assert matching.shape(match.key)[1] == matching.shape(match.value)[1] == graphs.KV_HEADS
    assert (match.mask.name if match.mask else None) == (masks[0] if masks else None)
    assert match.scale == (0.3 if kind is graphs.NativeGrouped else None)


@pytest.mark.parametrize("kind", [graphs.Attention, graphs.Rotary, graphs.PartialRotary])
def test_tap_is_the_key_before_any_position(kind):
    (match,) = found(kind)
    # The split of k_proj's output, whatever the rotation does with it.
    assert match.tap.target is torch.ops.aten.transpose.int
    source = match.tap.args[0].args[0]
    assert source.target is torch.ops.aten.linear.default
    assert source.args[1].target == "k_proj.weight"
    assert match.tap_layout == "bhsd"


NEAR_MISSES = [
    (graphs.Masked, (), "not the plain causal one"),
    (graphs.Alibi, ("mask",), "not the plain causal one"),
    (graphs.Sliding, ("mask",), "not the plain causal one"),
    (graphs.Bidirectional, (), "bidirectional"),
    (graphs.Cross, (), "cross-attention"),
    (graphs.TopLeftCache, (), "cross-attention"),
    (graphs.Dropped, (), "dropout"),
    (graphs.TwoProjections, (), "no single"),
]


@pytest.mark.parametrize(
    ("kind", "masks", "reason"), NEAR_MISSES, ids=lambda x: getattr(x, "__name__", None)
)
def test_near_miss_is_skipped_with_its_reason(kind, masks, reason):
    (skip,) = found(kind, masks)
    assert isinstance(skip, Skip), f"{kind.__name__} must not match"
    assert reason in skip.reason


def test_another_masks_name_proves_nothing():
    (skip,) = found(graphs.Masked, ("other",))
    assert isinstance(skip, Skip)


def test_graph_without_attention():
    class Plain(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.transpose(1, 2), -1) @ x

    program = torch.export.export(Plain(), (torch.randn(2, 9, 8),))
    assert matching.find(program.graph, (), None) == []
