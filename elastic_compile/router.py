"""The attention router and what it looks at (Elastic Attention, arXiv 2601.17367, router section).

A router sees the mean key hidden state of the two ends of the prompt, where instruction and
question are, and gives every key-value head one logit per class: 0 full, 1 sparse.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

FULL, SPARSE = 0, 1
"""The two route classes."""


def boundary_pool(
    keys: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    key_mask: Tensor | None = None,
    pool_tokens: int = 100,
) -> Tensor:
    """Mean key hidden state over the first and the last real tokens of every sample.

    Real tokens are the columns from ``start`` to ``end`` that ``key_mask`` does not exclude. The
    first and the last ``pool_tokens`` of them are averaged, each counted once where the two ends
    overlap. At most ``2 * pool_tokens`` columns of ``keys`` are read, whatever the length; the
    rest may hold anything, NaN included. Nothing waits for the device.

    Args:
        keys: Key hidden states before rotary embedding, [B, H, S, D], S at least 1.
        start: First real column of each sample, int [B]; 0 when omitted.
        end: Column after the last real one, int [B]; S when omitted.
        key_mask: Bool [B, S], True = real; all True when omitted.
        pool_tokens: Tokens pooled at each end; at least 1.

    Returns:
        [B, H, D], accumulated and returned in float32 (float64 for float64 keys). A sample with
        no real token gives zeros.

    Raises:
        ValueError: ``pool_tokens`` is below 1.
        TypeError: ``key_mask`` is not bool.
    """
    columns, valid, _ = _ends(keys, start, end, key_mask, pool_tokens)
    # A token within both ends is kept by the head: its place in the tail is `False`.
    picked = _pick(keys, columns)
    picked = picked.to(torch.promote_types(keys.dtype, torch.float32))
    total = torch.where(valid[:, None, :, None], picked, 0.0).sum(2)
    count = valid.sum(1).clamp(min=1)
    return total / count[:, None, None]


class PoolState(NamedTuple):
    """Running boundary pool of a prompt that arrives in chunks.

    Plain tensors of fixed shape with the batch first, so that a cache layer can hold them and
    reorder, select or repeat its rows. P is ``pool_tokens``. The newest tokens are kept one by
    one, since each later token replaces one of them; those already in the head sum are not kept
    again.
    """

    head_sum: Tensor
    """Sum over the first P real tokens, [B, H, D], float32 (float64 for float64 keys)."""

    head_count: Tensor
    """Real tokens in ``head_sum``, int64 [B], at most P."""

    tail_keys: Tensor
    """Newest P of the real tokens after the first P, oldest first, [B, H, P, D]."""

    tail_mask: Tensor
    """Filled places of ``tail_keys``, bool [B, P]; filled from the end."""


def pool_start(keys: Tensor, pool_tokens: int = 100) -> PoolState:
    """The state before any token.

    Args:
        keys: Key hidden states [B, H, S, D]; only shape, dtype and device are used.
        pool_tokens: P, tokens pooled at each end; at least 1.

    Returns:
        An empty state.

    Raises:
        ValueError: ``pool_tokens`` is below 1.
    """
    _check_pool_tokens(pool_tokens)
    batch, heads, _, size = keys.shape
    accumulate = torch.promote_types(keys.dtype, torch.float32)
    return PoolState(
        head_sum=keys.new_zeros(batch, heads, size, dtype=accumulate),
        head_count=keys.new_zeros(batch, dtype=torch.int64),
        tail_keys=keys.new_zeros(batch, heads, pool_tokens, size),
        tail_mask=keys.new_zeros(batch, pool_tokens, dtype=torch.bool),
    )


def pool_update(
    state: PoolState,
    keys: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> PoolState:
    """Add the next tokens of every sample.

    After any sequence of updates ``pool_read`` equals ``boundary_pool`` over all their tokens, up
    to float rounding. Costs the same whatever came before; nothing waits for the device.

    Args:
        state: The state so far; not modified.
        keys: The new tokens' key hidden states before rotary embedding, [B, H, S, D], S at least
            1.
        start: First real column of these ``keys``, int [B]; below 0 means 0.
        end: Column of these ``keys`` after the last real one, int [B]; above S means S.
        key_mask: Bool [B, S], True = real.

    Returns:
        The new state, of the same shapes and dtypes.

    Raises:
        TypeError: ``key_mask`` is not bool.
    """
    if keys.shape[2] == 1:
        return _pool_update_one(state, keys, start, end, key_mask)
    pool_tokens = state.tail_keys.shape[2]
    device = keys.device
    columns, valid, total = _ends(keys, start, end, key_mask, pool_tokens)
    picked = _pick(keys, columns)
    first, last = picked[:, :, :pool_tokens], picked[:, :, pool_tokens:]

    # First real tokens of the chunk that complete the head.
    room = pool_tokens - state.head_count
    place = torch.arange(pool_tokens, device=device)
    to_head = valid[:, :pool_tokens] & (place < room[:, None])
    added = torch.where(to_head[:, None, :, None], first.to(state.head_sum.dtype), 0.0).sum(2)
    head_count = state.head_count + to_head.sum(1)

    # The new tail: the newest tokens of the chunk that are not in the head, right-aligned, then
    # what they leave room for of the old tail. Place k counts from the newest.
    fresh = (total - to_head.sum(1)).clamp(max=pool_tokens)
    k = pool_tokens - 1 - place
    from_chunk = k < fresh[:, None]
    old_place = place + fresh[:, None]
    old_mask = state.tail_mask.gather(1, old_place.clamp(max=pool_tokens - 1))
    tail_mask = from_chunk | (old_mask & (old_place < pool_tokens))
    source = torch.where(from_chunk, place + pool_tokens, old_place.clamp(max=pool_tokens - 1))
    both = torch.cat([state.tail_keys, last.to(state.tail_keys.dtype)], dim=2)
    # Contiguous as at the start: a change of strides would compile the next call anew.
    tail_keys = _pick(both, source).contiguous()
    return PoolState(state.head_sum + added, head_count, tail_keys, tail_mask)


def _pool_update_one(
    state: PoolState,
    key: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    key_mask: Tensor | None,
) -> PoolState:
    """``pool_update`` for one token, which every decode step pays for."""
    pool_tokens = state.tail_keys.shape[2]
    real = torch.ones_like(state.head_count, dtype=torch.bool)
    if start is not None:
        real = real & (start <= 0)
    if end is not None:
        real = real & (end >= 1)
    if key_mask is not None:
        _check_key_mask(key_mask)
        real = real & key_mask[:, 0]
    to_head = real & (state.head_count < pool_tokens)
    to_tail = (real & (state.head_count >= pool_tokens))[:, None]
    token = key[:, :, 0].to(state.head_sum.dtype)
    shifted_keys = torch.cat([state.tail_keys[:, :, 1:], key.to(state.tail_keys.dtype)], dim=2)
    shifted_mask = torch.cat([state.tail_mask[:, 1:], to_tail], dim=1)
    return PoolState(
        state.head_sum + torch.where(to_head[:, None, None], token, 0.0),
        state.head_count + to_head,
        torch.where(to_tail[:, :, None, None], shifted_keys, state.tail_keys),
        torch.where(to_tail, shifted_mask, state.tail_mask),
    )


def pool_read(state: PoolState) -> Tensor:
    """The boundary pool of everything a state has seen.

    Args:
        state: From ``pool_start`` and ``pool_update``.

    Returns:
        [B, H, D] in the dtype of ``state.head_sum``. A sample with no real token gives zeros.
    """
    tail = state.tail_keys.to(state.head_sum.dtype)
    tail = torch.where(state.tail_mask[:, None, :, None], tail, 0.0).sum(2)
    count = (state.head_count + state.tail_mask.sum(1)).clamp(min=1)
    return (state.head_sum + tail) / count[:, None, None]


def _ends(
    keys: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    key_mask: Tensor | None,
    pool_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of the first and the last P real tokens of every sample.

    Returns:
        columns int64 [B, 2P], in range even where not valid; valid bool [B, 2P], each real token
        valid once; and the number of real tokens, int64 [B]. In the first half place i is the
        i-th real token, in the second half place P-1 is the last one.
    """
    _check_pool_tokens(pool_tokens)
    batch, length, device = keys.shape[0], keys.shape[2], keys.device
    place = torch.arange(pool_tokens, device=device)
    if start is None:
        low = torch.zeros(batch, dtype=torch.int64, device=device)
    else:
        low = start.to(torch.int64).clamp(min=0)
    if end is None:
        high = torch.full((batch,), length, dtype=torch.int64, device=device)
    else:
        high = end.to(torch.int64).clamp(max=length)

    if key_mask is None:
        total = (high - low).clamp(min=0)
        first = low[:, None] + place
        last = high[:, None] - pool_tokens + place
    else:
        _check_key_mask(key_mask)
        position = torch.arange(length, device=device)
        real = key_mask & (position >= low[:, None]) & (position < high[:, None])
        rank = real.to(torch.int64).cumsum(1)
        total = rank[:, -1]
        first = _columns_by_rank(real, rank - 1, position, pool_tokens)
        last = _columns_by_rank(
            real, rank - 1 - total[:, None] + pool_tokens, position, pool_tokens
        )
    columns = torch.cat([first, last], dim=1).clamp(min=0).clamp(max=length - 1)
    in_first = place < total[:, None]
    # The i-th from the end has rank total - P + place, 0-based: in the first half when below P.
    in_last = total[:, None] - pool_tokens + place >= pool_tokens
    return columns, torch.cat([in_first, in_last], dim=1), total


