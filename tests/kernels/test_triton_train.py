"""The Triton kernels for training without a GPU: in the interpreter, and their host side."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_compile.kernels import ops, triton_backward, triton_dual
from elastic_compile.kernels._call import AttentionCall


@pytest.mark.slow
def test_in_the_interpreter():
    pytest.importorskip("triton")
    cases = Path(__file__).parent / "triton_train_interpreted.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout


def test_what_the_dual_forward_declines():
    tensor = torch.zeros(1, 2, 4, 16)
    route = torch.zeros(1, 2, dtype=torch.int32)
    for modes in (("full", "full"), ("streaming", "streaming"), ("full", "blocks")):
        call = AttentionCall(tensor, tensor, tensor, route, 1, 2, *modes)
        ok, reason = triton_dual.supports(call)
        assert not ok and "one class of full heads and one of streaming heads" in reason
    ok, reason = triton_dual.supports(AttentionCall(tensor, tensor, tensor, route, 1, 2))
    assert not ok and "needs a GPU" in reason
    with pytest.raises(ValueError, match=r"'triton' cannot serve this call: runs on cuda only"):
        ops.attention_train(tensor, tensor, tensor, route.float(), sink=1, local=2, kernel="triton")


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
def test_tiles_fit_the_shared_memory(dtype, size, tma):
    """What a program holds, and every stage of what it meets; 99 KiB is the least of any chip."""
    config = triton_backward.select_config(size, dtype, tma=tma)
    row = max(size, 32) * dtype.itemsize
    keys = 2 * config.keys + 2 * config.key_stages * config.key_rows
    rows = 2 * config.rows + 2 * config.row_stages * config.row_keys
    # TMA means a chip of 227 KiB.
    limit = (99 if dtype == torch.float32 else 227 if tma else 163) << 10
    assert max(keys, rows) * row <= limit
    dual = triton_dual.select_config(size, dtype, tma=tma)
    assert (dual.rows + 2 * dual.stages * dual.keys) * row <= limit
