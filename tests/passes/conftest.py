"""What the tests of the passes share."""

import pytest

from elastic_compile.passes import capture


@pytest.fixture
def captures(monkeypatch):
    """Classes of the modules that were really traced."""
    traced = []
    original = capture.capture

    def count(site, *args):
        traced.append(type(site).__name__)
        return original(site, *args)

    monkeypatch.setattr(capture, "capture", count)
    return traced
