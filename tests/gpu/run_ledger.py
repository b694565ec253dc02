"""Run the GPU tests and record which kernel sources they passed on.

    python -m tests.gpu.run_ledger [PATH]

Needs a CUDA GPU and pytest. Writes PATH (default: tests/gpu_ledger.json) when every test passed;
``tests/test_gpu_ledger.py`` compares the hashes in it with the sources, where there is no GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from tests.gpu.ledger import LEDGER, triton_sources

PACKAGES = ("torch", "triton", "transformers")


def main(path: Path) -> int:
    """Returns the exit code of the test run."""
    if not torch.cuda.is_available():
        print("no CUDA GPU: the ledger stays as it is")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "gpu", f"--junitxml={report}", "--durations=8"]
        if "xdist" in sys.modules or _installed("pytest-xdist"):
            options += ["-n", "8"]  # compilation takes most of the time
        code = int(pytest.main([*options, str(Path(__file__).parent)]))
        cases = list(ET.parse(report).getroot().iter("testcase"))
    skipped = {
        _name(case): case.find("skipped").get("message")
        for case in cases
        if case.find("skipped") is not None
    }
    if code != 0:
        print("tests failed: the ledger stays as it is")
        return code
    ledger = {
        "sources": triton_sources(),
        "tests": sorted(_name(case) for case in cases if _name(case) not in skipped),
        "skipped": skipped,
        "card": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }
    path.write_text(json.dumps(ledger, indent=2) + "\n", encoding="utf-8")
    print(f"{len(ledger['tests'])} passed, {len(skipped)} skipped; wrote {path}")
    return 0


def _name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else LEDGER))
