"""The module that a rewritten attention gets as ``elastic_router``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from elastic_compile.config import ElasticConfig
from elastic_compile.router import AttentionRouter

ASK_ROUTER = -1
"""Entry of a forced-route table that leaves the decision to the router."""


class ElasticSite(AttentionRouter):
    """A site's router together with what its rewritten graph needs to know at run time.

    The parameters are the router's alone. Everything else is plain attributes and one
    non-persistent buffer, so a checkpoint of the model gains nothing but the router.

    Args:
        config: The model's configuration.
        kv_heads: Key-value heads that the site routes.
        head_dim: Size of a key head, for the report.
        tap_dim: Size of a pre-rotary key head, the router's input (head_dim but for MLA).
        index: Position among the rewritten sites, in module order.
        layer_idx: Layer of the KV cache that the site updates; None without a cache.
        attention_dropout: Probability that the module asks for in train mode.
        interface: Whether the module attends through transformers' ``AttentionInterface``.
        shards: Processes that share the site's heads (tensor parallelism); each routes its own.
        device: Device of the attention module.
    """

    forced: Tensor

    def __init__(
        self,
        config: ElasticConfig,
        *,
        kv_heads: int,
        head_dim: int,
        tap_dim: int,
        index: int,
        layer_idx: int | None,
        attention_dropout: float,
        interface: bool,
        shards: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tap_dim, config.hidden_multiplier, device=device, dtype=torch.float32)
        self.kv_heads = kv_heads
        self.shards = shards
        self.key_dim = head_dim
        self.index = index
        self.layer_idx = layer_idx
        self.attention_dropout = attention_dropout
        self.interface = interface
        self.sink, self.local = config.sink, config.local
        self.pool_tokens = config.pool_tokens
        self.reroute = config.reroute
        self.route_bias = config.route_bias
        self.kernel = config.kernel
        # Set while training: (site, logits [B, H, 2]) -> relaxed routes, float [B, H].
        self.relaxation: Callable[[ElasticSite, Tensor], Tensor] | None = None
        # `route_length` of compiled calls, which cannot read the thread's own.
        self.compiled_limit: Tensor | None = None
        # Tables of the `force_routes` blocks that are open, oldest first.
        self.forcing: dict[object, Tensor] = {}
        # A buffer, so that forcing routes is data and compiles nothing.
        forced = torch.full((1, kv_heads), ASK_ROUTER, dtype=torch.int32, device=device)
        self.register_buffer("forced", forced, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ElasticSite:
        """Moving and casting; memory that is new after the meta device must not hold routes."""
        was_meta = self.forced.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.forced.is_meta:
            self.forced.fill_(ASK_ROUTER)
            self.reset_parameters()
        return self

    def extra_repr(self) -> str:
        return (
            f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, sink={self.sink}, "
            f"local={self.local}"
        )
