"""The bench command on tiny random models: what it measures and says, never how fast."""

import json
import types

import pytest
import torch

import elastic_compile
from elastic_compile import ElasticConfig, _measure, bench
from elastic_compile._measure import Memory
from tests.families import build, tokens
from tests.training import helpers

CONFIG = ElasticConfig(sink=4, local=16)


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """Collecting garbage before every run takes most of the time beside a whole suite's objects."""
    monkeypatch.setattr(_measure, "gc", types.SimpleNamespace(collect=lambda: 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    build("llama", vocab_size=256).save_pretrained(path)
    helpers.tokenizer().save_pretrained(path)
    return path


def test_every_variant_is_measured_and_the_model_is_as_before():
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = []
    rows, drift = bench.bench(
        model,
        [tokens(1, 64), tokens(1, 96)],
        config=CONFIG,
        shares=(0.0, 0.5, 1.0),
        new_tokens=3,
        rounds=2,
        tell=said.append,
    )
    assert not elastic_compile.is_transformed(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    names = ["untouched", "0% streaming", "50% streaming", "100% streaming"]
    assert [(row.length, row.variant) for row in rows] == [
        (length, name) for length in (64, 96) for name in names
    ]
    for row in rows:
        assert len(row.runs) == (4 if row.variant == "untouched" else 2)
        assert row.ms_first > 0 and row.tokens_per_second > 0
    assert [row.msr for row in rows] == [None, 0.0, 0.5, 1.0] * 2
    for length, (_, none, half, all_) in ((64, rows[:4]), (96, rows[4:])):
        seen = 20 * 21 / 2 + (length + 2 - 20) * 20  # the cache has the new tokens but the last
        share = 1 - seen / ((length + 2) * (length + 3) / 2)
        assert (none.esr, half.esr, all_.esr) == pytest.approx((0, share / 2, share))
    assert drift >= 0
    assert said[1] == "2 of 2 attention sites rewritten"


def test_the_clock_sees_every_token(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(ticks)))
    run = bench.answer(build("llama"), tokens(1, 20), 5, Memory())
    # Started at 0; one tick for each of five tokens.
    assert (run.first, run.per_token) == (1.0, 1.0)
    assert run.msr is None and run.esr is None


def test_compiled_runs_compile_the_model_and_leave_it_uncompiled():
    model = build("llama")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rows, _ = bench.bench(
        model,
        [tokens(1, 48), tokens(1, 80)],
        config=CONFIG,
        shares=(0.0, 1.0),
        new_tokens=3,
        rounds=1,
        backend="eager",
    )
    assert len(rows) == 6
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    # Prefill and decode, untouched and transformed: a new share or length compiles nothing, nor
    # does the untouched model the second time.
    assert graphs == 4
    assert model._compiled_call_impl is None


def test_a_failing_run_restores_the_model(monkeypatch):
    model = build("llama")
    real = bench.answer

    def fails(model, *args):
        if elastic_compile.is_transformed(model):
            raise RuntimeError("stopped")
        return real(model, *args)

    monkeypatch.setattr(bench, "answer", fails)
    with pytest.raises(RuntimeError, match="stopped"):
        bench.bench(model, [tokens(1, 30)], config=CONFIG, new_tokens=2, rounds=1)
    assert not elastic_compile.is_transformed(model)


def test_a_transformed_model_is_refused():
    model = elastic_compile.transform(build("llama"), CONFIG)
    with pytest.raises(bench.BenchError, match="restore"):
        bench.bench(model, [tokens(1, 30)])


# --- the command ----------------------------------------------------------------------------------


def run(folder, *more):
    sizes = ["--lengths", "60", "--new-tokens", "2", "--rounds", "1", "--sink", "4"]
    return bench.main([str(folder), *sizes, "--local", "8", "--device", "cpu", *more])


def test_the_command_prints_one_table_and_writes_json(folder, tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert run(folder, "--shares", "0", "1", "--json", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["tokens", "heads", "TTFT"]
    assert [line.split()[1] for line in lines[1:4]] == ["untouched", "0%", "100%"]
    written = json.loads(file.read_text())
    assert written["meta"]["model"] == str(folder) and len(written["rows"]) == 3


def test_random_weights_need_the_configuration_only(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert run(tmp_path, "--shares", "1", "--random-weights") == 0


def test_a_router_is_timed_on_a_text(folder, tmp_path, capsys):
    model = elastic_compile.transform(build("llama", vocab_size=256), CONFIG)
    elastic_compile.save_router(helpers.stir(model), tmp_path / "router")
    (tmp_path / "text").write_text("the grass is green. " * 4)
    words = [str(folder), "--lengths", "60", "--new-tokens", "2", "--rounds", "1", "--shares", "1"]
    words += ["--device", "cpu", "--router", str(tmp_path / "router")]
    assert bench.main([*words, "--prompt", str(tmp_path / "text")]) == 0
    routed = capsys.readouterr().out.splitlines()[2].split()
    assert routed[1] == "routed" and 0 < float(routed[-2]) < 1
    (tmp_path / "text").write_text("short")
    assert bench.main([*words, "--prompt", str(tmp_path / "text")]) == 2
    assert "has 5 tokens, --lengths asks for 60" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "1"], "--lengths is 1; allowed: 2 or more"),
        (["--new-tokens", "1"], "--new-tokens is 1; allowed: 2 or more"),
        (["--shares", "1.5"], "from 0 to 1"),
        (["--router", "/no/such/folder"], "is no folder"),
        (["--router", ".", "--sink", "3"], "brings its own windows"),
        (["--router", "."], "--prompt FILE"),
        (["--router", ".", "--random-weights"], "fits no random model"),
    ],
)
def test_wrong_options_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["anything", *words])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told(capsys, tmp_path):
    assert bench.main([str(tmp_path / "nothing"), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_machine_that_changed_is_told(folder, monkeypatch, capsys):
    monkeypatch.setattr(bench, "DRIFT", -1.0)
    assert run(folder, "--shares", "1") == 0
    assert "other work on this machine?" in capsys.readouterr().out
