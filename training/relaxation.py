"""Routes with a gradient: Gumbel-Softmax, straight-through, and how the temperature anneals.

Elastic Attention (arXiv 2601.17367), section on training the router.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_compile._site import ElasticSite
from elastic_compile.router import FULL, SPARSE

EPSILON = 1e-10
"""ε of the Gumbel noise: keeps both logarithms finite."""

SCHEDULES = ("cosine", "exponential", "constant")


@dataclasses.dataclass(frozen=True)
class Temperature:
    """τ as a function of progress p in [0, 1], the share of the steps already taken.

    - ``"cosine"`` (the authors' released code): from ``start`` to ``end`` along half a cosine over
      the first ``share`` of the steps, then ``end``.
    - ``"exponential"`` (the paper): max(end, start · exp(−0.6 p)).
    - ``"constant"``: ``start``.

    Raises:
        ValueError: An unknown schedule, or a temperature or share out of range.
    """

    schedule: str = "cosine"
    start: float = 1.5
    end: float = 1.0
    share: float = 0.6

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"the temperature schedule is {self.schedule!r}; allowed: {', '.join(SCHEDULES)}"
            )
        if not 0 < self.end <= self.start < math.inf:
            raise ValueError(
                f"temperatures must satisfy 0 < end <= start, not start {self.start}, "
                f"end {self.end}"
            )
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; allowed: above 0, at most 1")

    def at(self, progress: float) -> float:
        """τ at ``progress`` in [0, 1]."""
        if self.schedule == "exponential":
            return max(self.end, self.start * math.exp(-0.6 * progress))
        if self.schedule == "constant":
            return self.start
        angle = math.pi * min(progress / self.share, 1.0)
        return self.end + (self.start - self.end) * 0.5 * (1 + math.cos(angle))


def gumbel(uniform: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Standard Gumbel noise g = −log(−log(u + ε) + ε) from uniform u in [0, 1), any shape."""
    return -torch.log(-torch.log(uniform + epsilon) + epsilon)


def straight_through(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Hard routes whose gradient is that of r_soft = softmax((z + g) / τ).

    Args:
        logits: z, [B, H, 2]; class 0 full, 1 sparse.
        noise: g, broadcastable to the logits.
        temperature: τ.

    Returns:
        r = onehot(argmax r_soft) + r_soft − stop_gradient(r_soft), its sparse class: float32
        [B, H], exactly 0.0 or 1.0. Ties go to full.
    """
    noisy = (logits.float() + noise) / temperature
    soft = noisy.softmax(-1)[..., SPARSE]
    hard = (noisy[..., SPARSE] > noisy[..., FULL]).to(soft.dtype)
    # In this order the correction is exactly zero, whatever the rounding.
    return hard + (soft - soft.detach())


class GumbelRelaxation:
    """What ``site.relaxation`` calls while training: relaxed routes, kept for the constraint.

    The noise of a step is fixed before the forward pass and indexed by site, so recomputing a
    layer (gradient checkpointing) draws nothing and gives the same routes. Routes are kept only
    while :meth:`recording`, once a site.
    """

    def __init__(self) -> None:
        self.temperature = 1.0
        self.noise: Tensor | None = None
        self.routes: dict[int, Tensor] = {}
        self._recording = False

    def begin(self, noise: Tensor, temperature: float) -> None:
        """Start a forward pass.

        Args:
            noise: Gumbel noise [B, sites, max kv heads, 2], on the device of the routers.
            temperature: τ of the step.
        """
        self.noise, self.temperature = noise, temperature
        self.routes = {}
        self._recording = True

    def end(self) -> list[Tensor]:
        """End the forward pass: the routes of every site that ran, float [B, H], by site."""
        self._recording = False
        routes, self.routes = self.routes, {}
        return [routes[index] for index in sorted(routes)]

    def __call__(self, site: ElasticSite, logits: Tensor) -> Tensor:
        assert self.noise is not None, "begin() was not called"
        noise = self.noise[:, site.index, : site.kv_heads].to(logits.device)
        if site.route_bias:
            logits = logits + logits.new_tensor([0.0, site.route_bias])
        route = straight_through(logits, noise, self.temperature)
        if self._recording:
            self.routes[site.index] = route
        return route


def sparsity_ratio(routes: Sequence[Tensor]) -> Tensor:
    """Ω_MSR of every sample: the share of (layer, kv head) pairs routed sparse, float [B].

    Args:
        routes: One float [B, H] a site. Hard values; a straight-through gradient passes.
    """
    heads = sum(route.shape[1] for route in routes)
    return torch.stack([route.sum(1).to(routes[0].device) for route in routes]).sum(0) / heads


def sample_noise(seed: int, keys: Sequence[int], sites: int, heads: int) -> Tensor:
    """Gumbel noise that belongs to a sample: the same in whatever batch or process it sits.

    Args:
        seed: Seed of the run.
        keys: Number of every sample in the run, [B].
        sites: Rewritten sites.
        heads: Most kv heads of a site.

    Returns:
        float32 [B, sites, heads, 2] on the CPU.
    """
    rows = []
    for key in keys:
        digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        rows.append(torch.rand(sites, heads, 2, generator=generator))
    return gumbel(torch.stack(rows))
