"""Draw a result file of prefill.py or model_prefill.py.

python examples/benchmarks/plot.py examples/benchmarks/results/prefill.json --out prefill.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

Row = dict[str, Any]
PEERS = {"sdpa": "torch SDPA", "fa3": "FlashAttention-3"}


def main() -> None:
    """Read the file and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        figure = draw(json.loads(args.results.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(f"{args.results}: {error}")
    figure.savefig(args.out, dpi=120)


def draw(found: dict[str, Any]) -> Figure:
    """The figure of a result file.

    Raises:
        ValueError: Its rows are of no benchmark that is drawn here.
    """
    rows = found.get("rows") or []
    if rows and all("sparse_kv_heads" in row for row in rows):
        figure = draw_prefill(rows)
    elif rows and all("geometry" in row for row in rows):
        figure = draw_models(rows)
    else:
        raise ValueError("no rows of prefill.py or model_prefill.py")
    meta = found["meta"]
    versions = meta["versions"]
    figure.suptitle(f"{meta['card']}, torch {versions['torch']}, {meta['dtype']}", fontsize=9)
    return figure


def draw_prefill(rows: list[Row]) -> Figure:
    """A column for every head size: speed-up over torch SDPA, and time, over length."""
    rows = [row for row in rows if row["B"] == 1]
    sizes = sorted({row["D"] for row in rows}, reverse=True)
    figure = Figure(figsize=(5 * len(sizes), 7), layout="constrained")
    axes = figure.subplots(2, len(sizes), squeeze=False, sharex=True)
    for column, size in enumerate(sizes):
        own = [row for row in rows if row["D"] == size]
        base = {row["S"]: row["ms"] for row in own if row["impl"] == "sdpa"}
        speed, time = axes[:, column]
        lines = [
            (PEERS[impl], "--", [row for row in own if row["impl"] == impl])
            for impl in PEERS
            if any(row["impl"] == impl for row in own)
        ]
        for sparse in sorted({row["sparse_kv_heads"] for row in own if row["impl"] == "elastic"}):
            line = [
                row for row in own if row["impl"] == "elastic" and row["sparse_kv_heads"] == sparse
            ]
            lines.append((f"{sparse} of {line[0]['kv_heads']} streaming", "-", line))
        for label, style, line in lines:
            points = sorted((row["S"], row["ms"]) for row in line)
            time.plot(*zip(*points, strict=True), style, marker=".", label=label)
            ratios = [(length, base[length] / ms) for length, ms in points if length in base]
            if ratios:
                speed.plot(*zip(*ratios, strict=True), style, marker=".", label=label)
        speed.set_title(f"head size {size}")
        speed.set_ylabel("times as fast as torch SDPA")
        time.set_ylabel("milliseconds")
        for axis in (speed, time):
            over_lengths(axis, sorted({row["S"] for row in own}))
            axis.set_yscale("log")
        time.legend(fontsize=8)
    return figure


def draw_models(rows: list[Row]) -> Figure:
    """A column for every geometry: speed-up of, and time to the first token, over length."""
    names = list(dict.fromkeys(row["geometry"] for row in rows))
    figure = Figure(figsize=(5 * len(names), 7), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex="col")
    for column, name in enumerate(names):
        speed, time = axes[:, column]
        found = [row for row in rows if row["geometry"] == name]
        untouched = sorted((row["S"], row["ms"]) for row in found if row["impl"] == "untouched")
        if untouched:
            lengths, times = zip(*untouched, strict=True)
            time.plot(lengths, [ms / 1e3 for ms in times], "k--", marker=".", label="untouched")
        own = [row for row in found if row["impl"] == "elastic"]
        for share in sorted({row["msr"] for row in own}):
            points = sorted(
                (row["S"], row["speedup"], row["ms"] / 1e3) for row in own if row["msr"] == share
            )
            lengths, ratios, seconds = zip(*points, strict=True)
            label = f"{share:.0%} streaming"
            speed.plot(lengths, ratios, marker=".", label=label)
            time.plot(lengths, seconds, marker=".", label=label)
        speed.axhline(1, color="grey", linewidth=0.8)
        speed.set_title(f"{name} geometry")
        speed.set_ylabel("times as fast as the untouched model")
        time.set_ylabel("seconds to the first token")
        time.set_yscale("log")
        for axis in (speed, time):
            over_lengths(axis, sorted({row["S"] for row in found}))
        time.legend(fontsize=8)
    return figure


def over_lengths(axis: Axes, lengths: list[int]) -> None:
    """A logarithmic axis of lengths, in units of 1,024 tokens."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length / 1024:g}K"))
    axis.set_xlabel("tokens")
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
