"""How many random examples the fuzz tests draw.

By default a small fixed sample. ``ELASTIC_COMPILE_FUZZ=500 pytest tests/kernels/test_fuzz.py``
draws 500 fresh ones; ``--hypothesis-seed=N`` repeats a run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("ELASTIC_COMPILE_FUZZ", "0"))


def fuzz(default: int) -> settings:
    """Settings of a fuzz test that draws ``default`` examples in the whole suite."""
    return settings(
        max_examples=EXAMPLES or default,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
