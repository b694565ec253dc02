"""Tiny random decoders of every family the transform is tested on.

Each family states, as functions of the layer count, which of its attention sites the transform has
to rewrite and why the others are left alone. Nothing here imports ``elastic_compile``: the
expectations come from the architectures, not from what the transform happens to report.

Weights are scaled up (see :func:`build`), so that attention is far from uniform and a wrong mask,
scale or route shows in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 384
HIDDEN = 256
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 32
POSITIONS = 2048

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=None
)
_LLAMA_LIKE: dict[str, Any] = dict(
    _COMMON,
    hidden_size=HIDDEN,
    intermediate_size=384,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=POSITIONS,
)


def _every(layers: int) -> list[int]:
    return list(range(layers))


def _none(layers: int) -> list[int]:
    return []


def _odd(layers: int) -> list[int]:
    return [i for i in range(layers) if i % 2]


def _alternating(layers: int, local: str) -> list[str]:
    return [local if i % 2 == 0 else "full_attention" for i in range(layers)]


@dataclass(frozen=True)
class Family:
    """One architecture in a tiny configuration.

    Attributes:
        name: Test id.
        config_class: Name of the configuration class in ``transformers``.
        fields: ``layers -> configuration fields``.
        attention: Path of a layer's attention module, with ``{}`` for the layer.
        rewritten: ``layers -> indices of the layers`` whose attention must be rewritten.
        attending: ``layers -> indices of the layers`` that have attention at all.
        reason: Regular expression that the reason of every skipped site must match.
        kv_heads: Key/value heads per layer that routes are made for.
        head_dim: Size of a head.
        attn_implementation: What the configuration is loaded with (None: the family's default).
        static_cache: Whether the untouched model can generate on a static cache at all.
        pads_count: Whether the untouched model counts padding as positions, so that a padded row
            legitimately differs from the same row alone.
    """

    name: str
    config_class: str
    fields: Callable[[int], dict[str, Any]]
    attention: str = "model.layers.{}.self_attn"
    rewritten: Callable[[int], list[int]] = _every
    attending: Callable[[int], list[int]] = _every
    reason: str = "$^"
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    attn_implementation: str | None = None
    static_cache: bool = True
    pads_count: bool = False

    def sites(self, layers: int) -> int:
        """Attention sites the transform must find."""
        return len(self.attending(layers))

    def config(self, layers: int = 2, **overrides: Any) -> Any:
        """The configuration, with fields overridden."""
        fields = {**self.fields(layers), **overrides}
        return getattr(transformers, self.config_class)(**fields)

    def attention_modules(self, model: nn.Module, layers: int | None = None) -> list[nn.Module]:
        """The attention modules of the layers in order, whatever was rewritten."""
        count = model.config.num_hidden_layers if layers is None else layers
        return [model.get_submodule(self.attention.format(i)) for i in self.attending(count)]


def _llama_like(**more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda layers: {**_LLAMA_LIKE, "num_hidden_layers": layers, **more}


def _gpt2(**more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda layers: dict(
        _COMMON,
        n_embd=HIDDEN,
        n_head=HEADS,
        n_layer=layers,
        n_inner=384,
        n_positions=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **more,
    )


def _falcon(**more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda layers: dict(
        _COMMON,
        hidden_size=HIDDEN,
        ffn_hidden_size=384,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
        max_position_embeddings=POSITIONS,
        **more,
    )


def _gemma(**more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda layers: {
        **_LLAMA_LIKE,
        "num_hidden_layers": layers,
        "head_dim": HEAD_DIM,
        # Not the head size: a dropped scale shows.
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": False,
        "sliding_window": 16,
        "layer_types": _alternating(layers, "sliding_attention"),
        **more,
    }


def _llama4(**more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda layers: {
        **_LLAMA_LIKE,
        "num_hidden_layers": layers,
        "head_dim": HEAD_DIM,
        "intermediate_size_mlp": 384,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        # 1: rotary, chunked unless layer_types say otherwise.
        "no_rope_layers": [int(i % 2 == 0) for i in range(layers)],
        "layer_types": _alternating(layers, "chunked_attention"),
        "attention_chunk_size": 16,
        # The temperature of the layers without rotary embedding moves every four tokens.
        "floor_scale": 4,
        "attn_scale": 0.3,
        **{name: value(layers) for name, value in more.items()},
    }


_SLIDING = r"(?i)sliding|window|local"

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("llama", "LlamaConfig", _llama_like(attention_bias=True)),
        Family("qwen2", "Qwen2Config", _llama_like()),
        # Head size 64 although hidden / heads is 32 (field case B36).
        Family("qwen3", "Qwen3Config", _llama_like(head_dim=64), head_dim=64),
        Family(
            "mixtral",
            "MixtralConfig",
            _llama_like(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        ),
        Family("phi3", "Phi3Config", _llama_like(partial_rotary_factor=0.5, sliding_window=None)),
        Family("gpt2", "GPT2Config", _gpt2(), attention="transformer.h.{}.attn", kv_heads=HEADS),
        Family(
            "gpt2_layer_scale",
            "GPT2Config",
            _gpt2(scale_attn_by_inverse_layer_idx=True),
            attention="transformer.h.{}.attn",
            kv_heads=HEADS,
        ),
        Family(
            "gpt_neox",
            "GPTNeoXConfig",
            lambda layers: dict(
                _COMMON,
                hidden_size=HIDDEN,
                intermediate_size=384,
                num_attention_heads=HEADS,
                num_hidden_layers=layers,
                max_position_embeddings=POSITIONS,
            ),
            attention="gpt_neox.layers.{}.attention",
            kv_heads=HEADS,
        ),
        Family(
            "falcon",
            "FalconConfig",
            _falcon(multi_query=True),
            attention="transformer.h.{}.self_attention",
            kv_heads=1,
        ),
        Family(
            "falcon_new",
            "FalconConfig",
            _falcon(new_decoder_architecture=True, num_kv_heads=KV_HEADS),
            attention="transformer.h.{}.self_attention",
        ),
        Family(
            "falcon_alibi",
            "FalconConfig",
            _falcon(alibi=True, multi_query=True),
            attention="transformer.h.{}.self_attention",
            rewritten=_none,
            reason=r"(?i)alibi|bias|mask",
            kv_heads=1,
            static_cache=False,
        ),
        Family("gemma3", "Gemma3TextConfig", _gemma(), rewritten=_odd, reason=_SLIDING),
        Family("olmo2", "Olmo2Config", _llama_like()),
        # Chunked layers have rotary embeddings and stay; the others have none and are rewritten.
        Family(
            "llama4",
            "Llama4TextConfig",
            _llama4(),
            rewritten=_odd,
            reason=r"(?i)chunk|mask",
            pads_count=True,
        ),
        # No chunks: rotary layers (complex rotation, then an L2 norm) are rewritten too.
        Family(
            "llama4_full",
            "Llama4TextConfig",
            _llama4(layer_types=lambda layers: ["full_attention"] * layers),
            pads_count=True,
        ),
        Family(
            "gemma2",
            "Gemma2Config",
            # A softcap low enough to bite.
            _gemma(attn_logit_softcapping=3.0, final_logit_softcapping=None),
            rewritten=_odd,
            reason=_SLIDING,
        ),
        Family(
            "gpt_oss",
            "GptOssConfig",
            lambda layers: {
                **_LLAMA_LIKE,
                "num_hidden_layers": layers,
                "head_dim": HEAD_DIM,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 16,
                "layer_types": _alternating(layers, "sliding_attention"),
            },
            rewritten=_odd,
            reason=_SLIDING,
        ),
        Family(
            "mistral",
            "MistralConfig",
            _llama_like(head_dim=HEAD_DIM),
            rewritten=_none,
            reason=_SLIDING,
        ),
        Family(
            "mistral_full",
            "MistralConfig",
            _llama_like(head_dim=HEAD_DIM, sliding_window=None),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeConfig",
            _llama_like(
                head_dim=HEAD_DIM,
                moe_intermediate_size=128,
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=1,
            ),
        ),
    )
}

MORE: dict[str, Family] = {
    f.name: f
    for f in (
        Family(
            "phi",
            "PhiConfig",
            _llama_like(partial_rotary_factor=0.5, resid_pdrop=0.0, embd_pdrop=0.0),
        ),
        Family(
            "gptj",
            "GPTJConfig",
            _gpt2(rotary_dim=16),
            attention="transformer.h.{}.attn",
            kv_heads=HEADS,
        ),
        Family(
            "opt",
            "OPTConfig",
            lambda layers: dict(
                _COMMON,
                hidden_size=HIDDEN,
                word_embed_proj_dim=HIDDEN,
                ffn_dim=384,
                num_attention_heads=HEADS,
                num_hidden_layers=layers,
                max_position_embeddings=POSITIONS,
                dropout=0.0,
            ),
            attention="model.decoder.layers.{}.self_attn",
            kv_heads=HEADS,
        ),
        # The scale is not the head size's: a dropped one shows.
        Family("granite", "GraniteConfig", _llama_like(attention_multiplier=0.3)),
        Family(
            "starcoder2",
            "Starcoder2Config",
            _llama_like(
                sliding_window=None, use_bias=True, residual_dropout=0.0, embedding_dropout=0.0
            ),
        ),
        # Sliding layers have rotary embeddings, the others none.
        Family(
            "cohere2",
            "Cohere2Config",
            lambda layers: {
                **_LLAMA_LIKE,
                "num_hidden_layers": layers,
                "sliding_window": 16,
                "layer_types": _alternating(layers, "sliding_attention"),
            },
            rewritten=_odd,
            reason=_SLIDING,
        ),
        # Every other layer without rotary embedding: its constants differ from its neighbours'.
        Family(
            "smollm3",
            "SmolLM3Config",
            lambda layers: {
                **_LLAMA_LIKE,
                "num_hidden_layers": layers,
                "no_rope_layers": [i % 2 for i in range(layers)],
            },
        ),
        Family(
            "stablelm",
            "StableLmConfig",
            _llama_like(partial_rotary_factor=0.25, qk_layernorm=True, use_parallel_residual=True),
        ),
        # Convolutions with attention in every other layer.
        Family(
            "lfm2",
            "Lfm2Config",
            lambda layers: {
                **_LLAMA_LIKE,
                "num_hidden_layers": layers,
                "layer_types": _alternating(layers, "conv"),
            },
            rewritten=_odd,
            attending=_odd,
        ),
    )
}
"""Tested with fewer questions: see ``tests/integration/test_more_families.py``."""

ALL = {**FAMILIES, **MORE}

# Each of these must have at least one rewritten site.
REWRITTEN = [f.name for f in FAMILIES.values() if f.rewritten(2)]
UNREWRITTEN = [f.name for f in FAMILIES.values() if not f.rewritten(2)]


def _is_query_or_key(name: str) -> bool:
    parts = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn")
    return any(part in name for part in parts)


@torch.no_grad()
def scale_weights(model: Any, seed: int = 0) -> None:
    """Redraw every parameter from one seed, large enough for attention to be selective.

    Matrices have the standard deviation of 1/sqrt(hidden), query and key projections 1.8 times
    that (logits of the softmax then spread over about ±3); vectors are their initial value plus
    noise, so that norms and biases cannot be dropped unnoticed. Embeddings that the model
    multiplies by sqrt(hidden) are divided by it, or the residual stream would drown attention.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("sinks"):
            parameter.copy_(2.0 + noise)  # learned sinks (gpt-oss) that take a real share
        elif parameter.ndim < 2:
            parameter.add_(noise, alpha=0.2)
        else:
            gain = 1.8 if _is_query_or_key(name) else 1.0
            if "embed_tokens" in name and "gemma" in model.config.model_type:
                gain /= math.sqrt(HIDDEN)
            parameter.copy_(noise * (gain / math.sqrt(HIDDEN)))


def build(
    name: str,
    layers: int = 2,
    seed: int = 0,
    *,
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Any:
    """A tiny model of a family of `ALL`, in eval mode; equal arguments give equal weights."""
    family = ALL[name]
    implementation = attn_implementation or family.attn_implementation
    config = family.config(layers, **overrides)
    kwargs = {} if implementation is None else {"attn_implementation": implementation}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    scale_weights(model, seed)
    model.to(dtype).eval()
    # Generation never stops early and pads with a token that no test prompt holds.
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length], int64, never the padding token 0."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)


def pad(rows: Sequence[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of different lengths to (ids [B, S], mask [B, S] int64) on `side`."""
    length = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for b, row in enumerate(rows):
        where = slice(length - len(row), None) if side == "left" else slice(0, len(row))
        ids[b, where] = row
        mask[b, where] = 1
    return ids, mask
