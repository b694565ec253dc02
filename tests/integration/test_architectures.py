"""The sweep over transformers' decoder families: a representative dozen, its table, its judge.

The whole sweep is `python -m tests.architectures`; as tests: `pytest -m grid` on this file.
"""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import elastic_compile
from elastic_compile.router import boundary_pool
from tests import architectures

ALL = {a.name: a for a in architectures.derive()}

# Family -> (rewritten sites, sites, reason of the others), from the architectures, not the report.
DOZEN = {
    "llama": (2, 2, None),
    "gpt_bigcode": (2, 2, None),
    "phi3": (2, 2, None),
    # Every second layer slides.
    "gemma2": (1, 2, "sliding window"),
    "gpt_oss": (1, 2, "sliding window"),
    # Latent attention: values narrower than keys, latents in the cache.
    "deepseek_v3": (2, 2, None),
    # One attention layer beside linear-attention layers.
    "qwen3_next": (1, 1, None),
    # Its indexer picks keys with a mask of its own.
    "deepseek_v32": (0, 2, "mask is not the plain causal one"),
    # An earlier layer's keys; and the layer that hands its keys on.
    "gemma3n_text": (1, 6, "sliding window|another layer's keys|for other layers to read"),
    # A vision tower, and positions of the model's own making.
    "qwen2_5_vl": (2, 2, None),
    "bart (encoder-decoder)": (2, 6, "bidirectional|cross-attention"),
}
NO_SITE = ("bloom", "mamba")


def judged(name: str) -> architectures.Result:
    return architectures.judge(ALL[name])


@pytest.fixture(autouse=True)
def no_compile(monkeypatch, request):
    """Compiling is most of the time and has tests of its own; the full sweep does it."""
    if "grid" not in request.keywords:
        checks = {k: v for k, v in architectures._CHECKS.items() if k != "compiled"}
        monkeypatch.setattr(architectures, "_CHECKS", checks)


# Latent caches and shared keys are what transformers changes between versions.
_OLDEST = ("deepseek_v3", "gemma3n_text")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.smoke] if n in _OLDEST else []) for n in DOZEN]
)
def test_family(name):
    rewritten, sites, reason = DOZEN[name]
    result = judged(name)
    assert result.verdict == ("exact" if rewritten else "skipped"), result
    assert (result.rewritten, result.sites) == (rewritten, sites), result
    assert sum(result.reasons.values()) == sites - rewritten
    for given in result.reasons:
        assert reason is not None and re.search(reason, given), given
    judged_fully = [v for v in result.checks.values() if not v.startswith("not judged")]
    assert len(judged_fully) == len(result.checks), result.checks
    assert not [v for v in result.checks.values() if "not routed" in v], result.checks


