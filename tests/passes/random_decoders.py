"""Small decoders put together from a :class:`Spec`: plain attention and what only resembles it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CACHE = (
    "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What one random decoder does. The defaults are Llama's."""

    host: str = "model"
    """``"model"``: a transformers model with masks and a cache; ``"module"``: a bare module."""
    dialect: str = "sdpa"
    """``"sdpa"``: calls torch's function; ``"interface"``: transformers' attention functions."""
    mask: str = "given"
    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    value_size: int = 8
    expand: str = "repeat_interleave"
    projection: str = "separate"
    position: str = "half"
    norm: str = "none"
    key_source: str = "hidden"
    value_twist: str = "none"
    query_twist: str = "none"
    scale: str = "none"
    dropout: str = "none"
    extra: str = "none"
    cached: bool = True
    layers: int = 2
    seed: int = 0


HIDDEN, VOCABULARY, SLIDING = 24, 50, 5

CHOICES: dict[str, tuple[Any, ...]] = {
    "host": ("model", "model", "module"),
    "dialect": ("sdpa", "interface"),
    "mask": (
        *["given"] * 20,
        *["causal_flag"] * 10,
        "argument", "none", "sliding", "own_bool", "own_additive", "own_shifted", "biased",
        "prefix", "thinned", "inverted", "sliced", "sliced_rows", "additive", "unchanged",
        "chunk_rule", "both",
    ),
    "heads": (4, 6),
    "kv_heads": (1, 2, 2, -1),
    "size": (4, 8, 12),
    "value_size": (-1, -1, 6),
    "expand": ("repeat_interleave", "expand", "gqa", "tile"),
    "projection": ("separate", "separate", "fused", "interleaved"),
    "position": ("none", "half", "pairs", "partial", "learned"),
    "norm": ("none", "none", "before", "after", "flat"),
    "key_source": (
        *["hidden"] * 24, "shifted", "memory", "short", "prefix", "reversed", "blurred", "pooled",
    ),
    "value_twist": ("none", "none", "gate", "running_sum", "from_key", "memory"),
    "query_twist": (*["none"] * 6, *["positions"] * 3, "length"),
    "scale": ("none", "number", "layer", "parameter", "in_query"),
    "dropout": (*["none"] * 5, *["train"] * 3, "always"),
    "extra": (
        *["none"] * 8, *["gate", "key_mean", "in_place", "causal_mean", "weights"] * 2,
        "twice", "mask_sum", "flat_batch",
    ),
    "cached": (True, False),
    "layers": (1, 2),
}  # fmt: skip


def complete(fields: dict[str, Any]) -> Spec:
    """A spec from independently drawn fields, made to fit together."""
    fields = dict(fields)
    if fields["kv_heads"] == -1:
        fields["kv_heads"] = fields["heads"]
    if fields["value_size"] == -1 or fields["projection"] != "separate":
        fields["value_size"] = fields["size"]
    if fields["value_twist"] == "from_key":
        fields["value_size"] = fields["size"]
    if fields["host"] == "module":
        fields["cached"] = False
        fields["dialect"] = "sdpa"
        if fields["mask"] in ("given", "sliding", "chunk_rule"):
            fields["mask"] = "causal_flag"
    elif fields["mask"] == "argument":
        fields["mask"] = "given"
    if fields["mask"] == "causal_flag" and fields["dialect"] == "sdpa":
        # torch aligns the flag to the first key: a cached step would be another model.
        fields["cached"] = False
    if fields["key_source"] in ("memory", "short", "pooled", "prefix"):
        fields["cached"] = False
    return Spec(**fields)


