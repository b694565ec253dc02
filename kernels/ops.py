"""The attention ops: one definition, many implementations.

``torch.ops.elastic_compile.attention`` and ``torch.ops.elastic_compile.exact_attention`` are opaque
to compilers (one node, no host sync, no guard on lengths) and differentiable. Call them through the
functions below, which spell out what the flat schema means. Importing this module needs torch only.

The method: "Elastic Attention" (arXiv 2601.17367), section 3: every kv head of a layer is routed to
full or to sparse attention, and one call serves all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_compile.kernels import _library
from elastic_compile.kernels._dispatch import default_implementation, fuses_routes

__all__ = [
    "attention",
    "attention_train",
    "default_implementation",
    "exact_attention",
    "fuses_routes",
    "route",
]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    route: Tensor,
    *,
    full_mode: str = "full",
    sparse_mode: str = "streaming",
    sink: int,
    local: int,
    scale: float | Tensor | None = None,
    start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_indptr: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int = 64,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention in which each kv head of each document follows its route.

    Query row i of sample b sits at the absolute key position ``p = kv_len[b] - Sq + i``, so the
    last row sees the last key (bottom-right alignment). It sees key j when ``start[b] <= j <= p``,
    ``j < kv_len[b]``, ``key_mask[b, j]``, and the mode of the head's class allows it:

    - ``"full"``: every such key;
    - ``"streaming"``: ``j - start[b] < sink`` or ``p - j < local``; exact to the token, and a row
      always counts itself: ``local=8`` shows keys p-7 ... p;
    - ``"blocks"``: ``j // block_size`` is in the head's list for query block ``p // block_size``.

    A row that sees nothing (padding, fewer keys than queries) yields zeros, ``lse = -inf`` and no
    gradient. Keys outside ``[start, kv_len)`` or masked may hold anything, NaN included.

    The score of a visible pair is ``q.k * scale``, then ``softcap * tanh(score / softcap)`` where
    one is given. Learned sinks are extra logits in the softmax's denominator, one per query head;
    they have no value. Accumulation is in float32 (float64 for float64 inputs).

    Differentiable in query, key, value, sinks and a tensor scale that is not zero, through the
    output and through lse. Double backward is not supported.

    Args:
        query: [B, Hq, Sq, D], float32, bfloat16, float16 or float64; any strides (all inputs).
        key: [B, Hkv, Skv, D], the query's dtype. Hq must be a multiple of Hkv; query head h reads
            kv head ``h // (Hq / Hkv)``.
        value: [B, Hkv, Skv, Dv], the query's dtype; Dv may differ from D.
        route: int32 [documents, Hkv]: 0 = full class, anything else = sparse class. A document is a
            batch row, or one of ``cu_seqlens``.
        full_mode: Mode of class 0: ``"full"``, ``"streaming"`` or ``"blocks"``.
        sparse_mode: Mode of the sparse class.
        sink: Number of first real tokens that streaming heads always see, >= 0.
        local: Number of newest tokens, the query's own included, that streaming heads see, >= 1.
        scale: Factor on the scores: a number, a 0-d tensor, or None for ``D ** -0.5``.
        start: int [B], first real key of each sample; None for 0.
        kv_len: int [B] or 0-d, filled length of the keys; None for Skv.
        key_mask: bool [B, Skv], True = real key. Needed only where padding is not described by
            start and kv_len (a hole). It does not move ``start``.
        cu_seqlens: int32 [documents + 1], ascending; documents packed in one row. B must be 1, and
            start and kv_len None. Document d holds keys ``cu_seqlens[d] <= j < cu_seqlens[d + 1]``;
            its sink counts from its first key; keys outside all documents count as absent.
        block_indptr: int32 [documents, Hkv, rows + 1] with ``rows >= ceil(Skv / block_size)``:
            query block r of head h lists ``block_indices[indptr[d, h, r] : indptr[d, h, r + 1]]``.
            Offsets ascend over the flattened array; rows are absolute (row = p // block_size).
        block_indices: int32 [nnz], ids of key blocks in absolute positions, ascending in a row.
            Entries behind the last offset are not read.
        block_size: Tokens in a block, for queries and keys.
        softcap: Positive cap on the scores, or None.
        sinks: Learned sink logits [Hq], or None.
        dropout_p: Probability of dropping an attention weight, in [0, 1).
        dropout_seed: 0-d int64, needed where ``dropout_p > 0``; the same seed draws the same
            weights on every device, in every chunking and in the backward.
        kernel: Implementation: ``"auto"`` (the best one that supports the call; environment
            variable ``ELASTIC_COMPILE_KERNEL`` overrides) or a name, which never falls back.

    Returns:
        out: [B, Hq, Sq, Dv] in the query's dtype, a transposed view of contiguous [B, Sq, Hq, Dv].
        lse: [B, Hq, Sq], natural log of the softmax's denominator (before dropout, learned sinks
            included), float32 (float64 for float64 inputs), contiguous.

    Raises:
        ValueError: Shapes or options that mean nothing, or a named kernel that cannot serve them.
        TypeError: Wrong dtypes.
    """
    number, tensor = _split_scale(scale)
    result: tuple[Tensor, Tensor] = _library.attention(
        query,
        key,
        value,
        route,
        sink,
        local,
        full_mode,
        sparse_mode,
        number,
        tensor,
        start,
        kv_len,
        key_mask,
        cu_seqlens,
        block_indptr,
        block_indices,
        block_size,
        softcap,
        sinks,
        dropout_p,
        dropout_seed,
        kernel,
    )
    return result


