"""Result files of the benchmarks, and what prefill.py works out from its rows."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import _results
import model_prefill
import prefill

KEY = ("impl", "S")


def meta(commit="b", card="H200", **more):
    return {"card": card, "versions": {"torch": "2.11"}, "commit": commit, **more}


def rows(**ms):
    return [{"impl": name, "S": 8, "ms": value} for name, value in ms.items()]


def test_a_run_replaces_the_file(tmp_path):
    path = tmp_path / "deep" / "x.json"
    _results.Results(path, meta("a"), KEY).add(rows(elastic=1.0, sdpa=2.0))
    _results.Results(path, meta("b"), KEY).add(rows(elastic=3.0))
    found = json.loads(path.read_text())
    assert found == {"meta": meta("b"), "rows": rows(elastic=3.0)}


def test_short_runs_add_up(tmp_path):
    path = tmp_path / "x.json"
    _results.Results(path, meta("a", other={"x": 1}), KEY).add(rows(elastic=1.0, sdpa=2.0))
    again = _results.Results(path, meta("b", other={"y": 2}), KEY, append=True)
    assert again.row(impl="sdpa", S=8) == rows(sdpa=2.0)[0] and again.row(impl="sdpa", S=9) is None
    again.add(rows(elastic=3.0, fa3=4.0))
    found = json.loads(path.read_text())
    assert found["rows"] == rows(sdpa=2.0, elastic=3.0, fa3=4.0)
    assert found["meta"]["commits"] == ["a", "b"] and found["meta"]["other"] == {"x": 1, "y": 2}
    third = _results.Results(path, meta("c"), KEY, append=True)
    assert third.meta["commits"] == ["a", "b", "c"]


@pytest.mark.parametrize("change", [{"card": "A100"}, {"versions": {"torch": "2.13"}}])
def test_rows_of_another_machine_are_not_mixed(tmp_path, change):
    path = tmp_path / "x.json"
    _results.Results(path, meta(), KEY).add(rows(elastic=1.0))
    before = path.read_text()
    with pytest.raises(ValueError, match="write to another file, or without --append"):
        _results.Results(path, meta() | change, KEY, append=True)
    assert path.read_text() == before


def test_nothing_is_written_without_a_file():
    results = _results.Results(None, meta(), KEY, append=True)
    results.add(rows(elastic=1.0))
    assert results.rows == rows(elastic=1.0)


def test_visible_shares_are_those_of_counted_pairs():
    length, sink, local = 50, 3, 7
    streamed = sum(j < sink or i - j < local for i in range(length) for j in range(i + 1))
    full = length * (length + 1) // 2
    assert prefill.visible_share(0, 8, length, sink, local) == 1
    assert prefill.visible_share(8, 8, length, sink, local) == streamed / full
    assert prefill.visible_share(2, 8, length, sink, local) == (6 + 2 * streamed / full) / 8


def test_how_many_calls_are_timed():
    assert prefill.calls(1e-5, 0.3) == 200
    assert prefill.calls(0.01, 0.3) == 30
    assert prefill.calls(0.2, 0.3) == 5
    assert prefill.calls(1.0, 0.3) == 5


def test_the_table_of_ratios(capsys):
    base = {"D": 128, "S": 8192, "B": 1, "kv_heads": 8}
    share = prefill.visible_share(8, 8, 8192, 128, 2048)
    found = [
        {"impl": "elastic", "sparse_kv_heads": 0, "ms": 2.0} | base,
        {"impl": "elastic", "sparse_kv_heads": 8, "ms": 2.2 * share} | base,
        {"impl": "elastic", "sparse_kv_heads": 8, "ms": 9.0} | base | {"B": 4},
        {"impl": "sdpa", "sparse_kv_heads": 0, "ms": 1.8} | base,
    ]
    prefill.print_ratios(found, 128, 2048)
    line = capsys.readouterr().out.splitlines()[-1]
    assert "(0.90x, 1.000)" in line and ", 1.100)" in line and "9.000" not in line


def test_long_prefills_run_once_and_are_not_warmed_up():
    assert model_prefill.rounds_at(8192, 3) == (3, False)
    assert model_prefill.rounds_at(65536, 3) == (2, False)
    assert model_prefill.rounds_at(262144, 3) == (1, True)
    assert model_prefill.rounds_at(65536, 1) == (1, False)
