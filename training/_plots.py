"""Training curves as a picture. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_compile._files import write_atomic


def plot_curves(records: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw the curves of a run: loss, Ω_MSR with its targets, multipliers, temperature and rate.

    Args:
        records: Lines of ``metrics.jsonl``, at least one.
        path: PNG file.

    Returns:
        False where matplotlib is not installed; then nothing is written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    tasks = list(records[-1]["tasks"])
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for color, task in enumerate(tasks):
        rows = [(r["step"], r["tasks"][task]) for r in records if r["tasks"][task]["samples"]]
        steps = [step for step, _ in rows]
        for axis, key in ((axes[0], "lm_loss"), (axes[1], "msr")):
            values = [values[key] for _, values in rows]
            axis.plot(steps, values, color=f"C{color}", alpha=0.25, linewidth=0.8)
            axis.plot(steps, _smooth(values), color=f"C{color}", label=task)
        low, high = rows[-1][1]["target"] if rows else (0.0, 0.0)
        axes[1].axhspan(low, high, color=f"C{color}", alpha=0.12)
        axes[1].axhline(low, color=f"C{color}", linestyle=":", linewidth=0.8)
        for key, style in (("lambda1", "-"), ("lambda2", "--")):
            axes[2].plot(
                [r["step"] for r in records],
                [r["tasks"][task][key] for r in records],
                color=f"C{color}",
                linestyle=style,
                label=f"{task} {'λ1' if key == 'lambda1' else 'λ2'}",
            )
    steps = [r["step"] for r in records]
    axes[3].plot(steps, [r["temperature"] for r in records], color="C0", label="temperature")
    rate = axes[3].twinx()
    rate.plot(steps, [r["router_lr"] for r in records], color="C1", label="router learning rate")
    for axis, title in zip(
        axes,
        (
            "loss of scored tokens (nats)",
            "Ω_MSR of hard routes, and targets (dotted, shaded)",
            "multipliers",
            "temperature (left), learning rate (right)",
        ),
        strict=True,
    ):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
    axes[1].set_ylim(-0.02, 1.02)
    for axis in axes[:3]:
        axis.legend(fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_atomic(path, buffer.getvalue())
    return True


def _smooth(values: Sequence[float], share: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        mean, weight = share * mean + (1 - share) * value, share * weight + 1 - share
        found.append(mean / weight)
    return found
