"""Who decides a route, when, from what, and how it is read back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import elastic_compile
from tests.families import build, pad, tokens
from tests.integration.helpers import (
    LENGTH,
    POOL,
    counting,
    elastic_config,
    error,
    esr,
    generate,
    logits,
    msr,
    new_cache,
    positions,
    prompts,
    random_routers,
    rewritten_rows,
    routes_of,
    run,
    streaming_oracle,
    visible_pairs,
)

# The untouched model run in another shape (cached, padded) rounds by up to 1e-5 itself.
ATOL = 2e-5


@pytest.fixture
def pair(pairs):
    return pairs("llama")


@pytest.fixture
def routed(pair):
    with random_routers(pair.model, seed=3):
        yield pair


@pytest.fixture(scope="module")
def uneven():
    """(untouched, transformed) models whose layers have 2 and 4 key/value heads."""

    def make():
        model = build("llama")
        attention = model.model.layers[1].self_attn
        torch.manual_seed(1)
        for name in ("k_proj", "v_proj"):
            setattr(attention, name, nn.Linear(256, 4 * 32))
            nn.init.normal_(getattr(attention, name).weight, std=0.11)
        attention.num_key_value_groups = 2
        return model

    return make(), elastic_compile.transform(make(), elastic_config())


# --- reading routes -------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "gemma3", "llama4"])
def test_last_routes_has_one_column_per_rewritten_site(pairs, name):
    pair = pairs(name)
    ids, mask = prompts(3, side="left")
    cache = new_cache(pair.model, "dynamic")
    run(pair.model, ids, mask, cache, position_ids=positions(mask))
    for source in (pair.model, cache):
        routes = elastic_compile.last_routes(source)
        assert tuple(routes.shape) == (3, len(pair.rewritten), pair.kv_heads)
        assert not routes.is_floating_point()
        assert not routes.any(), "an untrained router sends every head to full attention"


def test_last_routes_reads_forced_routes(pair):
    ids, _ = prompts(3)
    routes = torch.randint(0, 2, (3, 2, 2), generator=torch.Generator().manual_seed(1))
    cache = new_cache(pair.model, "dynamic")
    with elastic_compile.force_routes(pair.model, routes):
        run(pair.model, ids, None, cache)
        assert torch.equal(routes_of(pair.model), routes)
    assert torch.equal(routes_of(cache), routes)


def test_last_routes_belongs_to_the_last_call(routed):
    a, b = tokens(2, 30, seed=1), tokens(2, 30, seed=2)
    run(routed.model, a)
    first = routes_of(routed.model).clone()
    run(routed.model, b)
    second = routes_of(routed.model).clone()
    assert not torch.equal(first, second)
    run(routed.model, a)
    assert torch.equal(routes_of(routed.model), first)


def test_a_decode_step_reports_the_routes_in_force(routed):
    ids, _ = prompts(2)
    cache = new_cache(routed.model, "dynamic")
    run(routed.model, ids, None, cache)
    routes = routes_of(routed.model).clone()
    run(routed.model, tokens(2, 1, seed=4), None, cache)
    assert torch.equal(routes_of(routed.model), routes)


def test_layers_of_different_kv_heads_give_a_list(uneven):
    base, model = uneven
    ids, mask = prompts(2, side="left")
    at = positions(mask)
    assert [row.kv_heads for row in rewritten_rows(model)] == [2, 4]
    actual = logits(model, ids, mask, position_ids=at)
    assert error(actual, logits(base, ids, mask, position_ids=at), mask) <= ATOL
    routes = elastic_compile.last_routes(model)
    assert [tuple(r.shape) for r in routes] == [(2, 2), (2, 4)]
    forced = [torch.tensor([0, 1]), torch.tensor([1, 0, 0, 1])]
    with elastic_compile.force_routes(model, forced):
        moved = logits(model, ids, mask, position_ids=at)
        seen = elastic_compile.last_routes(model)
    for got, wanted in zip(seen, forced, strict=True):
        assert torch.equal(got.long(), wanted.expand(2, -1))
    assert error(moved, actual, mask) > 1e-3
    logits(model, ids)
    assert msr(elastic_compile.sparsity(model)) == ([0.0, 0.0], 0.0)
    with elastic_compile.force_routes(model, forced):
        logits(model, ids)
        layers, overall = msr(elastic_compile.sparsity(model))
    assert layers == pytest.approx([0.5, 0.5]) and overall == pytest.approx(0.5)


# --- sparsity -------------------------------------------------------------------------------------


def brute_force(routes, mask):
    """(Ω_MSR, Ω_ESR) per layer, counted pair by pair; routes [B, layers, kv heads], mask [B, S]."""
    shares = torch.zeros(routes.shape, dtype=torch.float64)
    for b in range(len(mask)):
        # Padding asks nothing: only real tokens are queries.
        queries = mask[b].bool()
        full, kept = (int(visible_pairs(mask[b], s)[queries].sum()) for s in (False, True))
        shares[b] = routes[b] * (1 - kept / full)
    return routes.double().mean((0, 2)), shares.mean((0, 2))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("source", ["model", "cache"])
def test_sparsity_is_counted_exactly(pair, side, source):
    ids, mask = prompts(3, side=side)
    real = torch.ones_like(ids) if mask is None else mask
    routes = torch.randint(0, 2, (3, 2, 2), generator=torch.Generator().manual_seed(2))
    routes[0] = torch.tensor([[1, 1], [0, 0]])
    cache = new_cache(pair.model, "dynamic") if source == "cache" else None
    with elastic_compile.force_routes(pair.model, routes):
        run(pair.model, ids, mask, cache, position_ids=positions(real))
        sparsity = elastic_compile.sparsity(pair.model if cache is None else cache)
    expected_msr, expected_esr = brute_force(routes, real)
    layers, overall = msr(sparsity)
    assert layers == pytest.approx(expected_msr.tolist())
    assert overall == pytest.approx(expected_msr.mean().item())
    layers, overall = esr(sparsity)
    assert layers == pytest.approx(expected_esr.tolist(), abs=1e-6)
    assert overall == pytest.approx(expected_esr.mean().item(), abs=1e-6)


@pytest.mark.parametrize("length", [1, 5, 12, 13, 40, 200])
def test_sparsity_at_the_ends(pair, length):
    ids = tokens(2, length)
    with elastic_compile.force_routes(pair.model, "full"):
        run(pair.model, ids)
        assert msr(elastic_compile.sparsity(pair.model))[1] == 0
        assert esr(elastic_compile.sparsity(pair.model))[1] == 0
    with elastic_compile.force_routes(pair.model, "sparse"):
        run(pair.model, ids)
        sparsity = elastic_compile.sparsity(pair.model)
    # A prompt that fits the window prunes nothing, whatever it is called.
    expected = brute_force(torch.ones(2, 2, 2), torch.ones_like(ids))[1].mean().item()
    assert msr(sparsity)[1] == 1
    assert esr(sparsity)[1] == pytest.approx(expected, abs=1e-6)
    assert (expected == 0) == (length <= 12)


# --- forcing --------------------------------------------------------------------------------------


def test_named_routes_equal_tensors(pair):
    ids, _ = prompts()
    out = {}
    for kind in ("full", "sparse"):
        for routes in (
            kind,
            pair.routes(kind),
            pair.routes(kind).to(torch.int32),
            pair.routes(kind).expand(3, -1, -1),
        ):
            with elastic_compile.force_routes(pair.model, routes):
                result = logits(pair.model, ids)
            assert error(result, out.setdefault(kind, result)) == 0.0
    assert error(out["full"], out["sparse"]) > 1e-3


def test_forcing_nests_and_ends(routed):
    model = routed.model
    ids, _ = prompts()
    free = logits(model, ids)
    with elastic_compile.force_routes(model, "sparse"):
        sparse = logits(model, ids)
        with elastic_compile.force_routes(model, "full"):
            assert error(logits(model, ids), logits(routed.base, ids)) <= ATOL
        assert error(logits(model, ids), sparse) == 0.0
    assert error(logits(model, ids), free) == 0.0
    with pytest.raises(KeyError), elastic_compile.force_routes(model, "sparse"):
        raise KeyError("out of the block")
    assert error(logits(model, ids), free) == 0.0
    assert error(free, sparse) > 1e-3


def test_minus_one_asks_the_router(routed):
    ids, _ = prompts()
    run(routed.model, ids)
    free = routes_of(routed.model).clone()
    # The second layer's router sees what the first layer made: leave that one free, or whole.
    for forced, free_layers in (([[-1, -1], [1, -1]], (0, 1)), ([[0, -1], [1, 0]], (0,))):
        forced = torch.tensor(forced)
        with elastic_compile.force_routes(routed.model, forced):
            run(routed.model, ids)
            seen = routes_of(routed.model).clone()
        for layer in range(2):
            for head in range(2):
                wanted = forced[layer, head]
                if wanted >= 0:
                    assert torch.equal(seen[:, layer, head], wanted.expand(3))
                elif layer in free_layers:
                    assert torch.equal(seen[:, layer, head], free[:, layer, head])


def test_forcing_decides_at_each_step_too(pair):
    """Routes forced after the prefill govern the steps made while they are forced."""
    ids, _ = prompts(2)
    cache = new_cache(pair.model, "dynamic")
    run(pair.model, ids[:, :30], None, cache)
    with elastic_compile.force_routes(pair.model, "sparse"):
        step = logits(pair.model, ids[:, 30:31], cache=cache)
    # Keys of the second layer come from a full prefill, so only a difference can be asked for.
    assert error(step, logits(pair.base, ids)[:, 30:31]) > 1e-3


def test_forcing_one_model_leaves_others_alone(pairs):
    one, other = pairs("llama"), pairs("qwen2")
    ids, _ = prompts()
    with elastic_compile.force_routes(one.model, "sparse"):
        assert error(logits(other.model, ids), logits(other.base, ids)) <= ATOL


def test_route_bias_moves_every_route(pairs):
    ids, _ = prompts()
    for bias, expected in ((1e6, 1.0), (-1e6, 0.0)):
        pair = pairs("llama", config={"route_bias": bias})
        with random_routers(pair.model, seed=3):
            run(pair.model, ids)
            assert routes_of(pair.model).float().mean() == expected


# --- what the router sees -------------------------------------------------------------------------


def test_the_router_sees_both_ends_and_nothing_between(pairs):
    """Tokens beyond the pooled ends do not move the routes of a model of one layer."""
    pair = pairs("llama", layers=1)
    ids, _ = prompts(8)
    with random_routers(pair.model, seed=3):
        run(pair.model, ids)
        routes = routes_of(pair.model).clone()
        middle = ids.clone()
        middle[:, POOL:-POOL] = tokens(8, LENGTH - 2 * POOL, seed=77)
        run(pair.model, middle)
        assert torch.equal(routes_of(pair.model), routes)
        for end in (slice(0, POOL), slice(-POOL, None)):
            changed = ids.clone()
            changed[:, end] = tokens(8, POOL, seed=78)
            run(pair.model, changed)
            assert not torch.equal(routes_of(pair.model), routes)


def test_pooled_keys_are_those_before_the_rotary_embedding(pairs):
    """Positions do not reach the router: shifting them leaves the routes of layer 0 as they are."""
    for name in ("llama", "qwen3", "gpt_neox", "phi3", "falcon", "llama4_full"):
        pair = pairs(name)
        ids, _ = prompts(4)
        with random_routers(pair.model, seed=3):
            run(pair.model, ids)
            routes = routes_of(pair.model)[:, 0].clone()
            scrambled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:LENGTH]
            run(pair.model, ids, torch.ones_like(ids), position_ids=scrambled.expand(4, -1))
            assert torch.equal(routes_of(pair.model)[:, 0], routes), name


# --- route_length: never the answer ---------------------------------------------------------------


def _with_answers(side, seed):
    """(ids, mask, route lengths) of three prompts followed by 9 answer tokens each."""
    rows = [
        torch.cat([tokens(1, 31 - 7 * b, b)[0], tokens(1, 9, seed=50 + seed + b)[0]])
        for b in range(3)
    ]
    ids, mask = pad(rows, side or "left")
    if side is None:
        rows = [row[-24:] for row in rows]
        ids, mask = torch.stack(rows), None
        return ids, mask, torch.full((3,), 15)
    ends = mask.shape[1] - mask.flip(1).argmax(1)
    return ids, mask, ends - 9


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_swapping_the_answer_leaves_routes_bit_identical(routed, side):
    model = routed.model
    seen, unlimited = [], []
    for seed in (0, 1000, 2000):
        ids, mask, lengths = _with_answers(side, seed)
        kwargs = {} if mask is None else {"position_ids": positions(mask)}
        with elastic_compile.route_length(model, lengths):
            run(model, ids, mask, **kwargs)
            seen.append(routes_of(model).clone())
        run(model, ids, mask, **kwargs)
        unlimited.append(routes_of(model).clone())
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert 0 < seen[0].float().mean() < 1
    # Without the limit the answer does decide: the test above could fail.
    assert not (torch.equal(unlimited[0], unlimited[1]) and torch.equal(unlimited[0], unlimited[2]))


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_one_forward_evaluation_routes_as_generate_does(routed, side):
    """And so has the logits that cached generation would have under those routes."""
    model = routed.model
    ids, mask, lengths = _with_answers(side, 0)
    kwargs = {} if mask is None else {"position_ids": positions(mask)}
    with elastic_compile.route_length(model, lengths):
        evaluated = logits(model, ids, mask, **kwargs)
        routes = routes_of(model).clone()
    assert error(evaluated, streaming_oracle(routed, ids, routes, mask, **kwargs), mask) <= ATOL
    for b in range(3):
        row = ids[b : b + 1] if mask is None else ids[b : b + 1, mask[b].bool()]
        prompt = row[:, : row.shape[1] - 9]
        cache = new_cache(model, "dynamic")
        generate(model, prompt, cache=cache, new=4)
        assert torch.equal(routes_of(cache)[0], routes[b])


def test_route_length_ends_with_its_block(routed):
    model = routed.model
    ids, _ = prompts()
    run(model, ids)
    free = routes_of(model).clone()
    with elastic_compile.route_length(model, torch.full((3,), 7)):
        run(model, ids)
        limited = routes_of(model).clone()
    assert not torch.equal(limited, free)
    run(model, ids)
    assert torch.equal(routes_of(model), free)
    # Columns up to the end are no limit at all.
    with elastic_compile.route_length(model, torch.full((3,), LENGTH)):
        run(model, ids)
        assert torch.equal(routes_of(model), free)


def test_route_length_of_one_model_leaves_others_alone(pairs):
    """A teacher evaluated inside the student's block sees its whole prompt."""
    one, other = pairs("llama"), pairs("qwen2")
    ids, _ = prompts()
    with random_routers(one.model, seed=3), random_routers(other.model, seed=3):
        run(other.model, ids)
        free = routes_of(other.model).clone()
        with elastic_compile.route_length(other.model, torch.full((3,), 7)):
            run(other.model, ids)
            assert not torch.equal(routes_of(other.model), free)
        with elastic_compile.route_length(one.model, torch.full((3,), 7)):
            run(other.model, ids)
            assert torch.equal(routes_of(other.model), free)