class RandomConfig(PreTrainedConfig):
    model_type = "random_decoder"

    def __init__(self, spec: Any = None, **kwargs: Any) -> None:
        self.hidden_size = HIDDEN
        self.vocab_size = VOCABULARY
        self.sliding_window = SLIDING
        self.num_hidden_layers = getattr(spec, "layers", 1)
        self.num_attention_heads = getattr(spec, "heads", 1)
        super().__init__(**kwargs)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, kind: str) -> Tensor:
    """``x`` [B, H, S, D] at the positions of ``cos`` and ``sin`` [B, 1, S, D / 2]."""
    if kind == "none":
        return x
    if kind == "learned":
        return x + cos.repeat(1, 1, 1, 2)
    if kind == "pairs":
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    if kind == "partial":
        half = x.shape[-1] // 2
        quarter = half // 2
        turned = rotate(x[..., :half], cos[..., :quarter], sin[..., :quarter], "half")
        return torch.cat((turned, x[..., half:]), -1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class RandomAttention(nn.Module):
    def __init__(self, spec: Spec, config: Any, layer_idx: int) -> None:
        super().__init__()
        s = spec
        self.spec, self.config, self.layer_idx = spec, config, layer_idx
        self.is_causal = s.mask != "none"
        self.num_key_value_groups = s.heads // s.kv_heads
        q, k, v = s.heads * s.size, s.kv_heads * s.size, s.kv_heads * s.value_size
        if s.projection == "separate":
            self.q_proj, self.k_proj = nn.Linear(HIDDEN, q), nn.Linear(HIDDEN, k)
            self.v_proj = nn.Linear(HIDDEN, v)
        else:
            self.qkv = nn.Linear(HIDDEN, q + k + v)
        if s.norm != "none":
            self.k_norm = nn.LayerNorm(k if s.norm == "flat" else s.size)
        if s.scale == "parameter":
            self.temperature = nn.Parameter(torch.tensor(0.4))
        if s.key_source == "prefix":
            self.prefix = nn.Parameter(torch.randn(1, 3, HIDDEN))
        if s.value_twist == "gate" or s.extra == "gate":
            self.gate = nn.Linear(HIDDEN, s.kv_heads)
        self.o_proj = nn.Linear(s.heads * s.value_size, HIDDEN)

    def _keys_from(self, hidden: Tensor, memory: Tensor) -> Tensor:
        match self.spec.key_source:
            case "memory":
                return memory
            case "shifted":
                return F.pad(hidden, (0, 0, 1, -1))
            case "short":
                return hidden[:, 2:]
            case "pooled":
                return hidden[:, ::2]
            case "prefix":
                return torch.cat((self.prefix.expand(hidden.shape[0], -1, -1), hidden), 1)
            case "reversed":
                return hidden.flip(1)
            case "blurred":
                return hidden + hidden.mean(1, keepdim=True)
        return hidden

    def _project(self, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.spec
        source = self._keys_from(hidden, memory)
        if s.projection == "separate":
            q, k, v = self.q_proj(hidden), self.k_proj(source), self.v_proj(source)
        else:
            sizes = [s.heads * s.size, s.kv_heads * s.size, s.kv_heads * s.value_size]
            if s.projection == "interleaved":
                # One group after the other: its queries, its key, its value.
                group = s.heads // s.kv_heads

                def split(x: Tensor) -> tuple[Tensor, ...]:
                    x = self.qkv(x).unflatten(2, (s.kv_heads, group + 2, s.size))
                    return x[..., :group, :].flatten(2), x[..., -2, :].flatten(2), x[..., -1, :]

                q, (_, k, v) = split(hidden)[0], split(source)
                v = v.flatten(2)
            else:
                q = self.qkv(hidden).split(sizes, -1)[0]
                _, k, v = self.qkv(source).split(sizes, -1)
        if s.norm == "flat":
            k = self.k_norm(k)

        def heads(x: Tensor, size: int) -> Tensor:
            return x.view(*x.shape[:2], -1, size).transpose(1, 2)

        return heads(q, s.size), heads(k, s.size), heads(v, s.value_size)

    def _mask(self, mask: Tensor | None, hidden: Tensor, keys: int) -> tuple[Tensor | None, bool]:
        kind, rows = self.spec.mask, hidden.shape[1]
        plain = mask is None and rows > 1
        if kind == "causal_flag":
            return None, True
        if kind == "none":
            return None, False
        if kind == "both":
            return mask, True
        if kind in ("given", "argument", "sliding", "chunk_rule"):
            return mask, plain
        row = torch.arange(rows, device=hidden.device)[:, None] + (keys - rows)
        column = torch.arange(keys, device=hidden.device)[None]
        own = (column <= row)[None, None]
        if kind == "own_bool":
            return own, False
        if kind == "own_shifted":
            return (column <= row + 1)[None, None], False
        if kind == "own_additive":
            return torch.where(own, 0.0, -torch.inf).to(hidden.dtype), False
        given = own.expand(hidden.shape[0], -1, -1, -1) if mask is None else mask
        if kind == "biased":
            slope = (column - row).to(hidden.dtype)[None, None] * 0.1
            return torch.where(given, slope, torch.finfo(hidden.dtype).min), False
        if kind == "prefix":
            return given | (column < 2)[None, None], False
        if kind == "thinned":
            return given & ((column % 2 == 0) | (column == row))[None, None], False
        if kind == "inverted":
            return ~given, False
        if kind == "sliced":
            return given[..., :keys], False
        if kind == "sliced_rows":
            return given[:, :, -1:, :keys].expand(-1, -1, rows, -1), False
        if kind == "additive":
            return torch.where(given, 0.0, torch.finfo(hidden.dtype).min).to(hidden.dtype), False
        return given & torch.ones_like(given), False

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        memory: Tensor,
        attention_mask: Tensor | None = None,
        past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        s = self.spec
        batch, rows = hidden.shape[:2]
        q, k, v = self._project(hidden, memory)
        cos, sin = position_embeddings
        if s.norm == "before":
            k = self.k_norm(k)
        q = rotate(q, cos, sin, s.position)
        if k.shape[2] == rows:
            k = rotate(k, cos, sin, s.position)
        if s.norm == "after":
            k = self.k_norm(k)
        if s.extra == "in_place":
            k = k.clone()
            k.mul_(1.5)
        if s.value_twist == "gate" and v.shape[2] == rows:
            v = v * self.gate(hidden).sigmoid().transpose(1, 2)[..., None]
        elif s.value_twist == "running_sum":
            v = v.cumsum(2) / 4
        elif s.value_twist == "from_key":
            v = v + k
        elif s.value_twist == "memory" and v.shape[2] == rows:
            v = v * memory.mean(-1)[:, None, :, None]
        if s.query_twist == "length":
            q = q * math.log(rows + 1)
        elif s.query_twist == "positions":
            q = q * (1.0 + cos[..., :1].abs())
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        scale: Any = None
        if s.scale == "number":
            scale = 0.9
        elif s.scale == "layer":
            scale = 0.5 / (self.layer_idx + 1)
        elif s.scale == "parameter":
            q, scale = q * self.temperature, 1.0
        elif s.scale == "in_query":
            q, scale = q * s.size**-0.5, 1.0
        mask, causal = self._mask(attention_mask, hidden, k.shape[2])
        out = self._attend(q, k, v, mask, causal, scale)
        if s.extra == "twice":
            out = out + self._attend(q.flip(1), k, v, mask, causal, scale)
        elif s.extra == "weights":
            out = (
                out
                + (q @ k.repeat_interleave(s.heads // s.kv_heads, 1).mT).mean((2, 3))[
                    :, None, :, None
                ]
            )
        elif s.extra == "mask_sum" and mask is not None:
            out = (
                out
                * mask.to(out.dtype)
                .nan_to_num(neginf=0.0)
                .clamp(-1, 1)
                .mean((1, 3))[:, :, None, None]
            )
        elif s.extra == "gate":
            out = out * self.gate(hidden).sigmoid().repeat(1, 1, s.heads // s.kv_heads)[..., None]
        elif s.extra == "key_mean":
            out = out + k.mean((1, 2, 3))[:, None, None, None]
        elif s.extra == "causal_mean":
            out = out + hidden.cumsum(1).mean(-1)[..., None, None] / 10
        return self.o_proj(out.reshape(batch, rows, -1)), None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any
    ) -> Tensor:
        """[B, S, H, Dv]."""
        s = self.spec
        dropout = {"none": 0.0, "train": 0.2 * self.training, "always": 0.2}[s.dropout]
        if s.dialect == "interface":
            function = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, sdpa_attention_forward
            )
            return function(
                self, q, k, v, mask, dropout=dropout, scaling=scale,
                is_causal=causal if causal else None,
            )[0]  # fmt: skip
        group = s.heads // s.kv_heads
        extra = {}
        if s.expand == "gqa":
            extra = {"enable_gqa": True}
        elif s.expand == "tile":
            k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
        elif s.expand == "expand":
            k, v = (
                x[:, :, None].expand(-1, -1, group, -1, -1).reshape(
                    x.shape[0], -1, x.shape[2], x.shape[3]
                )
                for x in (k, v)
            )  # fmt: skip
        else:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        if s.extra == "flat_batch" and mask is None and s.expand != "gqa":
            shape = q.shape[:3]
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=causal, scale=scale
            )
            return out.reshape(*shape, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, **extra
        )
        return out.transpose(1, 2)


def tables(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    rate = 10.0 ** -(torch.arange(size // 2) / (size // 2))
    angle = positions[:, None, :, None] * rate
    return angle.cos(), angle.sin()


class Layer(nn.Module):
    def __init__(self, spec: Spec, config: Any, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = RandomAttention(spec, config, index)
        self.mlp = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), **kwargs)[0]
        return hidden + self.mlp(hidden).tanh()


class RandomModule(nn.Module):
    """A bare decoder: hidden states, memory and, for some specs, a 4-D mask go in."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        config = RandomConfig(spec)
        self.layers = nn.ModuleList(Layer(spec, config, i) for i in range(spec.layers))

    def forward(
        self, hidden: Tensor, memory: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        where = torch.arange(hidden.shape[1], device=hidden.device)[None]
        where = tables(where, self.spec.size)
        for layer in self.layers:
            hidden = layer(
                hidden, position_embeddings=where, memory=memory, attention_mask=attention_mask
            )
        return hidden


class RandomModel(PreTrainedModel):
    """A transformers decoder with the masks and the cache of transformers."""

    config_class = RandomConfig
    _supports_sdpa = True

    def __init__(self, spec: Spec) -> None:
        config = RandomConfig(spec)
        config._attn_implementation = "sdpa"
        super().__init__(config)
        self.spec = spec
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(spec, config, i) for i in range(spec.layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        past = kwargs.get("cache", past_key_values) if self.spec.cached else None
        if past is None and use_cache and self.spec.cached:
            past = DynamicCache()
        hidden = self.embed(input_ids)
        begin = 0 if past is None else past.get_seq_length()
        position = torch.arange(hidden.shape[1], device=hidden.device)[None] + begin
        common = dict(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask)
        common |= {CACHE: past, "position_ids": position}
        if self.spec.mask == "sliding":
            mask = create_sliding_window_causal_mask(**common)
        elif self.spec.mask == "chunk_rule":
            mask = create_causal_mask(**common, and_mask_function=_same_chunk)
        else:
            mask = create_causal_mask(**common)
        where = tables(position, self.spec.size)
        memory = hidden.roll(1, 2)
        for layer in self.layers:
            hidden = layer(
                hidden, position_embeddings=where, memory=memory, attention_mask=mask, past=past
            )
        return CausalLMOutputWithPast(logits=self.head(hidden), past_key_values=past)


def _same_chunk(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query // 6 == key // 6


def build(spec: Spec) -> nn.Module:
    """The decoder of ``spec`` with random weights that make attention far from uniform."""
    with torch.random.fork_rng([]):
        torch.manual_seed(spec.seed)
        model = (RandomModel if spec.host == "model" else RandomModule)(spec)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("_proj" in name or "qkv" in name):
                parameter.data.mul_(3.0)
    return model.eval()
