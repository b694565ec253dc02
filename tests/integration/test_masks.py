"""Streaming heads are plain attention under an explicit mask; padding and own masks are kept.

The reference is always the untouched model with a boolean mask built pair by pair
(`helpers.streaming_oracle`).
"""

from __future__ import annotations

import pytest
import torch

import elastic_compile
from elastic_compile import _runtime, _state
from tests.families import FAMILIES, REWRITTEN, UNREWRITTEN, build, pad, tokens
from tests.integration.helpers import (
    LENGTH,
    LOCAL,
    SINK,
    counting,
    decode_logits,
    error,
    logits,
    new_cache,
    positions,
    prompts,
    streaming_oracle,
)

# The untouched model run in another shape (cached, padded) rounds by up to 1e-5 itself.
ATOL = 2e-5
SMOKE = {"llama", "gpt2", "gemma3"}
rewritten_families = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.smoke] if n in SMOKE else []) for n in REWRITTEN],
)


# --- R-mask ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["sparse", "mixed"])
@rewritten_families
def test_streaming_equals_the_explicit_mask(pairs, name, kind, side):
    pair = pairs(name)
    ids, mask = prompts(side=side)
    kwargs = {} if side is None else {"position_ids": positions(mask)}
    routes = pair.routes(kind)
    expected = streaming_oracle(pair, ids, routes, mask, **kwargs)
    with counting() as count, elastic_compile.force_routes(pair.model, routes):
        actual = logits(pair.model, ids, mask, **kwargs)
    assert error(actual, expected, mask) <= ATOL
    assert count["fallbacks"] == {}
    full = logits(pair.base, ids, mask, **kwargs)
    if routes.any():
        assert error(expected, full, mask) > 1e-3


@pytest.mark.parametrize("side", [None, "left", "right"])
@rewritten_families
def test_every_head_alone(pairs, name, side):
    """A head routed to streaming changes that head's queries and no other's."""
    pair = pairs(name)
    ids, mask = prompts(2, side=side)
    kwargs = {} if side is None else {"position_ids": positions(mask)}
    seen = []
    for head in {0, pair.kv_heads - 1}:
        routes = pair.routes("full")
        routes[-1, head] = 1
        with elastic_compile.force_routes(pair.model, routes):
            actual = logits(pair.model, ids, mask, **kwargs)
        assert error(actual, streaming_oracle(pair, ids, routes, mask, **kwargs), mask) <= ATOL
        assert error(actual, logits(pair.base, ids, mask, **kwargs), mask) > 1e-4
        seen.append(actual)
    if len(seen) == 2:
        assert error(seen[0], seen[1], mask) > 1e-4


@pytest.mark.parametrize("side", [None, "left"])
@rewritten_families
def test_routes_per_sample(pairs, name, side):
    pair = pairs(name)
    ids, mask = prompts(3, side=side)
    kwargs = {} if side is None else {"position_ids": positions(mask)}
    shape = (3, *pair.routes("full").shape)
    routes = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3))
    routes[0], routes[1] = 0, 1
    with elastic_compile.force_routes(pair.model, routes):
        actual = logits(pair.model, ids, mask, **kwargs)
    assert error(actual, streaming_oracle(pair, ids, routes, mask, **kwargs), mask) <= ATOL
    # Row 0 is full and row 1 is not: neither decides for the batch.
    rows = None if mask is None else mask[:1]
    full = logits(pair.base, ids, mask, **kwargs)
    assert error(actual[:1], full[:1], rows) <= ATOL
    rows = None if mask is None else mask[1:2]
    assert error(actual[1:2], full[1:2], rows) > 1e-3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@rewritten_families
