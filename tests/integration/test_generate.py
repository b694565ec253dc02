"""`generate` in all its forms: as the untouched model when full, else consistent with itself."""

from __future__ import annotations

import pytest
import torch

import elastic_compile
from tests.families import FAMILIES, REWRITTEN, UNREWRITTEN, pad, tokens
from tests.integration.helpers import (
    cache_argument,
    cache_of,
    counting,
    decode_logits,
    each_thread,
    error,
    generate,
    logits,
    new_cache,
    positions,
    prompts,
    random_routers,
    routes_of,
    run,
    streaming_oracle,
)

# The untouched model run in another shape (cached, padded) rounds by up to 1e-5 itself.
ATOL = 2e-5
SMOKE = {"llama", "qwen3", "gpt2", "falcon", "gemma3"}
WIDE = ["llama", "gpt2", "gemma3"]


def families(names):
    return [pytest.param(n, marks=[pytest.mark.smoke] if n in SMOKE else []) for n in names]


def static(name):
    if not FAMILIES[name].static_cache:
        pytest.skip("the untouched model cannot generate on a static cache")


def mixed(pair):
    routes = pair.routes("mixed")
    return routes if routes.any() else pair.routes("sparse")


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", families(REWRITTEN + UNREWRITTEN))
def test_greedy_equals_the_untouched_model(pairs, name, cache, side):
    pair = pairs(name)
    if cache == "static":
        static(name)
    ids, mask = prompts(side=side)
    kwargs = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "none": {"use_cache": False},
    }[cache]
    with counting() as count:
        actual = generate(pair.model, ids, mask, **kwargs)
    assert torch.equal(actual, generate(pair.base, ids, mask, **kwargs))
    assert count["calls"] == 8 * len(pair.rewritten)
    assert count["fallbacks"] == {}


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", families(REWRITTEN))
def test_forced_streaming_agrees_over_caches(pairs, name, side):
    """dynamic == static == no cache == the untouched model re-run under the explicit mask."""
    pair = pairs(name)
    static(name)
    ids, mask = prompts(side=side)
    routes = mixed(pair)
    with elastic_compile.force_routes(pair.model, routes):
        dynamic = generate(pair.model, ids, mask)
        static_ = generate(pair.model, ids, mask, cache_implementation="static")
        none = generate(pair.model, ids, mask, use_cache=False)
    assert torch.equal(dynamic, static_)
    assert torch.equal(dynamic, none)
    assert not torch.equal(dynamic, generate(pair.base, ids, mask)), "routes changed nothing"
    # The last token is the oracle's choice after everything before it.
    whole = torch.cat([ids, dynamic], dim=1)
    real = torch.ones_like(whole) if mask is None else torch.cat([mask, mask.new_ones(3, 8)], 1)
    expected = streaming_oracle(pair, whole, routes, real, position_ids=positions(real))
    assert torch.equal(expected[:, ids.shape[1] - 1 : -1].argmax(-1), dynamic)


# --- other modes, all heads full: equal to the untouched model ------------------------------------

MODES = {
    "beams": dict(num_beams=3),
    "beams_returned": dict(num_beams=4, num_return_sequences=3, length_penalty=0.5),
    "samples": dict(do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2),
    "chunked_prefill": dict(prefill_chunk_size=16),
    "prompt_lookup": dict(prompt_lookup_num_tokens=3),
    "repetition_penalty": dict(repetition_penalty=1.3),
}


def _mode(mode):
    ids, mask = prompts(side="left")
    if mode == "prompt_lookup":  # one row only, and something to look up
        row = tokens(1, 12)
        ids, mask = torch.cat([row, row, row, row[:, :4]], dim=1), None
    return ids, mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WIDE)
def test_mode_equals_the_untouched_model(pairs, name, mode):
    pair = pairs(name)
    ids, mask = _mode(mode)
    out = []
    for model in (pair.model, pair.base):
        torch.manual_seed(7)
        with counting() as count:
            out.append(generate(model, ids, mask, new=12, **MODES[mode]))
        if model is pair.model:
            assert count["calls"] > 0 and count["fallbacks"] == {}
    assert torch.equal(*out)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["full", "mixed"])
