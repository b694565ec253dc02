"""The sparsity constraint: targets, multipliers that ascend, and the mean over tasks.

Objective (Elastic Attention, arXiv 2601.17367): max over λ, min over routers of
CE + λ1_k · d + λ2_k · d², with k the sample's task and d how far its Ω_MSR is from the target t_k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FORMS = ("distance", "signed")
"""Linear term: the distance |Ω − t|, with λ >= 0, or the difference Ω − t of the paper's equation,
whose multiplier may take either sign."""


@dataclass(frozen=True)
class Target:
    """Where Ω_MSR of a task should be: an interval [low, high] without penalty inside.

    Raises:
        ValueError: Not 0 <= low <= high <= 1.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError(
                f"a target is a number from 0 to 1 or an interval low:high, not {self}"
            )

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}:{self.high:g}"

    @classmethod
    def parse(cls, value: Target | float | str | Sequence[float]) -> Target:
        """A target from ``0.7``, ``".7"``, ``".9:1"`` or ``(0.9, 1.0)``."""
        if isinstance(value, Target):
            return value
        if isinstance(value, str):
            parts: Sequence[str | float] = value.split(":")
        elif isinstance(value, Sequence):
            parts = value
        else:
            parts = [value]
        try:
            numbers = [float(part) for part in parts]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"a target is a number from 0 to 1 or an interval low:high, not {value!r}"
            )
        return cls(numbers[0], numbers[-1])


def resolve_targets(
    tasks: Sequence[str],
    given: Mapping[str, Target | float | str | Sequence[float]],
    preset: Mapping[str, Target],
) -> dict[str, Target]:
    """The target of every task in the data.

    Args:
        tasks: Tasks that the data holds.
        given: The user's targets, which come first.
        preset: Those of the preset.

    Returns:
        One target a task, in the order of ``tasks``.

    Raises:
        ValueError: A task without a target, a target for a task that is not in the data, or a
            target that is none.
    """
    unknown = [name for name in given if name not in tasks]
    if unknown:
        raise ValueError(
            f"a target is given for {', '.join(unknown)}, but the data has only the tasks "
            f"{', '.join(tasks)}"
        )
    found = {}
    for name in tasks:
        if name in given:
            try:
                found[name] = Target.parse(given[name])
            except ValueError as error:
                raise ValueError(f"task {name!r}: {error}") from None
        elif name in preset:
            found[name] = preset[name]
    missing = [name for name in tasks if name not in found]
    if missing:
        raise ValueError(
            f"no target for the task {', '.join(map(repr, missing))}: give --target "
            + " ".join(f"{name}=T" for name in missing)
            + " with T the share of sparse heads, from 0 to 1, or an interval low:high"
        )
    return found


class Multipliers(nn.Module):
    """λ1 and λ2 of every task, trained by gradient ascent (an optimiser group with
    ``maximize=True``).

    Args:
        tasks: Number of tasks.
        seed: Start values are uniform in [0, 0.5), as in the paper.
        form: One of :data:`FORMS`.
    """

    def __init__(self, tasks: int, seed: int = 0, form: str = "distance") -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"the constraint form is {form!r}; allowed: {', '.join(FORMS)}")
        self.form = form
        start = torch.rand(2, tasks, generator=torch.Generator().manual_seed(seed)) / 2
        self.linear = nn.Parameter(start[0].clone())
        self.quadratic = nn.Parameter(start[1].clone())

    def forward(self, ratio: Tensor, low: Tensor, high: Tensor, task: Tensor) -> Tensor:
        """The penalty of every sample.

        Args:
            ratio: Ω_MSR, float [B].
            low: Lower end of every sample's target, [B].
            high: Upper end, [B].
            task: Task of every sample, int64 [B].

        Returns:
            λ1_k · d + λ2_k · d², float [B]; d is zero inside the interval.
        """
        outside = (ratio - high).relu() - (low - ratio).relu()
        # A number has no inside: met exactly, the signed form still has its slope.
        gap = torch.where(low == high, ratio - low, outside)
        linear = gap if self.form == "signed" else gap.abs()
        return self.linear[task] * linear + self.quadratic[task] * gap.square()

    @torch.no_grad()
    def project(self) -> None:
        """After a step: multipliers of a distance cannot be negative."""
        if self.form == "distance":
            self.linear.clamp_(min=0.0)
            self.quadratic.clamp_(min=0.0)


def task_weights(tasks: Sequence[int]) -> list[float]:
    """Weights that make a sum over samples the mean over tasks of the mean within each task.

    Args:
        tasks: Task of every sample of the *global* batch: over all ranks and accumulation steps.

    Returns:
        One weight a sample; they sum to 1.
    """
    counts: dict[int, int] = {}
    for task in tasks:
        counts[task] = counts.get(task, 0) + 1
    return [1.0 / (len(counts) * counts[task]) for task in tasks]
