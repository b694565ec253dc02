"""The GPU kernels are those that last passed on a GPU.

Continuous integration has none: it checks that nobody changed a kernel without running
``python -m tests.gpu.run_ledger`` on a machine with one, or saying in the ledger, under
"pending", why that has not happened yet.
"""

import json

from tests.gpu.ledger import LEDGER, ROOT, imports_triton, triton_sources


def complaints(ledger, sources):
    """What keeps the ledger from covering the sources."""
    if ledger.get("pending"):
        return []
    if not ledger.get("tests"):
        return ["the ledger names no test that passed"]
    tested = ledger["sources"]
    changed = [name for name, digest in sources.items() if tested.get(name) != digest]
    gone = [name for name in tested if name not in sources]
    return [
        f"{name}: not the file that was tested on a GPU; run python -m tests.gpu.run_ledger there"
        for name in changed
    ] + [f"{name}: tested on a GPU, but no longer there" for name in gone]


def test_the_kernels_are_those_that_passed_on_a_gpu():
    ledger = json.loads(LEDGER.read_text(encoding="utf-8"))
    assert {"sources", "tests", "card", "versions"} <= set(ledger)
    assert complaints(ledger, triton_sources()) == []


def test_random_calls_and_the_memory_checker_are_recorded():
    ledger = json.loads(LEDGER.read_text(encoding="utf-8"))
    assert ledger["fuzz"]["cases"] >= 500 and isinstance(ledger["fuzz"]["seed"], int)
    assert ledger["memcheck"]["summary"] == "ERROR SUMMARY: 0 errors"


def test_the_recorded_tests_exist():
    ledger = json.loads(LEDGER.read_text(encoding="utf-8"))
    for name in ledger["tests"]:
        module, test = name.split("::")
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        assert f"def {test.split('[')[0]}(" in path.read_text(encoding="utf-8"), name


def test_a_changed_kernel_is_noticed():
    sources = {"kernels/a.py": "1", "kernels/b.py": "2"}
    ledger = {"sources": dict(sources), "tests": ["t"], "card": "", "versions": {}}
    assert complaints(ledger, sources) == []
    assert len(complaints(ledger, sources | {"kernels/a.py": "3"})) == 1
    assert len(complaints(ledger, sources | {"kernels/new.py": "3"})) == 1
    assert len(complaints(ledger, {"kernels/a.py": "1"})) == 1
    assert complaints(ledger | {"tests": []}, sources) != []
    pending = ledger | {"pending": "no GPU at hand"}
    assert complaints(pending, sources | {"kernels/a.py": "3"}) == []


def test_which_files_are_kernels():
    assert imports_triton("import triton")
    assert imports_triton("def f():\n    from triton import language")
    assert not imports_triton("from elastic_compile.kernels import triton_prefill")
    assert set(triton_sources()) >= {"kernels/_triton_prefill.py", "kernels/triton_prefill.py"}
