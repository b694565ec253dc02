"""Further families: everything that differs between architectures, once each.

What does not depend on the architecture (lifecycle, errors, training) is tested on a few families
elsewhere.
"""

from __future__ import annotations

import os
import re

import pytest
import torch
from transformers.models.gptj import modeling_gptj

import elastic_compile
from tests.families import MORE, POSITIONS
from tests.integration.helpers import (
    LENGTH,
    Pair,
    counting,
    decode_logits,
    error,
    generate,
    logits,
    new_cache,
    positions,
    prompts,
    site_rows,
    streaming_oracle,
)

ATOL = 1e-5
# Compiling takes most of the time: geometries that differ most.
COMPILED = ("phi", "gptj", "smollm3", "lfm2")

# Older releases write GPT-J's attention out as matrix products: no site.
written_out = pytest.mark.skipif(
    hasattr(modeling_gptj, "GPTJ_ATTENTION_CLASSES"), reason="no SDPA in this transformers release"
)


def families(names):
    return [pytest.param(n, marks=[written_out] if n == "gptj" else []) for n in names]


more_families = pytest.mark.parametrize("name", families(MORE))


@more_families
@pytest.mark.parametrize("layers", [2, 3])
def test_matches_are_a_function_of_the_layer_count(pairs, name, layers):
    pair = pairs(name, layers=layers)
    family, rows = pair.family, site_rows(pair.model)
    attending = family.attending(layers)
    assert [row.path for row in rows] == [family.attention.format(i) for i in attending]
    status = {i: row.status for i, row in zip(attending, rows, strict=True)}
    assert [i for i in attending if status[i] == "rewritten"] == family.rewritten(layers)
    for row in rows:
        if row.status == "rewritten":
            assert row.checked and (row.kv_heads, row.head_dim) == (
                family.kv_heads,
                family.head_dim,
            )
        else:
            assert re.search(family.reason, row.reason), row.reason


@more_families
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_all_full_is_the_untouched_model(pairs, name, side):
    pair = pairs(name)
    ids, mask = prompts(side=side)
    where = {} if mask is None or side == "right" else {"position_ids": positions(mask)}
    if name == "opt":
        where = {}  # makes its own
    with counting() as count:
        got = logits(pair.model, ids, mask, **where)
    assert count == {"calls": len(pair.rewritten), "fallbacks": {}}
    assert error(got, logits(pair.base, ids, mask, **where), mask) <= ATOL


@more_families
def test_streaming_heads_are_the_untouched_model_under_their_mask(pairs, name):
    pair = pairs(name)
    ids, _ = prompts()
    routes = pair.routes("mixed")
    with elastic_compile.force_routes(pair.model, routes):
        got = logits(pair.model, ids)
    assert error(got, streaming_oracle(pair, ids, routes)) <= ATOL
    assert error(got, logits(pair.base, ids)) > 1e-3


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_scaled_positions(kind):
    """Field case B66: streaming keys keep their own positions, however those are scaled."""
    fields = {
        "linear": dict(factor=4.0),
        "dynamic": dict(factor=2.0),
        "yarn": dict(factor=4.0, original_max_position_embeddings=24),
        "llama3": dict(
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=24,
        ),
    }[kind]
    rope = {"rope_type": kind, "rope_theta": 1e4, **fields}
    pair = Pair(
        "llama",
        rope_parameters=rope,
        max_position_embeddings=24 if kind == "dynamic" else POSITIONS,
    )
    ids, _ = prompts()
    assert error(logits(pair.base, ids), logits(Pair("llama").base, ids)) > 1e-2
    assert error(logits(pair.model, ids), logits(pair.base, ids)) <= ATOL
    assert torch.equal(generate(pair.model, ids), generate(pair.base, ids))
    routes = pair.routes("sparse")
    with elastic_compile.force_routes(pair.model, routes):
        got = decode_logits(pair.model, ids, None, new_cache(pair.model, "dynamic"), LENGTH - 8)
    # The frequencies of "dynamic" follow the longest sequence so far.
    rows = slice(0, LENGTH - 8) if kind == "dynamic" else slice(None)
    wanted = streaming_oracle(pair, ids[:, rows], routes)
    assert error(got[:, rows], wanted) <= ATOL


@more_families
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generate_gives_the_untouched_tokens(pairs, name, kind):
    pair = pairs(name)
    ids, mask = prompts(side="left")
    runs = [
        generate(model, ids, mask, cache=new_cache(model, kind))
        for model in (pair.base, pair.model)
    ]
    assert torch.equal(*runs)


@pytest.mark.parametrize(
    "name", families(MORE if os.environ.get("ELASTIC_COMPILE_FULL") else COMPILED)
)
def test_compiled_calls_hold_the_op_and_are_exact(pairs, name):
    pair = pairs(name)
    graphs = []

    def spy(graph, inputs):
        graphs.append(graph)
        return graph.forward

    ids, _ = prompts(batch=1, length=LENGTH)
    torch._dynamo.reset()
    compiled = torch.compile(pair.model, backend=spy, fullgraph=True, dynamic=True)
    with counting() as count:
        got = logits(compiled, ids)
    op = torch.ops.elastic_compile.attention.default
    found = [node for graph in graphs for node in graph.graph.nodes if node.target is op]
    assert len(graphs) == 1 and len(found) == len(pair.rewritten)
    assert count["fallbacks"] == {}
    assert error(got, logits(pair.base, ids)) <= ATOL
