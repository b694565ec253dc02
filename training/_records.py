"""The records of a run: one JSON line a step, which a resumed run continues."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elastic_compile._files import write_atomic


class MetricsFile:
    """``metrics.jsonl``: one line a step, on disk before the next step starts.

    Holds no times and no paths, so that a resumed run writes the file of an unbroken one.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.last: dict[str, Any] | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Add the record of a step."""
        self.last = record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")

    def keep_until(self, step: int) -> None:
        """Cut the file after ``step`` (0: empty): what follows is done again."""
        kept = []
        for record, line in self._lines():
            if record["step"] <= step:
                kept.append(line)
        write_atomic(self.path, "".join(kept).encode())

    def read(self) -> list[dict[str, Any]]:
        """All records."""
        return [record for record, _ in self._lines()]

    def _lines(self) -> list[tuple[dict[str, Any], str]]:
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                found.append((json.loads(line), line))
            except ValueError:
                break  # killed while writing it
        return found
