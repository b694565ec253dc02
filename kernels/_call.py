"""The arguments of one op call, as every implementation receives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FULL, STREAMING, BLOCKS = MODES = ("full", "streaming", "blocks")


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of ``elastic_compile::attention``, in schema order.

    Field meanings, shapes and dtypes are those of
    :func:`elastic_compile.kernels.ops.attention`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    route: Tensor
    sink: int
    local: int
    full_mode: str = FULL
    sparse_mode: str = STREAMING
    scale: float | None = None
    scale_tensor: Tensor | None = None
    start: Tensor | None = None
    kv_len: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    block_indptr: Tensor | None = None
    block_indices: Tensor | None = None
    block_size: int = 64
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    implementation: str = "auto"

    @property
    def modes(self) -> tuple[str, str]:
        """The modes of route class 0 and of route class 1."""
        return self.full_mode, self.sparse_mode

    @property
    def resolved_scale(self) -> float | Tensor:
        """The factor on the scores: a float, or the caller's 0-d tensor."""
        return resolve_scale(self)

    @property
    def uniform(self) -> bool:
        """True when the shapes alone say that every route means the same visible keys."""
        if BLOCKS in self.modes:
            return False
        return STREAMING not in self.modes or self.key.shape[2] <= self.sink + self.local


@dataclass(frozen=True)
class ExactCall:
    """Arguments of ``elastic_compile::exact_attention``, in schema order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    reason: str
    scale: float | None = None
    scale_tensor: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    @property
    def resolved_scale(self) -> float | Tensor:
        """The factor on the scores: a float, or the caller's 0-d tensor."""
        return resolve_scale(self)


@dataclass(frozen=True)
class RouteCall:
    """Arguments of ``elastic_compile::route``, in schema order.

    Field meanings, shapes and dtypes are those of :func:`elastic_compile.kernels.ops.route`.
    """

    tap: Tensor
    key_mask: Tensor | None
    end: Tensor | None
    forced: Tensor
    weights: list[Tensor]
    pool_tokens: int
    route_bias: float = 0.0


def new_outputs(call: AttentionCall | ExactCall) -> tuple[Tensor, Tensor]:
    """Memory for the results of a call: output [B, Hq, Sq, Dv] and log-sum-exp [B, Hq, Sq].

    The output's heads are neighbours in memory ([B, Sq, Hq, Dv], transposed), as torch SDPA leaves
    them on a GPU and models merge them: no copy stands between the op and the projection.
    """
    batch, heads, queries, _ = call.query.shape
    out = call.query.new_empty((batch, queries, heads, call.value.shape[3])).transpose(1, 2)
    return out, out.new_empty((batch, heads, queries), dtype=compute_dtype(out.dtype))


def resolve_scale(call: AttentionCall | ExactCall) -> float | Tensor:
    """Returns ``scale``, else ``scale_tensor``, else ``D ** -0.5``."""
    if call.scale is not None:
        return call.scale
    if call.scale_tensor is not None:
        return call.scale_tensor
    return call.query.shape[-1] ** -0.5


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype for inputs of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
