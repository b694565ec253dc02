"""Run the GPU tests and record which kernel sources they passed on.

    python -m tests.gpu.run_ledger --fuzz 500 [--seed 7] [PATH]

Needs a CUDA GPU, pytest and compute-sanitizer. Writes PATH (default: tests/gpu_ledger.json) when
every test passed and the memory checker found nothing; ``tests/test_gpu_ledger.py`` compares the
hashes in it with the sources, where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from tests.gpu.ledger import LEDGER, ROOT, triton_sources

PACKAGES = ("torch", "triton", "transformers")


def main() -> int:
    """Returns the exit code of the test run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=LEDGER, metavar="PATH")
    fuzz, seed = (
        int(os.environ.get(f"ELASTIC_COMPILE_{name}", default))
        for name, default in (("FUZZ", 0), ("FUZZ_SEED", 1))
    )
    parser.add_argument(
        "--fuzz", type=int, default=fuzz, help="number of random calls; default: one of a kind"
    )
    parser.add_argument("--seed", type=int, default=seed, help="of the random calls")
    return record(**vars(parser.parse_args()))


def record(path: Path, fuzz: int, seed: int) -> int:
    """Runs the tests with ``fuzz`` random calls of ``seed``; returns their exit code."""
    # Read by tests.gpu.fuzzing, here and in the processes that run the tests.
    os.environ |= {"ELASTIC_COMPILE_FUZZ": str(fuzz), "ELASTIC_COMPILE_FUZZ_SEED": str(seed)}
    os.environ.pop("ELASTIC_COMPILE_FUZZ_CASE", None)
    from tests.gpu import fuzzing

    if not torch.cuda.is_available():
        print("no CUDA GPU: the ledger stays as it is")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "gpu", f"--junitxml={report}", "--durations=8"]
        if "xdist" in sys.modules or _installed("pytest-xdist"):
            # Compilation takes most of the time.
            options += ["-n", str(min(os.cpu_count() or 1, 14))]
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
    checked = memcheck()
    if checked is None:
        return 3
    ledger = {
        "sources": triton_sources(),
        "tests": sorted(_name(case) for case in cases if _name(case) not in skipped),
        "skipped": skipped,
        "fuzz": {"seed": fuzzing.SEED, "cases": fuzzing.CASES},
        "memcheck": checked,
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


def memcheck() -> dict[str, str] | None:
    """What compute-sanitizer says of a few small calls; None where it is missing or complains."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed: the ledger stays as it is")
        return None
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
    command = [tool, "--tool", "memcheck", sys.executable, "-m", "tests.gpu.memcheck"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(result.stdout[-3000:] + result.stderr[-1000:])
    summary = re.findall(r"ERROR SUMMARY: .*", result.stdout + result.stderr)
    if result.returncode != 0 or summary != ["ERROR SUMMARY: 0 errors"]:
        print("the memory checker found errors: the ledger stays as it is")
        return None
    said = re.findall(r"[Vv]ersion [0-9.]+", version.stdout)
    return {"tool": said[0] if said else "", "summary": summary[0]}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
