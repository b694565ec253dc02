"""Telling Dynamo of the backend ``"elastic"`` where no installed entry point does."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from typing import Any

GROUP = "torch_dynamo_backends"
ENTRY = EntryPoint("elastic", "elastic_compile.passes.backend:elastic", GROUP)


def announce() -> None:
    """Name the backend, without importing it, if Dynamo is loaded.

    What an installed entry point would do, for checkouts that are not installed. A name registered
    with its function would clash with the entry point.
    """
    registry: Any = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        getattr(registry, "_BACKENDS", {}).setdefault(ENTRY.name, ENTRY)
