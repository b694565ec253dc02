"""Models that are not transformers', calling ``scaled_dot_product_attention`` causally."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elastic_compile
from elastic_compile._state import rewritten_sites
from elastic_compile.passes.discovery import LENGTH, PLAIN_BATCH, PLAIN_LENGTH
from tests import own_models
from tests.own_models import (
    HEADS,
    SIZE,
    WIDTH,
    Block,
    FusedAttention,
    NanoLike,
    SplitAttention,
    TuneLike,
    build,
    tokens,
)

SINK, LOCAL = 2, 3
ROOT = Path(__file__).parents[2]
KINDS = [NanoLike, TuneLike]
by_name = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def config():
    return elastic_compile.ElasticConfig(sink=SINK, local=LOCAL, pool_tokens=4)


def transformed(kind, *args, **kwargs):
    model = build(kind, *args, **kwargs)
    return elastic_compile.transform(model, config(), example_inputs=(tokens(),))


@torch.no_grad()
def run(model, *args, **kwargs):
    return model(*args, **kwargs)


@contextlib.contextmanager
def explicit(sparse):
    """Causal SDPA under a mask written out pair by pair, for heads that are streaming or full."""
    original = F.scaled_dot_product_attention

    def attend(q, k, v, attn_mask=None, is_causal=False, **kwargs):
        assert is_causal
        seen = torch.zeros(q.shape[1], q.shape[2], k.shape[2], dtype=torch.bool)
        group = q.shape[1] // len(sparse)
        for head in range(q.shape[1]):
            for i in range(q.shape[2]):
                for j in range(i + 1):
                    near = j < SINK or i - j < LOCAL
                    seen[head, i, j] = near or not sparse[head // group]
        return original(q, k, v, attn_mask=seen[None], **kwargs)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@by_name
def test_all_full_is_exact_and_streaming_is_the_explicit_mask(kind):
    base, model = build(kind), transformed(kind)
    report = elastic_compile.report(model)
    assert [(s.status, s.checked) for s in report.sites] == [("rewritten", True)] * 2
    # Grouped heads are routed as groups although the model repeats them.
    heads = own_models.KV_HEADS if kind is TuneLike else HEADS
    assert {s.kv_heads for s in report.sites} == {heads}
    ids = tokens(2, 31, seed=1)
    full = run(base, ids)
    torch.testing.assert_close(run(model, ids), full, atol=2e-5, rtol=0)
    mixed = [i % 2 == 1 for i in range(heads)]
    for sparse in ([True] * heads, mixed):
        with explicit(sparse):
            expected = run(base, ids)
        with elastic_compile.force_routes(model, torch.tensor([sparse] * 2).int()):
            torch.testing.assert_close(run(model, ids), expected, atol=1e-4, rtol=0)
        assert (expected - full).abs().max() > 1e-3


@by_name
def test_restore_state_dict_and_copies(kind):
    base, model = build(kind), transformed(kind)
    ids = tokens(2, 25, seed=2)
    keys = {k for k in model.state_dict() if "elastic_router" not in k}
    assert keys == set(base.state_dict())
    # Without its routers' keys, a checkpoint of the untouched model is still one of this model.
    missing = model.load_state_dict(base.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all("elastic_router" in key for key in missing.missing_keys)
    with elastic_compile.force_routes(model, "sparse"):
        sparse = run(model, ids)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        with elastic_compile.force_routes(other, "sparse"):
            assert torch.equal(run(other, ids), sparse)
    elastic_compile.restore(model)
    assert torch.equal(run(model, ids), run(base, ids))
    assert set(model.state_dict()) == set(base.state_dict())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_routers_are_saved_and_loaded(tmp_path):
    model = transformed(TuneLike)
    with torch.no_grad():
        for parameter in elastic_compile.router_parameters(model):
            parameter.normal_()
    elastic_compile.save_router(model, tmp_path)
    other = build(TuneLike)
    elastic_compile.transform(other, router=tmp_path, example_inputs=(tokens(),))
    ids = tokens(3, 30, seed=3)
    assert torch.equal(run(other, ids), run(model, ids))
    assert torch.equal(elastic_compile.last_routes(other), elastic_compile.last_routes(model))
    assert elastic_compile.last_routes(other).any()


@by_name
def test_compiled_in_as_many_graphs_as_untouched(kind):
    def graphs(model):
        torch._dynamo.reset()
        seen = []

        def keep(graph, inputs):
            seen.append(graph)
            return graph.forward

        compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=True)
        for length in (20, 33):
            out = run(compiled, tokens(2, length))
        return seen, out

    plain, expected = graphs(build(kind))
    model = transformed(kind)
    ours, got = graphs(model)
    assert len(ours) == len(plain)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    names = [str(n.target) for n in ours[0].graph.nodes]
    assert sum(name.startswith("elastic_compile.attention") for name in names) == 2


def test_dropout_in_train_mode_is_kept():
    base = build(NanoLike, attention=Dropped)
    model = transformed(NanoLike, attention=Dropped)
    ids = tokens(2, 25)
    torch.testing.assert_close(run(model, ids), run(base, ids), atol=2e-5, rtol=0)
    assert [site.attention_dropout for _, site in rewritten_sites(model)] == [0.5, 0.5]
    model.train()
    torch.manual_seed(1)
    first = run(model, ids)
    torch.manual_seed(1)
    assert torch.equal(run(model, ids), first)
    assert not torch.allclose(run(model, ids), first)


def test_a_scale_and_shared_keys_and_values_are_kept():
    class Scaled(FusedAttention):
        def __init__(self):
            super().__init__(scale=0.05)

    class Shared(nn.Module):
        """Values are the keys themselves."""

        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k = (p(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for p in (self.q, self.k))
            return (
                F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)
            )

    for attention in (Scaled, Shared):
        base = build(NanoLike, attention=attention)
        model = transformed(NanoLike, attention=attention)
        assert len(elastic_compile.report(model).rewritten) == 2
        ids = tokens(2, 25)
        torch.testing.assert_close(run(model, ids), run(base, ids), atol=2e-5, rtol=0)
        with elastic_compile.force_routes(model, "sparse"), explicit([True] * HEADS):
            got = run(model, ids)
            torch.testing.assert_close(got, run(base, ids), atol=1e-4, rtol=0)


class Bidirectional(FusedAttention):
    def forward(self, x):
        q, k, v = (
            p.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for p in self.qkv(x).chunk(3, -1)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Biased(Bidirectional):
    def attend(self, q, k, v):
        i = torch.arange(q.shape[2])
        bias = -(i[:, None] - i).abs().float()
        bias = bias.masked_fill(i[:, None] < i, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class OwnTriangle(Bidirectional):
    """Causal, by a buffer that anybody may overwrite."""

    def attend(self, q, k, v):
        seen = self.seen[: q.shape[2], : q.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Twice(Bidirectional):
    def attend(self, q, k, v):
        once = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(once, k, v, is_causal=True)


class Dropped(FusedAttention):
    def __init__(self):
        super().__init__(dropout=0.5)


class Across(SplitAttention):
    """Keys of another tensor, longer than the queries."""

    def forward(self, x):
        return super().forward(x, torch.cat([x, x], 1))


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (Bidirectional, "bidirectional"),
        (Biased, "not the plain causal one"),
        (OwnTriangle, "not the plain causal one"),
        (Twice, "more than once"),
        (Across, "cross-attention"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_near_misses_are_left_alone_with_the_reason(attention, reason):
    model = build(NanoLike, attention=attention)
    ids = tokens()
    expected = run(model, ids)
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match=reason):
        elastic_compile.transform(model, config(), example_inputs=(ids,))
    assert torch.equal(run(model, ids), expected) and list(model.state_dict()) == keys
    assert not elastic_compile.is_transformed(model)


def test_a_layer_that_is_called_twice_is_left_alone():
    class Recurrent(NanoLike):
        def forward(self, ids):
            self.blocks = nn.ModuleList([self.blocks[0], self.blocks[0]])
            return super().forward(ids)

    model = build(Recurrent)
    with pytest.raises(ValueError, match="more than once"):
        elastic_compile.transform(model, config(), example_inputs=(tokens(),))


def test_one_model_may_hold_both():
    class Mixed(NanoLike):
        def __init__(self):
            super().__init__()
            self.blocks[0] = Block(Bidirectional())

    base, model = build(Mixed), transformed(Mixed)
    assert [s.status for s in elastic_compile.report(model).sites] == ["skipped", "rewritten"]
    assert torch.equal(run(model, tokens()), run(base, tokens()))


def test_a_mask_that_the_caller_hands_over_is_never_taken_for_causal():
    length = 20
    seen = torch.ones(length, length, dtype=torch.bool).tril().expand(3, 1, length, length)
    model = build(TuneLike)
    example = {"tokens": tokens(3, length), "mask": seen}
    with pytest.raises(ValueError, match="or the model built its own"):
        elastic_compile.transform(model, config(), example_inputs=example)
    # Transformed without one, a mask given later is honoured exactly.
    elastic_compile.transform(model, config(), example_inputs=(tokens(),))
    other = seen & (torch.arange(length) != 2)
    with elastic_compile.force_routes(model, "sparse"):
        got = run(model, tokens(3, length), mask=other)
    assert torch.equal(got, run(build(TuneLike), tokens(3, length), mask=other))


def test_the_untaken_branch_is_live_until_the_transform():
    """Flags are read when the module is captured: the eager branch has no site."""
    model = build(NanoLike)
    for block in model.blocks:
        block.attention.fused = False
    with pytest.raises(ValueError, match="no attention site found"):
        elastic_compile.transform(model, config(), example_inputs=(tokens(),))


def test_a_cache_of_its_own_is_refused_by_name():
    model = build(TuneLike)
    for layer in model.layers:
        layer.attention.cache = own_models.Keep()
    with pytest.raises(ValueError, match="keeps keys from call to call"):
        elastic_compile.transform(model, config(), example_inputs=(tokens(),))
    assert not elastic_compile.is_transformed(model)
    # Switched off, the model transforms.
    for layer in model.layers:
        layer.attention.cache = None
    elastic_compile.transform(model, config(), example_inputs=(tokens(),))
    assert len(elastic_compile.report(model).rewritten) == 2


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, "is not a transformers model.*pass example_inputs"),
        ((tokens(2, 20),), "at least 3 rows"),
        ((tokens(3, 5),), "at least 13 tokens"),
        ({}, "needs tensors"),
        ({"words": tokens()}, "unexpected keyword argument 'words'"),
        ((torch.randn(3, 20),), "does not run on example_inputs"),
    ],
    ids=["missing", "rows", "tokens", "empty", "name", "dtype"],
)
def test_missing_or_wrong_example_inputs(example, message):
    model = build(NanoLike)
    with pytest.raises(ValueError, match=message):
        elastic_compile.transform(model, config(), example_inputs=example)
    assert not any("forward" in module.__dict__ for module in model.modules())
    elastic_compile.transform(model, config(), example_inputs=(tokens(),))


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ELASTIC_COMPILE_FULL"), reason="set ELASTIC_COMPILE_FULL=1")
def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, "examples/custom_model.py", "--backend", "eager"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "4 of 4 attention sites rewritten" in done.stdout
    assert "largest difference, all heads full: 0" in done.stdout


CAPTURED = (PLAIN_BATCH, PLAIN_LENGTH)


class Branching(FusedAttention):
    """Other attention for other sizes: an export sees one of the two."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.condition(*x.shape[:2]):
            q = q * 1.5
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "condition",
    [
        lambda rows, tokens: tokens > 16,
        lambda rows, tokens: tokens < 8,
        lambda rows, tokens: tokens % 16 == 0,
        lambda rows, tokens: tokens % LENGTH == 0,
        lambda rows, tokens: tokens % PLAIN_LENGTH == 0,
        lambda rows, tokens: rows * tokens > 100,
        lambda rows, tokens: rows > 7,
        lambda rows, tokens: rows == tokens,
    ],
    ids=["long", "short", "multiple", "multiple of 13", "multiple of 11", "area", "rows", "square"],
)
def test_calls_of_a_size_for_which_the_code_differs_run_the_original(condition):
    model = build(NanoLike, attention=functools.partial(Branching, condition))
    shapes = ((2, 25), (3, 5), (9, 16), (5, 5), (3, 13), (8, 15), (2, 22), CAPTURED)
    with torch.no_grad():
        expected = {shape: model(tokens(*shape)) for shape in shapes}
        elastic_compile.transform(model, config(), example_inputs=(tokens(),))
        for shape, value in expected.items():
            torch.testing.assert_close(model(tokens(*shape)), value, atol=2e-5, rtol=0)
        # What does as the captured code is routed, and nothing else.
        with elastic_compile.force_routes(model, "sparse"):
            for shape, value in expected.items():
                moved = (model(tokens(*shape)) - value).abs().max() > 1e-3
                assert moved == (condition(*shape) == condition(*CAPTURED) and shape[1] > 5)


@pytest.mark.parametrize(
    "condition",
    [lambda rows, tokens: rows == 1, lambda rows, tokens: tokens == 1],
    ids=["row", "token"],
)
def test_code_for_a_single_row_or_token_is_noticed(condition):
    """Export takes it that no size is 1 and leaves no condition behind."""

    class Single(FusedAttention):
        def forward(self, x):
            y = super().forward(x)
            return y * 2 if condition(*x.shape[:2]) else y

    model = build(NanoLike, attention=Single)
    with torch.no_grad():
        expected = {shape: model(tokens(*shape)) for shape in ((1, 20), (3, 1))}
        elastic_compile.transform(
            model, config(), example_inputs=(tokens(),), allow_unrewritten=True
        )
        assert all("self-check" in s.reason for s in elastic_compile.report(model).sites)
        for shape, value in expected.items():
            assert torch.equal(model(tokens(*shape)), value)
