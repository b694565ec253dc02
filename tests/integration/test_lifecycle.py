"""Transform, restore, copy, pickle, save, load: the model stays a Hugging Face model."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

import elastic_compile
from tests.families import FAMILIES, build, tokens
from tests.integration.helpers import (
    counting,
    elastic_config,
    error,
    generate,
    logits,
    positions,
    prompts,
    random_routers,
    rewritten_rows,
    routes_of,
    run,
    site_rows,
)

ATOL = 1e-5
ROOT = Path(__file__).resolve().parents[2]


def transformed(name="llama", **build_kw):
    return elastic_compile.transform(build(name, **build_kw), elastic_config())


def snapshot(model):
    """Everything about a model that `restore` has to give back."""
    modules = {}
    for path, module in model.named_modules():
        attributes = {
            key: value
            for key, value in module.__dict__.items()
            if key not in ("_parameters", "_buffers", "_modules", "training")
        }
        modules[path] = {
            "class": type(module),
            "attributes": set(attributes),
            "forward": getattr(module.forward, "__func__", module.forward),
            "children": list(module._modules),
            "parameters": {k: id(v) for k, v in module._parameters.items()},
            "buffers": {k: id(v) for k, v in module._buffers.items()},
            "hooks": {
                key: len(value)
                for key, value in attributes.items()
                if "hook" in key and hasattr(value, "__len__")
            },
        }
    return {
        "modules": modules,
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "implementation": model.config._attn_implementation,
        "ignored": copy.deepcopy(getattr(model, "_keys_to_ignore_on_save", None)),
        "training": model.training,
    }


def check_same(model, before, state):
    after = snapshot(model)
    for key, value in before.items():
        if key != "modules":
            assert after[key] == value, key
    assert list(after["modules"]) == list(before["modules"])
    for path, value in before["modules"].items():
        assert after["modules"][path] == value, path
    assert list(model.state_dict()) == list(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


# --- transform ------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_transform_returns_the_same_object(caplog):
    model = build("llama")
    classes = [type(module) for module in model.modules()]
    assert not elastic_compile.is_transformed(model)
    with caplog.at_level(logging.INFO, logger="elastic_compile"):
        result = elastic_compile.transform(model, elastic_config())
    assert result is model
    assert isinstance(model, PreTrainedModel)
    assert type(model) is transformers.LlamaForCausalLM
    assert elastic_compile.is_transformed(model)
    known = [type(m) for p, m in model.named_modules() if "elastic_router" not in p]
    assert known == classes
    lines = [r.getMessage() for r in caplog.records if "attention sites rewritten" in r.message]
    assert len(lines) == 1 and "2 of 2 attention sites rewritten" in lines[0]


def test_the_summary_names_what_was_skipped(caplog):
    with caplog.at_level(logging.INFO, logger="elastic_compile"):
        elastic_compile.transform(build("gemma3"), elastic_config())
    lines = [r.getMessage() for r in caplog.records if "attention sites rewritten" in r.message]
    assert len(lines) == 1 and "1 of 2 attention sites rewritten" in lines[0]
    assert "sliding" in lines[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "falcon_new"])
def test_the_report_prints_as_a_table(pairs, name):
    text = str(elastic_compile.report(pairs(name).model))
    rows = site_rows(pairs(name).model)
    for row in rows:
        lines = [line for line in text.splitlines() if row.path in line]
        assert len(lines) == 1
        assert row.status in lines[0] and row.cls in lines[0]
        assert str(row.kv_heads) in lines[0] and str(row.head_dim) in lines[0]
    for row in rows:
        if row.reason:
            assert row.reason in text


def test_backbone_names_do_not_change():
    model = build("llama")
    names = [name for name, _ in model.named_parameters()]
    state = list(model.state_dict())
    elastic_compile.transform(model, elastic_config())
    added = [n for n, _ in model.named_parameters() if n not in names]
    assert [n for n, _ in model.named_parameters() if n in names] == names
    assert added and all(".self_attn.elastic_router." in name for name in added)
    assert [key for key in model.state_dict() if key in set(state)] == state
    assert {key for key in model.state_dict() if key not in set(state)} == set(added)


def test_example_inputs_may_be_given():
    model = build("llama")
    example = {"input_ids": tokens(3, 19), "attention_mask": torch.ones(3, 19, dtype=torch.int64)}
    elastic_compile.transform(model, elastic_config(), example_inputs=example)
    assert len(rewritten_rows(model)) == 2
    ids, mask = prompts(side="left")
    assert error(logits(model, ids, mask), logits(build("llama"), ids, mask), mask) <= ATOL


def test_models_without_a_language_head():
    ids, mask = prompts(side="left")
    base = build("llama").model
    model = elastic_compile.transform(build("llama").model, elastic_config())
    assert len(rewritten_rows(model)) == 2
    with torch.no_grad():
        actual = model(ids, attention_mask=mask).last_hidden_state
        expected = base(ids, attention_mask=mask).last_hidden_state
    assert error(actual, expected, mask) <= ATOL
    config = FAMILIES["qwen2"].config(2, num_labels=3, pad_token_id=0)
    classifier = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    expected = logits(classifier, ids, mask)
    elastic_compile.transform(classifier, elastic_config())
    assert len(rewritten_rows(classifier)) == 2
    assert error(logits(classifier, ids, mask), expected) <= ATOL


def test_cross_attention_is_left_alone():
    """GPT-2 with an encoder: its own attention is rewritten, and the encoder still counts."""
    model, base = build("gpt2", add_cross_attention=True), build("gpt2", add_cross_attention=True)
    elastic_compile.transform(model, elastic_config())
    assert [row.path for row in rewritten_rows(model)] == [
        f"transformer.h.{i}.attn" for i in range(2)
    ]
    ids, mask = prompts(side="left")
    encoded = torch.randn(3, 7, 256)
    for kwargs in ({}, {"use_cache": True}):
        expected = logits(base, ids, mask, encoder_hidden_states=encoded, **kwargs)
        actual = logits(model, ids, mask, encoder_hidden_states=encoded, **kwargs)
        assert error(actual, expected, mask) <= ATOL
        assert error(expected, logits(base, ids, mask), mask) > 1e-3


def test_the_default_configuration_needs_no_arguments():
    model = elastic_compile.transform(build("llama"))
    ids, _ = prompts()
    assert error(logits(model, ids), logits(build("llama"), ids)) <= ATOL


def test_train_mode_and_gradients_are_kept():
    model = build("llama").train()
    model.lm_head.weight.requires_grad_(False)
    elastic_compile.transform(model, elastic_config())
    assert model.training and all(m.training for m in model.modules())
    assert not model.lm_head.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["lm_head.weight"]


def test_random_state_is_left_alone():
    """A transform in the middle of a script must not change its later random numbers, so far as
    the backbone goes: routers draw theirs, nothing else does."""
    model = build("mistral")
    torch.manual_seed(5)
    elastic_compile.transform(model, elastic_config(), allow_unrewritten=True)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize(
    "name, implementation", [("llama", "eager"), ("llama", "flex_attention"), ("qwen3", "eager")]
)
def test_models_loaded_with_any_implementation(name, implementation):
    """B52: rewritten, with the results of the implementation that can be run here."""
    reference = build(name, attn_implementation="sdpa")
    model = build(name, attn_implementation=implementation)
    elastic_compile.transform(model, elastic_config())
    assert len(rewritten_rows(model)) == 2
    ids, mask = prompts(side="left")
    at = positions(mask)
    with counting() as count:
        actual = logits(model, ids, mask, position_ids=at)
    assert error(actual, logits(reference, ids, mask, position_ids=at), mask) <= ATOL
    assert count == {"calls": 2, "fallbacks": {}}
    assert torch.equal(generate(model, ids, mask), generate(reference, ids, mask))
    elastic_compile.restore(model)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", ["gpt2", "falcon", "gemma2"])
def test_eager_models(name):
    reference = build(name, attn_implementation="eager")
    model = build(name, attn_implementation="eager")
    elastic_compile.transform(model, elastic_config())
    assert len(rewritten_rows(model)) == len(FAMILIES[name].rewritten(2))
    ids, mask = prompts(side="left")
    at = positions(mask)
    actual = logits(model, ids, mask, position_ids=at)
    assert error(actual, logits(reference, ids, mask, position_ids=at), mask) <= ATOL


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_attention_weights_of_an_eager_model(name):
    """The op makes no weights; who asks for them gets the right ones, and it is counted."""
    reference = build(name, attn_implementation="eager")
    model = elastic_compile.transform(build(name, attn_implementation="eager"), elastic_config())
    ids, mask = prompts(side="left")
    kwargs = {"position_ids": positions(mask), "output_attentions": True}
    with counting() as count:
        actual = run(model, ids, mask, **kwargs)
    expected = run(reference, ids, mask, **kwargs)
    assert error(actual.logits, expected.logits, mask) <= ATOL
    assert len(actual.attentions) == len(expected.attentions) == 2
    rows = mask[:, None, :, None].bool()
    for got, wanted in zip(actual.attentions, expected.attentions, strict=True):
        assert ((got - wanted).abs() * rows).max() <= ATOL
    assert sum(count["fallbacks"].values()) == len(rewritten_rows(model))
    # The next call is routed again.
    with counting() as count:
        run(model, ids, mask)
    assert count["fallbacks"] == {}


# --- restore --------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "gemma3", "llama4"])
def test_restore_is_bit_for_bit(name):
    model = build(name)
    ids, mask = prompts(side="left")
    before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    expected = logits(model, ids, mask)
    dense = logits(model, ids)
    tokens_before = generate(model, ids, mask)
    elastic_compile.transform(model, elastic_config())
    with elastic_compile.force_routes(model, "sparse"):
        assert error(logits(model, ids), dense) > 1e-3
    generate(model, ids, mask)
    elastic_compile.restore(model)
    assert not elastic_compile.is_transformed(model)
    check_same(model, before, state)
    with counting() as count:
        assert torch.equal(logits(model, ids, mask), expected)
        assert torch.equal(logits(model, ids), dense)
        assert torch.equal(generate(model, ids, mask), tokens_before)
    assert count["calls"] == 0


def test_restore_keeps_what_was_there_before():
    """An instance's own forward, hooks of others and a train mode survive a round trip."""
    model = build("llama")
    attention = model.model.layers[0].self_attn
    calls = []
    original = attention.forward

    def own_forward(*args, **kwargs):
        calls.append("forward")
        return original(*args, **kwargs)

    attention.forward = own_forward
    handle = attention.register_forward_hook(lambda *_: calls.append("hook"))
    model.model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    elastic_compile.transform(model, elastic_config())
    ids, _ = prompts()
    calls.clear()
    run(model, ids)
    assert calls.count("hook") == 1 and calls.count("pre") == 1
    elastic_compile.restore(model)
    check_same(model, before, state)
    assert attention.forward is own_forward
    calls.clear()
    run(model, ids)
    assert sorted(calls) == ["forward", "hook", "pre"]
    handle.remove()


