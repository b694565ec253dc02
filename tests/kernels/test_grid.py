"""Every implementation against the oracle, over lengths, geometries, dtypes, routes and phases.

A pairwise cover of the axes of ``cases.AXES`` runs by default. The whole product runs with
``ELASTIC_COMPILE_GRID=1 pytest tests/kernels/test_grid.py -m grid`` (hours on a laptop).
"""

import itertools
import os

import pytest
import torch

from elastic_compile.kernels import ops
from tests import oracle
from tests.kernels import cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WHOLE = os.environ.get("ELASTIC_COMPILE_GRID") == "1"  # 15,120 cases are not even collected else
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 1e-4


def check(case, heads=None):
    arguments, options = cases.build(case)
    out, lse = ops.attention(*arguments, **options)
    del options["kernel"]
    expected, expected_lse = oracle.attention(*arguments, heads=heads, **options)
    chosen = slice(None) if heads is None else heads
    assert out.shape == (*arguments[0].shape[:3], arguments[2].shape[3])
    assert out.dtype == case.dtype and out.transpose(1, 2).is_contiguous()
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    torch.testing.assert_close(
        out[:, chosen].double(), expected, rtol=0, atol=TOLERANCE[case.dtype]
    )
    torch.testing.assert_close(
        lse[:, chosen].double(), expected_lse, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE
    )


@pytest.mark.parametrize("case", cases.pairwise(), ids=str)
def test_pairwise_cover(case):
    group = case.heads[0] // case.heads[1]
    edges = {h for kv in range(case.heads[1]) for h in (kv * group, (kv + 1) * group - 1)}
    check(case, sorted(edges))


if WHOLE:

    @pytest.mark.grid
    @pytest.mark.parametrize("case", cases.product(), ids=str)
    def test_whole_grid(case):
        check(case)


def test_cover_is_complete():
    cover = cases.pairwise()
    assert cover == cases.pairwise()
    values = [[getattr(case, axis) for axis in cases.AXES] for case in cover]
    found = {
        (i, row[i], j, row[j])
        for row in values
        for i, j in itertools.combinations(range(len(row)), 2)
    }
    axes = list(cases.AXES.values())
    for i, j in itertools.combinations(range(len(axes)), 2):
        for a, b in itertools.product(axes[i], axes[j]):
            assert (i, a, j, b) in found or (a, b) == ("blocks", "cpu")


def test_poison_is_seen():
    assert torch.empty(2).isnan().all() and torch.ones(2).new_empty(1).isnan().all()