# --- when routes are decided ----------------------------------------------------------------------


def _chunks(model, ids, cuts, cache):
    for low, high in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        run(model, ids[:, low:high], None, cache)
    return routes_of(cache).clone()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_first_call_decides(routed, kind):
    """The paper: later calls, of one token or many, keep the routes."""
    model = routed.model
    ids, _ = prompts()
    first = _chunks(model, ids[:, :16], [], new_cache(model, kind))
    whole = _chunks(model, ids, [], new_cache(model, kind))
    assert not torch.equal(first, whole)
    assert torch.equal(_chunks(model, ids, [16], new_cache(model, kind)), first)
    assert torch.equal(_chunks(model, ids, [16, 17, 18, 30], new_cache(model, kind)), first)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("cuts", [[20], [16, 32], [10, 20, 30], [3], [37], [2, 4, 6, 8], [12, 15]])
def test_each_call_routes_as_one_shot_prefill(pairs, kind, cuts):
    """Chunked prefill ends with the routes that the whole prompt gets at once."""
    pair = pairs("llama", layers=1, config={"reroute": "each_call"})
    with random_routers(pair.model, seed=3):
        for length in (LENGTH, 9 if max(cuts) < 9 else LENGTH):
            ids = tokens(4, length, seed=6)
            whole = _chunks(pair.model, ids, [], new_cache(pair.model, kind))
            assert torch.equal(_chunks(pair.model, ids, cuts, new_cache(pair.model, kind)), whole)
            assert length < LENGTH or 0 < whole.float().mean() < 1


