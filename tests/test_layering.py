"""The written dependency direction (docs/design.md), checked on the import statements.

Imports inside functions count too: they avoid a cycle at import time, not the dependency.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "elastic_compile": "elastic_compile",
    "passes": "elastic_compile.passes",
    "kernels": "elastic_compile.kernels",
    "training": "elastic_compile.training",
}
COMMANDS = {"__main__", "bench", "card", "demo", "evaluate", "explain", "fit"}
# What the rest of the package may use of kernels/: the operators, their counters.
KERNEL_FACADE = {"elastic_compile.kernels.ops", "elastic_compile.kernels._counters"}
# Implementations of one operator: none may lean on another.
IMPLEMENTATIONS = {"reference", "cpu", "triton", "gluon"}

ALLOWED = {
    "api": {"api", "training", "passes", "leaf", "facade"},
    "training": {"training", "passes", "leaf", "facade"},
    "passes": {"passes", "leaf", "facade"},
    "leaf": {"leaf", "facade"},
    "facade": {"facade", "kernels"},
    "kernels": {"facade", "kernels"},
}
# Installed only by extras: a module that needs one imports it where it is used.
OPTIONAL = {
    "accelerate",
    "datasets",
    "gguf",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "peft",
}


def sources():
    """Dotted module name to source text, of everything that is packaged."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path.read_text(encoding="utf-8")
    return found


def imports(module, source, modules, top_level_only=False):
    """(line, absolute dotted name) of every import; names of ours end at a module."""
    tree = ast.parse(source)
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in modules else node.module
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, node.args[0].value


def layer(module):
    parts = module.split(".")
    if module in KERNEL_FACADE:
        return "facade"
    if len(parts) > 1 and parts[1] in ("passes", "training", "kernels"):
        return parts[1]
    if len(parts) == 1 or parts[1] == "_api" or parts[1] in COMMANDS:
        return "api"
    return "leaf"


def implementation(module):
    """Which implementation a kernels module belongs to, by the first word of its name."""
    match = re.match(r"elastic_compile\.kernels\._?([a-z]+)", module)
    return match[1] if match and match[1] in IMPLEMENTATIONS else None


def violations(modules):
    """Every import that goes against the written direction, as readable lines."""
    for module, source in modules.items():
        for line, target in imports(module, source, modules):
            if target.split(".")[0] != "elastic_compile" or target == "elastic_compile.kernels":
                continue
            here, there = layer(module), layer(target)
            if there not in ALLOWED[here]:
                yield f"{module}:{line} ({here}) imports {target} ({there})"
            ours, theirs = implementation(module), implementation(target)
            if ours and theirs and ours != theirs:
                yield f"{module}:{line} (implementation {ours}) imports {target}"
            if target == "elastic_compile.kernels.ops" and here == "kernels":
                yield f"{module}:{line} imports the operators it implements"


@pytest.mark.smoke
def test_imports_follow_the_written_direction():
    modules = sources()
    assert {"elastic_compile.router", "elastic_compile.passes", "elastic_compile.training"} <= set(
        modules
    )
    assert list(violations(modules)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("elastic_compile.passes.x", "from elastic_compile.training import fit"),
        ("elastic_compile.passes.x", "from elastic_compile import _api"),
        ("elastic_compile.passes.x", "import elastic_compile"),
        ("elastic_compile.passes.x", "from elastic_compile import transform"),
        ("elastic_compile.passes.x", "def f():\n    from elastic_compile.kernels import _dispatch"),
        ("elastic_compile.training.x", "import elastic_compile.fit"),
        ("elastic_compile._x", "from elastic_compile import passes"),
        ("elastic_compile._x", "import importlib\nimportlib.import_module('elastic_compile._api')"),
        ("elastic_compile.kernels.x", "from elastic_compile.config import ElasticConfig"),
        ("elastic_compile.kernels.cpu", "from elastic_compile.kernels import reference"),
        ("elastic_compile.kernels._triton_fwd", "import elastic_compile.kernels._cpu"),
        ("elastic_compile.kernels.x", "from elastic_compile.kernels import ops"),
    ],
)
def test_the_check_sees_a_wrong_import(module, source):
    names = ["fit", "_api", "passes", "training", "config", "kernels.reference", "kernels.ops"]
    modules = {f"elastic_compile.{name}": "" for name in [*names, "kernels._dispatch"]}
    assert list(violations({**modules, module: source})) != []


def test_the_check_allows_the_right_imports():
    modules = {
        "elastic_compile.config": "import torch",
        "elastic_compile.kernels.reference": "import torch",
        "elastic_compile.kernels.ops": "from elastic_compile.kernels import reference",
        "elastic_compile._runtime": "from elastic_compile.kernels import ops",
        "elastic_compile.passes.a": "from elastic_compile import _runtime, config",
        "elastic_compile.training.a": "from elastic_compile.passes import a",
        "elastic_compile._api": "from elastic_compile.passes.a import transform",
        "elastic_compile.fit": "import elastic_compile\nfrom elastic_compile.training import a",
    }
    assert list(violations(modules)) == []


@pytest.mark.smoke
def test_kernels_is_no_regular_package():
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists(), (
        "kernels/__init__.py would shadow the distribution of that name that transformers imports "
        "whenever Python starts in the repository root"
    )


def test_no_function_is_shadowed_by_a_module():
    import elastic_compile

    modules = {name.removeprefix("elastic_compile.") for name in sources()}
    assert set(elastic_compile.__all__) & modules == set()


def test_extras_are_imported_where_they_are_used():
    modules = sources()
    found = [
        f"{module}:{line} imports {target}"
        for module, source in modules.items()
        if layer(module) != "training"
        for line, target in imports(module, source, modules, top_level_only=True)
        if target.split(".")[0] in OPTIONAL
    ]
    assert found == []


def test_every_import_is_declared():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = {
        name.lower().replace("-", "_") for name in re.findall(r'"([A-Za-z0-9_.-]+)[><=;\[" ]', text)
    }
    modules = sources()
    undeclared = {
        f"{target.split('.')[0]} ({module})"
        for module, source in modules.items()
        for _, target in imports(module, source, modules)
        if target.split(".")[0] not in {*sys.stdlib_module_names, *declared, "elastic_compile"}
    }
    assert undeclared == set()
