"""Forward attention on the CPU, pieced together from torch's flash kernel.

In :func:`full` and :func:`streaming` a row's keys are cut into pieces that need no mask, or one
band mask for all blocks; each piece is one call of the flash kernel, and pieces are merged by their
log-sum-exps. Memory is linear in the number of keys, and kv heads are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from elastic_compile.kernels import _tile
from elastic_compile.kernels._call import compute_dtype
from elastic_compile.kernels._tile import Tile

BLOCK = 64
"""Query rows of a block, here and in the tiles of the backward; 32 ... 128 are within 10 %."""

Piece = tuple[Tensor, Tensor]
"""Output [B, Hq, rows, Dv] and log-sum-exp [B, Hq, rows]."""


def prepare(tensor: Tensor, upcast: bool) -> Tensor:
    """An input as the kernel wants it; ``upcast`` computes half precision in float32."""
    if upcast:
        tensor = tensor.to(compute_dtype(tensor.dtype))
    # Once, rather than in every piece.
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def full(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Piece:
    """Causal attention of the last rows of a sequence over all keys before them.

    Args:
        query: [B, Hq, rows, D], with rows <= keys; the last row sits at the last key.
        key: [B, Hkv, keys, D].
        value: [B, Hkv, keys, Dv].
        scale: Factor on the scores.
    """
    past = key.shape[2] - query.shape[2]
    if query.shape[2] == 1:
        return _every_key(query, key, value, scale)
    recent = _flash(query, key[:, :, past:], value[:, :, past:], scale, causal=True)
    if past == 0:
        return recent
    return _merge(_every_key(query, key[:, :, :past], value[:, :, :past], scale), recent)


def streaming(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sink: int, local: int
) -> Piece:
    """As :func:`full`, but a row sees the first ``sink`` and the last ``local`` keys only."""
    rows, past = query.shape[2], key.shape[2] - query.shape[2]
    if rows == 1 and past >= sink + local:
        key, value = (torch.cat([x[:, :, :sink], x[:, :, -local:]], 2) for x in (key, value))
        return _every_key(query, key, value, scale)
    # Rows before position sink + local see every key; behind it, sink and window are apart.
    dense = min(max(sink + local - past, 0), rows)
    pieces = []
    if dense:
        end = past + dense
        pieces.append(full(query[:, :, :dense], key[:, :, :end], value[:, :, :end], scale))
    if dense < rows:
        late = query[:, :, dense:]
        window = _window(late, key, value, scale, local)
        if sink:
            window = _merge(_every_key(late, key[:, :, :sink], value[:, :, :sink], scale), window)
        pieces.append(window)
    return _concatenate(pieces)


def attend(tile: Tile) -> Piece:
    """A tile of any kind, mask and bias as one bias; softcap and dropout do without the kernel."""
    if tile.softcap is not None or tile.dropout is not None:
        return _tile.forward(tile)
    dtype = tile.query.dtype
    upcast = dtype == torch.float16 or (tile.bias is not None and tile.bias.dtype != dtype)
    query, key, value = (prepare(x, upcast) for x in (tile.query, tile.key, tile.value))
    if tile.real is not None:
        unreal = ~tile.real[:, None, :, None]
        key, value = key.masked_fill(unreal, 0.0), value.masked_fill(unreal, 0.0)
    bias = _as_bias(tile, query.dtype)
    out, lse = _flash(query, key, value, float(tile.scale), mask=bias)
    if tile.sinks is not None:
        out, lse = with_sinks(out, lse, tile.sinks)
    empty = bias.amax(-1) == -torch.inf
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Piece:
    """Adds learned sink logits [Hq] to the denominator of rows that see some key."""
    total = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    return out * torch.exp(lse - total)[..., None], total


def _as_bias(tile: Tile, dtype: torch.dtype) -> Tensor:
    """Mask and bias of a tile as [B or 1, Hq or 1, rows, keys], -inf where invisible."""
    given = [tensor for tensor in (tile.visible, tile.bias) if tensor is not None]
    _, kv_heads, keys, _ = tile.key.shape
    rows, group = tile.query.shape[2], tile.query.shape[1] // kv_heads
    batch, *heads, _, _ = torch.broadcast_shapes((1, 1, 1, rows, keys), *(x.shape for x in given))
    if heads != [1, 1]:
        heads = [kv_heads, group]
    bias = tile.query.new_zeros((), dtype=dtype) if tile.bias is None else tile.bias.to(dtype)
    bias = bias.expand(batch, *heads, rows, keys)
    if tile.visible is not None:
        bias = bias.masked_fill(~tile.visible, -torch.inf)
    return bias.flatten(1, 2).contiguous()


def _window(query: Tensor, key: Tensor, value: Tensor, scale: float, local: int) -> Piece:
    """Attention of the last rows of a sequence over the ``local`` keys up to each row's own."""
    first = key.shape[2] - query.shape[2] - local + 1
    key, value = key[:, :, first:], value[:, :, first:]
    even = query.shape[2] // BLOCK * BLOCK
    pieces = []
    if even:
        pieces.append(_band(query[:, :, :even], key, value, scale, local, BLOCK))
    if even < query.shape[2]:
        rest = query[:, :, even:]
        pieces.append(
            _band(rest, key[:, :, even:], value[:, :, even:], scale, local, rest.shape[2])
        )
    return _concatenate(pieces)


