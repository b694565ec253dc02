"""Softmax attention of some query rows over some keys, forward and explicit backward.

The arithmetic that the reference (one tile), the CPU kernel and ``exact_attention`` (many tiles)
share. A tile must hold every key that its rows see; rows and keys of a tile are independent of all
other tiles, so tiles are computed in any order and their key gradients added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_compile.kernels._call import compute_dtype


@dataclass(frozen=True)
class Dropout:
    """Seeded dropout of attention weights.

    Attributes:
        p: Probability of dropping, in [0, 1).
        seed: 0-d int64.
        head: int64, ``sample * Hq + query head``, broadcastable to [B, Hkv, G, 1, 1].
        row: int64, absolute key position of the rows, broadcastable to [B, 1, 1, Sq, 1].
        column: int64 [Skv], position of the keys.
    """

    p: float
    seed: Tensor
    head: Tensor
    row: Tensor
    column: Tensor

    def factor(self, dtype: torch.dtype) -> Tensor:
        """Returns 0 (dropped) or 1 / (1 - p) (kept) for every weight of the tile.

        A weight is kept when ``mix(mix(mix(mix(seed ^ seed >> 32) ^ head) + row) + column) >= p *
        2**32`` in unsigned 32-bit arithmetic, with the finaliser ``x ^= x >> 16; x *= 0x7feb352d;
        x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16`` as ``mix``: a function of the coordinates
        alone, so every device, chunking and direction draws the same.
        """
        stream = _mix(_mix(self.seed ^ (self.seed >> 32)) ^ self.head)
        mixed = _mix(_mix(stream + self.row) + self.column)
        return (mixed >= round(self.p * 2**32)).to(dtype) / (1.0 - self.p)


@dataclass(frozen=True)
class Tile:
    """One tile; G = Hq / Hkv query heads share a kv head.

    Attributes:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        value: [B, Hkv, Skv, Dv].
        scale: Factor on the scores.
        visible: bool, broadcastable to [B, Hkv, G, Sq, Skv]; None when all pairs are visible.
        real: bool, broadcastable to [B, Skv]; other keys count as zeros whatever they hold.
            None when all are real.
        bias: float, added to the capped scores; broadcastable to [B, Hkv, G, Sq, Skv].
        softcap: ``c`` of ``c * tanh(score / c)``.
        sinks: Learned sink logits [Hq].
        dropout: Dropout of the weights.
        dtype: Computation dtype; None for float32 (float64 for float64 inputs).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | Tensor
    visible: Tensor | None = None
    real: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: Dropout | None = None
    dtype: torch.dtype | None = None


class TileGradients(NamedTuple):
    """Gradients in the computation dtype; ``sinks`` and ``bias`` are None where a tile has none."""

    query: Tensor  # [B, Hq, Sq, D]
    key: Tensor  # [B, Hkv, Skv, D]
    value: Tensor  # [B, Hkv, Skv, Dv]
    sinks: Tensor | None  # [Hq]
    bias: Tensor | None  # [B, Hkv, G, Sq, Skv]


def forward(tile: Tile) -> tuple[Tensor, Tensor]:
    """Returns output [B, Hq, Sq, Dv] and log-sum-exp [B, Hq, Sq] in the computation dtype."""
    state = _evaluate(tile, None)
    weights = state.weights if state.keep is None else state.weights * state.keep
    out = _unfold(weights.flatten(2, 3) @ state.value, state.lse)
    return out, state.lse.flatten(1, 2)


def backward(
    tile: Tile,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: tuple[Tensor, Tensor] | None = None,
) -> TileGradients:
    """Gradients of a tile.

    Args:
        tile: The tile.
        grad_out: Gradient of its output [B, Hq, Sq, Dv].
        grad_lse: Gradient of its log-sum-exp [B, Hq, Sq], or None for zero.
        saved: Its output and log-sum-exp, to spare computing them again; they carry the rounding of
            the output's dtype into the gradients.
    """
    state = _evaluate(tile, None if saved is None else saved[1])
    grad = _fold(grad_out.to(state.query.dtype), state)
    grad = grad.masked_fill(state.empty.flatten(2, 3)[..., None], 0.0)
    weights = state.weights if state.keep is None else state.weights * state.keep
    grad_value = weights.flatten(2, 3).mT @ grad
    grad_scores = (grad @ state.value.mT).view_as(state.weights)
    if state.keep is not None:
        grad_scores.mul_(state.keep)

    # The row term of the softmax's gradient also carries what arrived through the log-sum-exp.
    if saved is None:
        delta = (state.weights * grad_scores).sum(-1)
    else:
        delta = (grad * _fold(saved[0].to(grad.dtype), state)).sum(-1).view_as(state.lse)
    if grad_lse is not None:
        delta = delta - grad_lse.to(delta.dtype).view_as(delta).masked_fill(state.empty, 0.0)
    grad_scores.sub_(delta[..., None]).mul_(state.weights)
    grad_bias = None if tile.bias is None else grad_scores.clone()
    if state.capped is not None and tile.softcap is not None:
        grad_scores.mul_(1.0 - (state.capped / tile.softcap).square())
    folded = grad_scores.flatten(2, 3)
    return TileGradients(
        query=_unfold(folded @ state.key, state.lse) * tile.scale,
        key=folded.mT @ state.query,
        value=grad_value,
        sinks=_sink_gradient(tile, state, delta),
        bias=grad_bias,
    )