def test_cached_decode_equals_the_explicit_mask(pairs, name, side, cache):
    """B03: rows of a prefill and 12 steps are the rows of one masked forward."""
    pair = pairs(name)
    ids, mask = prompts(side=side)
    where = None if side is None else positions(mask)
    routes = pair.routes("mixed")
    if not routes.any():
        routes = pair.routes("sparse")
    kwargs = {} if where is None else {"position_ids": where}
    expected = streaming_oracle(pair, ids, routes, mask, **kwargs)
    with counting() as count, elastic_compile.force_routes(pair.model, routes):
        actual = decode_logits(
            pair.model, ids, mask, new_cache(pair.model, cache), 28, position_ids=where
        )
    assert error(actual, expected, mask) <= ATOL
    assert count["fallbacks"] == {}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "gemma3"])
def test_multi_token_steps_equal_the_explicit_mask(pairs, name, cache):
    """Chunks of several tokens on a filled cache: the causal edge is at the bottom right."""
    pair = pairs(name)
    ids, _ = prompts()
    routes = pair.routes("sparse")
    expected = streaming_oracle(pair, ids, routes)
    store, rows = new_cache(pair.model, cache), []
    with elastic_compile.force_routes(pair.model, routes):
        for low, high in [(0, 17), (17, 19), (19, 35), (35, 36), (36, 40)]:
            rows.append(logits(pair.model, ids[:, low:high], cache=store))
    assert error(torch.cat(rows, dim=1), expected) <= ATOL


@pytest.mark.parametrize("sink, local", [(1, 1), (1, 8), (7, 1), (2, 37)])
def test_odd_windows(pairs, sink, local):
    pair = pairs("llama", config={"sink": sink, "local": local})
    ids, mask = prompts(side="left")
    kwargs = {"position_ids": positions(mask)}
    routes = pair.routes("sparse")
    expected = streaming_oracle(pair, ids, routes, mask, sink=sink, local=local, **kwargs)
    with elastic_compile.force_routes(pair.model, routes):
        assert error(logits(pair.model, ids, mask, **kwargs), expected, mask) <= ATOL
        actual = decode_logits(
            pair.model,
            ids,
            mask,
            new_cache(pair.model, "dynamic"),
            30,
            position_ids=positions(mask),
        )
    assert error(actual, expected, mask) <= ATOL


# --- boundaries -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_layer(pairs):
    """Window 8, sink 2, one layer: which keys a query sees can be read off its logits."""
    return pairs("llama", layers=1, config={"sink": 2, "local": 8})


@pytest.mark.parametrize("way", ["prefill", "decode", "chunk"])
@pytest.mark.parametrize("offset", [0, 5])
def test_window_edge_is_token_exact(one_layer, way, offset):
    """B28: query 20 sees keys 0, 1 and 13..20; with five pads before them, the same tokens."""
    model = one_layer.model
    row = tokens(1, 32)
    mask = torch.cat([torch.zeros(1, offset), torch.ones(1, 32)], dim=1).long()

    def query_20(content):
        ids = torch.cat([torch.zeros(1, offset, dtype=torch.int64), content], dim=1)
        stop = offset + 21
        kwargs = {"position_ids": positions(mask)}
        with elastic_compile.force_routes(model, "sparse"):
            if way == "prefill":
                return logits(model, ids, mask, **kwargs)[:, stop - 1]
            low = stop - 1 if way == "decode" else stop - 3
            cache = new_cache(model, "dynamic")
            for a, b in [(0, low), (low, stop)]:
                at = {"position_ids": kwargs["position_ids"][:, a:b]}
                last = logits(model, ids[:, a:b], mask[:, :b], cache=cache, **at)[:, -1]
            return last

    reference = query_20(row)
    for key in range(21):
        changed = row.clone()
        changed[0, key] = row[0, key] % 300 + 1
        seen = error(query_20(changed), reference) > 0
        assert seen == (key < 2 or key > 12), key


