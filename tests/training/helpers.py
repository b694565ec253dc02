"""What the training tests share: a byte tokenizer, tiny models, rows longer than the window."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import elastic_compile
from elastic_compile import _state
from elastic_compile.training import fit
from tests.families import build

SINK, LOCAL, POOL = 4, 8, 8
LENGTH = 56


def tokenizer(chat: bool = False) -> Any:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=inner)
    if chat:
        result.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
    return result


def config(**fields: Any) -> elastic_compile.ElasticConfig:
    return elastic_compile.ElasticConfig(
        # At these sizes the definition itself is the fastest implementation.
        **{"sink": SINK, "local": LOCAL, "pool_tokens": POOL, "kernel": "reference", **fields}
    )


def plain(layers: int = 2, **fields: Any) -> Any:
    """A tiny untouched Llama in evaluation mode."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, head_dim=16)
    return build("llama", layers, **{**sizes, **fields}).eval()


@functools.cache
def _transformed(layers: int) -> Any:
    return elastic_compile.transform(plain(layers), config())


def tiny(layers: int = 2) -> Any:
    """The same, transformed; a copy, since copying takes less time."""
    return copy.deepcopy(_transformed(layers))


def sites(model: Any) -> list[Any]:
    return [site for _, site in _state.rewritten_sites(model)]


def stir(model: Any, seed: int = 0, scale: float = 1.5) -> Any:
    """Random router weights: routes depend on the prompt, gradients reach every layer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in sites(model):
            for parameter in site.parameters():
                if parameter.ndim < 2:
                    parameter.zero_()
                else:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * scale / parameter.shape[1] ** 0.5)
    return model


def letters(rng: random.Random, count: int, alphabet: str = "abcdefghijklmnop") -> str:
    return "".join(rng.choice(alphabet) for _ in range(count))


def rows(tasks: str = "ab", each: int = 4, prompt: int = 40, seed: int = 0) -> list[dict[str, str]]:
    """Rows of several tasks, prompts of unequal lengths beyond sink + local."""
    rng = random.Random(seed)
    return [
        {"prompt": letters(rng, prompt - i), "completion": letters(rng, 3 + i % 2), "task": task}
        for i in range(each)
        for task in tasks
    ]


def run(model: Any, out: Any, data: Any = None, **settings: Any) -> Any:
    """A short fit."""
    defaults = dict(
        data=rows() if data is None else data,
        targets={"a": 0.3, "b": (0.9, 1.0)},
        length=LENGTH,
        steps=4,
        batch_size=4,
        save_every=100,
        progress=False,
        curves=False,
    )
    transformed = elastic_compile.is_transformed(model)
    return fit(
        model,
        tokenizer(),
        out=out,
        config=None if transformed else config(),
        **{**defaults, **settings},
    )
