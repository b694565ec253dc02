"""Reported faults of comparable kernels that no other file covers (``tests/field_cases.py``)."""

import pytest
import torch

from elastic_compile.kernels import ops
from tests import oracle
from tests.kernels.cases import KERNELS, alternating, block_lists, inputs


@pytest.mark.parametrize("mode", ("full", "streaming", "blocks"))
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", (1, 2, 7, 63, 127))
def test_few_rows_on_a_long_cache(rows, kernel, mode):
    # field case B04
    if (kernel, mode) == ("cpu", "blocks"):
        kernel = "auto"
    tensors = inputs(1, 8, 2, rows, 4097, 32)
    options = {"sink": 4, "local": 64, "sparse_mode": mode}
    if mode == "blocks":
        options |= block_lists(1, 2, 4097) | {"block_size": 64}
    out, lse = ops.attention(*tensors, alternating(1, 2), kernel=kernel, **options)
    heads = [0, 7]
    expected, expected_lse = oracle.attention(*tensors, alternating(1, 2), heads=heads, **options)
    torch.testing.assert_close(out[:, heads].double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[:, heads].double(), expected_lse, rtol=1e-5, atol=1e-5)