@rewritten_families
def test_sinks_count_from_the_first_real_token(pairs, name):
    """B06: with sparse routes a left-padded row equals the same row alone."""
    if FAMILIES[name].pads_count:
        pytest.skip("the untouched model itself counts padding as positions")
    pair = pairs(name)
    ids, mask = prompts(side="left")
    with elastic_compile.force_routes(pair.model, "sparse"):
        batch = logits(pair.model, ids, mask, position_ids=positions(mask))
        for b in range(3):
            length = int(mask[b].sum())
            alone = logits(pair.model, ids[b : b + 1, -length:])
            assert error(batch[b : b + 1, -length:], alone) <= ATOL


@pytest.mark.parametrize("kind", ["full", "sparse", "mixed"])
@pytest.mark.parametrize("name", REWRITTEN + UNREWRITTEN)
def test_causality_probe(pairs, name, kind):
    """B15: changing token 23 leaves all logits before it bit-identical."""
    pair = pairs(name)
    ids, _ = prompts(2)
    changed = ids.clone()
    changed[:, 23] = ids[:, 23] % 300 + 1
    routes = pair.routes(kind) if pair.rewritten else "full"
    for mask in (None, torch.ones_like(ids)):
        with elastic_compile.force_routes(pair.model, routes):
            one, other = logits(pair.model, ids, mask), logits(pair.model, changed, mask)
        assert torch.equal(one[:, :23], other[:, :23])
        assert error(one[:, 23:24], other[:, 23:24]) > 1e-3


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "sparse"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "gemma3", "qwen3"])
def test_padding_rows_stay_finite(pairs, name, kind):
    """B09, B27: queries that see nothing are zero, never NaN, and reach nobody else."""
    pair = pairs(name)
    for side in ("left", "right"):
        ids, mask = prompts(side=side)
        with elastic_compile.force_routes(pair.model, kind):
            assert torch.isfinite(logits(pair.model, ids, mask)).all()


def test_a_row_of_nothing_but_padding(pairs):
    pair = pairs("llama")
    ids, _ = prompts()
    mask = torch.ones_like(ids)
    mask[1] = 0
    expected = logits(pair.base, ids, mask)
    for kind in ("full", "sparse"):
        with elastic_compile.force_routes(pair.model, kind):
            actual = logits(pair.model, ids, mask)
        assert torch.isfinite(actual).all()
        if kind == "full":
            assert error(actual, expected, mask) <= ATOL