def _band(query: Tensor, key: Tensor, value: Tensor, scale: float, local: int, block: int) -> Piece:
    """Rows i over keys i ... i + local - 1; the blocks of all rows go in one call per sample."""
    batch, heads, rows, _ = query.shape
    kv_heads, blocks, width = key.shape[1], rows // block, local + block - 1
    keys = key[:, :, : rows + local - 1].unfold(2, width, block)  # [B, Hkv, blocks, D, width]
    values = value[:, :, : rows + local - 1].unfold(2, width, block)
    folded = query.reshape(batch, kv_heads, heads // kv_heads, blocks, block, -1)
    folded = folded.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)  # [B, blocks, Hkv, G * block, D]
    row = torch.arange(block)[:, None]
    column = torch.arange(width)
    hidden = (column < row) | (column >= row + local)
    mask = query.new_zeros(block, width).masked_fill_(hidden, -torch.inf)
    mask = mask.repeat(heads // kv_heads, 1)
    pieces = [
        _flash(
            folded[sample],
            keys[sample].permute(1, 0, 3, 2),
            values[sample].permute(1, 0, 3, 2),
            scale,
            mask=mask,
        )
        for sample in range(batch)
    ]
    out, lse = (torch.stack(tensors) for tensors in zip(*pieces, strict=True))
    shape = (batch, blocks, kv_heads, heads // kv_heads, block)
    out = out.reshape(*shape, -1).permute(0, 2, 3, 1, 4, 5).reshape(batch, heads, rows, -1)
    return out, lse.reshape(shape).permute(0, 2, 3, 1, 4).reshape(batch, heads, rows)


def _every_key(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Piece:
    """All rows over all keys; a group's query heads become rows, so keys are read once."""
    batch, heads, rows, _ = query.shape
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1] * rows, -1)
    out, lse = _flash(folded, key, value, scale)
    return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Piece:
    # This ATen op is what scaled_dot_product_attention runs; it also returns the log-sum-exp. It
    # masks with -inf before it scales, so a scale that is not positive goes into the query.
    if scale < 0:
        query, scale = -query, -scale
    elif scale == 0:
        query, scale = torch.zeros_like(query), 1.0
    # It wants one head size, and zeros behind the shorter one change nothing.
    size = value.shape[3]
    if size != query.shape[3]:
        head = max(query.shape[3], size)
        query, key, value = (F.pad(x, (0, head - x.shape[3])) for x in (query, key, value))
    # It reads a head as if it were contiguous, whatever the stride says.
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out[..., :size], lse


def _merge(first: Piece, second: Piece) -> Piece:
    """Attention over the union of two disjoint, non-empty sets of keys."""
    lse = torch.logaddexp(first[1], second[1])
    share = torch.exp(first[1] - lse)[..., None]
    return torch.lerp(second[0].to(lse.dtype), first[0].to(lse.dtype), share), lse


def _concatenate(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    outs, lses = zip(*pieces, strict=True)
    dtype = outs[-1].dtype
    return torch.cat([out.to(dtype) for out in outs], 2), torch.cat(lses, 2)