@pytest.mark.parametrize("name", WIDE)
def test_second_turn(pairs, name, kind, cache):
    """B58: the cache of a first answer and a longer conversation."""
    pair = pairs(name)
    first, turn = tokens(2, 30), tokens(2, 9, seed=5)
    routes = mixed(pair) if kind == "mixed" else pair.routes("full")
    out = []
    for model in (pair.model, pair.base):
        store = new_cache(model, cache)
        force = (
            elastic_compile.force_routes(model, routes)
            if model is pair.model
            else torch.inference_mode()
        )
        with force:
            answer = generate(model, first, cache=store, new=6)
            whole = torch.cat([first, answer, turn], dim=1)
            out.append((whole, generate(model, whole, cache=store, new=6)))
    if kind == "full":
        assert torch.equal(out[0][0], out[1][0])
        assert torch.equal(out[0][1], out[1][1])
    whole, answer = out[0]
    expected = streaming_oracle(pair, torch.cat([whole, answer], dim=1), routes)
    assert torch.equal(expected[:, whole.shape[1] - 1 : -1].argmax(-1), answer)


def test_a_cached_prefix_shared_by_two_questions(pairs):
    """The document is prefilled once and its cache copied for each question."""
    import copy

    pair = pairs("llama")
    document = tokens(1, 25)
    stores = {}
    for model in (pair.model, pair.base):
        stores[model] = new_cache(model, "dynamic")
        run(model, document, cache=stores[model])
    for seed in (1, 2):
        whole = torch.cat([document, tokens(1, 6, seed)], dim=1)
        answers = [
            generate(model, whole, cache=copy.deepcopy(store)) for model, store in stores.items()
        ]
        assert torch.equal(*answers)


# --- other modes, routed: consistent with themselves ----------------------------------------------


@pytest.fixture
def routed(pairs):
    """A pair whose routers answer differently to different prompts."""
    pair = pairs("llama")
    with random_routers(pair.model, seed=3):
        ids, mask = prompts(side="left")
        run(pair.model, ids, mask, position_ids=positions(mask))
        routes = routes_of(pair.model)
        assert 0 < routes.float().mean() < 1
        assert not torch.equal(routes[0], routes[1]) and not torch.equal(routes[1], routes[2])
        yield pair


def test_rows_of_a_batch_equal_rows_alone(routed):
    """Each row is routed by itself, padded or not."""
    model = routed.model
    ids, mask = prompts(side="left")
    batch = generate(model, ids, mask, new=10)
    run(model, ids, mask, position_ids=positions(mask))
    together = routes_of(model)
    for b in range(3):
        row = ids[b : b + 1, mask[b].argmax() :]
        assert torch.equal(generate(model, row, new=10), batch[b : b + 1])
        run(model, row)
        assert torch.equal(routes_of(model)[0], together[b])


def test_routes_do_not_depend_on_the_amount_of_padding(routed):
    model = routed.model
    row = tokens(1, 33, seed=2)
    seen = []
    for pads in (0, 1, 5, 31):
        ids, mask = pad([row[0], tokens(1, 33 + pads)[0]], "left")
        run(model, ids, mask, position_ids=positions(mask))
        seen.append(routes_of(model)[0])
        run(model, *pad([row[0], tokens(1, 33 + pads)[0]], "right"))
        seen.append(routes_of(model)[0])
    assert all(torch.equal(routes, seen[0]) for routes in seen)


def test_cached_steps_keep_the_routes_of_the_prompt(routed):
    """Logits of the steps are those of the oracle under the routes of the prefill."""
    ids, mask = prompts(side="left")
    at = positions(mask)
    cut = 32
    run(routed.model, ids[:, :cut], mask[:, :cut], position_ids=at[:, :cut])
    routes = routes_of(routed.model)
    expected = streaming_oracle(routed, ids, routes, mask, position_ids=at)
    for kind in ("dynamic", "static"):
        cache = new_cache(routed.model, kind)
        actual = decode_logits(routed.model, ids, mask, cache, cut, position_ids=at)
        assert error(actual, expected, mask) <= ATOL
        assert torch.equal(routes_of(cache), routes)