def test_transform_restore_transform():
    model = build("llama")
    ids, _ = prompts()
    expected = logits(model, ids)
    for _ in range(2):
        elastic_compile.transform(model, elastic_config())
        with elastic_compile.force_routes(model, "sparse"):
            sparse = logits(model, ids)
        assert error(logits(model, ids), expected) <= ATOL < 1e-3 < error(sparse, expected)
        elastic_compile.restore(model)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("failure", ["router", "example", "none_rewritten"])
def test_a_failed_transform_leaves_the_model_as_it_was(failure, tmp_path):
    model = build("mistral" if failure == "none_rewritten" else "llama")
    ids, _ = prompts()
    before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    expected = logits(model, ids)
    kwargs = {}
    if failure == "router":
        # Read whole before anything is touched, but of another geometry.
        other = elastic_compile.transform(build("qwen3"), elastic_config())
        elastic_compile.save_router(other, tmp_path)
        kwargs["router"] = tmp_path
    elif failure == "example":
        kwargs["example_inputs"] = {"input_ids": torch.rand(2, 9)}
    with pytest.raises(Exception) as problem:
        elastic_compile.transform(model, elastic_config(), **kwargs)
    assert str(problem.value)
    assert not elastic_compile.is_transformed(model)
    check_same(model, before, state)
    assert torch.equal(logits(model, ids), expected)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_deepcopy_is_independent(name):
    model = transformed(name)
    ids, _ = prompts()
    expected = logits(model, ids)
    twin = copy.deepcopy(model)
    assert elastic_compile.is_transformed(twin)
    with counting() as count:
        assert torch.equal(logits(twin, ids), expected)
    assert count["calls"] == len(rewritten_rows(twin)) and count["fallbacks"] == {}
    with elastic_compile.force_routes(twin, "sparse"):
        assert error(logits(twin, ids), expected) > 1e-3
        assert torch.equal(logits(model, ids), expected)
    # Weights of the copy are the copy's: its forward must not reach into the original.
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert torch.equal(logits(model, ids), expected)
    assert error(logits(twin, ids), expected) > 1e-3
    elastic_compile.restore(twin)
    assert elastic_compile.is_transformed(model)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("name, way", [("llama", "torch"), ("gemma3", "pickle")])