@pytest.mark.parametrize("kind", ["full", "sparse", "mixed"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_right_padding_followed_by_decode(pairs, name, cache, kind):
    """The pads are a hole in the middle of the keys, which [start, end) cannot express."""
    pair = pairs(name)
    ids, mask = prompts(3, 28, side="right")
    steps = tokens(3, 6, seed=9)
    ids = torch.cat([ids, steps], dim=1)
    mask = torch.cat([mask, torch.ones_like(steps)], dim=1)
    at = positions(mask)
    routes = pair.routes(kind)
    with counting() as count, elastic_compile.force_routes(pair.model, routes):
        actual = decode_logits(
            pair.model, ids, mask, new_cache(pair.model, cache), 28, position_ids=at
        )
    expected = streaming_oracle(pair, ids, routes, mask, position_ids=at)
    assert error(actual, expected, mask) <= ATOL
    assert count["fallbacks"] == {}
    if kind == "full":
        untouched = decode_logits(
            pair.base, ids, mask, new_cache(pair.base, cache), 28, position_ids=at
        )
        assert error(actual, untouched, mask) <= ATOL


@pytest.mark.parametrize("kind", ["full", "sparse"])
def test_a_hole_within_the_prompt(pairs, kind):
    """A 2-D mask with zeros in the middle is padding like any other."""
    pair = pairs("llama")
    ids, _ = prompts(2)
    mask = torch.ones_like(ids)
    mask[0, 10:19] = 0
    mask[1, :3] = 0
    mask[1, 30:33] = 0
    at = positions(mask)
    routes = pair.routes(kind)
    with elastic_compile.force_routes(pair.model, routes):
        actual = logits(pair.model, ids, mask, position_ids=at)
    assert error(actual, streaming_oracle(pair, ids, routes, mask, position_ids=at), mask) <= ATOL


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_dtype_of_the_padding_mask_does_not_matter(pairs, dtype):
    pair = pairs("llama")
    ids, mask = prompts(side="left")
    at = positions(mask)
    expected = logits(pair.base, ids, mask, position_ids=at)
    assert error(logits(pair.model, ids, mask.to(dtype), position_ids=at), expected, mask) <= ATOL


def test_a_padding_mask_shorter_than_a_static_cache(pairs):
    """Unfilled keys of a static cache are never read, a NaN there included."""
    pair = pairs("llama")
    ids, mask = prompts(side="left")
    at = positions(mask)
    for kind in ("full", "sparse"):
        routes = pair.routes(kind)
        cache = new_cache(pair.model, "static", 96)
        with elastic_compile.force_routes(pair.model, routes):
            logits(pair.model, ids[:, :30], mask[:, :30], cache=cache, position_ids=at[:, :30])
            for layer in cache.layers:
                layer.keys[:, :, 45:] = float("nan")
                layer.values[:, :, 45:] = float("nan")
            rows = [
                logits(
                    pair.model,
                    ids[:, i : i + 1],
                    mask[:, : i + 1],
                    cache=cache,
                    position_ids=at[:, i : i + 1],
                )
                for i in range(30, LENGTH)
            ]
        expected = streaming_oracle(pair, ids, routes, mask, position_ids=at)[:, 30:]
        assert error(torch.cat(rows, dim=1), expected, mask[:, 30:]) <= ATOL


# --- the caller's own masks -----------------------------------------------------------------------


def prefix_lm(batch, length, prefix):
    """Causal, but the first `prefix` tokens see each other: bool [B, 1, S, S]."""
    seen = torch.ones(length, length).tril().bool()
    seen[:prefix, :prefix] = True
    return seen.expand(batch, 1, length, length).contiguous()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "falcon", "phi3", "mixtral"])
def test_own_4d_mask_is_exact_and_counted(pairs, name, dtype):
    pair = pairs(name)
    ids, _ = prompts(2)
    mask = prefix_lm(2, LENGTH, 15)
    if dtype == torch.float32:
        # A bias, not only minus infinity: it has to reach the scores as it is.
        bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(5))
        mask = bias.masked_fill(~mask, torch.finfo(dtype).min)
    with counting() as count:
        actual = logits(pair.model, ids, mask)
    expected = logits(pair.base, ids, mask)
    assert error(actual, expected) <= ATOL
    assert error(expected, logits(pair.base, ids)) > 1e-3
    assert sum(count["fallbacks"].values()) == pair.layers
    assert all(isinstance(reason, str) and reason for reason in count["fallbacks"])
    # What the caller asked to see is seen, whatever the routes.
    with elastic_compile.force_routes(pair.model, "sparse"):
        assert error(logits(pair.model, ids, mask), expected) <= ATOL


def test_own_4d_mask_with_a_mask_per_head(pairs):
    pair = pairs("llama")
    ids, _ = prompts(2)
    mask = prefix_lm(2, LENGTH, 15).repeat(1, 8, 1, 1)
    mask[:, 3] = torch.ones(LENGTH, LENGTH).tril().bool()
    actual = logits(pair.model, ids, mask)
    assert error(actual, logits(pair.base, ids, mask)) <= ATOL


def test_own_4d_mask_during_cached_steps(pairs):
    pair = pairs("llama")
    ids, _ = prompts(2)
    mask = prefix_lm(2, LENGTH, 15)
    out = []
    for model in (pair.model, pair.base):
        cache = new_cache(model, "dynamic")
        rows = [
            logits(model, ids[:, a:b], mask[:, :, a:b, :b], cache=cache)
            for a, b in [(0, 30), (30, 31), (31, 40)]
        ]
        out.append(torch.cat(rows, dim=1))
    assert error(out[0], out[1]) <= ATOL


