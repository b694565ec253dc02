"""A run that is told to end, and what a run says of a router that has learned nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from elastic_compile.fit import main
from elastic_compile.training import FitResult
from elastic_compile.training._stop import StopOnSignal
from elastic_compile.training.trainer import checkpoint_step, last_checkpoint
from tests.training.helpers import run, sites, tiny
from tests.training.test_fit import ROOT, command, saved  # noqa: F401

STEPS = ("--steps", "14", "--save-every", "100", "--quiet")


def start(saved, out, **environment):  # noqa: F811
    return subprocess.Popen(
        [sys.executable, "-m", "elastic_compile.fit", *command(saved, out, *STEPS)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def test_a_run_that_is_told_to_end_saves_and_goes_on(saved, tmp_path):  # noqa: F811
    assert main(command(saved, tmp_path / "whole", *STEPS)) == 0
    out = tmp_path / "stopped"
    process = start(saved, out)
    wait_for_lines(out / "metrics.jsonl", 4, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    last = checkpoint_step(last_checkpoint(out / "checkpoints"))
    assert 4 <= last < 14 and f"after step {last} of 14" in said and "--resume" in said
    assert (out / "metrics.jsonl").read_bytes().count(b"\n") == last
    assert not (out / "elastic_config.json").exists()
    assert main(command(saved, out, *STEPS, "--resume")) == 0
    whole = tmp_path / "whole" / "metrics.jsonl"
    assert (out / "metrics.jsonl").read_bytes() == whole.read_bytes()


def test_all_processes_end_at_the_same_step(saved, tmp_path):  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    out = tmp_path / "two"
    processes = [
        start(saved, out, RANK=str(rank), LOCAL_RANK=str(rank), **together) for rank in range(2)
    ]
    wait_for_lines(out / "metrics.jsonl", 2, processes[0])
    # One alone: it tells the other.
    processes[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [143, 143], said
    last = checkpoint_step(last_checkpoint(out / "checkpoints"))
    assert all(f"after step {last} of 14" in one for one in said)


def test_the_handler_goes_with_the_run():
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal() as stop:
        assert signal.getsignal(signal.SIGTERM) != before and not stop.asked
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
    assert signal.getsignal(signal.SIGTERM) == before
    seen = []

    def elsewhere():
        with StopOnSignal():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def result(tmp_path, **tasks):
    """A result whose tasks have (Ω_MSR, target) throughout; an Ω of None: no samples."""
    record = {
        "tasks": {
            name: {
                "samples": 0 if ratio is None else 2,
                "msr": ratio,
                "target": target if isinstance(target, list) else [target, target],
            }
            for name, (ratio, target) in tasks.items()
        }
    }
    return FitResult(tmp_path, [json.loads(json.dumps(record)) for _ in range(30)], None)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"a": (0.0, 0.7), "b": (0.01, 1.0)}, ["collapsed", "full", "higher lambda_lr"]),
        ({"a": (1.0, 0.7), "b": (0.99, 1.0)}, ["collapsed", "sparse", "lower lambda_lr"]),
        ({"a": (1.0, 1.0), "b": (0.99, 1.0)}, ["collapsed", "sparse", "a lower one"]),
        ({"a": (0.3, 0.7), "b": (0.9, 1.0)}, ["task a", "0.30", "below its target 0.7"]),
        ({"a": (0.9, [0.1, 0.5]), "b": (0.9, 1.0)}, ["task a", "above its target 0.1:0.5"]),
    ],
)
def test_what_is_wrong_is_said(tmp_path, tasks, words):
    (advice,) = result(tmp_path, **tasks).advice()
    assert all(word in advice for word in words), advice


@pytest.mark.parametrize(
    "tasks",
    [
        {"a": (0.6, 0.7), "b": (0.8, 1.0)},
        {"a": (0.0, 0.0), "b": (0.01, [0.0, 0.2])},
        {"a": (0.5, [0.3, 0.6]), "b": (None, 1.0)},
        {"a": (None, 0.7)},
    ],
)
def test_nothing_wrong(tmp_path, tasks):
    assert result(tmp_path, **tasks).advice() == []


def test_a_real_run_that_collapses_says_so(tmp_path, caplog):
    model = tiny()
    for site in sites(model):
        site.router[-1].bias.data.copy_(torch.tensor([50.0, -50.0]))
    found = run(model, tmp_path / "out", steps=2, router_lr=0.0)
    assert "every head is full" in "".join(found.advice()) and "has collapsed" in caplog.text
