"""A run that is told to end, and what a run says of a router that has learned nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch

from elastic_compile.fit import main
from elastic_compile.training import FitResult, _fit
from elastic_compile.training._stop import StopOnSignal
from elastic_compile.training.trainer import checkpoint_step, last_checkpoint
from tests.training.helpers import run, sites, tiny
from tests.training.test_fit import ROOT, command, saved  # noqa: F401

STEPS = ("--steps", "6", "--save-every", "100", "--quiet")
# Tells its own process to end at the end of step 3: no race with the run.
TOLD = """
import os, signal, sys
from elastic_compile.training import _fit
step_end = _fit._Clock.on_step_end
def told(self, args, state, *rest, **more):
    if state.global_step == 3 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    step_end(self, args, state, *rest, **more)
_fit._Clock.on_step_end = told
from elastic_compile.fit import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_that_is_told_to_end_saves_and_goes_on(saved, tmp_path, monkeypatch, capsys):  # noqa: F811
    assert main(command(saved, tmp_path / "whole", *STEPS)) == 0
    out = tmp_path / "stopped"
    step_end = _fit._Clock.on_step_end

    def told(self, args, state, *rest, **more):
        if state.global_step == 3:
            signal.raise_signal(signal.SIGTERM)
        step_end(self, args, state, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(_fit._Clock, "on_step_end", told)
        assert main(command(saved, out, *STEPS)) == 143
    said = capsys.readouterr().err
    assert "after step 3 of 6" in said and "--resume" in said
    assert checkpoint_step(last_checkpoint(out / "checkpoints")) == 3
    assert (out / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert not (out / "elastic_config.json").exists()
    assert main(command(saved, out, *STEPS, "--resume")) == 0
    whole = tmp_path / "whole" / "metrics.jsonl"
    assert (out / "metrics.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.long
def test_all_processes_end_at_the_same_step(saved, tmp_path):  # noqa: F811
    """One alone is told: it tells the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    out = tmp_path / "two"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOLD, *command(saved, out, *STEPS)],
            env={
                **os.environ,
                **together,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [143, 143], said
    assert all("after step 3 of 6" in one for one in said)
    assert checkpoint_step(last_checkpoint(out / "checkpoints")) == 3


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