def test_pickle_stays_transformed(name, way, tmp_path):
    """B57: a pickle that comes back silently untransformed is the fault to find."""
    model = transformed(name)
    ids, mask = prompts(side="left")
    with random_routers(model, seed=3):
        expected = logits(model, ids, mask)
        routes = routes_of(model)
        if way == "torch":
            torch.save(model, tmp_path / "model.pt")
            loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        else:
            loaded = pickle.loads(pickle.dumps(model))
    assert elastic_compile.is_transformed(loaded)
    with counting() as count:
        assert torch.equal(logits(loaded, ids, mask), expected)
    assert count["calls"] == len(rewritten_rows(loaded)) and count["fallbacks"] == {}
    assert torch.equal(routes_of(loaded), routes)
    with elastic_compile.force_routes(loaded, "sparse"):
        assert error(logits(loaded, ids, mask), expected, mask) > 1e-3
    elastic_compile.restore(loaded)
    with counting() as count:
        assert error(logits(loaded, ids, mask), logits(build(name), ids, mask), mask) == 0
    assert count["calls"] == 0


def test_pickle_in_another_process(tmp_path):
    """A process that has imported nothing of ours gets a working transformed model."""
    model = transformed()
    ids, _ = prompts()
    with elastic_compile.force_routes(model, "sparse"):
        sparse = logits(model, ids)
    torch.save(model, tmp_path / "model.pt")
    torch.save((ids, logits(model, ids), sparse), tmp_path / "expected.pt")
    script = """
        import sys, torch
        torch.set_num_threads(1)
        model = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
        ids, full, sparse = torch.load(sys.argv[1] + "/expected.pt")
        import elastic_compile
        assert elastic_compile.is_transformed(model)
        with torch.no_grad():
            assert (model(ids, use_cache=False).logits - full).abs().max() <= 1e-5
            assert sum(elastic_compile.counters()["calls"].values()) == 2
            with elastic_compile.force_routes(model, "sparse"):
                assert (model(ids, use_cache=False).logits - sparse).abs().max() <= 1e-5
            assert (full - sparse).abs().max() > 1e-3
            mask = torch.ones_like(ids)
            mask[0, :5] = 0
            assert model.generate(ids, attention_mask=mask, max_new_tokens=3).shape[1] == 43
        assert not elastic_compile.counters()["fallbacks"]
        print("fine")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and "fine" in result.stdout, result.stderr[-3000:]


# --- saving ---------------------------------------------------------------------------------------


def saved_keys(folder):
    keys = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():
                keys[key] = opened.get_tensor(key)
    return keys


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_save_pretrained_saves_the_untouched_model(name, tmp_path):
    """B56: same keys, same config.json, and plain transformers loads it."""
    plain, routed = tmp_path / "plain", tmp_path / "routed"
    build(name).save_pretrained(plain)
    model = transformed(name)
    ids, mask = prompts(side="left")
    with random_routers(model, seed=3):
        model.save_pretrained(routed)
    expected, actual = saved_keys(plain), saved_keys(routed)
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    for file in ("config.json", "generation_config.json"):
        assert (routed / file).read_text() == (plain / file).read_text()
    loaded, info = AutoModelForCausalLM.from_pretrained(routed, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not elastic_compile.is_transformed(loaded)
    loaded.eval()
    assert torch.equal(logits(loaded, ids, mask), logits(build(name), ids, mask))
    # Saving changed nothing about the model in memory.
    assert elastic_compile.is_transformed(model)
    assert error(logits(model, ids, mask), logits(loaded, ids, mask), mask) <= ATOL


def test_save_pretrained_puts_the_router_beside_the_backbone(tmp_path):
    model = transformed()
    ids, _ = prompts()
    with random_routers(model, seed=3):
        expected = logits(model, ids)
        routes = routes_of(model)
        model.save_pretrained(tmp_path)
    assert routes.any() and not routes.all()
    assert (tmp_path / "elastic_router").is_dir()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    elastic_compile.transform(loaded, router=tmp_path / "elastic_router")
    assert torch.equal(logits(loaded, ids), expected)
    assert torch.equal(routes_of(loaded), routes)


def test_sharded_saving(tmp_path):
    model = transformed()
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert list(index["weight_map"]) and not any("elastic" in key for key in index["weight_map"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids, _ = prompts()
    assert torch.equal(logits(loaded, ids), logits(build("llama"), ids))


@pytest.mark.smoke
def test_routers_travel_by_their_own_folder(tmp_path):
    model = transformed()
    ids, _ = prompts()
    with random_routers(model, seed=3):
        expected, routes = logits(model, ids), routes_of(model).clone()
        elastic_compile.save_router(model, tmp_path)
    full = logits(model, ids)
    assert error(full, expected) > 1e-3
    elastic_compile.load_router(model, tmp_path)
    assert torch.equal(logits(model, ids), expected)
    # And at transform, where the folder's configuration holds.
    other = elastic_compile.transform(build("llama"), router=tmp_path)
    assert torch.equal(logits(other, ids), expected)
    assert torch.equal(routes_of(other), routes)


def test_router_parameters_are_all_and_only_the_routers():
    model = transformed()
    parameters = list(elastic_compile.router_parameters(model))
    names = {id(p): n for n, p in model.named_parameters()}
    found = [names[id(p)] for p in parameters]
    expected = [n for n, _ in model.named_parameters() if ".elastic_router." in n]
    assert sorted(found) == sorted(expected) and len(found) == len(set(found))
    # Linear(32,128) Linear(128,32) | Linear(32,128) Linear(128,32) Linear(32,2), with biases.
    mlp = 32 * 128 + 128 + 128 * 32 + 32
    assert sum(p.numel() for p in parameters) == 2 * (2 * mlp + 32 * 2 + 2)


def test_state_dict_round_trip():
    model, other = transformed(), transformed(seed=1)
    ids, _ = prompts()
    with random_routers(model, seed=3):
        expected = logits(model, ids)
        other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), expected)


@pytest.mark.parametrize("name", ["falcon_new", "llama4_full"])
def test_casting_after_the_transform(name):
    """`.to(dtype)` reaches routers and lifted constants, and no captured code pins a dtype."""
    model, base = transformed(name).to(torch.bfloat16), build(name).to(torch.bfloat16)
    ids, mask = prompts(side="left")
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    with counting() as count:
        actual = logits(model, ids, mask)
    assert error(actual, logits(base, ids, mask), mask) <= 0.15
    assert count["fallbacks"] == {}


def test_double_precision():
    ids, mask = prompts(side="left")
    double, base = transformed().double(), build("llama").double()
    assert error(logits(double, ids, mask), logits(base, ids, mask), mask) < 1e-9


# --- offloading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, how, when",
    [
        ("llama", "cpu", "before"),
        ("llama", "cpu", "after"),
        ("llama", "disk", "before"),
        ("gpt2", "disk", "after"),
        ("gpt2", "cpu", "before"),
    ],
)
def test_offloaded_models(name, how, when, tmp_path):
    """Offload hooks and fake tensors do not mix: weights must never be lost to a transform."""
    accelerate = pytest.importorskip("accelerate")
    reference = build(name)
    model = build(name)
    device = torch.device("cpu")

    def offload():
        if how == "cpu":
            accelerate.cpu_offload(model, execution_device=device)
        else:
            accelerate.disk_offload(model, tmp_path, execution_device=device)

    if when == "before":
        offload()
    elastic_compile.transform(model, elastic_config())
    if when == "after":
        offload()
    ids, mask = prompts(side="left")
    assert len(rewritten_rows(model)) == 2
    with counting() as count:
        actual = logits(model, ids, mask)
    assert error(actual, logits(reference, ids, mask), mask) <= ATOL
    assert count == {"calls": 2, "fallbacks": {}}
    with elastic_compile.force_routes(model, "sparse"):
        assert error(logits(model, ids, mask), actual, mask) > 1e-3
    assert torch.equal(generate(model, ids, mask, new=3), generate(reference, ids, mask, new=3))
    elastic_compile.restore(model)
    assert error(logits(model, ids, mask), logits(reference, ids, mask), mask) == 0


def test_dispatch_with_a_device_map():
    accelerate = pytest.importorskip("accelerate")
    model = transformed()
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    ids, _ = prompts()
    with counting() as count:
        assert error(logits(model, ids), logits(build("llama"), ids)) <= ATOL
    assert count == {"calls": 2, "fallbacks": {}}
