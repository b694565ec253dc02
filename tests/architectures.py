"""A sweep over every decoder family that transformers can build small from its configuration.

The families come from transformers' own mappings, so a new release is covered by running this::

    python -m tests.architectures --json docs/support.json --table docs/support.md

Each family is built twice with equal weights in a process of its own; the transformed model is
judged against the untouched one, not by what the transform reports: logits without a mask and
left-padded, greedy generation on a dynamic and a static cache, a compiled call, and `restore`.
Routes forced to streaming have to move the logits at every rewritten site, and where the site
takes its mask as an argument they have to equal the untouched model under an explicit mask.

A run adds to the JSON file what is not in it yet for the installed transformers (``--again``
repeats), so that an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

ROOT = Path(__file__).resolve().parent.parent
JSON = ROOT / "docs" / "support.json"
TABLE = ROOT / "docs" / "support.md"

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, POSITIONS = 64, 4, 2, 16, 128, 384, 512
SINK, LOCAL, LENGTH, NEW = 4, 8, 40, 6
TIMEOUT = 240

# --- which families there are ---------------------------------------------------------------------

DECODER, MULTIMODAL, ENCODER_DECODER = "decoder", "multimodal", "encoder-decoder"

# The mappings of one kind, in the order in which a model type is looked up. A type that is in
# several kinds (bart: a decoder and an encoder-decoder) is a family of each, unless both name the
# same class.
MAPPINGS: dict[str, tuple[tuple[str, str], ...]] = {
    DECODER: (("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),),
    MULTIMODAL: (
        ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "AutoModelForImageTextToText"),
        ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "AutoModelForMultimodalLM"),
    ),
    ENCODER_DECODER: (
        ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
        ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model type of transformers in one role."""

    name: str
    model_type: str
    kind: str
    auto: str
    cls: str


def derive() -> list[Architecture]:
    """Every family of the installed transformers, by kind and name."""
    found: list[Architecture] = []
    classes: set[tuple[str, str]] = set()
    for kind, mappings in MAPPINGS.items():
        for mapping, auto in mappings:
            for model_type, names in sorted(getattr(modeling_auto, mapping, {}).items()):
                cls = names if isinstance(names, str) else names[0]
                if model_type not in CONFIG_MAPPING or (model_type, cls) in classes:
                    continue
                classes.add((model_type, cls))
                taken = {a.name for a in found}
                name = model_type if model_type not in taken else f"{model_type} ({kind})"
                if name not in taken:
                    found.append(Architecture(name, model_type, kind, auto, cls))
    return found


# --- small configurations -------------------------------------------------------------------------

# Field -> value. A field is set only where the family has it, at any depth of nesting, and only if
# its default is a number (None often means "derive it").
_RULES: dict[str, Any] = {
    # hidden
    **dict.fromkeys(
        (
            "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim "
            "out_hidden_size projection_dim text_hidden_size encoder_hidden_size dim_model "
            "decoder_hidden_size projector_hidden_size backbone_hidden_size output_dim "
            "projection_hidden_size lru_width kv_n_embd hidden_dim patch_embed_hidden_size "
            "vision_output_dim cross_hidden_size projector_input_dim projector_output_dim "
            "embed_dim_per_layer adapter_out_dim adapter_in_dim image_token_embed_dim"
        ).split(),
        HIDDEN,
    ),
    # inner
    **dict.fromkeys(
        (
            "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner dim_ff dff "
            "ffn_hidden_size mlp_dim intermediate_size_mlp moe_intermediate_size "
            "shared_expert_intermediate_size dense_intermediate_size shared_intermediate_size "
            "expert_ffn_hidden_size expert_hidden_size moe_shared_expert_intermediate_size d_inner "
            "shared_experts_intermediate_size feed_forward_size mlp_intermediate_size"
        ).split(),
        INNER,
    ),
    # heads
    **dict.fromkeys(
        (
            "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
            "decoder_attention_heads attention_heads swa_num_attention_heads n_mamba_heads "
            "cross_num_attention_heads linear_num_value_heads linear_num_heads resampler_n_heads "
            "resampler_heads index_n_heads"
        ).split(),
        HEADS,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads "
            "linear_num_key_heads num_global_key_value_heads cross_num_key_value_heads"
        ).split(),
        KV_HEADS,
    ),
    **dict.fromkeys(
        (
            "head_dim d_kv dim_head kv_channels swa_head_dim attention_head_dim rotary_dim d_head "
            "linear_key_head_dim linear_value_head_dim linear_head_dim global_head_dim "
            "cross_head_dim resampler_head_dim resampler_dim_head index_head_dim"
        ).split(),
        HEAD_DIM,
    ),
    # layers: models with per-layer lists are cut by _columns
    **dict.fromkeys(
        (
            "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
            "num_decoder_layers num_encoder_layers layers num_blocks num_hidden_groups "
            "resampler_depth num_layers_per_stack n_input_layers n_recurrent_layers "
            "n_output_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers "
            "decoder_num_layers conf_num_hidden_layers"
        ).split(),
        2,
    ),
    # vocabulary and positions
    **dict.fromkeys(
        (
            "vocab_size vocab_size_per_layer_input unpadded_vocab_size src_vocab_size "
            "tgt_vocab_size decoder_vocab_size embedding_vocab_size base_vocab_size"
        ).split(),
        VOCAB,
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions "
            "max_encoder_position_embeddings max_decoder_position_embeddings max_seq_length"
        ).split(),
        POSITIONS,
    ),
    # windows shorter than the prompts, so that a wrong one shows
    **dict.fromkeys(
        (
            "sliding_window sliding_window_size attention_chunk_size attention_window "
            "local_attention window_size keep_window_size attention_window_size "
            "local_attention_window_len"
        ).split(),
        16,
    ),
    # experts
    **dict.fromkeys(
        (
            "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts "
            "ffn_num_experts zero_expert_num"
        ).split(),
        4,
    ),
    **dict.fromkeys("num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts".split(), 2),
    **dict.fromkeys("n_group topk_group n_groups mamba_n_groups o_groups".split(), 1),
    # multi-head latent attention: values narrower than keys
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    "index_topk": 8,
    # state-space and linear-attention layers: heads x head size = expand x hidden
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_expand": 2,
    "expand": 2,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    # small embeddings by layer
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    # vision and audio
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "num_query_tokens": 4,
    "num_image_tokens": 16,
    "num_position_embeddings": 16,
    "position_embedding_size": 64,
    "latent_query_num": 4,
    "codebook_size": 64,
    "adapter_input_size": HIDDEN,
    "index_kpool": 2,
    "base_channels": 32,
    "latent_channels": 32,
    "num_res_blocks": 1,
    # thresholds on positions, low enough to act on short prompts
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    "original_max_position_embeddings": 64,
}

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
MAX_LAYERS = 8

