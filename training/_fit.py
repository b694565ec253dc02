"""``fit``: train the routers of a model and leave a router folder."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from elastic_compile import _state
from elastic_compile._checkpoint import load_router, save_router
from elastic_compile._files import dump_json, read_json, write_atomic
from elastic_compile._version import __version__
from elastic_compile.config import ElasticConfig
from elastic_compile.passes import pipeline
from elastic_compile.training import tasks as tasks_
from elastic_compile.training._plots import plot_curves
from elastic_compile.training._records import MetricsFile
from elastic_compile.training._stop import StopOnSignal, TrainingStopped
from elastic_compile.training.constraints import Target, resolve_targets
from elastic_compile.training.data import Encoder, TrainingStream
from elastic_compile.training.settings import PRESETS, choose
from elastic_compile.training.trainer import (
    RouterTrainer,
    checkpoint_step,
    drop_incomplete,
    last_checkpoint,
    training_arguments,
    training_only_routers,
)

logger = logging.getLogger("elastic_compile")

RUN_FILE = "fit.json"
METRICS_FILE = "metrics.jsonl"
CURVES_FILE = "curves.png"
CHECKPOINTS = "checkpoints"
_ONE_WAY = 0.02
"""Ω_MSR this near to 0 or 1 in every task: the router does not look at its input."""
_FAR = 0.25
"""A target missed by more than this is reported; healthy runs end within it."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a fit has left behind."""

    folder: Path
    """The router folder: ``transform(model, router=folder)``."""
    records: list[dict[str, Any]]
    """One a step, as in ``metrics.jsonl``."""
    seconds_per_step: float | None
    """Mean of this process's steps without the first; None when it ran fewer than two."""

    def summary(self, last: int = 20) -> str:
        """A table of what every task settled at, over the last steps."""
        records = self.records[-last:]
        lines = [f"{'task':<20}{'target':>10}{'Ω_MSR':>8}{'loss':>9}{'λ1':>8}{'λ2':>8}"]
        for task, final in records[-1]["tasks"].items():
            rows = [r["tasks"][task] for r in records if r["tasks"][task]["samples"]]
            low, high = final["target"]
            values = [
                sum(row[key] for row in rows) / len(rows) if rows else float("nan")
                for key in ("msr", "lm_loss")
            ]
            lines.append(
                f"{task:<20}{Target(low, high)!s:>10}{values[0]:>8.3f}{values[1]:>9.4f}"
                f"{final['lambda1']:>8.3f}{final['lambda2']:>8.3f}"
            )
        return "\n".join(lines)

    def advice(self, last: int = 20) -> list[str]:
        """What is wrong with the router by its last steps, and what to change; empty if nothing.

        A router that sends all heads of every task one way has learned nothing from its input; a
        task far from its target was not given the steps or the weight to reach it.
        """
        found = []
        for task, final in self.records[-1]["tasks"].items():
            rows = [r["tasks"][task] for r in self.records[-last:] if r["tasks"][task]["samples"]]
            if rows:
                ratio = sum(row["msr"] for row in rows) / len(rows)
                found.append((task, ratio, Target(*final["target"])))
        if not found:
            return []
        if all(ratio < _ONE_WAY for _, ratio, _ in found) and any(
            target.low > _FAR for _, _, target in found
        ):
            return [
                "the router has collapsed: every head is full for every task, as without a "
                "router. Give the constraint more weight (a higher lambda_lr) or more steps, or "
                "the routers a higher router_lr"
            ]
        if all(ratio > 1 - _ONE_WAY for _, ratio, _ in found):
            asked = all(target.low > 1 - _FAR for _, _, target in found)
            return [
                "the router has collapsed: every head is sparse for every task. "
                + (
                    "Every target asks for that: give tasks that need distant tokens a lower one, "
                    "for instance 0.7"
                    if asked
                    else "Give the constraint less weight (a lower lambda_lr), or tasks that need "
                    "distant tokens more samples"
                )
            ]
        lines = []
        for task, ratio, target in found:
            if ratio < target.low - _FAR or ratio > target.high + _FAR:
                side = "below" if ratio < target.low else "above"
                lines.append(
                    f"task {task}: Ω_MSR {ratio:.2f} is far {side} its target {target}; more steps "
                    "or a higher lambda_lr bring it nearer, at a price in loss that the curves show"
                )
        return lines