@pytest.mark.parametrize("turn", [15, 3])
def test_each_call_follows_the_second_turn(pairs, turn):
    """A new question routes again, by the newest tokens: decoded ones among them if it is short."""
    pair = pairs("llama", layers=1, config={"reroute": "each_call"})
    with random_routers(pair.model, seed=3):
        ids = tokens(4, 25 + turn, seed=6)
        cache = new_cache(pair.model, "dynamic")
        before = _chunks(pair.model, ids[:, :20], [], cache)
        for i in range(20, 25):
            run(pair.model, ids[:, i : i + 1], None, cache)
            assert torch.equal(routes_of(cache), before), "one token decides nothing"
        run(pair.model, ids[:, 25:], None, cache)
        whole = _chunks(pair.model, ids, [], new_cache(pair.model, "dynamic"))
        assert torch.equal(routes_of(cache), whole)
        assert not torch.equal(before, whole)


def test_each_call_with_rows_that_are_repeated(pairs):
    """What has been pooled so far belongs to the row and moves with it."""
    pair = pairs("llama", layers=1, config={"reroute": "each_call"})
    with random_routers(pair.model, seed=3):
        document, questions = tokens(2, 20, seed=1), tokens(4, 10, seed=3)
        cache = new_cache(pair.model, "dynamic")
        run(pair.model, document, None, cache)
        cache.batch_repeat_interleave(2)
        run(pair.model, questions, None, cache)
        run(pair.model, torch.cat([document.repeat_interleave(2, 0), questions], dim=1))
        assert torch.equal(routes_of(cache), routes_of(pair.model))
        assert 0 < routes_of(cache).float().mean() < 1


def test_each_call_with_left_padding(pairs):
    pair = pairs("llama", layers=1, config={"reroute": "each_call"})
    ids, mask = prompts(side="left")
    at = positions(mask)
    with random_routers(pair.model, seed=3):
        whole = new_cache(pair.model, "dynamic")
        run(pair.model, ids, mask, whole, position_ids=at)
        # The first chunk of the last row is padding and nothing else.
        assert not mask[2, :12].any()
        parts = new_cache(pair.model, "dynamic")
        for low, high in [(0, 12), (12, 25), (25, LENGTH)]:
            run(
                pair.model,
                ids[:, low:high],
                mask[:, :high],
                parts,
                position_ids=at[:, low:high],
            )
        assert torch.equal(routes_of(parts), routes_of(whole))


def test_counters_count(pair):
    ids, _ = prompts()
    with counting() as count:
        for _ in range(3):
            run(pair.model, ids)
    assert count["calls"] == 6 and count["fallbacks"] == {}
    # A snapshot, not the live table.
    elastic_compile.counters()["calls"].clear()
    assert sum(elastic_compile.counters()["calls"].values()) > 0
