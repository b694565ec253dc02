"""Everything here needs a CUDA GPU."""

from pathlib import Path

import pytest

from tests.kernels.conftest import counts, poisoned_memory

__all__ = ["counts", "poisoned_memory"]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