def fit(
    model: nn.Module,
    tokenizer: Any,
    *,
    data: Sequence[Any],
    out: str | os.PathLike[str],
    targets: Mapping[str, Any] | None = None,
    preset: str = "quick",
    recipe: str = "default",
    config: ElasticConfig | None = None,
    prose: str | os.PathLike[str] | None = None,
    chat_template: bool = False,
    truncate: str | None = None,
    resume: bool = False,
    progress: bool = True,
    curves: bool = True,
    save_dtype: torch.dtype | None = None,
    training_args: Mapping[str, Any] | None = None,
    **settings: Any,
) -> FitResult:
    """Train the routers of ``model``; the backbone stays as it is, bit for bit.

    The objective and its optimisation are those of Elastic Attention (arXiv 2601.17367): relaxed
    routes, a cross-entropy on the scored tokens, and per task a sparsity constraint whose
    multipliers ascend. Routers see the prompt only.

    Args:
        model: A Hugging Face decoder. Transformed here, unless it is already; then its routers
            are trained from what they are.
        tokenizer: Its tokenizer.
        data: ``"builtin:niah_single,lm_code"``, paths of JSONL files, or rows as dicts
            (``{"prompt", "completion", "task"}`` or ``{"text", "task", "scored_tokens"}``).
        out: Folder for the router, ``metrics.jsonl``, ``curves.png``, ``fit.json`` and
            checkpoints.
        targets: Ω_MSR per task: a number, or an interval ``"lo:hi"`` or ``(lo, hi)`` without
            penalty inside. They come before the preset's.
        preset: ``"quick"`` or ``"paper"``: sizes, rates, window and targets that go together.
        recipe: ``"default"``, ``"released"`` or ``"paper"``: which variant of the method.
        config: For a model that is not transformed yet; None: the preset's sink and window.
        prose: Folder of text for the built-in tasks.
        chat_template: Put prompts into the tokenizer's chat template.
        truncate: ``"middle"``: cut the middle out of over-long prompts; None: they are errors.
        resume: Go on from the last checkpoint in ``out`` (from the start if there is none).
        progress: Show a progress bar.
        curves: Draw ``curves.png`` (with matplotlib, the extra ``plot``).
        save_dtype: Type that the trained routers are rounded to and saved in; None: float32.
        training_args: Further fields of ``transformers.TrainingArguments``.
        **settings: Fields of :class:`~elastic_compile.training.settings.FitSettings`.

    Returns:
        The router folder and the curves. The model is transformed and has the trained routers.

    Raises:
        ValueError: Bad data (with file and line), a task without a target, a setting out of
            range, ``out`` holding another run.
        TrainingDiverged: The loss or a gradient is not finite.
        TrainingStopped: The process got SIGTERM; the last step is in a checkpoint to resume from.
        ImportError: accelerate is not installed (extra ``train``).
    """
    chosen = choose(preset, recipe, **settings)
    encoder = Encoder(tokenizer, chosen.length, chat_template, truncate)
    folder = None if prose is None else os.fspath(prose)
    sources = tasks_.load_sources(data, encoder, seed=chosen.seed, prose=folder)
    names = [source.task for source in sources]
    goals = resolve_targets(names, targets or {}, PRESETS[preset].targets)
    _require_accelerate()
    _prepare_model(model, config, preset, chosen.seed)
    stream = TrainingStream(sources, chosen.steps, chosen.batch_size, chosen.seed)
    model_config = _state.get_state(model).config
    _check_length(chosen.length, model_config)

    out = Path(out)
    checkpoints = out / CHECKPOINTS
    run = {
        "library_version": __version__,
        "preset": preset,
        "recipe": recipe,
        "config": model_config.to_dict(),
        "settings": chosen.to_dict(),
        "targets": {name: str(target) for name, target in goals.items()},
        "data": [item if isinstance(item, str) else _describe(item) for item in data],
        "prose": folder,
        "chat_template": chat_template,
        "truncate": truncate,
    }
    arguments = training_arguments(chosen, checkpoints, **(training_args or {}))
    main = arguments.process_index == 0
    metrics = MetricsFile(out / METRICS_FILE)
    with arguments.main_process_first():
        if main:
            _claim(out, run, resume)
            drop_incomplete(checkpoints)
        start = last_checkpoint(checkpoints) if resume else None
        if main:
            metrics.keep_until(0 if start is None else checkpoint_step(start))

    prepared = training_only_routers(model, chosen.gradient_checkpointing)
    with StopOnSignal() as stop, prepared as recomputed:
        clock = _Clock(metrics, chosen.steps, progress and main)
        trainer = RouterTrainer(
            model,
            arguments,
            stream=stream,
            targets=goals,
            settings=chosen,
            metrics=metrics,
            recomputed=recomputed,
            callbacks=[clock, stop],
        )
        try:
            if start is not None and checkpoint_step(start) >= chosen.steps:
                load_router(model, start)
            else:
                trainer.train(resume_from_checkpoint=None if start is None else os.fspath(start))
        finally:
            clock.close()
            # Mixed precision wraps the model's forward.
            trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    reached = trainer.state.global_step
    if stop.asked and reached < chosen.steps:
        raise TrainingStopped(
            f"told to end (SIGTERM) after step {reached} of {chosen.steps}, which is in "
            f"{checkpoints}; the same call with resume (--resume) goes on from there"
        )
    if save_dtype is not None:
        # The model too: what is used now is what will be loaded.
        for _, site in _state.rewritten_sites(model):
            site.to(save_dtype)
    result = FitResult(out, metrics.read(), clock.seconds_per_step)
    if main:
        for advice in result.advice():
            logger.warning("%s", advice)
    if main:
        save_router(model, out)
        _write_run(
            out,
            {
                **run,
                "finished": {
                    "seconds_per_step": clock.seconds_per_step,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "device": _device_name(arguments.device),
                },
            },
        )
        if curves and not plot_curves(result.records, out / CURVES_FILE):
            logger.warning(
                "matplotlib is not installed (extra 'plot'): no %s was drawn; %s has the numbers",
                CURVES_FILE,
                METRICS_FILE,
            )
    return result