def _check_pool_tokens(pool_tokens: int) -> None:
    if pool_tokens < 1:
        raise ValueError(f"pool_tokens is {pool_tokens}; allowed: 1 or more")


def _check_key_mask(key_mask: Tensor) -> None:
    if key_mask.dtype != torch.bool:
        raise TypeError(
            f"key_mask must be bool with True = real, not {key_mask.dtype}; convert a 0/1 padding "
            "mask with .bool()"
        )


def _columns_by_rank(real: Tensor, slot: Tensor, position: Tensor, slots: int) -> Tensor:
    """Column of the real token that belongs in each slot, int64 [B, slots]; 0 where there is none.

    A scatter of column numbers: no comparison of every slot with every column, and, unlike
    ``searchsorted``, ONNX has it.
    """
    wanted = real & (slot >= 0) & (slot < slots)
    slot = torch.where(wanted, slot, slots)
    columns = torch.zeros(real.shape[0], slots + 1, dtype=torch.int64, device=real.device)
    return columns.scatter(1, slot, position.expand_as(slot))[:, :slots]


def _pick(keys: Tensor, columns: Tensor) -> Tensor:
    """Columns [B, N] of keys [B, H, S, D], as [B, H, N, D]."""
    # Indexing tokens copies them whole; `gather` would go element by element.
    sample = torch.arange(keys.shape[0], device=keys.device)[:, None]
    return keys.transpose(1, 2)[sample, columns].transpose(1, 2)


