"""Prefix reuse: one document prefilled once, many questions."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import elastic_compile
from tests.families import build, tokens
from tests.integration.helpers import (
    elastic_config,
    error,
    new_cache,
    random_routers,
    routes_of,
    run,
)

ATOL = 2e-5
ROWS = 4


@pytest.fixture(params=["first", "each_call"])
def routed(request):
    # One layer: what a later one pools depends on the routes that the document was prefilled with.
    model = elastic_compile.transform(
        build("llama", layers=1), elastic_config(reroute=request.param)
    )
    with random_routers(model, seed=3):
        yield model, request.param


def prefill(model, ids):
    cache = new_cache(model, "dynamic")
    return run(model, ids, cache=cache), cache


@pytest.mark.parametrize("document_length", [4, 25])
@pytest.mark.parametrize("question_length", [3, 9])
@pytest.mark.parametrize("how", ["copy", "crop"])
def test_many_questions(routed, how, document_length, question_length):
    """Questions do not see one another; `pool_tokens` is 6, so short ones leave older tokens in."""
    model, reroute = routed
    document = tokens(ROWS, document_length, seed=2)
    _, store = prefill(model, document)
    kept = routes_of(store)
    different = 0
    for seed in range(3):
        question = tokens(ROWS, question_length, seed=seed + 5)
        ids = torch.cat([document, question], 1)
        cache = copy.deepcopy(store) if how == "copy" else store
        out = run(model, question, cache=cache)
        routes = routes_of(cache)
        one_shot, whole = prefill(model, ids)
        different += int((routes_of(whole) != kept).sum())
        if reroute == "first":
            assert torch.equal(routes, kept)
        else:
            assert torch.equal(routes, routes_of(whole))
        for token in tokens(2, 1, seed=seed + 9):
            run(model, token.expand(ROWS, 1), cache=cache)
        if how == "crop":
            cache.crop(document_length - cache.get_seq_length())
            assert cache.get_seq_length() == document_length
        with elastic_compile.force_routes(model, "sparse"):
            again = run(model, question, cache=copy.deepcopy(store))
        assert out.logits.shape == again.logits.shape
        if document_length > 12 and not routes.all():
            assert error(out.logits, again.logits) > 1e-3
        if torch.equal(routes_of(whole), kept):
            assert error(out.logits, one_shot.logits[:, document_length:]) <= ATOL
    assert different or document_length < 6, "these questions change no route"


def test_selected_and_repeated_rows(routed):
    model, reroute = routed
    document = tokens(ROWS, 25, seed=2)
    _, store = prefill(model, document)
    cache = copy.deepcopy(store)
    cache.batch_select_indices(torch.tensor([2, 0, 3, 1]))
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    for made, chosen in ((cache, [2, 0, 3, 1]), (repeated, [2, 2, 0, 0, 3, 3, 1, 1])):
        question = tokens(len(chosen), 4, seed=7)
        out = run(model, question, cache=made)
        alone = []
        for b, row in enumerate(chosen):
            _, one = prefill(model, document[row : row + 1])
            alone.append(run(model, question[b : b + 1], cache=one).logits)
            assert torch.equal(routes_of(made)[b], routes_of(one)[0])
        assert error(out.logits, torch.cat(alone)) <= ATOL
        if reroute == "each_call":
            # What the crop goes back to has moved with its row as well.
            routes = routes_of(made)
            made.crop(-4)
            assert error(run(model, question, cache=made).logits, out.logits) <= ATOL
            assert torch.equal(routes_of(made), routes)


def test_a_crop_that_cannot_be_followed_is_said(caplog):
    from elastic_compile import _carry

    model = elastic_compile.transform(build("llama"), elastic_config(reroute="each_call"))
    _, cache = prefill(model, tokens(1, 25))
    run(model, tokens(1, 5), cache=cache)
    _carry._SAID.clear()
    with caplog.at_level(logging.WARNING, "elastic_compile"):
        cache.crop(-5)
        assert not caplog.records
        cache.crop(-2)
    assert "copy the cache" in caplog.text
