"""``evaluate``: what routing costs and saves, sample by sample, beside full and all-streaming."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from elastic_compile import _state
from elastic_compile.training._losses import accepts_logits_to_keep, forward_scored, scored_loss
from elastic_compile.training.data import IGNORED, Sample, Source, pad_samples

MODES = ("full", "streaming", "routed")
"""All heads full, all heads streaming, and as the routers say."""


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One task. Lists have one entry a sample, dictionaries one a mode."""

    samples: int
    nll: dict[str, list[float]]
    """Mean negative log-likelihood of the scored tokens, nats, every sample for itself."""
    exact: dict[str, list[bool]] | None
    """Whether every answer token is the most likely one given the true ones before it; None for
    language modelling."""
    msr: list[float]
    """Ω_MSR of every sample."""
    sparse_share: list[list[float]]
    """How often each head was sparse, [layers][kv heads]."""

    def mean_nll(self, mode: str) -> float:
        """Mean of ``nll`` over the samples."""
        return sum(self.nll[mode]) / self.samples

    def exact_match(self, mode: str) -> float | None:
        """Share of exact matches."""
        return None if self.exact is None else sum(self.exact[mode]) / self.samples

    def mean_msr(self) -> float:
        """Mean Ω_MSR."""
        return sum(self.msr) / self.samples

    def recovered(self) -> float | None:
        """(nll_streaming − nll_routed) / (nll_streaming − nll_full); None where streaming loses
        nothing or a mode was not run."""
        if not set(MODES) <= set(self.nll):
            return None
        loss = self.mean_nll("streaming") - self.mean_nll("full")
        return (self.mean_nll("streaming") - self.mean_nll("routed")) / loss if loss > 0 else None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of :func:`evaluate`; prints as a table."""

    tasks: dict[str, TaskResult]
    modes: tuple[str, ...]

    def mean_msr(self) -> float:
        """Mean over tasks of the mean Ω_MSR."""
        return sum(task.mean_msr() for task in self.tasks.values()) / len(self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: means first, then every sample (four decimals)."""

        def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
            return [round(value, digits) for value in values]

        return {
            "modes": list(self.modes),
            "mean_msr": round(self.mean_msr(), 4),
            "tasks": {
                name: {
                    "samples": task.samples,
                    "mean_nll": {mode: round(task.mean_nll(mode), 4) for mode in self.modes},
                    "exact_match": None
                    if task.exact is None
                    else {mode: round(task.exact_match(mode) or 0.0, 4) for mode in self.modes},
                    "msr": round(task.mean_msr(), 4),
                    "recovered": None
                    if task.recovered() is None
                    else round(task.recovered() or 0.0, 4),
                    "sparse_share": [rounded(row, 3) for row in task.sparse_share],
                    "per_sample": {
                        "nll": {mode: rounded(task.nll[mode]) for mode in self.modes},
                        "exact": None
                        if task.exact is None
                        else {mode: [int(x) for x in task.exact[mode]] for mode in self.modes},
                        "msr": rounded(task.msr),
                    },
                }
                for name, task in self.tasks.items()
            },
        }

    def __str__(self) -> str:
        width = max(17, *map(len, self.tasks)) + 1
        head = f"{'task':<{width}}{'samples':>8}"
        head += "".join(f"{mode + ' EM·nll':>18}" for mode in self.modes)
        lines = [f"{head}{'Ω_MSR':>8}{'recovered':>11}"]
        for name, task in self.tasks.items():
            cells = []
            for mode in self.modes:
                match = task.exact_match(mode)
                start = "" if match is None else f"{match:.3f} · "
                cells.append(f"{start}{task.mean_nll(mode):.4f}")
            share = task.recovered()
            lines.append(
                f"{name:<{width}}{task.samples:>8}"
                + "".join(f"{cell:>18}" for cell in cells)
                + f"{task.mean_msr():>8.3f}{'-' if share is None else f'{share:.3f}':>11}"
            )
        lines.append(f"mean Ω_MSR {self.mean_msr():.3f}")
        return "\n".join(lines)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sources: Sequence[Source],
    *,
    samples: int = 192,
    batch_size: int = 8,
    modes: Sequence[str] = MODES,
    progress: bool = True,
) -> Evaluation:
    """Score every sample with one forward pass a mode.

    Routers see the prompt only, so the routes are those that ``generate`` takes on the prompt.

    Args:
        model: A transformed model. It is put into evaluation mode for the call.
        sources: One a task, from :func:`elastic_compile.training.tasks.load_sources` with
            ``split="test"``.
        samples: Samples a task; a source with fewer gives all it has.
        batch_size: Samples a forward pass.
        modes: Which of :data:`MODES`; Ω_MSR is that of the last of them.
        progress: Show a progress bar.

    Returns:
        Scores and routes of every sample.

    Raises:
        ValueError: The model is not transformed, or an unknown mode.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ValueError(f"modes are {list(modes)}; allowed: {', '.join(MODES)}")
    if samples < 1 or batch_size < 1:
        raise ValueError(f"samples is {samples}, batch_size {batch_size}; allowed: 1 or more")
    sites = [site for _, site in _state.rewritten_sites(model)]
    counts = [min(samples, len(source) or samples) for source in sources]
    keep = accepts_logits_to_keep(model)
    device = sites[0].forced.device
    were = [(module, module.training) for module in model.modules()]
    model.eval()
    bar = tqdm(total=sum(counts) * len(modes), desc="evaluate", unit="sample", disable=not progress)
    results = {}
    try:
        with bar:
            for source, count in zip(sources, counts, strict=True):
                nll: dict[str, list[float]] = {mode: [] for mode in modes}
                exact: dict[str, list[bool]] = {mode: [] for mode in modes}
                routes: list[Tensor] = []
                answer = True
                for start in range(0, count, batch_size):
                    batch = [source.sample(i) for i in range(start, min(start + batch_size, count))]
                    answer = answer and all(sample.answer for sample in batch)
                    for mode in modes:
                        losses, matches, taken = score(model, batch, mode, device, keep)
                        nll[mode] += losses
                        exact[mode] += matches
                        bar.update(len(batch))
                    # Of the last mode: the routed one, unless it was left out.
                    routes.append(taken)
                results[source.task] = _result(nll, exact if answer else None, routes, sites)
    finally:
        for module, mode_ in were:
            module.training = mode_
    return Evaluation(results, tuple(modes))


def score(
    model: nn.Module, batch: Sequence[Sample], mode: str, device: torch.device, keep: bool
) -> tuple[list[float], list[bool], Tensor]:
    """Losses, exact matches and routes int32 [B, heads of all layers] of one batch."""
    inputs = {name: tensor.to(device) for name, tensor in pad_samples(batch).items()}
    sites = [site for _, site in _state.rewritten_sites(model)]
    previous = _state.set_limit(_state.Limit(inputs["route_length"]))
    try:
        with _forced(sites, mode):
            logits, labels = forward_scored(model, inputs, keep)
    finally:
        _state.set_limit(previous)
    losses = scored_loss(logits, labels)
    right = (logits.argmax(-1) == labels) | (labels == IGNORED)
    calls = [_state.last_call(site) for site in sites]
    routes = torch.cat([call.route.to(device) for call in calls if call is not None], 1)
    return losses.tolist(), right.all(1).tolist(), routes.to(torch.int32).cpu()


@contextlib.contextmanager
def _forced(sites: Sequence[Any], mode: str) -> Iterator[None]:
    """Routes of a mode; in ``"routed"`` those the caller has forced stay."""
    if mode == "routed":
        yield
        return
    saved = [site.forced.clone() for site in sites]
    try:
        for site in sites:
            site.forced.fill_(int(mode == "streaming"))
        yield
    finally:
        for site, table in zip(sites, saved, strict=True):
            site.forced.copy_(table)


def _result(
    nll: dict[str, list[float]],
    exact: dict[str, list[bool]] | None,
    routes: Sequence[Tensor],
    sites: Sequence[Any],
) -> TaskResult:
    table = torch.cat(list(routes)).double()
    shares = table.mean(0).split([site.kv_heads for site in sites])
    return TaskResult(
        samples=len(table),
        nll=nll,
        exact=exact,
        msr=table.mean(1).tolist(),
        sparse_share=[share.tolist() for share in shares],
    )


__all__ = ["MODES", "Evaluation", "TaskResult", "evaluate", "score"]