class _State(NamedTuple):
    """Intermediates of both directions, the query heads of a group folded into its rows."""

    query: Tensor  # [B, Hkv, G * Sq, D], scaled
    key: Tensor  # [B, Hkv, Skv, D]
    value: Tensor  # [B, Hkv, Skv, Dv]
    capped: Tensor | None  # [B, Hkv, G, Sq, Skv], scores after a softcap, before bias and mask
    weights: Tensor  # [B, Hkv, G, Sq, Skv], the softmax before dropout
    keep: Tensor | None  # [B, Hkv, G, Sq, Skv]
    lse: Tensor  # [B, Hkv, G, Sq]
    empty: Tensor  # bool [B, Hkv, G, Sq], rows that see nothing


def _evaluate(tile: Tile, lse: Tensor | None) -> _State:
    dtype = tile.dtype or compute_dtype(tile.query.dtype)
    batch, heads, rows, _ = tile.query.shape
    _, kv_heads, keys, _ = tile.key.shape
    query = (tile.query.to(dtype) * tile.scale).reshape(batch, kv_heads, -1, tile.query.shape[3])
    key, value = tile.key.to(dtype), tile.value.to(dtype)
    if tile.real is not None:
        unreal = ~tile.real[:, None, :, None]
        key, value = key.masked_fill(unreal, 0.0), value.masked_fill(unreal, 0.0)

    scores = (query @ key.mT).view(batch, kv_heads, heads // kv_heads, rows, keys)
    capped = None
    if tile.softcap is not None:
        capped = scores.div_(tile.softcap).tanh_().mul_(tile.softcap)
        scores = capped.clone()
    if tile.bias is not None:
        scores.add_(tile.bias)
    if tile.visible is not None:
        scores.masked_fill_(~tile.visible, -torch.inf)

    if lse is None:
        # Not exp(scores - lse): where all scores are a mask's lowest number, lse loses the count.
        lse = torch.logsumexp(scores, -1)
        empty = lse == -torch.inf
        weights = torch.softmax(scores, -1).masked_fill_(empty[..., None], 0.0)
        if tile.sinks is not None:
            without = lse.masked_fill(empty, 0.0)
            lse = torch.logaddexp(without, _per_head(tile.sinks, lse))
            weights.mul_(torch.exp(without - lse)[..., None])
            lse.masked_fill_(empty, -torch.inf)
    else:
        lse = lse.to(dtype).reshape(scores.shape[:-1])
        empty = lse == -torch.inf
        weights = scores.sub_(lse.masked_fill(empty, 0.0)[..., None]).exp_()
    query = query.masked_fill(empty.flatten(2, 3)[..., None], 0.0)
    keep = None if tile.dropout is None else tile.dropout.factor(dtype)
    return _State(query, key, value, capped, weights, keep, lse, empty)


def _sink_gradient(tile: Tile, state: _State, delta: Tensor) -> Tensor | None:
    if tile.sinks is None:
        return None
    share = torch.exp(_per_head(tile.sinks, state.lse) - state.lse).masked_fill(state.empty, 0.0)
    return -(share * delta).sum((0, 3)).flatten()


def _per_head(sinks: Tensor, lse: Tensor) -> Tensor:
    """[Hq] -> [1, Hkv, G, 1] in the dtype of ``lse``."""
    return sinks.to(lse.dtype).reshape(1, *lse.shape[1:3], 1)


def _fold(tensor: Tensor, state: _State) -> Tensor:
    """[B, Hq, Sq, X] -> [B, Hkv, G * Sq, X]."""
    batch, kv_heads, group, rows = state.lse.shape
    return tensor.reshape(batch, kv_heads, group * rows, -1)


def _unfold(tensor: Tensor, lse: Tensor) -> Tensor:
    """[B, Hkv, G * Sq, X] -> [B, Hq, Sq, X]."""
    batch, kv_heads, group, rows = lse.shape
    return tensor.reshape(batch, kv_heads * group, rows, -1)


def _mix(x: Tensor) -> Tensor:
    low = 0xFFFFFFFF
    x = x & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)
