"""Pictures of the benchmarks' results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

plot = pytest.importorskip("plot", exc_type=ImportError)

META = {"card": "H200", "versions": {"torch": "2.11"}, "dtype": "bf16"}


def attention(impl, sparse=0, size=128, batch=1):
    return [
        {"impl": impl, "D": size, "S": length, "B": batch, "kv_heads": 8, "sparse_kv_heads": sparse}
        | {"ms": length / 100}
        for length in (1024, 8192)
    ]


def labels(axis):
    return [line.get_label() for line in axis.get_lines()]


def test_attention():
    rows = [*attention("sdpa"), *attention("elastic"), *attention("elastic", 6), *attention("fa3")]
    rows += [*attention("elastic", 8, batch=4), *attention("elastic", 0, size=64)]
    figure = plot.draw({"meta": META, "rows": rows})
    speed, small_speed, time, small_time = figure.axes
    wanted = ["torch SDPA", "FlashAttention-3", "0 of 8 streaming", "6 of 8 streaming"]
    assert labels(speed) == labels(time) == wanted
    assert labels(small_speed) == [] and labels(small_time) == ["0 of 8 streaming"]


def test_models():
    rows = [
        {"geometry": name, "impl": "elastic", "S": length, "msr": share, "speedup": 1 + share}
        | {"ms": length / (1 + share)}
        for name in ("A", "B")
        for length in (16384, 8192)
        for share in (0.7, 0.0)
    ]
    # What was not finished for one geometry is not drawn; the rest is.
    rows += [
        {"geometry": "A", "impl": "untouched", "S": length, "msr": None, "speedup": 1.0}
        | {"ms": length}
        for length in (8192, 16384)
    ]
    figure = plot.draw({"meta": META, "rows": rows})
    speed, other_speed, time, other_time = figure.axes
    assert [axis.get_title() for axis in (speed, other_speed)] == ["A geometry", "B geometry"]
    shares = ["0% streaming", "70% streaming"]
    assert labels(speed)[:2] == labels(other_speed)[:2] == labels(other_time) == shares
    assert labels(time) == ["untouched", *shares]
    lines = {line.get_label(): line for line in time.get_lines()}
    assert list(lines["untouched"].get_xdata()) == [8192, 16384]
    assert list(lines["untouched"].get_ydata()) == [8.192, 16.384]
    assert list(lines["70% streaming"].get_ydata()) == pytest.approx([8.192 / 1.7, 16.384 / 1.7])
    assert list(speed.get_lines()[1].get_ydata()) == [1.7, 1.7]


@pytest.mark.parametrize("name", ["prefill.json", "model_prefill.json"])
def test_the_results_that_are_here(tmp_path, name):
    out = tmp_path / "x.png"
    command = [sys.executable, str(BENCHMARKS / "plot.py"), str(BENCHMARKS / "results" / name)]
    subprocess.run([*command, "--out", str(out)], check=True)
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"meta": META, "rows": [{"ms": 1}]}))
    command = [sys.executable, str(BENCHMARKS / "plot.py"), str(path), "--out", str(tmp_path / "y")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0 and "no rows of prefill.py or model_prefill.py" in result.stderr
    assert not (tmp_path / "y").exists()
