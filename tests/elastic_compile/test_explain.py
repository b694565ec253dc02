"""``explain`` says of a configuration what ``transform`` does with the model."""

import json
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import elastic_compile
from elastic_compile import ElasticConfig, _embedded
from elastic_compile.explain import BY_DEVICE, ExplainError, explain, main
from tests.families import build

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def folder_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    "config, sites", [(QWEN3_4B, 36), (LLAMA_31_8B, 32)], ids=["qwen3-4b", "llama-3.1-8b"]
)
def test_billions_of_parameters_take_seconds(tmp_path, config, sites, capsys):
    started = time.process_time()
    assert main([folder_of(tmp_path, config)]) == 0
    assert time.process_time() - started < 60
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("model.layers.")]
    assert len(rows) == sites
    assert {tuple(row[2:6]) for row in rows} == {("rewritten", "no", "8", "128")}
    assert f"{sites} of {sites} attention sites rewritten" in lines
    routers = f"{sites * 263_682:,} router parameters"
    assert any(line.startswith(f"{sites * 8} kv heads get a route") for line in lines)
    assert any(routers in line for line in lines)


@pytest.mark.parametrize("name", ["llama", "mixtral", "falcon_alibi", "gemma3"])
def test_it_says_what_transform_says(tmp_path, name):
    model = build(name)
    model.config.save_pretrained(tmp_path)
    told = explain(str(tmp_path)).report
    elastic_compile.transform(model, allow_unrewritten=True)
    real = elastic_compile.report(model)
    assert [(s.path, s.cls, s.status, s.kv_heads, s.head_dim) for s in told.sites] == [
        (s.path, s.cls, s.status, s.kv_heads, s.head_dim) for s in real.sites
    ]
    assert [s.reason for s in told.sites] == [s.reason for s in real.sites]
    assert not any(site.checked for site in told.sites)
    # The machine that explains is not the one that will run it.
    assert {site.implementation for site in told.rewritten} <= {BY_DEVICE}


def test_nothing_to_rewrite_is_exit_status_1(tmp_path, capsys):
    # Plain Mistral is all sliding windows.
    config = TINY | {"model_type": "mistral", "sliding_window": 32}
    assert main([folder_of(tmp_path, config)]) == 1
    out = capsys.readouterr().out
    assert "0 of 2 attention sites rewritten; 2 skipped: its mask is not the plain causal" in out


@pytest.mark.smoke
def test_json(tmp_path, capsys):
    folder = folder_of(tmp_path, TINY)
    assert main([folder, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == folder and told["cls"] == "LlamaForCausalLM"
    assert told["summary"] == "2 of 2 attention sites rewritten"
    assert told["routed_heads"] == 4 and told["router"] is None
    assert told["config"] == ElasticConfig().to_dict()
    assert [site["path"] for site in told["sites"]] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    assert {site["status"] for site in told["sites"]} == {"rewritten"}
    assert {site["checked"] for site in told["sites"]} == {False}


# ------------------------------------------------------------------ routers


@pytest.fixture
def tiny(tmp_path):
    """A tiny model's folder, and its router folder."""
    folder, router = tmp_path / "model", tmp_path / "router"
    folder.mkdir()
    folder_of(folder, TINY)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    elastic_compile.transform(model, ElasticConfig(sink=4, local=32))
    elastic_compile.save_router(model, router)
    return str(folder), router


def test_a_router_of_this_model_fits(tiny, capsys):
    assert main([tiny[0], "--router", str(tiny[1])]) == 0
    out = capsys.readouterr().out
    assert f"the router in {tiny[1]} fits this model" in out
    assert "(sink 4, local 32)" in out


def test_a_router_of_another_model_does_not(tiny, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    folder_of(other, TINY | {"num_hidden_layers": 3})
    assert main([str(other), "--router", str(tiny[1])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "2 sites there, 3 rewritten here" in error


def test_a_damaged_router_does_not(tiny, capsys):
    weights = next(tiny[1].glob("router-*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main([tiny[0], "--router", str(tiny[1])]) == 2
    assert "damaged or truncated" in capsys.readouterr().err


# ------------------------------------------------------------------ what cannot be explained


def refused(name, capsys):
    """The message of a refusal; also that there is no traceback and nothing on stdout."""
    assert main([name]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_an_unknown_id_offline(capsys):
    error = refused("nobody/such-a-model", capsys)
    assert "'nobody/such-a-model' is no folder here" in error
    assert "offline, give a folder that holds the model's config.json" in error


def test_a_folder_without_a_model(tmp_path, capsys):
    assert f"{tmp_path} has no config.json" in refused(str(tmp_path), capsys)
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path / "config.json") in refused(str(tmp_path), capsys)
    (tmp_path / "config.json").write_text("{")
    assert str(tmp_path / "config.json") in refused(str(tmp_path), capsys)
    assert "is a file" in refused(str(tmp_path / "config.json"), capsys)


@pytest.mark.parametrize("kind", ["t5", "vit"])
def test_no_causal_language_model(tmp_path, kind, capsys):
    error = refused(folder_of(tmp_path, {"model_type": kind}), capsys)
    assert "is no causal language model" in error


def test_a_model_that_reads_its_data_says_how_else(tmp_path):
    # BERT looks at its mask's values, which the meta device does not have.
    config = TINY | {"model_type": "bert"}
    with pytest.raises(ExplainError, match="cannot be run without its weights.*load the model"):
        explain(folder_of(tmp_path, config))


def test_the_process_exits_with_the_status(tmp_path):
    command = [sys.executable, "-m", "elastic_compile.explain", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "has no config.json" in done.stderr


def test_the_word_for_the_embedded_model(monkeypatch, tmp_path, capsys):
    def missing():
        raise _embedded.EmbeddedModelError("install it")

    monkeypatch.setattr(_embedded, "load_config", missing)
    assert "install it" in refused("smollm2", capsys)
    config = AutoConfig.from_pretrained(folder_of(tmp_path, TINY))
    monkeypatch.setattr(_embedded, "load_config", lambda: config)
    told = explain("smollm2")
    assert told.config == _embedded.CONFIG.to_dict() and len(told.report.rewritten) == 2


def test_nothing_is_allocated(tmp_path, monkeypatch):
    built = []
    real = elastic_compile._api.transform
    monkeypatch.setattr(
        elastic_compile._api, "transform", lambda m, *a, **k: built.append(m) or real(m, *a, **k)
    )
    explain(folder_of(tmp_path, TINY))
    assert {p.device for p in built[0].parameters()} == {torch.device("meta")}