def test_latent_attention_routes_by_the_unrotated_part_of_the_keys():
    base, model = (architectures.build(ALL["deepseek_v3"]) for _ in range(2))
    elastic_compile.transform(model, elastic_compile.ElasticConfig(sink=4, local=8, pool_tokens=6))
    hidden, pooled = [], []
    attention = base.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: hidden.append(kwargs["hidden_states"]), with_kwargs=True
    )
    router = model.model.layers[1].self_attn.elastic_router
    router.register_forward_pre_hook(lambda module, args: pooled.append(args[0]))
    ids, mask = architectures._prompts("left")
    with torch.no_grad():
        base(input_ids=ids, attention_mask=mask)
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True)
        config = base.config
        latent = attention.kv_a_proj_with_mqa(hidden[0])[..., : config.kv_lora_rank]
        keys = attention.kv_b_proj(attention.kv_a_layernorm(latent))
        keys = keys.view(3, architectures.LENGTH, config.num_attention_heads, -1).transpose(1, 2)
        tap = keys[..., : config.qk_nope_head_dim]
        expected = boundary_pool(tap, None, None, mask.bool(), 6)
    assert cache is not None
    torch.testing.assert_close(pooled[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif("dory" not in ALL, reason="not in this transformers")
def test_a_layer_that_runs_several_times_leaves_the_model_as_it_was():
    result = judged("dory")
    assert result.verdict == "skipped", result
    assert any("beside it attends more than once" in reason for reason in result.reasons)


def test_a_compiled_call_is_routed_where_an_outer_model_makes_the_positions():
    base, model = (architectures.build(ALL["fuyu"]) for _ in range(2))
    elastic_compile.transform(model, elastic_compile.ElasticConfig(sink=4, local=8, pool_tokens=6))
    calls = architectures.Calls(ALL["fuyu"], base)
    expected = calls.logits(base, None)
    elastic_compile.counters(reset=True)
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    assert architectures._error(calls.logits(compiled, None), expected, None) < 1e-5
    seen = elastic_compile.counters()
    assert sum(seen["calls"].values()) and not any(seen["fallbacks"].values())


@pytest.mark.parametrize("name", NO_SITE)
def test_family_without_a_site(name):
    result = judged(name)
    assert result.verdict == "no site", result
    assert "no module called" in result.detail


@pytest.mark.parametrize("fault", ["scale", "unrouted", "refused"])
def test_the_judge_sees_a_wrong_model(fault, monkeypatch):
    """A wrong scale, routes that change nothing, an error: each is a verdict of its own."""
    from elastic_compile.kernels import ops

    original = ops.attention
    if fault == "scale":
        # Everywhere but in transform's own check, which would refuse the model.
        def wrong(*args, **kwargs):
            scale = kwargs["scale"] * (1.0 if args[0].shape[2] < architectures.LENGTH else 1.01)
            return original(*args, **{**kwargs, "scale": scale})

        monkeypatch.setattr(ops, "attention", wrong)
    elif fault == "unrouted":

        def wrong(query, key, value, routes, **kwargs):
            routes = routes if query.shape[2] < architectures.LENGTH else routes * 0
            return original(query, key, value, routes, **kwargs)

        monkeypatch.setattr(ops, "attention", wrong)
    else:
        monkeypatch.setattr(elastic_compile, "transform", lambda *a, **k: 1 / 0)
    result = judged("llama")
    assert result.verdict == "WRONG", result
    said = {"scale": "logits: WRONG: off by", "unrouted": "change nothing", "refused": "ZeroDivis"}
    assert said[fault] in result.detail


def test_the_families_are_those_of_the_mappings():
    types = {a.model_type for a in ALL.values()}
    decoders = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert decoders <= types
    assert len(decoders) >= 60
    assert set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) <= types
    assert set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) <= types


def test_the_small_configurations_are_small_and_keep_every_kind_of_layer():
    config = architectures.small_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.hidden_size == architectures.HIDDEN and config.sliding_window == 16
    config = architectures.small_config("deepseek_v3")
    assert config.v_head_dim != config.qk_nope_head_dim + config.qk_rope_head_dim


def test_the_page_is_what_the_results_say():
    data = json.loads(architectures.JSON.read_text())
    assert architectures.TABLE.read_text() == architectures.render(data)


def test_the_results_name_every_family_of_the_installed_version():
    data = json.loads(architectures.JSON.read_text())
    run = data["runs"].get(transformers.__version__)
    if run is None:
        pytest.skip(f"the page has no column for transformers {transformers.__version__}")
    assert set(run["all"]) == set(ALL)
    # All decoders are judged; a family that is not is in the page's count.
    assert {name for name, a in ALL.items() if a.kind == "decoder"} <= set(run["families"])


def test_no_result_is_wrong():
    data = json.loads(architectures.JSON.read_text())
    wrong = [
        (version, name, row["detail"])
        for version, run in data["runs"].items()
        for name, row in run["families"].items()
        if row["verdict"] == "WRONG"
    ]
    assert not wrong
    newest = data["runs"][max(data["runs"], key=architectures._version)]["families"]
    exact = [r for r in newest.values() if r["verdict"] == "exact" and r["kind"] == "decoder"]
    assert len(exact) >= 60


@pytest.mark.grid
def test_every_family():
    """The full sweep; a family that the page lists otherwise is reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = list(architectures.isolated(list(ALL.values())))
    assert len(results) == len(ALL)
    assert not [(r.name, r.detail) for r in results if r.verdict == "WRONG"]
    assert torch.get_num_threads() == 1
