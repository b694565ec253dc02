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
    state = _evaluate(tile)
    weights = state.weights if state.keep is None else state.weights * state.keep
    out = _unfold(weights.flatten(2, 3) @ state.value, state.lse)
    return out, state.lse.flatten(1, 2)


def backward(tile: Tile, grad_out: Tensor, grad_lse: Tensor | None) -> TileGradients:
    """Gradients of a tile, from those of its output [B, Hq, Sq, Dv] and lse [B, Hq, Sq]."""
    state = _evaluate(tile)
    grad = _fold(grad_out.to(state.query.dtype), state)
    if state.empty is not None:
        grad = grad.masked_fill(state.empty.flatten(2, 3)[..., None], 0.0)
    weights = state.weights if state.keep is None else state.weights * state.keep
    grad_value = weights.flatten(2, 3).mT @ grad
    grad_weights = (grad @ state.value.mT).view_as(state.weights)
    if state.keep is not None:
        grad_weights = grad_weights * state.keep

    # The row term of the softmax's gradient also carries what arrived through the log-sum-exp.
    delta = (state.weights * grad_weights).sum(-1)
    if grad_lse is not None:
        through_lse = grad_lse.to(delta.dtype).view_as(delta)
        if state.empty is not None:
            through_lse = through_lse.masked_fill(state.empty, 0.0)
        delta = delta - through_lse
    grad_scores = state.weights * (grad_weights - delta[..., None])
    grad_bias = grad_scores if tile.bias is not None else None

    if tile.softcap is not None:
        slope = 1.0 - (state.capped / tile.softcap).square()
        grad_scores = grad_scores * slope
    grad_scores = (grad_scores * tile.scale).flatten(2, 3)
    return TileGradients(
        query=_unfold(grad_scores @ state.key, state.lse),
        key=grad_scores.mT @ state.query,
        value=grad_value,
        sinks=_sink_gradient(tile, state, delta),
        bias=grad_bias,
    )


class _State(NamedTuple):
    """Intermediates of both directions, the query heads of a group folded into its rows."""

    query: Tensor  # [B, Hkv, G * Sq, D]
    key: Tensor  # [B, Hkv, Skv, D]
    value: Tensor  # [B, Hkv, Skv, Dv]
    capped: Tensor  # [B, Hkv, G, Sq, Skv], scores after the softcap, before bias and mask
    weights: Tensor  # [B, Hkv, G, Sq, Skv], the softmax before dropout
    keep: Tensor | None  # [B, Hkv, G, Sq, Skv]
    lse: Tensor  # [B, Hkv, G, Sq]
    empty: Tensor | None  # bool [B, Hkv, G, Sq], rows that see nothing; None when there are none


def _evaluate(tile: Tile) -> _State:
    dtype = tile.dtype or compute_dtype(tile.query.dtype)
    batch, heads, rows, _ = tile.query.shape
    _, kv_heads, keys, _ = tile.key.shape
    query = tile.query.to(dtype).reshape(batch, kv_heads, heads // kv_heads * rows, -1)
    key, value = tile.key.to(dtype), tile.value.to(dtype)
    if tile.real is not None:
        unreal = ~tile.real[:, None, :, None]
        key, value = key.masked_fill(unreal, 0.0), value.masked_fill(unreal, 0.0)

    capped = (query @ key.mT).view(batch, kv_heads, heads // kv_heads, rows, keys) * tile.scale
    if tile.softcap is not None:
        capped = tile.softcap * torch.tanh(capped / tile.softcap)
    scores = capped if tile.bias is None else capped + tile.bias
    if tile.visible is not None:
        scores = scores.masked_fill(~tile.visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)

    empty = None
    if tile.visible is not None or tile.bias is not None:
        empty = lse == -torch.inf
        query = query.masked_fill(empty.flatten(2, 3)[..., None], 0.0)
    if tile.sinks is not None:
        lse = torch.logaddexp(lse, _per_head(tile.sinks, lse))
    if empty is not None:
        lse = lse.masked_fill(empty, -torch.inf)
        weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    else:
        weights = torch.exp(scores - lse[..., None])
    keep = None if tile.dropout is None else tile.dropout.factor(dtype)
    return _State(query, key, value, capped, weights, keep, lse, empty)


def _sink_gradient(tile: Tile, state: _State, delta: Tensor) -> Tensor | None:
    if tile.sinks is None:
        return None
    share = torch.exp(_per_head(tile.sinks, state.lse) - state.lse)
    if state.empty is not None:
        share = share.masked_fill(state.empty, 0.0)
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