def attention_train(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    route: Tensor,
    *,
    full_mode: str = "full",
    sparse_mode: str = "streaming",
    sink: int,
    local: int,
    scale: float | Tensor | None = None,
    start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_indptr: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int = 64,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`attention` under straight-through routes, differentiable in them.

    The output of a head is ``(1 - r) O_full + r O_sparse`` (arXiv 2601.17367, section 3). Routes
    are 0.0 or 1.0 in the forward pass, so it is the chosen mode's output, and so are the gradients
    of query, key and value; the route's is ``<dL/dO, O_sparse - O_full>`` over the rows and query
    heads of its kv head. Where an implementation has it, one pass over the keys yields both outputs
    (``kernel="triton"``); otherwise two calls do. The gradients of :func:`attention` repeat to the
    bit with the Triton kernels, and so do these.

    Args:
        query: As in :func:`attention`, like all arguments but the next.
        key: As in :func:`attention`.
        value: As in :func:`attention`.
        route: Floating [documents, Hkv], 0.0 or 1.0: above 0.5 means the sparse class. Its gradient
            is in its dtype; none flows to it through lse.
        full_mode: As in :func:`attention`.
        sparse_mode: As in :func:`attention`.
        sink: As in :func:`attention`.
        local: As in :func:`attention`.
        scale: As in :func:`attention`.
        start: As in :func:`attention`.
        kv_len: As in :func:`attention`.
        key_mask: As in :func:`attention`.
        cu_seqlens: As in :func:`attention`.
        block_indptr: As in :func:`attention`.
        block_indices: As in :func:`attention`.
        block_size: As in :func:`attention`.
        softcap: As in :func:`attention`.
        sinks: As in :func:`attention`.
        dropout_p: As in :func:`attention`.
        dropout_seed: As in :func:`attention`.
        kernel: As in :func:`attention`.

    Returns:
        out [B, Hq, Sq, Dv] and lse [B, Hq, Sq], as :func:`attention`.

    Raises:
        ValueError: Shapes or options that mean nothing, or a named kernel that cannot serve them.
        TypeError: Wrong dtypes.
    """
    number, tensor = _split_scale(scale)
    out, lse, _ = _library.attention_train(
        query,
        key,
        value,
        route,
        sink,
        local,
        full_mode,
        sparse_mode,
        number,
        tensor,
        start,
        kv_len,
        key_mask,
        cu_seqlens,
        block_indptr,
        block_indices,
        block_size,
        softcap,
        sinks,
        dropout_p,
        dropout_seed,
        kernel,
    )
    return out, lse


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    reason: str,
) -> tuple[Tensor, Tensor]:
    """Attention of all heads under a caller's own mask: what a site runs when it cannot route.

    The conventions of :func:`attention` hold for scores, learned sinks, dropout, gradients and rows
    that see nothing. Every call is counted as a fallback under ``reason``.

    Args:
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        value: [B, Hkv, Skv, Dv].
        attn_mask: Broadcastable 4-D to [B, Hq, Sq, Skv]; bool (True = visible), or floating, added
            to the scaled and capped scores; differentiable; None for no mask.
        scale: As in :func:`attention`.
        softcap: As in :func:`attention`.
        sinks: Learned sink logits [Hq], or None.
        is_causal: Also hide keys j > i, counted from the first query row as torch's
            scaled_dot_product_attention does (top-left alignment).
        dropout_p: As in :func:`attention`, rows counted from the first query.
        dropout_seed: As in :func:`attention`.
        reason: Why the call is not routed; the key of the fallback counter.

    Returns:
        out [B, Hq, Sq, Dv] and lse [B, Hq, Sq], as :func:`attention`.

    Raises:
        ValueError: Shapes or options that mean nothing.
        TypeError: Wrong dtypes.
    """
    number, tensor = _split_scale(scale)
    result: tuple[Tensor, Tensor] = _library.exact_attention(
        query,
        key,
        value,
        attn_mask,
        reason,
        number,
        tensor,
        softcap,
        sinks,
        is_causal,
        dropout_p,
        dropout_seed,
    )
    return result


def route(
    tap: Tensor,
    weights: Sequence[Tensor],
    forced: Tensor,
    *,
    key_mask: Tensor | None = None,
    end: Tensor | None = None,
    pool_tokens: int,
    route_bias: float = 0.0,
) -> Tensor:
    """Pool the ends of a prompt, run a router on them and decide, in one launch.

    The fused form of what :mod:`elastic_compile.router` writes out in torch: ``boundary_pool``,
    ``AttentionRouter`` and ``decide``, computed in float32. There is one implementation, Triton's:
    ask :func:`fuses_routes` first. Not differentiable: the result is integers.

    Args:
        tap: Key hidden states before rotary embedding, [B, H, S, D], float32, bfloat16 or float16;
            any strides, also of the last dimension: nothing is copied. What is not real may hold
            anything, NaN included.
        weights: Weight and bias of ``task.0``, ``task.2``, ``router.0``, ``router.2`` and
            ``router.4``: [mD, D], [mD], [D, mD], [D], the same again, [2, D], [2]; float32,
            bfloat16 or float16. Those that are not contiguous are copied.
        forced: int32 [1 or B, H]: routes that are given; below 0 where the router decides.
        key_mask: bool [1 or B, S], True = real; all real when omitted.
        end: int [1 or B], column after the last real one, clamped to [0, S]; S when omitted.
        pool_tokens: Real tokens pooled at each end, at least 1; each counts once.
        route_bias: Added to the sparse logit.

    Returns:
        int32 [B, H], contiguous: ``forced``, else 1 where the sparse logit is larger, else 0 (ties
        and NaN as well).

    Raises:
        ValueError: Shapes or options that mean nothing, or a call that the kernel does not serve.
        TypeError: Wrong dtypes.
    """
    with torch.no_grad():
        result: Tensor = _library.route(
            tap, key_mask, end, forced, list(weights), pool_tokens, route_bias
        )
    return result


def _split_scale(scale: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    return (None, scale) if isinstance(scale, Tensor) else (scale, None)
