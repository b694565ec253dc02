"""The fused router where there is no GPU: in the interpreter, and its host side."""

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_compile.kernels import _dispatch, ops, triton_route
from elastic_compile.router import AttentionRouter

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        "kernels/triton_route_interpreted.py",
        pytest.param("integration/fused_router_interpreted.py", marks=pytest.mark.long),
    ],
)
def test_in_the_interpreter(cases):
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{cases}"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout


def arguments(**changes):
    """Arguments of the operator that mean something."""
    given = dict(
        tap=torch.zeros(2, 3, 9, 16),
        weights=list(AttentionRouter(16, 2).parameters()),
        forced=torch.full((1, 3), -1, dtype=torch.int32),
        pool_tokens=4,
    )
    return given | changes


def test_inputs_on_the_cpu_are_declined():
    with pytest.raises(ValueError, match="needs a GPU"):
        ops.route(**arguments())
    assert not ops.fuses_routes(torch.device("cpu"), "auto")
    assert not ops.fuses_routes(torch.device("meta"), "triton")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(tap=torch.zeros(2, 9, 48)), ValueError, "tap must be 4-D"),
        (dict(pool_tokens=0), ValueError, "pool_tokens is 0"),
        (dict(key_mask=torch.ones(2, 9)), TypeError, "key_mask must be bool"),
        (dict(key_mask=torch.ones(2, 8, dtype=torch.bool)), ValueError, "key_mask must be"),
        (dict(end=torch.ones(2)), TypeError, "end must be int32 or int64"),
        (dict(end=torch.ones(3, dtype=torch.int64)), ValueError, "end must have shape"),
        (dict(forced=torch.zeros(1, 3)), TypeError, "forced must be int32"),
        (dict(forced=torch.zeros(2, 4, dtype=torch.int32)), ValueError, "forced must be"),
        (dict(weights=[torch.zeros(2)]), ValueError, "five linears, got 1 tensors"),
        (dict(weights=list(AttentionRouter(8).parameters())), ValueError, "weights\\[0\\]"),
        (dict(forced=torch.zeros(1, 3, dtype=torch.int32, device="meta")), ValueError, "device"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_that_mean_nothing(changes, error, message):
    with pytest.raises(error, match=message):
        ops.route(**arguments(**changes))


@pytest.mark.parametrize("name", ["reference", "cpu", "blocked"])
def test_a_named_implementation_that_is_not_tritons_is_not_fused(monkeypatch, name):
    monkeypatch.setattr(triton_route, "runs_on", lambda device: (True, ""))
    device = torch.device("cuda", 0)
    for environment in (None, "triton", name):
        if environment is not None:
            monkeypatch.setenv(_dispatch.ENVIRONMENT_VARIABLE, environment)
        assert not ops.fuses_routes(device, name)
        assert ops.fuses_routes(device, "auto") == (environment != name)
        assert ops.fuses_routes(device, "triton")


def test_sizes_are_powers_of_two_that_fit_the_registers():
    for size, multiplier, pool_tokens in itertools.product(
        (1, 16, 20, 64, 80, 128, 192, 256, 576, 1024), (1, 3, 4), (1, 6, 100, 5000)
    ):
        config = triton_route.select_config(size, size * multiplier, pool_tokens)
        width = max(16, 1 << (size - 1).bit_length())
        for value in (config.block, config.chunk, config.scan):
            assert value >= 16 and value & (value - 1) == 0
        # At most 32 values of a tile a thread.
        assert max(config.block, config.chunk) * width <= 32 * 32 * config.warps


def test_the_launcher_imports_triton_when_it_launches():
    tree = ast.parse(Path(triton_route.__file__).read_text(encoding="utf-8"))
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name and "triton" in name for name in names)
