"""Transformed models are built once and shared; a test that changes one builds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transformers

from tests.integration.helpers import Pair

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def pairs() -> Iterator[Callable[..., Pair]]:
    """`pairs(name, layers=2, config=None, **build)`: a cached :class:`Pair`."""
    built: dict[Any, Pair] = {}

    def get(name: str, layers: int = 2, config: dict | None = None, **kwargs: Any) -> Pair:
        key = (name, layers, repr(sorted((config or {}).items())), repr(sorted(kwargs.items())))
        if key not in built:
            built[key] = Pair(name, layers, config, **kwargs)
        return built[key]

    yield get
    built.clear()