def test_a_causal_4d_mask_gives_the_same_result(pairs):
    """However it is handled, results must be those of the untouched model."""
    pair = pairs("llama")
    ids, mask = prompts(2, side="left")
    at = positions(mask)
    causal = torch.ones(LENGTH, LENGTH).tril().bool() & mask[:, None, None, :].bool()
    causal = causal | torch.eye(LENGTH).bool()
    actual = logits(pair.model, ids, causal, position_ids=at)
    assert error(actual, logits(pair.base, ids, mask, position_ids=at), mask) <= ATOL


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gemma3"])
def test_packed_sequences_stay_exact(pairs, name):
    """Positions that restart mean several documents in a row, none of which sees another."""
    pair = pairs(name)
    ids, _ = prompts(2)
    cut = 23
    at = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]).expand(2, -1)
    actual = logits(pair.model, ids, position_ids=at)
    expected = logits(pair.base, ids, position_ids=at)
    assert error(actual, expected) <= ATOL
    assert error(actual[:, cut:], logits(pair.base, ids[:, cut:])) <= ATOL
    assert error(expected[:, cut:], logits(pair.base, ids)[:, cut:]) > 1e-3


def test_batches_of_unequal_padding_do_not_mix(pairs):
    """B07: one fully real row, one with nearly only padding, in one batch."""
    pair = pairs("llama")
    rows = [tokens(1, n, seed=n)[0] for n in (9, 17, 33, 64)]
    ids, mask = pad(rows, "left")
    for kind in ("full", "sparse"):
        with elastic_compile.force_routes(pair.model, kind):
            batch = logits(pair.model, ids, mask, position_ids=positions(mask))
            for b, row in enumerate(rows):
                alone = logits(pair.model, row[None])
                assert error(batch[b : b + 1, -len(row) :], alone) <= ATOL


def test_the_window_of_these_tests_bites():
    assert SINK + LOCAL < LENGTH - 14 - 12


# --- what layers share of a mask ------------------------------------------------------------------


def _counted(monkeypatch):
    made = []
    real = _runtime.MaskFacts

    def make(*fields):
        made.append(real(*fields))
        return made[-1]

    monkeypatch.setattr(_runtime, "MaskFacts", make)
    return made


@torch.no_grad()
def test_layers_of_a_call_share_what_follows_from_the_mask(monkeypatch):
    base, model = build("llama", 2).eval(), elastic_compile.transform(build("llama", 2).eval())
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    made = _counted(monkeypatch)
    model(ids, attention_mask=mask, use_cache=False)
    assert len(made) == 1 and made[0].start.tolist() == [0, 9] and made[0].real.tolist() == [40, 31]
    # The caller's own tensor, changed in place between calls.
    mask[1, :20] = 0
    found = model(ids, attention_mask=mask, use_cache=False).logits
    wanted = base(ids, attention_mask=mask, use_cache=False).logits
    assert len(made) == 2 and made[1].start.tolist() == [0, 20]
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-5)


def test_a_mask_that_changes_is_looked_at_again(monkeypatch):
    """Also without a decoder whose call begins, and where changes leave no trace."""
    made = _counted(monkeypatch)
    mask = torch.ones(1, 8, dtype=torch.bool)
    first = _runtime._facts(mask, 8)
    assert _runtime._facts(mask, 8) is first and len(made) == 1
    assert _runtime._facts(mask, 9).real.tolist() == [8]
    mask[0, :3] = False
    assert _runtime._facts(mask, 8).start.tolist() == [3]
    with torch.inference_mode():
        mask = torch.ones(1, 8, dtype=torch.bool)
        assert _runtime._facts(mask, 8).start.tolist() == [0]
        mask[0, :5] = False
        assert _runtime._facts(mask, 8).start.tolist() == [5]


def test_few_masks_are_remembered():
    for length in range(1, 50):
        _runtime._facts(torch.ones(1, length, dtype=torch.bool), length)
    assert len(_state._THREADS.masks) <= _state._MASKS
