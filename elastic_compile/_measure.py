"""Time, memory and forced sparsity: what the commands that measure share."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Memory:
    """Resident memory of this process and its high-water mark, where the system shows them."""

    def __init__(self) -> None:
        self.highest = 0
        """Largest high-water mark seen so far, bytes; 0 where it cannot be read."""
        self.available = self._reset()

    def _reset(self) -> bool:
        """Let the high-water mark start again from the present size (Linux)."""
        try:
            _CLEAR_REFS.write_text("5")
            return self._read("VmHWM") > 0
        except (OSError, ValueError):
            return False

    def _read(self, field: str) -> int:
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
        raise ValueError(f"{_STATUS} has no {field}")

    def begin(self) -> int:
        """Give freed memory back to the system and start a measurement; returns bytes in use."""
        gc.collect()
        if not self.available:
            return 0
        _trim()
        self.highest = max(self.highest, self._read("VmHWM"))
        self._reset()
        return self._read("VmRSS")

    def end(self, begun: int) -> int | None:
        """Bytes above ``begun`` at the highest point since then; None where unknown."""
        if not self.available:
            return None
        peak = self._read("VmHWM")
        self.highest = max(self.highest, peak)
        return max(peak - begun, 0)


def _trim() -> None:
    # glibc keeps freed memory; what one variant freed would hide what the next one takes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Cost of one call."""

    seconds: float
    """Wall time."""
    cpu_seconds: float
    """Processor time of all threads: what a busy machine distorts least."""
    extra_bytes: int | None
    """Resident memory added at the highest point; None where the system does not show it."""


def measure(memory: Memory, call: Callable[[], T]) -> tuple[T, Measured]:
    """Run ``call`` once without gradients; returns its result, time and added memory."""
    begun = memory.begin()
    started, cpu_started = time.perf_counter(), time.process_time()
    with torch.no_grad():
        result = call()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return result, Measured(seconds, cpu_seconds, memory.end(begun))


def spread_routes(kv_heads: Sequence[int], share: float) -> list[Tensor]:
    """Routes that let ``share`` of all heads stream, spread evenly over layers and heads.

    Args:
        kv_heads: Kv heads of every rewritten site.
        share: From 0 to 1.

    Returns:
        One int32 tensor [kv heads] a site, for ``force_routes``: 0 full, 1 sparse. The number of
        ones is ``share`` of all heads, rounded.
    """
    total = sum(kv_heads)
    ones = round(share * total)
    flat = torch.tensor(
        [(i + 1) * ones // total - i * ones // total for i in range(total)], dtype=torch.int32
    )
    return list(flat.split(list(kv_heads)))


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Lines of cells as a text in columns, flush right but for the columns in ``left``."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
