"""The rewritten graph of a few families, word for word.

After a deliberate change of the rewrite, write them again with

    ELASTIC_COMPILE_UPDATE_GOLDENS=1 python -m pytest tests/passes/test_goldens.py

and read the difference before committing it. They hold for the pinned torch (another one may
trace other ops), so elsewhere only parity is tested.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import elastic_compile
from elastic_compile import _runtime
from elastic_compile.passes import selfcheck
from elastic_compile.passes.rewrite import ElasticAttentionPass
from tests.families import FAMILIES, build

FOLDER = Path(__file__).parent / "goldens"
PINNED = "2.13."
NAMES = ("llama", "qwen3", "gpt2", "falcon")


def rewritten_source(name: str) -> str:
    model = build(name)
    elastic_compile.transform(model)
    module = FAMILIES[name].attention_modules(model)[0]
    lines = module.forward.program.source.strip().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.skipif(
    not torch.__version__.startswith(PINNED), reason=f"goldens are of torch {PINNED}x"
)
@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    path = FOLDER / f"{name}.txt"
    source = rewritten_source(name)
    if os.environ.get("ELASTIC_COMPILE_UPDATE_GOLDENS"):
        path.write_text(source)
    assert source == path.read_text(), f"the rewritten graph changed; see {__file__}"


def _wrong_scale(graph):
    for node in graph.find_nodes(op="call_function", target=_runtime.attention):
        node.kwargs = {**node.kwargs, "scale": 1.0}


def _drop_mask(graph):
    for node in graph.find_nodes(op="call_function", target=_runtime.attention):
        args = list(node.args)
        args[5] = None
        node.args = tuple(args)


def _drop_cache_update(graph):
    for node in graph.find_nodes(op="call_function", target=_runtime.cache_update):
        for user in list(node.users):
            user.replace_all_uses_with(node.args[2 + user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


MUTATIONS = (_wrong_scale, _drop_mask, _drop_cache_update)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__.strip("_"))
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_rewrite_turns_golden_and_self_check_red(monkeypatch, name, mutation):
    original = ElasticAttentionPass._rewrite

    def broken(self, module, match, made):
        original(self, module, match, made)
        mutation(module.graph)

    monkeypatch.setattr(ElasticAttentionPass, "_rewrite", broken)
    sources = []
    keep = selfcheck.check_site

    def check(site, found):
        sources.append(site.program.source)
        return keep(site, found)

    monkeypatch.setattr(selfcheck, "check_site", check)
    model = build(name)
    with pytest.raises(ValueError, match="self-check failed"):
        elastic_compile.transform(model)
    assert not elastic_compile.is_transformed(model)
    lines = "\n".join(line.rstrip() for line in sources[0].strip().splitlines()) + "\n"
    assert lines != (FOLDER / f"{name}.txt").read_text()
