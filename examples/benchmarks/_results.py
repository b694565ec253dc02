"""Result files of the benchmarks: ``{"meta": {card, versions, commit, …}, "rows": […]}``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """Rows of one run, written after each group, and merged into those of earlier runs if asked.

    Args:
        path: JSON file, or None to write nothing.
        meta: What holds for all rows; ``commit`` and ``versions`` among it.
        key: Fields that tell rows apart.
        append: Keep the rows of an existing file that this run does not measure again.

    Raises:
        ValueError: The existing file is of another card or of other versions.
    """

    def __init__(
        self, path: Path | None, meta: Row, key: Sequence[str], *, append: bool = False
    ) -> None:
        self.path, self.meta, self.key = path, meta, tuple(key)
        self.rows: list[Row] = []
        if path is None or not append or not path.exists():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        for field in ("card", "versions"):
            if found["meta"][field] != meta[field]:
                raise ValueError(
                    f"{path} has rows of {field} {found['meta'][field]}, this run is of "
                    f"{meta[field]}: write to another file, or without --append"
                )
        self.rows = found["rows"]
        for field, value in found["meta"].items():
            if isinstance(value, dict) and field != "versions":
                meta[field] = {**value, **meta.get(field, {})}
        commits = found["meta"].get("commits", [found["meta"]["commit"]])
        meta["commits"] = [*(c for c in commits if c != meta["commit"]), meta["commit"]]

    def row(self, **fields: Any) -> Row | None:
        """The first row that has these fields."""
        matching = (row for row in self.rows if all(row.get(k) == v for k, v in fields.items()))
        return next(matching, None)

    def add(self, rows: Sequence[Row]) -> None:
        """Takes rows in place of those of equal key, and writes the file."""
        keys = {self._key(row) for row in rows}
        self.rows = [row for row in self.rows if self._key(row) not in keys] + list(rows)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"    {json.dumps(row)}" for row in self.rows)
        head = json.dumps(self.meta, indent=2).replace("\n", "\n  ")
        self.path.write_text(f'{{\n  "meta": {head},\n  "rows": [\n{lines}\n  ]\n}}\n')

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(field) for field in self.key)


def commit() -> str:
    """git's HEAD, or "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Versions that matter to the times."""
    import torch
    import triton

    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }
