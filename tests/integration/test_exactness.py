"""All heads full equals the untouched model, and every site is accounted for."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import elastic_compile
from tests.families import FAMILIES, REWRITTEN, tokens
from tests.integration.helpers import (
    LENGTH,
    counting,
    decode_logits,
    error,
    logits,
    new_cache,
    positions,
    prompts,
    rewritten_rows,
    run,
    site_rows,
)

ATOL = 1e-5
SMOKE = {"llama", "qwen3", "gpt2", "falcon", "gemma3"}


def families(names):
    return [
        pytest.param(name, marks=[pytest.mark.smoke] if name in SMOKE else []) for name in names
    ]


every_family = pytest.mark.parametrize("name", families(FAMILIES))
rewritten_families = pytest.mark.parametrize("name", families(REWRITTEN))


# --- the report -----------------------------------------------------------------------------------


@every_family
def test_sites_are_rewritten_or_skipped_with_the_right_reason(pairs, name):
    pair = pairs(name)
    family, rows = pair.family, site_rows(pair.model)
    assert len(rows) == family.sites(pair.layers)
    paths = [family.attention.format(i) for i in range(pair.layers)]
    assert [row.path for row in rows] == paths
    rewritten = [i for i, row in enumerate(rows) if row.status == "rewritten"]
    assert rewritten == pair.rewritten
    modules = family.attention_modules(pair.model)
    for i, row in enumerate(rows):
        assert row.cls == type(family.attention_modules(pair.base)[i]).__name__
        if i in rewritten:
            assert row.checked is True
            assert not row.reason
            assert row.head_dim == family.head_dim
            assert row.kv_heads in (
                # Falcon's new architecture broadcasts its keys before they are cached.
                {family.kv_heads, 8} if name == "falcon_new" else {family.kv_heads}
            )
            assert row.implementation
            assert hasattr(modules[i], "elastic_router")
        else:
            assert row.status == "skipped"
            assert re.search(family.reason, row.reason), row.reason
            assert not hasattr(modules[i], "elastic_router")


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "gpt_oss"])
def test_counts_follow_the_number_of_layers(pairs, name):
    pair = pairs(name, layers=3)
    assert len(site_rows(pair.model)) == 3
    assert len(rewritten_rows(pair.model)) == len(FAMILIES[name].rewritten(3)) < 4


# --- logits ---------------------------------------------------------------------------------------


def _case(case):
    """(ids, mask, keyword arguments, mask of the compared tokens)."""
    if case == "no_cache":
        ids, mask = prompts()
        return ids, mask, {}, None
    if case == "own_cache":
        ids, mask = prompts()
        return ids, mask, {"use_cache": True}, None
    if case == "ones_mask":
        ids, _ = prompts()
        return ids, torch.ones_like(ids), {}, None
    if case == "left_pad":
        ids, mask = prompts(side="left")
        return ids, mask, {"position_ids": positions(mask)}, mask
    if case == "left_pad_no_positions":
        ids, mask = prompts(side="left")
        return ids, mask, {"use_cache": True}, mask
    if case == "right_pad":
        ids, mask = prompts(side="right")
        return ids, mask, {}, mask
    if case == "one_token":
        return tokens(3, 1), None, {}, None
    if case == "one_row":
        return tokens(1, LENGTH), None, {}, None
    if case == "one_row_one_token":
        return tokens(1, 1), torch.ones(1, 1, dtype=torch.int64), {}, None
    if case == "position_ids":
        ids, _ = prompts()
        return ids, None, {"position_ids": torch.arange(7, 7 + LENGTH).expand(3, -1)}, None
    raise AssertionError(case)


CASES = [
    "no_cache",
    "own_cache",
    "ones_mask",
    "left_pad",
    "left_pad_no_positions",
    "right_pad",
    "one_token",
    "one_row",
    "one_row_one_token",
    "position_ids",
]


@pytest.mark.parametrize("case", CASES)
@every_family
def test_untrained_logits_equal_the_untouched_model(pairs, name, case):
    pair = pairs(name)
    ids, mask, kwargs, compared = _case(case)
    with counting() as count:
        actual = logits(pair.model, ids, mask, **kwargs)
    expected = logits(pair.base, ids, mask, **kwargs)
    assert error(actual, expected, compared) <= ATOL
    # Equal because the op is exact, not because it was never reached.
    assert count["calls"] == len(pair.rewritten)
    assert count["fallbacks"] == {}
    assert torch.isfinite(actual).all()


@rewritten_families
def test_hidden_states_of_every_layer_equal(pairs, name):
    pair = pairs(name)
    ids, mask = prompts(side="left")
    kwargs = {"position_ids": positions(mask), "output_hidden_states": True}
    actual = run(pair.model, ids, mask, **kwargs).hidden_states
    expected = run(pair.base, ids, mask, **kwargs).hidden_states
    assert len(actual) == len(expected) == pair.layers + 1
    assert max(error(a, e, mask) for a, e in zip(actual, expected, strict=True)) <= ATOL


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@rewritten_families
def test_cached_steps_equal_the_untouched_model(pairs, name, kind):
    """Logits, not only greedy tokens, of a padded prefill and of each step after it."""
    pair = pairs(name)
    ids, mask = prompts(side="left")
    where = positions(mask)
    with counting() as count:
        actual = decode_logits(
            pair.model, ids, mask, new_cache(pair.model, kind), 32, position_ids=where
        )
    expected = decode_logits(
        pair.base, ids, mask, new_cache(pair.base, kind), 32, position_ids=where
    )
    assert error(actual, expected, mask) <= ATOL
    assert count["calls"] == len(pair.rewritten) * (1 + LENGTH - 32)
    assert count["fallbacks"] == {}


@rewritten_families
def test_the_batch_of_a_call_does_not_matter(pairs, name):
    """Symbols that an export confuses (batch with 1, sequence with head size) show here."""
    pair = pairs(name)
    for batch, length in [(1, 2), (2, 2), (2, 32), (8, 8), (5, 33)]:
        ids = tokens(batch, length, seed=batch)
        assert error(logits(pair.model, ids), logits(pair.base, ids)) <= ATOL, (batch, length)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_inputs_embeds(pairs, name):
    pair = pairs(name)
    ids, mask = prompts(side="left")
    embeds = pair.base.get_input_embeddings()(ids).detach()
    for model_mask in (None, mask):
        with torch.no_grad():
            actual = pair.model(inputs_embeds=embeds, attention_mask=model_mask).logits
            expected = pair.base(inputs_embeds=embeds, attention_mask=model_mask).logits
        assert error(actual, expected, model_mask) <= ATOL


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_bfloat16(pairs, name):
    pair = pairs(name, dtype=torch.bfloat16)
    ids, mask = prompts(side="left")
    where = positions(mask)
    actual = logits(pair.model, ids, mask, position_ids=where)
    expected = logits(pair.base, ids, mask, position_ids=where)
    assert actual.dtype == torch.bfloat16
    # The budget is the untouched model's own rounding error, measured in float32.
    exact = logits(copy.deepcopy(pair.base).float(), ids, mask, position_ids=where)
    budget = error(expected, exact, mask)
    assert 1e-3 < budget < 0.2
    assert error(actual, exact, mask) <= 1.5 * budget
    # Same greedy token wherever the untouched model's choice is clear.
    best = exact.topk(2, dim=-1).values
    clear = (best[..., 0] - best[..., 1] > 2 * budget) & mask.bool()
    assert clear.float().mean() > 0.3
    assert torch.equal(actual.argmax(-1)[clear], exact.argmax(-1)[clear])


def test_a_prompt_longer_than_a_query_block(pairs):
    """Kernels work in blocks: a length over several of them, off their multiples."""
    pair = pairs("llama")
    ids = tokens(2, 333)
    mask = torch.ones_like(ids)
    mask[1, :130] = 0
    where = positions(mask)
    actual = logits(pair.model, ids, mask, position_ids=where)
    assert error(actual, logits(pair.base, ids, mask, position_ids=where), mask) <= ATOL


# --- and it is the routes that make the difference ------------------------------------------------


@rewritten_families
def test_sparse_routes_differ_from_full_ones(pairs, name):
    """The reverse of the tests above: they could not pass with routing switched off."""
    pair = pairs(name)
    ids, _ = prompts()
    full = logits(pair.model, ids)
    with elastic_compile.force_routes(pair.model, "sparse"):
        sparse = logits(pair.model, ids)
    assert error(sparse, full) > 1e-3
    assert error(logits(pair.model, ids), full) == 0.0


@rewritten_families
def test_sparse_routes_below_the_window_are_full(pairs, name):
    """Up to sink + local keys every route means the same."""
    pair = pairs(name)
    for length in (1, 5, 12):
        ids = tokens(2, length)
        with elastic_compile.force_routes(pair.model, "sparse"):
            assert error(logits(pair.model, ids), logits(pair.base, ids)) <= ATOL


@pytest.mark.parametrize("name", families(["llama", "gpt2", "falcon", "gemma3"]))
def test_wide_windows_are_full(pairs, name):
    """R-wide: streaming with sink + local >= length equals full attention."""
    pair = pairs(name, config={"sink": 8, "local": LENGTH})
    ids, mask = prompts(side="left")
    where = positions(mask)
    with elastic_compile.force_routes(pair.model, "sparse"):
        actual = logits(pair.model, ids, mask, position_ids=where)
    assert error(actual, logits(pair.base, ids, mask, position_ids=where), mask) <= ATOL
