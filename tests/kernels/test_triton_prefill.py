"""The Triton prefill kernel where there is no GPU: in the interpreter, and its host side."""

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_compile.kernels import triton_prefill
from elastic_compile.kernels._call import AttentionCall
from elastic_compile.kernels.triton_prefill import select_config


@pytest.mark.slow
def test_in_the_interpreter():
    pytest.importorskip("triton")
    cases = Path(__file__).parent / "triton_interpreted.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout


def test_inputs_on_the_cpu_are_declined():
    tensor = torch.zeros(1, 2, 4, 16)
    route = torch.zeros(1, 2, dtype=torch.int32)
    ok, reason = triton_prefill.supports(AttentionCall(tensor, tensor, tensor, route, 1, 2))
    assert not ok and "needs a GPU" in reason


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_tiles_fit_the_shared_memory(capability):
    """Query rows, and keys and values for every stage, beside each other."""
    limit = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) << 10
    for dtype, size, queries, *flags in itertools.product(
        (torch.bfloat16, torch.float32),
        (16, 64, 80, 128, 192, 256),
        (1, 16, 17, 64, 65, 4096),
        *[(False, True)] * 2,
    ):
        tma, streams = flags
        config = select_config(size, dtype, capability, queries, streams=streams, tma=tma)
        width = 1 << (size - 1).bit_length()
        rows = config.rows + 2 * config.stages * config.keys
        assert rows * width * dtype.itemsize <= limit, (config, size, queries)
        assert tma or not config.tma


def test_the_launcher_imports_triton_when_it_launches():
    tree = ast.parse(Path(triton_prefill.__file__).read_text(encoding="utf-8"))
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name and "triton" in name for name in names)
