"""Settings of a fit: presets, recipes, and what they stand for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from elastic_compile.training.constraints import FORMS, Target
from elastic_compile.training.relaxation import EPSILON, SCHEDULES, Temperature

SENSITIVE, ROBUST = Target(0.7, 0.7), Target(1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """How routers are trained. Defaults are the preset ``"quick"``.

    Raises:
        ValueError: A setting that is out of range.
    """

    length: int = 4096
    """Most tokens of a sample."""
    steps: int = 300
    """Optimiser steps."""
    batch_size: int = 8
    """Samples a step, over all processes and accumulation steps."""
    micro_batch: int = 0
    """Samples a forward pass of one process; a step accumulates as many passes as the batch needs.
    0: all of a process's share at once."""
    router_lr: float = 2e-3
    """Peak learning rate of the routers."""
    lambda_lr: float = 3e-2
    """Learning rate of λ1 and λ2, constant."""
    warmup: float = 0.2
    """Share of the steps in which the routers' rate rises linearly; a cosine to zero follows."""
    weight_decay: float = 0.1
    """Of the routers; λ has none."""
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 5.0
    """The routers' gradient is clipped to this norm; 0: not clipped."""
    constraint: str = "distance"
    """Linear term, ``"distance"`` |Ω − t| with λ >= 0 or ``"signed"`` Ω − t."""
    temperature: str = "cosine"
    """Schedule of τ: ``"cosine"``, ``"exponential"`` or ``"constant"``."""
    temperature_start: float = 1.5
    temperature_end: float = 1.0
    temperature_share: float = 0.6
    """Share of the steps over which the cosine falls."""
    gumbel_epsilon: float = EPSILON
    """ε in g = −log(−log(u + ε) + ε)."""
    seed: int = 0
    """Of the routers' first weights, λ, the noise and the order of the data."""
    save_every: int = 50
    """Steps between checkpoints."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping their activations."""
    workers: int = 0
    """Processes that prepare data."""

    def __post_init__(self) -> None:
        for name, low in (
            ("length", 2),
            ("steps", 1),
            ("batch_size", 1),
            ("micro_batch", 0),
            ("save_every", 1),
            ("workers", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}; allowed: a whole number from {low}")
        for name in ("router_lr", "lambda_lr", "weight_decay", "max_grad_norm", "gumbel_epsilon"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; allowed: a finite number from 0")
        for name in ("beta1", "beta2", "warmup"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: from 0, below 1")
        if self.constraint not in FORMS:
            raise ValueError(
                f"constraint is {self.constraint!r}; allowed: {', '.join(map(repr, FORMS))}"
            )
        if self.temperature not in SCHEDULES:
            raise ValueError(
                f"temperature is {self.temperature!r}; allowed: {', '.join(map(repr, SCHEDULES))}"
            )
        self.annealing()

    def annealing(self) -> Temperature:
        """The temperature schedule."""
        return Temperature(
            self.temperature, self.temperature_start, self.temperature_end, self.temperature_share
        )

    def accumulation(self, processes: int = 1) -> int:
        """Forward passes a step in each of ``processes``.

        Raises:
            ValueError: The batch does not divide evenly.
        """
        share, rest = divmod(self.batch_size, processes)
        passes, remainder = divmod(share, self.micro_batch or max(1, share))
        if rest or remainder or not share:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide evenly among {processes} processes "
                f"with a micro_batch of {self.micro_batch or share}"
            )
        return passes

    def router_rate(self, step: int) -> float:
        """Factor on ``router_lr`` in step ``step`` (from 0): linear warm-up, then a cosine."""
        warm = math.ceil(self.warmup * self.steps)
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings that go together, with window sizes and targets."""

    settings: FitSettings
    sink: int
    local: int
    targets: dict[str, Target]
    """Targets of tasks known by name; all others must be given."""


# Retrieval needs its full heads, language modelling hardly (the paper's two regimes).
_BUILTIN_TARGETS = {
    "niah_single": SENSITIVE,
    "niah_multikey": SENSITIVE,
    "lm_code": ROBUST,
    "lm_prose": ROBUST,
}

PRESETS = {
    "quick": Preset(FitSettings(), sink=16, local=256, targets=_BUILTIN_TARGETS),
    "paper": Preset(
        FitSettings(
            length=65_536,
            steps=300,
            batch_size=48,
            micro_batch=1,
            router_lr=5e-4,
            lambda_lr=1e-3,
            gradient_checkpointing=True,
        ),
        sink=128,
        local=2048,
        targets={
            **_BUILTIN_TARGETS,
            # The five task labels of the paper's training data.
            "single_doc_qa": SENSITIVE,
            "multi_hop_qa": SENSITIVE,
            "summarization": ROBUST,
            "code": ROBUST,
            "in_context_learning": ROBUST,
        },
    ),
}
"""``quick``: a small model on one GPU in minutes, with rates at which tasks separate within 300
steps. ``paper``: the sizes and rates of arXiv 2601.17367."""

RECIPES: dict[str, dict[str, Any]] = {
    "default": {"constraint": "distance", "temperature": "cosine"},
    "released": {"constraint": "distance", "temperature": "cosine"},
    "paper": {
        "constraint": "signed",
        "temperature": "exponential",
        "temperature_end": 0.5,
    },
}
"""Which of the variants of the method. ``paper``: its equation (signed linear term, exponential
τ; it names no end for τ, here 0.5, which 300 steps do not reach). ``released``: the authors' code
(distance, cosine τ from 1.5 to 1.0 over 60 % of the steps). ``default``: ours, at present the
released variant with λ >= 0."""


def choose(preset: str = "quick", recipe: str = "default", **changes: Any) -> FitSettings:
    """Settings of a preset and a recipe, with changes.

    Args:
        preset: Name in :data:`PRESETS`.
        recipe: Name in :data:`RECIPES`.
        **changes: Fields of :class:`FitSettings`; None leaves a field as it is.

    Raises:
        ValueError: An unknown name, or a setting out of range.
        TypeError: An unknown field.
    """
    if preset not in PRESETS:
        raise ValueError(f"the preset is {preset!r}; allowed: {', '.join(map(repr, PRESETS))}")
    if recipe not in RECIPES:
        raise ValueError(f"the recipe is {recipe!r}; allowed: {', '.join(map(repr, RECIPES))}")
    fields = {field.name for field in dataclasses.fields(FitSettings)}
    unknown = sorted(set(changes) - fields)
    if unknown:
        raise TypeError(f"unknown setting {', '.join(unknown)}; allowed: {', '.join(fields)}")
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(PRESETS[preset].settings, **{**RECIPES[recipe], **given})