class AttentionRouter(nn.Module):
    """Two MLPs that turn a head's pooled key into full and sparse logits.

    ``task`` is Linear(D, mD), SiLU, Linear(mD, D); ``router`` is Linear(D, mD), SiLU,
    Linear(mD, D), SiLU, Linear(D, 2), with D the head size and m the hidden multiplier. The same
    weights serve all heads of a layer: 263,682 parameters at D = 128 and m = 4. The last layer
    starts at zero, so that an untrained router ties and every head is full.

    Args:
        head_dim: D, size of a key head; at least 1.
        hidden_multiplier: m; at least 1.
        device: Where the parameters are made; meta works.
        dtype: Their dtype.

    Raises:
        ValueError: A size is below 1.
    """

    def __init__(
        self,
        head_dim: int,
        hidden_multiplier: int = 4,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim < 1 or hidden_multiplier < 1:
            raise ValueError(
                "a router needs head_dim >= 1 and hidden_multiplier >= 1, "
                f"not {head_dim} and {hidden_multiplier}"
            )
        self.head_dim = head_dim
        self.hidden_multiplier = hidden_multiplier
        hidden = hidden_multiplier * head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, device=device, dtype=dtype)

        self.task = nn.Sequential(linear(head_dim, hidden), nn.SiLU(), linear(hidden, head_dim))
        self.router = nn.Sequential(
            linear(head_dim, hidden),
            nn.SiLU(),
            linear(hidden, head_dim),
            nn.SiLU(),
            linear(head_dim, 2),
        )
        self._zero_last()

    def reset_parameters(self) -> None:
        """Draw new weights, for a router made on the meta device and then given memory."""
        for module in (*self.task, *self.router):
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        self._zero_last()

    def _zero_last(self) -> None:
        last = self.router[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        """Logits of both classes for every head.

        Args:
            pooled: Pooled key hidden states, [B, H, D], any float dtype; cast to the router's.

        Returns:
            [B, H, 2] in the router's dtype; class 0 is full, class 1 sparse.
        """
        weight = self.task[0].weight
        # A quantised linear that took the place of ours hands out its weight by a method.
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
        logits: Tensor = self.router(self.task(pooled.to(dtype)))
        return logits

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, hidden_multiplier={self.hidden_multiplier}"


def decide(logits: Tensor, route_bias: float | Tensor = 0.0) -> Tensor:
    """Routes from logits: the larger one, without noise.

    Args:
        logits: [B, H, 2], any float dtype.
        route_bias: Added to every sparse logit; a number or a 0-d tensor.

    Returns:
        int32 [B, H]: 0 full, 1 sparse. Ties, and logits that are NaN, go to full.
    """
    # In float32: a bias far smaller than a bfloat16 logit still moves a close decision.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sparse = logits[..., SPARSE] + route_bias > logits[..., FULL]
    return sparse.to(torch.int32)
