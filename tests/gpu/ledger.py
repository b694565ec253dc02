"""What the ledger of GPU tests covers."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "tests" / "gpu_ledger.json"


def triton_sources() -> dict[str, str]:
    """SHA-256 of every file in kernels/ that imports triton, anywhere in it."""
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        if imports_triton(path.read_text(encoding="utf-8"))
    }


def imports_triton(source: str) -> bool:
    """Whether Python source has an import of triton, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        if any(name.split(".")[0] == "triton" for name in names):
            return True
    return False
