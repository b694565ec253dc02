"""Fixtures of the kernel tests."""

import pytest
import torch

from elastic_compile.kernels import _counters


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh float memory holds NaN, so that an element nobody wrote is seen."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


@pytest.fixture
def counts():
    """The counters, reset; call it for a snapshot."""
    _counters.reset()
    return _counters.snapshot
