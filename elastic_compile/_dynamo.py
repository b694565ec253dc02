"""Telling Dynamo of the backend ``"elastic"`` where no installed entry point does."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any

GROUP = "torch_dynamo_backends"
ENTRY = EntryPoint("elastic", "elastic_compile.passes.backend:elastic", GROUP)
_REGISTRY = "torch._dynamo.backends.registry"


def _installed() -> bool:
    try:
        return any(entry.group == GROUP for entry in distribution("elastic_compile").entry_points)
    except PackageNotFoundError:
        return False


def announce(load: bool = False) -> None:
    """Name the backend to Dynamo, without importing it, in a checkout that is not installed.

    An installed package has an entry point. A name that were registered with its function would
    clash with the entry point.

    Args:
        load: Import Dynamo for it, which takes seconds; otherwise only a loaded one is told.
    """
    registry: Any = sys.modules.get(_REGISTRY)
    if _installed() or (registry is None and not load):
        return
    registry = registry or importlib.import_module(_REGISTRY)
    getattr(registry, "_BACKENDS", {}).setdefault(ENTRY.name, ENTRY)