Override = dict[str, Any]

# What the rules cannot know: (fields, why). Dotted names reach into nested configurations.
OVERRIDES: dict[str, tuple[Override, str]] = {
    "bailing_hybrid": (
        {"num_expert_group": 1, "num_experts_per_token": 2, "layer_group_size": 2},
        "its own names for the experts' fields",
    ),
    "kimi_linear": ({"num_experts_per_token": 2}, "its own name for the experts a token takes"),
    "cohere_compass_text": (
        {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        },
        "its default leaves the rotary parameters empty",
    ),
    "deepseek_v2": ({"num_experts_per_tok": 2}, "its default leaves the number open"),
    "dots1": (
        {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "its default leaves the experts open",
    ),
    "dory": (
        {
            "num_hidden_layers": 4,
            "n_input_layers": 1,
            "n_recurrent_layers": 2,
            "n_output_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "its layers are counted in three groups",
    ),
    "hunyuan_v1_dense": ({"head_dim": HEAD_DIM}, "its default leaves the head size open"),
    "hunyuan_v1_moe": (
        {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 2},
        "its default leaves the head size open",
    ),
    "ministral": ({"head_dim": HEAD_DIM}, "its default leaves the head size open"),
    "nemotron": ({"num_key_value_heads": KV_HEADS}, "its default leaves the number open"),
    "lfm2_moe": (
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
        "its default leaves the kinds of its layers open",
    ),
    "mamba2": ({"num_heads": 8}, "heads x head size has to be expand x hidden size"),
    "qwen4_exp_text": (
        {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
        "its default leaves the indexer open",
    ),
    "reformer": (
        {"is_decoder": True, "axial_pos_embds": False},
        "a decoder only where its configuration says so; the axial positions fix the length",
    ),
    "gemma3n_text": (
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "intermediate_size": [INNER] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
        },
        "the layers that share keys are counted from the end",
    ),
    "dbrx": (
        {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
        "its default lacks fields that it reads",
    ),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        ({"global_head_dim": 2 * HEAD_DIM}, "the head size of full layers is no field afterwards"),
    ),
    **dict.fromkeys(
        ("musicgen_decoder", "musicgen_melody_decoder"),
        ({"num_codebooks": 1, "audio_channels": 1}, "with more, a token is a column of codes"),
    ),
    **dict.fromkeys(
        "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text paddleocr_vl_text glm4v_text "
        "glm46v_text glm_ocr_text glmga_text".split(),
        ({"rope_parameters.mrope_section": [2, 3, 3]}, "the sections are a constant of the code"),
    ),
    "glm4v_moe_text": (
        {"rope_parameters.mrope_section": [1, 1, 2]},
        "the sections are a constant of the code",
    ),
    "encoder-decoder": (
        {"decoder.is_decoder": True, "decoder.add_cross_attention": True},
        "a decoder only where its configuration says so",
    ),
    "zaya": ({"num_experts_per_tok": 1}, "it takes one expert a token"),
    "xmod": ({"default_language": "en_XX", "languages": ["en_XX"]}, "it adds weights by language"),
    "blt": (
        {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
        "hash tables of half a million rows",
    ),
    "zamba": (
        {
            "num_hidden_layers": 6,
            "attention_hidden_size": 2 * HIDDEN,
            "attention_head_dim": 2 * HEAD_DIM,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"] * 2,
        },
        "a shared layer attends to twice the hidden size",
    ),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1}, "two layers, one that attends"),
    "granitemoehybrid": (
        {"layer_types": ["linear_attention", "full_attention"]},
        "its default has no attention layers",
    ),
    "recurrent_gemma": ({"num_hidden_layers": 3}, "every third layer attends"),
    "hrm_text": ({"num_hidden_layers": 16}, "it counts a layer for every time it runs"),
    **dict.fromkeys(
        ("hunyuan_vl", "hunyuan_vl_text"),
        (
            {"rope_parameters.mrope_section": [2, 3, 3], "head_dim": HEAD_DIM},
            "its default leaves the sections open",
        ),
    ),
    "ernie4_5_vl_moe_text": (
        {"rope_parameters.mrope_section": [3, 3, 2]},
        "the sections are a constant of the code",
    ),
    **dict.fromkeys(
        ("chameleon", "emu3"),
        ({"vocabulary_map": {"<image>": 300}}, "its default leaves the image tokens open"),
    ),
    "bamba": ({"attn_layer_indices": [1]}, "its default has no attention layers"),
}


# Decoders whose own configuration is not that of their model type.
_OTHER_CONFIG = {
    "musicgen": "MusicgenDecoderConfig",
    "musicgen_melody": "MusicgenMelodyDecoderConfig",
}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _columns(config: PreTrainedConfig) -> tuple[str | None, list[int]]:
    """The layers to keep of a model that lists its layers: one of every kind, in order."""
    count_name = next((n for n in _LAYER_COUNTS if _number(vars(config).get(n))), None)
    if count_name is None:
        return None, []
    count = vars(config)[count_name]
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == count and count > 2
    ]
    # Lists of distinct numbers (indices of layers) do not say what kind a layer is.
    lists = [v for v in lists if len({repr(x) for x in v}) <= MAX_LAYERS // 2]
    kept: dict[str, int] = {}
    for index in range(count):
        kept.setdefault(repr([v[index] for v in lists]), index)
    chosen = sorted(kept.values())[:MAX_LAYERS]
    index = 0
    while len(chosen) < 2 and index < count:
        if index not in chosen:
            chosen.append(index)
        index += 1
    return count_name, sorted(chosen)


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of ``config`` made small, nested configurations included."""
    fields: dict[str, Any] = {}
    fields_of = vars(config)
    count_name, columns = _columns(config)
    count = fields_of[count_name] if count_name else 0
    for name, value in fields_of.items():
        if name.startswith("_") or name in ("id2label", "label2id"):
            continue
        if isinstance(value, PreTrainedConfig):
            fields[name] = _shrunk(value)
        elif name in ("pad_token_id",) and _number(value):
            fields[name] = 0
        elif name in ("bos_token_id", "eos_token_id", "decoder_start_token_id") and (
            _number(value) or isinstance(value, (list, tuple))
        ):
            fields[name] = 1
        elif isinstance(value, (list, tuple)) and count > 2 and len(value) == count:
            fields[name] = type(value)(value[i] for i in columns)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            fields[name] = _rope(value)
        elif name == "head_dim" and value == fields_of.get("qk_rope_head_dim"):
            fields[name] = _RULES["qk_rope_head_dim"]
        elif _number(value) and name in _RULES and value:
            fields[name] = _RULES[name] if name != count_name else len(columns)
            if name in ("num_key_value_heads", "num_kv_heads"):
                heads = fields_of.get("num_attention_heads")
                fields[name] = HEADS if value == heads else KV_HEADS
    if count_name and "num_hidden_layers" in fields:
        fields["num_hidden_layers"] = len(columns)
    for name, value in OVERRIDES.get(config.model_type, ({}, ""))[0].items():
        _set(fields, name, value)
    return fields


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            out[name] = _rope(item)
        elif name == "mrope_section" and item:
            out[name] = _section(item, HEAD_DIM // 2)
        elif name == "original_max_position_embeddings":
            out[name] = 64
        else:
            out[name] = item
    return out


def _section(parts: Any, total: int) -> list[int]:
    """Parts in the same proportion that add up to ``total``."""
    whole = sum(parts)
    out = [max(1, total * part // whole) for part in parts]
    out[-1] += total - sum(out)
    return out


def _set(fields: dict[str, Any], dotted: str, value: Any) -> None:
    *path, name = dotted.split(".")
    for key in path:
        fields = fields.setdefault(key, {})
    fields[name] = value


def _get(config: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        config = getattr(config, key)
    return config


def small_config(model_type: str, decoder: bool = True) -> PreTrainedConfig:
    """A small configuration of ``model_type``, made from its default one.

    Args:
        model_type: As in transformers' mappings.
        decoder: Whether encoders that can be decoders (BERT) shall be.

    Raises:
        Exception: Whatever the configuration class raises.
    """
    cls = CONFIG_MAPPING[model_type]
    if model_type in _OTHER_CONFIG:
        made = getattr(transformers, _OTHER_CONFIG[model_type])
        return made(**_shrunk(made()))
    fields = _shrunk(cls())
    if decoder and vars(cls()).get("is_decoder") is False:
        fields["is_decoder"] = True
    # Nested configurations come as dicts, which their class needs the model type for.
    default = cls()

    def typed(target: dict[str, Any], config: PreTrainedConfig) -> None:
        for name, value in target.items():
            inner = vars(config).get(name)
            if isinstance(value, dict) and isinstance(inner, PreTrainedConfig):
                if inner.model_type and "model_type" not in value:
                    value["model_type"] = inner.model_type
                typed(value, inner)

    typed(fields, default)
    return cls(**fields)


@torch.no_grad()
def scale_weights(model: nn.Module, seed: int = 0) -> None:
    """Redraw matrices so that attention is selective, and move vectors off their initial value."""
    generator = torch.Generator().manual_seed(seed)
    query_key = ("q_proj", "k_proj", "qkv", "query", "key", "c_attn", "q_b_proj", "kv_b_proj")
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) in seen or not parameter.is_floating_point() or not parameter.numel():
            continue
        seen.add(id(parameter))
        noise = torch.randn(parameter.shape, generator=generator)
        if "sinks" in name:
            parameter.copy_(1.0 + noise)
        elif parameter.ndim < 2:
            parameter.add_(noise, alpha=0.1)
        elif parameter.ndim == 2:
            gain = 1.8 if any(part in name for part in query_key) else 1.0
            parameter.copy_(noise * (gain / math.sqrt(min(parameter.shape[-1], HIDDEN * 2))))
        elif parameter.ndim == 3:
            parameter.copy_(noise / math.sqrt(min(parameter.shape[-2:])))
        # Convolutions of towers keep their initial values.


def build(architecture: Architecture, seed: int = 0) -> Any:
    """A small model in eval mode, float32; equal arguments give equal weights."""
    config = small_config(architecture.model_type, architecture.kind == DECODER)
    torch.manual_seed(seed)
    if type(config) is CONFIG_MAPPING[architecture.model_type]:
        auto = getattr(transformers, architecture.auto)
        model = auto.from_config(config, dtype=torch.float32)
    else:
        model = getattr(transformers, architecture.cls)._from_config(config, dtype=torch.float32)
    count = sum(p.numel() for p in model.parameters())
    if count > 100_000_000:
        raise MemoryError(f"still {count / 1e6:.0f} million parameters")
    scale_weights(model, seed)
    model.eval()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.generation_config.forced_eos_token_id = None
    return model


# --- calls ----------------------------------------------------------------------------------------


def _prompts(side: str | None) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 200, (3, LENGTH), generator=generator)
    if side is None:
        return ids, None
    mask = torch.ones_like(ids)
    for row in range(3):
        mask[row, : 7 * row] = 0
    return ids.masked_fill(mask == 0, 0), mask


class Calls:
    """Calls of one family's models: which inputs they take."""

    def __init__(self, architecture: Architecture, model: Any) -> None:
        self.encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self.encoder: dict[str, Tensor] = {}
        self.refused: set[str] = set()
        if self.encoder_decoder:
            name = model.main_input_name
            generator = torch.Generator().manual_seed(2)
            if name == "input_ids":
                self.encoder = {name: torch.randint(2, 200, (3, LENGTH), generator=generator)}
            elif name == "input_features":
                config = model.config
                bins = getattr(config, "num_mel_bins", None)
                if bins is None:
                    raise ValueError("the shape of its features is not in its configuration")
                length = 2 * getattr(config, "max_source_positions", 16)
                self.encoder = {name: torch.randn(3, bins, length, generator=generator)}
            elif name == "pixel_values":
                vision = getattr(model.config, "encoder", model.config)
                size = vision.image_size
                self.encoder = {
                    name: torch.randn(3, vision.num_channels, size, size, generator=generator)
                }
            else:
                raise ValueError(f"its encoder takes {name!r}")

    def arguments(self, ids: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of one forward call."""
        if self.encoder_decoder:
            given = {**self.encoder, "decoder_input_ids": ids}
            return given if mask is None else {**given, "decoder_attention_mask": mask}
        return {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}

    @torch.no_grad()
    def logits(self, model: Any, side: str | None) -> Tensor:
        """Logits [3, LENGTH, vocabulary] without a cache."""
        ids, mask = _prompts(side)
        out = model(**self.arguments(ids, mask), use_cache=False)
        return out.logits if hasattr(out, "logits") else out[0]

    @torch.no_grad()
    def generate(self, model: Any, side: str | None, cache: str) -> Tensor:
        """Greedily generated tokens [3, NEW]."""
        ids, mask = _prompts(side)
        mask = torch.ones_like(ids) if mask is None else mask
        given = self.arguments(ids, mask)
        if cache == "static":
            given["cache_implementation"] = "static"
        out = model.generate(
            **given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, num_beams=1
        )
        return out[:, -NEW:]

    def example_inputs(self) -> dict[str, Tensor] | None:
        """What `transform` is given: nothing where it makes token ids up itself."""
        return self.arguments(*_prompts(None)) if self.encoder_decoder else None


def _error(actual: Tensor, expected: Tensor, side: str | None) -> float:
    """Largest difference at real tokens, relative to the largest value."""
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual.double() - expected.double()).abs()
    if side is not None:
        mask = _prompts(side)[1]
        assert mask is not None
        difference = difference[mask.bool()]
    worst = float(difference.max() / expected.double().abs().max().clamp(min=1e-6))
    return math.inf if math.isnan(worst) else worst


TOLERANCE = 2e-5
"""Relative to the largest logit: float32 through a few layers."""
MOVED = 1e-3
"""A streaming head changes the logits by more than this."""


# --- judging one family ---------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What became of one family."""

    name: str
    kind: str
    cls: str
    verdict: str
    """"exact", "skipped", "refused", "no site", "not built", "not run" or "WRONG"."""
    rewritten: int = 0
    sites: int = 0
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> how many sites it leaves alone."""
    detail: str = ""
    checks: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def judge(architecture: Architecture) -> Result:
    """Build, transform and compare one family."""
    result = Result(architecture.name, architecture.kind, architecture.cls, "exact")
    began = time.time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _judge(architecture, result)
    result.seconds = round(time.time() - began, 1)
    return result


def _judge(architecture: Architecture, result: Result) -> None:
    import elastic_compile

    try:
        base, model = build(architecture), build(architecture)
        calls = Calls(architecture, base)
    except Exception as error:
        result.verdict, result.detail = "not built", _short(error)
        return
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            expected = calls.logits(base, None)
    except Exception as error:
        result.verdict, result.detail = "not run", _short(error)
        return
    if not torch.isfinite(expected).all():
        result.verdict, result.detail = "not run", "the untouched model's logits are not finite"
        return
    again = calls.logits(base, None)
    if not torch.equal(expected, again):
        result.verdict, result.detail = "not run", "the untouched model is not deterministic"
        return

    config = elastic_compile.ElasticConfig(sink=SINK, local=LOCAL, pool_tokens=6)
    try:
        elastic_compile.transform(model, config, example_inputs=calls.example_inputs())
    except ValueError as error:
        if "does not run on made-up" in str(error) and not _caches(calls, base):
            result.verdict, result.detail = "not run", _short(error.__cause__ or error)
            return
        if type(error).__name__ != "NoSiteError":
            result.verdict, result.detail = "WRONG", f"transform: {_short(error)}"
            return
        _nothing(model, result, str(error))
        if not torch.equal(calls.logits(model, None), expected):
            result.verdict, result.detail = "WRONG", "a refused transform changed the model"
        return
    except Exception as error:
        refused = type(error).__name__ == "SelfCheckError"
        result.verdict = "refused" if refused else "WRONG"
        result.detail = str(error) if refused else f"transform: {_short(error)}"
        if refused and not torch.equal(calls.logits(model, None), expected):
            result.verdict, result.detail = "WRONG", "a refused transform changed the model"
        return
    report = elastic_compile.report(model)
    result.sites, result.rewritten = len(report.sites), len(report.rewritten)
    for row in report.skipped:
        result.reasons[row.reason] = result.reasons.get(row.reason, 0) + 1
    for name, check in _CHECKS.items():
        try:
            result.checks[name] = check(calls, base, model, expected)
        except Exception as error:
            result.checks[name] = f"WRONG: {_short(error)}"
    wrong = [f"{n}: {v}" for n, v in result.checks.items() if v.startswith("WRONG")]
    if wrong:
        result.verdict, result.detail = "WRONG", "; ".join(wrong)


@torch.no_grad()
def _caches(calls: Calls, base: Any) -> bool:
    """Whether the untouched model runs with a cache."""
    try:
        base(**calls.arguments(*_prompts("left")), use_cache=True)
    except Exception:
        return False
    return True


def _nothing(model: Any, result: Result, message: str) -> None:
    """Zero sites: which there are and why not."""
    import elastic_compile

    if message.startswith("no attention site"):
        result.verdict, result.detail = "no site", message.split(": ", 1)[1].split(". ")[0]
        return
    result.verdict = "skipped"
    try:
        copied = copy.deepcopy(model)
        calls = Calls(Architecture("", "", "", "", ""), copied)
        elastic_compile.transform(
            copied, example_inputs=calls.example_inputs(), allow_unrewritten=True
        )
        for row in elastic_compile.report(copied).skipped:
            result.reasons[row.reason] = result.reasons.get(row.reason, 0) + 1
        result.sites = len(elastic_compile.report(copied).sites)
    except Exception as error:
        result.verdict, result.detail = "WRONG", f"allow_unrewritten: {_short(error)}"


def _within(error: float) -> str:
    return f"{error:.1e}" if error <= TOLERANCE else f"WRONG: off by {error:.1e}"


def _plain(calls: Calls, base: Any, model: Any, expected: Tensor) -> str:
    from elastic_compile import counters

    counters(reset=True)
    error = _error(calls.logits(model, None), expected, None)
    seen = counters()
    if not sum(seen["calls"].values()):
        return "WRONG: the attention op did not run"
    if any(seen["fallbacks"].values()):
        return f"WRONG: fell back: {seen['fallbacks']}"
    return _within(error)


def _padded(calls: Calls, base: Any, model: Any, expected: Tensor) -> str:
    from elastic_compile import counters

    try:
        reference = calls.logits(base, "left")
    except Exception as error:
        calls.refused.add("left")
        return f"not judged: the untouched model raises {_short(error)}"
    counters(reset=True)
    error = _error(calls.logits(model, "left"), reference, "left")
    if any(counters()["fallbacks"].values()):
        return f"WRONG: fell back: {counters()['fallbacks']}"
    return _within(error)


def _generate(cache: str, side: str | None) -> Callable[..., str]:
    def check(calls: Calls, base: Any, model: Any, expected: Tensor) -> str:
        from elastic_compile import counters

        if not hasattr(base, "generate"):
            return "not judged: the untouched model has no generate"
        try:
            reference = calls.generate(base, side, cache)
        except Exception as error:
            return f"not judged: the untouched model raises {_short(error)}"
        counters(reset=True)
        got = calls.generate(model, side, cache)
        if not torch.equal(got, reference):
            return f"WRONG: {got.tolist()}"
        # The model's own code may have built a dense mask: exact, and said, but not routed.
        reasons = [reason for reason, count in counters()["fallbacks"].items() if count]
        return f"equal, but not routed: {'; '.join(reasons)}" if reasons else "equal"

    return check


def _streaming(calls: Calls, base: Any, model: Any, expected: Tensor) -> str:
    """Every rewritten site moves the logits when its heads stream, and only by what it must."""
    import elastic_compile
    from elastic_compile._state import rewritten_sites

    sites = rewritten_sites(model)
    for index, (path, _) in enumerate(sites):
        tables = [
            torch.full((router.kv_heads,), int(i == index)) for i, (_, router) in enumerate(sites)
        ]
        with elastic_compile.force_routes(model, tables):
            moved = _error(calls.logits(model, None), expected, None)
        if not moved > MOVED:
            return f"WRONG: streaming heads of {path} change nothing ({moved:.1e})"
    out = []
    for side in (None, "left"):
        try:
            reference = _streaming_reference(calls, base, model, side)
        except Exception as error:
            return f"moves; no reference: {_short(error)}"
        with elastic_compile.force_routes(model, "sparse"):
            got = calls.logits(model, side)
        out.append(_error(got, reference, side))
    return _within(max(out))


def _streaming_reference(calls: Calls, base: Any, model: Any, side: str | None) -> Tensor:
    """The untouched model whose rewritten sites run under an explicit streaming mask."""
    import elastic_compile

    ids, mask = _prompts(side)
    real = torch.ones_like(ids) if mask is None else mask
    i = torch.arange(LENGTH)
    start = real.argmax(1)
    near = (i[:, None] - i[None, :] < LOCAL)[None]
    first = (i[None, :] < start[:, None] + SINK)[:, None, :]
    visible = (i[None, :] <= i[:, None])[None] & (near | first) & real.bool()[:, None, :]
    visible = (visible | torch.eye(LENGTH, dtype=torch.bool) & (real == 0)[:, :, None])[:, None]
    low = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    handles, used = [], []
    for row in elastic_compile.report(model).rewritten:

        def replace(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            name = "attention_mask" if "attention_mask" in kwargs else "mask"
            if name not in kwargs:
                raise LookupError("its mask is not a keyword argument")
            used.append(name)
            given = kwargs[name]
            own = given is not None and given.is_floating_point()
            return args, {**kwargs, name: low if own else visible}

        handles.append(
            base.get_submodule(row.path).register_forward_pre_hook(replace, with_kwargs=True)
        )
    try:
        return calls.logits(base, side)
    finally:
        for handle in handles:
            handle.remove()


def _compiled(calls: Calls, base: Any, model: Any, expected: Tensor) -> str:
    from elastic_compile import counters

    def run(which: Any, fullgraph: bool) -> tuple[dict[str | None, Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(which, backend="eager", dynamic=True, fullgraph=fullgraph)
        got = {s: calls.logits(compiled, s) for s in wanted}
        return got, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    side = None if "left" in calls.refused else "left"
    wanted = {side: calls.logits(base, side), None: expected}
    note = "one graph"
    counters(reset=True)
    try:
        got, graphs = run(model, True)
    except Exception as error:
        # Only where the untouched model is one graph has the transformed one to be.
        try:
            run(base, True)
        except Exception:
            try:
                run(base, False)
            except Exception as reason:
                return f"not judged: the untouched model raises {_short(reason)}"
            note = "graph breaks as untouched"
            counters(reset=True)
            got, graphs = run(model, False)
        else:
            return f"WRONG: {_short(error)}"
    reasons = [reason for reason, count in counters()["fallbacks"].items() if count]
    if reasons:
        note += f", but not routed: {'; '.join(reasons)}"
    if note.startswith("one graph") and graphs > len(got):
        return f"WRONG: {graphs} graphs for {len(got)} calls"
    return f"{_within(max(_error(got[s], wanted[s], s) for s in got))}, {note}"


def _tower(calls: Calls, base: Any, model: Any, expected: Tensor) -> str:
    """The vision tower of a transformed model is the untouched one."""
    towers = [
        (name, module)
        for name, module in base.named_modules()
        if isinstance(module, transformers.PreTrainedModel)
        and module is not base
        and module.main_input_name == "pixel_values"
        and hasattr(module.config, "image_size")
    ]
    if not towers or calls.encoder_decoder:
        return "no vision tower"
    name, tower = towers[0]
    config = tower.config
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", 3)
    size = config.image_size
    size = size if isinstance(size, int) else size[0]
    pixels = torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        try:
            want = tower(pixels)[0]
        except Exception as error:
            return f"not judged: {name} takes no plain image ({type(error).__name__})"
        got = model.get_submodule(name)(pixels)[0]
    return "equal" if torch.equal(want, got) else f"WRONG: {name} differs"


def _restored(calls: Calls, base: Any, model: Any, expected: Tensor) -> str:
    import elastic_compile

    torch._dynamo.reset()
    elastic_compile.restore(model)
    return "equal" if torch.equal(calls.logits(model, None), expected) else "WRONG: differs"


_CHECKS: dict[str, Callable[..., str]] = {
    "logits": _plain,
    "left padding": _padded,
    "streaming": _streaming,
    "generate, dynamic cache": _generate("dynamic", None),
    "generate, dynamic cache, padded": _generate("dynamic", "left"),
    "generate, static cache": _generate("static", None),
    "generate, static cache, padded": _generate("static", "left"),
    "compiled": _compiled,
    "vision tower": _tower,
    "restore": _restored,
}


# --- running many ---------------------------------------------------------------------------------


def _child(architecture: Architecture, path: str) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        result = judge(architecture)
    except BaseException as error:
        result = Result(architecture.name, architecture.kind, architecture.cls, "WRONG")
        result.detail = _short(error) + " | " + traceback.format_exc()[-400:]
    Path(path).write_text(json.dumps(dataclasses.asdict(result)))


def isolated(
    architectures: list[Architecture], jobs: int = 1, timeout: float = TIMEOUT
) -> Iterator[Result]:
    """Judge every family in a process of its own; results in the order in which they end."""
    import tempfile

    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    waiting = list(architectures)
    if method == "fork" and len(waiting) > 3:
        # The tracers' imports take longer than a family does: the children inherit them.
        judge(next(a for a in derive() if a.name == "llama"))
    running: list[tuple[Architecture, Any, str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                architecture = waiting.pop(0)
                path = os.path.join(folder, f"{len(waiting)}.json")
                process = context.Process(target=_child, args=(architecture, path))
                process.start()
                running.append((architecture, process, path, time.time()))
            for entry in list(running):
                architecture, process, path, began = entry
                process.join(0.05)
                late = time.time() - began > timeout
                if process.is_alive() and not late:
                    continue
                if process.is_alive():
                    process.kill()
                    process.join()
                running.remove(entry)
                if os.path.exists(path):
                    yield Result(**json.loads(Path(path).read_text()))
                    continue
                why = f"not done in {timeout:.0f} s" if late else f"exit code {process.exitcode}"
                result = Result(architecture.name, architecture.kind, architecture.cls, "WRONG")
                result.detail = f"the process ended: {why}"
                yield result


@contextlib.contextmanager
def _saved(path: Path | None) -> Iterator[dict[str, Any]]:
    """The results in ``path``, written back at the end."""
    data: dict[str, Any] = {"runs": {}}
    if path is not None and path.exists():
        data = json.loads(path.read_text())
    try:
        yield data
    finally:
        if path is not None:
            write(path, data)


def write(path: Path, data: dict[str, Any]) -> None:
    """The results, sorted, one family a line."""
    lines = ["{", '"runs": {']
    versions = sorted(data["runs"], key=_version)
    for v, version in enumerate(versions):
        run = data["runs"][version]
        torch_version = json.dumps(run["torch"])
        lines.append(f'{json.dumps(version)}: {{"torch": {torch_version},')
        lines.append(f'"all": {json.dumps(sorted(run["all"]))},')
        lines.append('"families": {')
        rows = sorted(run["families"].items())
        for index, (name, row) in enumerate(rows):
            comma = "," if index + 1 < len(rows) else ""
            lines.append(f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}{comma}")
        lines.append("}}" + ("," if v + 1 < len(versions) else ""))
    lines += ["}", "}", ""]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("\n".join(lines))
    temporary.replace(path)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


# --- the table ------------------------------------------------------------------------------------


def cell(run: dict[str, Any], name: str) -> str:
    """One family in the run of one version, in a few words."""
    row = run["families"].get(name)
    if row is None:
        return "not judged" if name in run["all"] else "not in this version"
    verdict = row["verdict"]
    if verdict == "exact":
        return f"**{row['rewritten']} of {row['sites']}** rewritten"
    if verdict == "skipped":
        return f"0 of {row['sites']}"
    return verdict


def _note(row: dict[str, Any]) -> str:
    notes = []
    if row["verdict"] not in ("exact", "skipped"):
        notes.append(row["detail"])
    notes += [f"{count} left alone: {reason}" for reason, count in sorted(row["reasons"].items())]
    for name, value in row["checks"].items():
        if value.startswith("not judged") or "not routed" in value or "no ref" in value:
            notes.append(f"{name}: {value}")
    text = "; ".join(notes).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    return text if len(text) <= 400 else text[:399] + "…"


def render(data: dict[str, Any]) -> str:
    """The support page."""
    versions = sorted(data["runs"], key=_version)
    newest = data["runs"][versions[-1]]
    lines = [
        "# Supported architectures",
        "",
        "<!-- Generated by `python -m tests.architectures --json docs/support.json --table "
        "docs/support.md`; do not edit. -->",
        "",
        "Every decoder family of transformers' own mappings that can be built small from its "
        "configuration, judged against the untouched model: logits with and without left padding, "
        "greedy generation on dynamic and static caches with and without left padding, streaming "
        "heads against an explicit mask, `restore` bit for bit and, for as many as the first "
        'table says, a compiled call (`torch.compile(backend="eager", dynamic=True)`, in one graph '
        "where the untouched model is). *n of m* counts "
        "the attention sites that were found in a model of a few layers, one of every kind; what "
        "is not rewritten keeps its own attention, for the reason given.",
        "",
        "The page is made by running, for every transformers version of interest,",
        "",
        "```bash",
        "python -m tests.architectures --json docs/support.json --table docs/support.md",
        "```",
        "",
        f"torch {newest['torch']}, float32 on a CPU.",
        "",
        "| verdict | " + " | ".join(f"transformers {v}" for v in versions) + " |",
        "|---|" + "---|" * len(versions),
    ]
    counts = {v: _counts(data["runs"][v]["families"]) for v in versions}
    for verdict in VERDICTS:
        numbers = [counts[v].get(verdict, 0) for v in versions]
        lines.append(f"| {VERDICTS[verdict]} | " + " | ".join(str(x) for x in numbers) + " |")
        if verdict == "exact":
            compiled = [
                sum("compiled" in row["checks"] for row in data["runs"][v]["families"].values())
                for v in versions
            ]
            lines.append("| … compiled too | " + " | ".join(str(x) for x in compiled) + " |")
    left = [len(set(data["runs"][v]["all"]) - set(data["runs"][v]["families"])) for v in versions]
    if any(left):
        lines.append("| not judged on this version | " + " | ".join(map(str, left)) + " |")
    for kind in MAPPINGS:
        names = sorted(
            {
                name
                for v in versions
                for name, row in data["runs"][v]["families"].items()
                if row["kind"] == kind
            }
        )
        lines += [
            "",
            f"## {kind.capitalize()}s" if kind != MULTIMODAL else "## Multimodal decoders",
            "",
            "| family | " + " | ".join(versions) + " | notes (newest version) |",
            "|---|" + "---|" * (len(versions) + 1),
        ]
        for name in names:
            rows = [data["runs"][v]["families"].get(name) for v in versions]
            shown = next(row for row in reversed(rows) if row is not None)
            cells = " | ".join(cell(data["runs"][v], name) for v in versions)
            lines.append(f"| {name} | {cells} | {_note(shown)} |")
    return "\n".join(lines) + "\n"


VERDICTS = {
    "exact": "rewritten, every check passed",
    "skipped": "every site left alone, with the reason",
    "refused": "the whole model refused by the self-check",
    "no site": "no attention site",
    "not built": "cannot be built small",
    "not run": "the untouched model does not run on token ids alone",
    "WRONG": "**wrong**",
}


def _counts(families: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in families.values():
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    return counts


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these families")
    parser.add_argument("--kind", choices=list(MAPPINGS), help="this kind of family")
    parser.add_argument("--json", type=Path, help="file of results; added to")
    parser.add_argument("--table", type=Path, help="the page to write from the results")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds a family may take")
    parser.add_argument("--again", action="store_true", help="repeat what the file has already")
    parser.add_argument(
        "--without", nargs="+", default=[], choices=list(_CHECKS), help="checks to leave out"
    )
    parser.add_argument("--list", action="store_true", help="print the families and stop")
    args = parser.parse_args(argv)
    architectures = derive()
    if args.only:
        unknown = set(args.only) - {a.name for a in architectures}
        if unknown:
            parser.error(f"not in transformers {transformers.__version__}: {sorted(unknown)}")
        architectures = [a for a in architectures if a.name in args.only]
    if args.kind:
        architectures = [a for a in architectures if a.kind == args.kind]
    if args.list:
        for a in architectures:
            print(a.name, a.kind, a.cls)
        return 0
    for check in args.without:
        del _CHECKS[check]
    import elastic_compile
    import elastic_compile.passes.pipeline  # noqa: F401  (before the forks, so that it is shared)

    with _saved(args.json) as data:
        run = data["runs"].setdefault(
            transformers.__version__, {"torch": torch.__version__.split("+")[0], "families": {}}
        )
        known = {a.name for a in derive()}
        run["all"] = sorted(known)
        for name in list(run["families"]):
            if name not in known:
                del run["families"][name]
        todo = [
            a for a in architectures if args.again or args.only or a.name not in run["families"]
        ]
        for number, result in enumerate(isolated(todo, args.jobs, args.timeout), 1):
            run["families"][result.name] = dataclasses.asdict(result)
            del run["families"][result.name]["seconds"]
            summary = f"{result.rewritten} of {result.sites}" if result.sites else ""
            print(
                f"[{number}/{len(todo)}] {result.name}: {result.verdict} {summary} "
                f"{result.detail} {result.reasons or ''} ({result.seconds} s)",
                flush=True,
            )
            if args.json is not None and number % 10 == 0:
                write(args.json, data)
        if args.table is not None:
            args.table.write_text(render(data))
        counts = _counts(run["families"])
        print(", ".join(f"{VERDICTS[v]}: {n}" for v, n in counts.items()))
        return 1 if counts.get("WRONG") else 0


if __name__ == "__main__":
    sys.exit(main())
