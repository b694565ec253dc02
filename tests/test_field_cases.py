"""The map from reported faults to tests holds what it says."""

import ast
from pathlib import Path

from tests.field_cases import LATER, TESTS

ROOT = Path(__file__).parent


def defined(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_every_named_test_exists():
    names = {name for tests in TESTS.values() for name in tests}
    missing = [n for n in sorted(names) if n.split("::")[1] not in defined(ROOT / n.split("::")[0])]
    assert names and not missing


def test_every_case_is_in_one_table():
    assert not set(TESTS) & set(LATER)
    # Numbers that name no case of ours.
    unused = {5, 8, 10, 13, 14, 19, 24, 29, 32, 33, 34, 38, 43, 45, 47, 54, 60, 62, 68}
    unused |= {74, 76, 83}
    assert {int(name[1:]) for name in TESTS | LATER} == set(range(1, 85)) - unused
