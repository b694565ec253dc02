"""``attention_train`` for the plain causal case, out of torch SDPA calls."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def mix_blocked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    route: Tensor,
    *,
    sink: int,
    local: int,
    scale: float | None = None,
) -> Tensor:
    """Routed output of two differentiable SDPA calls, which have fast GPU backwards.

    Args:
        query: [B, Hq, S, D].
        key: [B, H, S, D], S as the query's.
        value: [B, H, S, Dv].
        route: Straight-through routes, float [B, H].
        sink: First tokens that streaming heads see.
        local: Newest tokens, the query's own included, that they see.
        scale: Factor on the scores; None: D ** -0.5.

    Returns:
        [B, Hq, S, Dv].
    """
    group = query.shape[1] // key.shape[1]
    full = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=group > 1
    )
    sparse = streaming_blocked(query, key, value, sink=sink, local=local, scale=scale)
    # lerp is exact at 0 and 1.
    return torch.lerp(full, sparse, _per_query_head(route, group).to(full.dtype))


def streaming_blocked(
    query: Tensor, key: Tensor, value: Tensor, *, sink: int, local: int, scale: float | None = None
) -> Tensor:
    """Streaming attention of all heads, causal, without padding: linear in S.

    Query blocks attend to [sink | window] of their own keys in one SDPA call. Arguments and result
    as :func:`mix_blocked`.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if length <= sink + local:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=group > 1
        )
    block = min(256, -(-length // 16) * 16)
    blocks = -(-length // block)
    # Widened to a multiple of 8 keys, which memory-efficient SDPA wants; the mask hides the rest.
    reach = local - 1 + -(sink + local - 1 + block) % 8
    columns = torch.arange(reach + block, device=query.device)
    place = torch.arange(block, device=query.device)[:, None]
    first = torch.arange(blocks, device=query.device)[:, None, None] * block
    row, column = first + place, first - reach + columns
    near = (column >= 0) & (column <= row) & (row - column < local)
    head = torch.arange(sink, device=query.device)
    far = (head <= row) & (row - head >= local)
    visible = torch.cat([far, near], 2)

    def windows(x: Tensor) -> Tensor:
        """[B, H, S, D] -> [B * blocks, H, sink + reach + block, D]."""
        padded = pad(x, (0, 0, reach, blocks * block - length))
        own = padded.unfold(2, reach + block, block).permute(0, 2, 1, 4, 3)
        shared = x[:, None, :, :sink].expand(-1, blocks, -1, -1, -1)
        return torch.cat([shared, own], 3).flatten(0, 1)

    rows = pad(query, (0, 0, 0, blocks * block - length))
    # The query heads of a group become rows: keys are not repeated.
    rows = rows.reshape(batch, kv_heads, group, blocks, block, dim).permute(0, 3, 1, 2, 4, 5)
    out = scaled_dot_product_attention(
        rows.reshape(batch * blocks, kv_heads, group * block, dim),
        windows(key),
        windows(value),
        attn_mask=visible.repeat(batch, group, 1)[:, None],
        scale=scale,
    )
    out = out.reshape(batch, blocks, kv_heads, group, block, -1).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(batch, heads, blocks * block, -1)[:, :, :length]


def _per_query_head(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, 1)[:, :, None, None]
