"""Small models of our own that call ``scaled_dot_product_attention``: no transformers in them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, KV_HEADS, SIZE, WIDTH, WORDS = 4, 2, 8, 32, 50


class FusedAttention(nn.Module):
    """One projection for query, key and value, and an eager branch with a triangular buffer."""

    def __init__(self, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout, self.scale, self.fused = dropout, scale, True
        self.register_buffer("seen", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, SIZE).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        if self.fused:
            p = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=p, scale=self.scale
            )
        else:
            score = (q @ k.transpose(-2, -1)) * (self.scale or SIZE**-0.5)
            score = score.masked_fill(~self.seen[:length, :length], float("-inf"))
            y = score.softmax(-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, **kwargs) -> Tensor:
        x = x + self.attention(self.norm_1(x), **kwargs)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class NanoLike(nn.Module):
    """Learned positions, causal attention, tied output; no cache."""

    def __init__(self, layers: int = 2, attention=FusedAttention) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rotation(nn.Module):
    """Rotary positions as a module that is called on queries and keys, [B, S, H, D]."""

    def __init__(self) -> None:
        super().__init__()
        rate = 100.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
        angle = torch.arange(128)[:, None] * rate
        self.register_buffer("table", torch.stack([angle.cos(), angle.sin()], -1), False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        table = self.table[first : first + x.shape[1]][None, :, None]
        even = pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1]
        odd = pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1]
        return torch.stack([even, odd], -1).flatten(-2)


class Keep(nn.Module):
    """A key-value cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key = self.value = None

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.key is not None:
            key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        self.key, self.value = key, value
        return key, value


class SplitAttention(nn.Module):
    """Separate projections, rotary module, grouped heads by expand, a mask or a cache if given."""

    def __init__(self, rotation: nn.Module | None = None) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.k = nn.Linear(WIDTH, KV_HEADS * SIZE, False)
        self.v = nn.Linear(WIDTH, KV_HEADS * SIZE, False)
        self.rotation = rotation or Rotation()
        self.cache = None

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        batch, length = x.shape[:2]
        q = self.q(x).view(batch, length, HEADS, SIZE)
        k = self.k(y).view(batch, y.shape[1], KV_HEADS, SIZE)
        v = self.v(y).view(batch, y.shape[1], KV_HEADS, SIZE)
        q, k, v = (
            self.rotation(q).transpose(1, 2),
            self.rotation(k).transpose(1, 2),
            v.transpose(1, 2),
        )
        if self.cache is not None:
            k, v = self.cache(k, v)
        group = HEADS // KV_HEADS
        k, v = (
            z[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, HEADS, -1, SIZE)
            for z in (k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(out.transpose(1, 2).reshape(batch, length, WIDTH))


class TuneLike(nn.Module):
    """One rotary module shared by all layers, grouped attention, an optional mask argument."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(SplitAttention()) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, False)

    def forward(self, tokens: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(self.norm(x))


def tokens(batch: int = 3, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def build(kind: type[nn.Module], *args, **kwargs) -> nn.Module:
    """The same weights every time, large enough that attention matters."""
    torch.manual_seed(0)
    model = kind(*args, **kwargs)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(2.0)
    return model.eval()
