"""Counts of op calls and fallbacks, made inside the opaque ops so compiled graphs count too."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_tables: dict[str, Counter[str]] = {
    "calls": Counter(),
    "backward": Counter(),
    "fallbacks": Counter(),
}


def count_call(implementation: str) -> None:
    """Counts one forward op call served by ``implementation``."""
    _add("calls", implementation)


def count_backward(implementation: str) -> None:
    """Counts one backward op call served by ``implementation``."""
    _add("backward", implementation)


def count_fallback(reason: str) -> None:
    """Counts one forward op call that could not use the implementation meant for it."""
    _add("fallbacks", reason)


def snapshot() -> dict[str, dict[str, int]]:
    """Returns a copy of all counts since the last :func:`reset`.

    Returns:
        ``{"calls": {implementation: n}, "backward": {implementation: n},
        "fallbacks": {reason: n}}``. ``exact_attention`` counts as implementation ``"exact"`` and
        as a fallback under the caller's reason. A call of which an implementation of this device
        declined the arguments counts as a fallback under ``"<implementation>: <its reason>"``.
        Calls replayed from a CUDA graph are not seen.
    """
    with _lock:
        return {table: dict(counter) for table, counter in _tables.items()}


def reset() -> None:
    """Sets every count to zero."""
    with _lock:
        for counter in _tables.values():
            counter.clear()


def _add(table: str, key: str) -> None:
    with _lock:
        _tables[table][key] += 1
