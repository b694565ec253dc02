"""Small attention modules and their exported graphs, for the matcher and the pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim

HEADS, KV_HEADS, SIZE = 4, 2, 8
HIDDEN = HEADS * SIZE


def repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, heads, length, size = x.shape
    x = x[:, :, None].expand(batch, heads, n, length, size)
    return x.reshape(batch, heads * n, length, size)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos[:, None] + turned * sin[:, None]


class Attention(nn.Module):
    """Grouped attention written with SDPA; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * SIZE)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * SIZE)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, SIZE).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(self.split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))

    def merge(self, x: Tensor) -> Tensor:
        return self.o_proj(x.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **kwargs) -> Tensor:
        n = HEADS // KV_HEADS
        return F.scaled_dot_product_attention(q, repeat_kv(k, n), repeat_kv(v, n), **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.attend(*self.project(x), is_causal=True))


class Rotary(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.merge(self.attend(q, k, v, is_causal=True))


class PartialRotary(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x)
        n = SIZE // 2
        cos, sin = cos[..., :n], sin[..., :n]
        k = torch.cat([rotate(k[..., :n], cos, sin), k[..., n:]], -1)
        q = torch.cat([rotate(q[..., :n], cos, sin), q[..., n:]], -1)
        return self.merge(self.attend(q, k, v, is_causal=True))


class NativeGrouped(Attention):
    """SDPA's own grouping, and a scale of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        return self.merge(out)


class Masked(Attention):
    """Whatever 4-D mask the caller hands over."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.merge(self.attend(*self.project(x), attn_mask=mask))


class SlicedMask(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.merge(self.attend(q, k, v, attn_mask=mask[:, :, :, : k.shape[2]]))


class Alibi(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        distance = torch.arange(x.shape[1]).float()
        slopes = torch.linspace(0.1, 0.5, HEADS)[:, None, None]
        bias = torch.where(mask, slopes * distance, torch.finfo(torch.float32).min)
        return self.merge(self.attend(*self.project(x), attn_mask=bias))


class Sliding(Attention):
    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        visible = (i[:, None] >= i) & (i[:, None] - i < 4)
        return self.merge(self.attend(*self.project(x), attn_mask=visible))


class Bidirectional(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.attend(*self.project(x)))


class Cross(Attention):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.split(self.q_proj(x))
        k, v = self.split(self.k_proj(memory)), self.split(self.v_proj(memory))
        return self.merge(self.attend(q, k, v, is_causal=True))


class Dropped(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.attend(*self.project(x), is_causal=True, dropout_p=0.1))


class TwoProjections(Attention):
    """Keys from two projections: no single tensor of pre-rotary keys."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x)
        k = torch.cat([rotate(k[..., : SIZE // 2], cos[..., :4], sin[..., :4]), v[..., :4]], -1)
        return self.merge(self.attend(q, k, v, is_causal=True))


class TopLeftCache(Attention):
    """Keys of an earlier call in front: torch's is_causal then means something else."""

    def forward(self, x: Tensor, past_key: Tensor, past_value: Tensor) -> Tensor:
        q, k, v = self.project(x)
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        return self.merge(self.attend(q, k, v, is_causal=True))


def inputs(kind: type[Attention], batch: int = 2, length: int = 9) -> tuple[Tensor, ...]:
    """Random inputs of a module class."""
    x = torch.randn(batch, length, HIDDEN)
    if kind in (Rotary, PartialRotary, TwoProjections):
        angle = torch.randn(1, length, SIZE)
        return x, angle.cos(), angle.sin()
    if kind in (Masked, SlicedMask, Alibi):
        extra = 3 if kind is SlicedMask else 0
        i = torch.arange(length + extra)
        return x, (i[:length, None] >= i).expand(batch, 1, length, length + extra)
    if kind is Cross:
        return x, torch.randn(batch, length + 4, HIDDEN)
    if kind is TopLeftCache:
        past = torch.randn(batch, KV_HEADS, 5, SIZE)
        return x, past, past.clone()
    return (x,)


def graph_of(module: Attention, arguments: tuple[Tensor, ...]) -> fx.GraphModule:
    """The module as an exported graph with dynamic batch and length."""

    def dims(x: Tensor, index: int) -> dict:
        found = {d: Dim.DYNAMIC for d, n in enumerate(x.shape) if n in (2, 9, 12, 13) and d < 2}
        if x.dim() == 4:
            found |= {2: Dim.DYNAMIC} | ({3: Dim.DYNAMIC} if x.dtype == torch.bool else {})
            found.pop(1, None)
        return found

    shapes = tuple(dims(x, i) for i, x in enumerate(arguments))
    program = torch.export.export(module.eval(), arguments, dynamic_shapes=shapes, strict=False)
    return program.module(check_guards=False)