def _prepare_model(model: nn.Module, config: ElasticConfig | None, preset: str, seed: int) -> None:
    if _state.owner(model) is not None:
        mine = _state.get_state(model).config
        if config is not None and config.differences(mine):
            raise ValueError(
                f"the model is transformed already, with another configuration than asked for: "
                f"{', '.join(config.differences(mine))} differ; leave config out or restore the "
                "model first"
            )
        return
    if config is None:
        config = ElasticConfig(sink=PRESETS[preset].sink, local=PRESETS[preset].local)
    report = pipeline.transform(model, config)
    logger.info("%s", report.summary())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _, site in _state.rewritten_sites(model):
            site.reset_parameters()


def _check_length(length: int, config: ElasticConfig) -> None:
    window = config.sink + config.local
    if length <= window:
        raise ValueError(
            f"length is {length}, sink + local is {window}: a streaming head sees everything, so "
            "there is nothing to learn; use longer samples or a smaller window"
        )


def _require_accelerate() -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise ImportError(
            "training needs accelerate: pip install 'elastic_compile[train]'"
        ) from None


def _describe(item: Any) -> str:
    return os.fspath(item) if isinstance(item, os.PathLike) else f"row of {item.get('task')!r}"


def _claim(out: Path, run: Mapping[str, Any], resume: bool) -> None:
    """Make the folder this run's, or see that it is the run to resume."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; a fit writes to a folder")
    file = out / RUN_FILE
    if file.is_file():
        if not resume:
            raise ValueError(
                f"{out} holds a fit already: resume it (--resume), or name another folder"
            )
        before = read_json(file)
        changed = [
            f"{key} ({_difference(before.get(key), run[key])})"
            for key in run
            if before.get(key) != run[key] and key != "library_version"
        ]
        if changed:
            raise ValueError(
                f"{out} holds another fit: {', '.join(changed)} changed. A run is resumed with "
                "the settings it was started with; for others name another folder"
            )
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    _write_run(out, run)


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return ", ".join(f"{key}: {before.get(key)!r} there, {now.get(key)!r} now" for key in keys)
    return f"{before!r} there, {now!r} now"


def _write_run(out: Path, run: Mapping[str, Any]) -> None:
    write_atomic(out / RUN_FILE, dump_json(dict(run)))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class _Clock(TrainerCallback):
    """Progress bar and seconds a step."""

    def __init__(self, metrics: MetricsFile, steps: int, show: bool) -> None:
        self.metrics, self.steps, self.show = metrics, steps, show
        self.bar: Any = None
        self.times: list[float] = []

    @property
    def seconds_per_step(self) -> float | None:
        if len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.show:
            self.bar = tqdm(
                total=self.steps,
                initial=state.global_step,
                desc="fit",
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self.times.append(time.perf_counter())
        if self.bar is not None:
            self.bar.update(1)
            record = self.metrics.last
            if record is not None:
                ratios = " ".join(
                    f"{task}={values['msr']:.2f}"
                    for task, values in record["tasks"].items()
                    if values["samples"]
                )
                self.bar.set_postfix_str(f"loss {record['lm_loss']:.3f} Ω {ratios}", refresh=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


__all__ = ["FitResult", "fit"]
