"""Random calls of the prefill kernels against the float64 oracle.

``ELASTIC_COMPILE_FUZZ=500 ELASTIC_COMPILE_FUZZ_SEED=7 pytest -n 8 tests/gpu/test_fuzz.py`` runs 500
cases of seed 7; with ``ELASTIC_COMPILE_FUZZ_CASE=123`` in place of the first, that one alone.
"""

import pytest
import torch

from elastic_compile.kernels import gluon_prefill, triton_prefill
from tests.gpu import fuzzing

pytestmark = pytest.mark.gpu
MODULES = {"gluon": gluon_prefill, "triton": triton_prefill}


def numbers(kind):
    if fuzzing.ONLY is not None:
        return [int(fuzzing.ONLY)] if int(fuzzing.ONLY) % fuzzing.KINDS == kind.number else []
    return range(kind.number, fuzzing.CASES, fuzzing.KINDS)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in fuzzing.kinds() if numbers(kind)],
    ids=lambda kind: f"{kind.number}-{kind.kernel}",
)
def test_random_calls(poisoned_memory, kind):
    if kind.kernel == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    for number in numbers(kind):
        _, call = fuzzing.case(number, "cuda")
        where = (
            f"repeat with ELASTIC_COMPILE_FUZZ_SEED={fuzzing.SEED} "
            f"ELASTIC_COMPILE_FUZZ_CASE={number}\n{kind}\n{fuzzing.described(call)}"
        )
        assert MODULES[kind.kernel].supports(call) == (True, ""), where
        before = [x.clone() for x in (call.query, call.key, call.value)]
        try:
            fuzzing.check(call, *fuzzing.run(call, kind.kernel, kind.config))
        except Exception as error:
            raise AssertionError(f"{error}\n{where}") from error
        for x, copy in zip((call.query, call.key, call.value), before, strict=True):
            assert torch.equal(x.nan_to_num(), copy.nan_to_num()), where