def test_routed_generate_agrees_over_caches(routed):
    ids, mask = prompts(side="left")
    dynamic = generate(routed.model, ids, mask, new=12)
    assert torch.equal(
        dynamic, generate(routed.model, ids, mask, new=12, cache_implementation="static")
    )
    assert not torch.equal(dynamic, generate(routed.base, ids, mask, new=12))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_of_several_rows_equal_row_by_row(routed, cache):
    """Beams move between rows of the cache; the routes must move with them."""
    ids, mask = prompts(side="left")
    kwargs = {"num_beams": 3, "num_return_sequences": 2, "new": 10}
    if cache == "static":
        kwargs["cache_implementation"] = "static"
    batch = generate(routed.model, ids, mask, **kwargs).reshape(3, 2, -1)
    for b in range(3):
        alone = generate(routed.model, ids[b : b + 1, mask[b].argmax() :], **kwargs)
        assert torch.equal(alone, batch[b])


def test_prompt_lookup_gives_greedy_tokens(routed):
    """Candidate tokens enter as multi-token calls; with reroute="first" they decide nothing."""
    ids, _ = _mode("prompt_lookup")
    greedy = generate(routed.model, ids, new=12)
    assert torch.equal(generate(routed.model, ids, new=12, prompt_lookup_num_tokens=3), greedy)


def test_returned_samples_share_the_routes_of_their_prompt(routed):
    ids, mask = prompts(side="left")
    torch.manual_seed(3)
    several = generate(routed.model, ids, mask, do_sample=True, num_return_sequences=2, new=10)
    repeated = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    torch.manual_seed(3)
    assert torch.equal(generate(routed.model, *repeated, do_sample=True, new=10), several)


def test_threads_with_caches_of_their_own(routed):
    rows = [tokens(1, 30 + 3 * i, seed=i) for i in range(4)]
    alone = [generate(routed.model, row, new=8) for row in rows]
    assert len({tuple(a[0].tolist()) for a in alone}) == 4

    def job(row):
        def call():
            torch.set_num_threads(1)
            cache = new_cache(routed.model, "dynamic")
            answers = [generate(routed.model, row, new=8) for _ in range(3)]
            run(routed.model, row, cache=cache)
            # Each thread's "last call" is its own.
            return answers, routes_of(routed.model), routes_of(cache)

        return call

    for row, expected, (answers, mine, cached) in zip(
        rows, alone, each_thread([job(row) for row in rows]), strict=True
    ):
        assert all(torch.equal(answer, expected) for answer in answers)
        run(routed.model, row)
        assert torch.equal(mine, routes_of(routed.model))
        assert torch.equal(cached, mine)


# --- caches whose rows move -----------------------------------------------------------------------


def _prefilled(routed, kind, rows=3):
    ids, mask = prompts(side="left")
    cache = new_cache(routed.model, kind)
    out = run(routed.model, ids[:rows], mask[:rows], cache, position_ids=positions(mask)[:rows])
    assert cache_of(out) is cache
    return ids[:rows], mask[:rows], cache


def _step(model, token, mask, cache):
    """Logits of one more token per row."""
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return logits(model, token, mask, cache=cache, position_ids=positions(mask)[:, -1:])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reorder_cache_carries_routes(routed, kind):
    _, mask, cache = _prefilled(routed, kind)
    routes, order, token = routes_of(cache), torch.tensor([2, 0, 1]), tokens(3, 1, seed=8)
    plain = _step(routed.model, token, mask, cache)
    _, mask, cache = _prefilled(routed, kind)
    cache.reorder_cache(order)
    assert torch.equal(routes_of(cache), routes[order])
    moved = _step(routed.model, token[order], mask[order], cache)
    assert error(moved, plain[order]) <= ATOL


