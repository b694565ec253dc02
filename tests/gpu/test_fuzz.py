"""Random calls of the prefill kernels against the reference in float64.

``ELASTIC_COMPILE_FUZZ=500 ELASTIC_COMPILE_FUZZ_SEED=7 pytest -m gpu tests/gpu/test_fuzz.py`` draws
500 cases of seed 7; a failure names its case.
"""

import pytest
import torch

from elastic_compile.kernels import gluon_prefill, triton_prefill
from tests.gpu import fuzzing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", fuzzing.kinds(), ids=lambda kind: f"{kind.number}-{kind.kernel}")
def test_random_calls(poisoned_memory, kind):
    draw = kind.random
    for number in range(fuzzing.PER_KIND):
        call = fuzzing.case(kind, draw, "cuda")
        module = gluon_prefill if kind.kernel == "gluon" else triton_prefill
        if kind.kernel == "gluon" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a GPU of compute capability 9.0")
        assert module.supports(call) == (True, ""), kind
        out, lse = fuzzing.run(call, kind.kernel)
        try:
            fuzzing.check(call, out, lse)
        except AssertionError as error:
            where = f"seed {fuzzing.SEED}, {kind}, case {number}: {fuzzing.described(call)}"
            raise AssertionError(f"{error}\n{where}") from error
