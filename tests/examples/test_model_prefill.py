"""The logic of model_prefill.py on a tiny model on the CPU: rows, resuming, what does not fit."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import _results
import model_prefill

CPU = model_prefill.Device("cpu")


def arguments(**changes):
    given = dict(
        lengths=[48, 96],
        shares=[0.0, 1.0],
        sink=4,
        local=16,
        rounds=1,
        backends=["none", "eager"],
        elastic_backends=None,
        resume=False,
    )
    return argparse.Namespace(**(given | changes))


def measure(path, *, append=False, **changes):
    meta = {"card": "none", "versions": {}, "commit": "a", "untouched_ms": {}}
    results = _results.Results(path, meta, model_prefill.KEY, append=append)
    model_prefill.measure(arguments(**changes), "tiny", results, CPU)
    return json.loads(path.read_text())


def told(found):
    return [(row["impl"], row["S"], row["msr"]) for row in found["rows"]]


ALL = [
    (impl, length, msr)
    for length in (48, 96)
    for impl, msr in (("untouched", None), ("elastic", 0.0), ("elastic", 1.0))
]


@pytest.fixture
def forwards(monkeypatch):
    """Lengths of the calls made so far."""
    made = []
    real = model_prefill.prefill

    def counting(model, ids):
        made.append(ids.shape[1])
        return real(model, ids)

    monkeypatch.setattr(model_prefill, "prefill", counting)
    return made


def test_rows(tmp_path):
    found = measure(tmp_path / "x.json", lengths=[48], shares=[1.0])
    assert told(found) == [ALL[0], ALL[2]]
    variants = found["meta"]["untouched_ms"]["tiny"]
    for row in found["rows"]:
        own = variants[str(row["S"])]
        assert set(own) == {"none", "eager"} and row["ms"] > 0
        assert row["backend"] == min(own, key=own.get)
        assert row["speedup"] == pytest.approx(min(own.values()) / row["ms"], rel=2e-3, abs=1e-3)


def test_a_run_that_was_cut_short_is_resumed(tmp_path, forwards):
    path = tmp_path / "x.json"
    measure(path, backends=["none"])
    whole = json.loads(path.read_text())
    assert told(whole) == ALL
    kept = [row for row in whole["rows"] if (row["S"], row["msr"]) != (96, 1.0)]
    path.write_text(json.dumps(whole | {"rows": kept}))
    forwards.clear()
    found = measure(path, append=True, resume=True, backends=["none"])
    # Two calls to compare the models, one that warms up and one that is timed.
    assert forwards == [96] * 4
    assert found["rows"][:-1] == kept and told(found) == ALL
    base = next(row for row in kept if row["S"] == 96 and row["impl"] == "untouched")
    last = found["rows"][-1]
    assert last["speedup"] == pytest.approx(base["ms"] / last["ms"], rel=2e-3, abs=1e-3)
    forwards.clear()
    assert measure(path, append=True, resume=True) == found
    assert forwards == []


def test_what_does_not_fit_is_left_out(tmp_path, monkeypatch, capsys):
    real = model_prefill.timed

    def timed(model, ids, *rest, **options):
        if ids.shape[1] > 48:
            raise torch.OutOfMemoryError("too much\nand more")
        return real(model, ids, *rest, **options)

    monkeypatch.setattr(model_prefill, "timed", timed)
    assert told(measure(tmp_path / "x.json", backends=["none"])) == ALL[:3]
    assert "none at 96: too much\n" in capsys.readouterr().out


def test_long_prompts_are_compared_on_their_beginning_and_run_once(tmp_path, monkeypatch, forwards):
    """But for compiled models, which may be compiled anew."""
    monkeypatch.setattr(model_prefill, "SHORT", 40)
    monkeypatch.setattr(model_prefill, "rounds_at", lambda length, rounds: (1, True))
    options = dict(lengths=[48], shares=[0.5], backends=["none"], elastic_backends=["eager"])
    found = measure(tmp_path / "x.json", **options)
    assert forwards == [40, 40, 48, 48, 48]
    # The transformed model may have backends of its own.
    assert [row["backend"] for row in found["rows"]] == ["none", "eager"]


def test_other_logits_stop_the_run(tmp_path, monkeypatch):
    real = model_prefill.elastic_compile.transform

    def transform(model, config):
        model = real(model, config)
        # Weights are shared with the untouched model: this one gets its own.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone() * 1.2)
        return model

    monkeypatch.setattr(model_prefill.elastic_compile, "transform", transform)
    with pytest.raises(SystemExit, match="logits differ by .* nothing is timed"):
        measure(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_both_models_hold_their_weights_once():
    base = model_prefill.build("tiny", 64, CPU)
    other = model_prefill.twin(base)
    assert other is not base and other.model.layers[0] is not base.model.layers[0]
    own = {tensor.data_ptr() for tensor in base.parameters()}
    assert {tensor.data_ptr() for tensor in other.parameters()} == own