def test_batch_select_carries_routes(routed):
    _, mask, cache = _prefilled(routed, "dynamic")
    routes, keep, token = routes_of(cache), torch.tensor([2, 1]), tokens(3, 1, seed=8)
    plain = _step(routed.model, token, mask, cache)
    _, mask, cache = _prefilled(routed, "dynamic")
    cache.batch_select_indices(keep)
    assert torch.equal(routes_of(cache), routes[keep])
    assert error(_step(routed.model, token[keep], mask[keep], cache), plain[keep]) <= ATOL


def test_batch_repeat_carries_routes(routed):
    _, mask, cache = _prefilled(routed, "dynamic")
    routes, token = routes_of(cache), tokens(3, 1, seed=8)
    plain = _step(routed.model, token, mask, cache)
    _, mask, cache = _prefilled(routed, "dynamic")
    cache.batch_repeat_interleave(2)
    twice = [0, 0, 1, 1, 2, 2]
    assert torch.equal(routes_of(cache), routes[twice])
    assert error(_step(routed.model, token[twice], mask[twice], cache), plain[twice]) <= ATOL


def test_crop_keeps_routes(routed):
    ids, mask, cache = _prefilled(routed, "dynamic", rows=1)
    routes = routes_of(cache)
    token = tokens(1, 1, seed=8)
    plain = _step(routed.model, token, mask, cache)
    # One name, two conventions over the versions: a negative number drops that many tokens.
    cache.crop(-1)
    assert cache.get_seq_length() == ids.shape[1]
    assert torch.equal(routes_of(cache), routes)
    assert error(_step(routed.model, token, mask, cache), plain) <= ATOL


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reset_of_a_static_cache_routes_again(pairs, name):
    """A stored route must not outlive the sequence that it was decided for."""
    pair = pairs(name)
    model = pair.model
    with random_routers(model, seed=3):
        first, second = tokens(2, 30, seed=1), tokens(2, 36, seed=2)
        cache = new_cache(model, "static")
        decode_logits(model, first, None, cache, 25)
        old = routes_of(cache).clone()
        cache.reset()
        again = decode_logits(model, second, None, cache, 30)
        routes = routes_of(cache)
        fresh = new_cache(model, "static")
        assert error(again, decode_logits(model, second, None, fresh, 30)) <= ATOL
        assert torch.equal(routes, routes_of(fresh))
        assert not torch.equal(routes, old), "both prompts have the same routes: no test"


def test_reset_of_a_dynamic_cache_takes_another_batch(pairs):
    """An emptied cache is a new one, as it is for the untouched model."""
    pair = pairs("llama")
    ids, _ = prompts(3)
    with random_routers(pair.model, seed=3):
        cache = new_cache(pair.model, "dynamic")
        run(pair.model, ids, None, cache)
        cache.reset()
        actual = decode_logits(pair.model, ids[:2], None, cache, 30)
        fresh = new_cache(pair.model, "dynamic")
        assert error(actual, decode_logits(pair.model, ids[:2], None, fresh, 30)) <= ATOL
        assert torch.equal(routes_of(cache), routes_of(fresh))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", WIDE)
def test_a_prompt_of_one_token(pairs, name, cache):
    """No call has several tokens, so nothing is ever routed: full attention."""
    pair = pairs(name)
    ids = tokens(2, 30)
    with random_routers(pair.model, seed=3):
        store = new_cache(pair.model, cache)
        actual = decode_logits(pair.model, ids, None, store, 1)
    assert error(actual, logits(pair.base, ids)) <= ATOL


def test_cache_by_name_and_by_default(pairs):
    """The cache is found by what it is, wherever the caller puts it."""
    pair = pairs("llama")
    ids, _ = prompts()
    name = cache_argument(pair.model)
    with torch.no_grad():
        cache = cache_of(pair.model(ids[:, :30], use_cache=True))
        step = pair.model(ids[:, 30:], **{name: cache}).logits
    assert error(step, logits(pair.base, ids)[:, 30:]) <= ATOL
