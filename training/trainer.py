"""The trainer: what is special about training routers, on top of ``transformers.Trainer``.

Checkpoints, resuming, accumulation, mixed precision and processes are the ecosystem's. Ours are
which parameters train, the relaxed forward pass, the constraint and the records of a run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from elastic_compile import _state
from elastic_compile._checkpoint import load_router, router_parameters, save_router
from elastic_compile._files import write_atomic
from elastic_compile._site import ElasticSite
from elastic_compile.training._losses import ChunkedLoss
from elastic_compile.training._records import MetricsFile
from elastic_compile.training.constraints import Multipliers, Target
from elastic_compile.training.data import TrainingStream, collate
from elastic_compile.training.relaxation import GumbelRelaxation, sample_noise, sparsity_ratio
from elastic_compile.training.settings import FitSettings

COMPLETE = "complete"
"""File whose presence says that a checkpoint was written to the end."""
_MULTIPLIERS = "multipliers.pt"


class TrainingDiverged(RuntimeError):
    """The loss or a gradient is no finite number any more."""


class RouterTrainer(Trainer):
    """Trains the routers of a transformed model; the backbone is frozen and in evaluation mode.

    Args:
        model: A transformed model.
        args: Arguments made by :func:`training_arguments`.
        stream: All samples of the run.
        targets: Target of every task, in the stream's order of tasks.
        settings: The fit's settings.
        metrics: Where a line a step goes.
        recomputed: Layers under gradient checkpointing, from :func:`training_only_routers`.
        callbacks: Further callbacks.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        stream: TrainingStream,
        targets: Mapping[str, Target],
        settings: FitSettings,
        metrics: MetricsFile,
        recomputed: Sequence[nn.Module] = (),
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.settings, self.targets, self.metrics = settings, dict(targets), metrics
        self.annealing = settings.annealing()
        self.sites = [site for _, site in _state.rewritten_sites(model)]
        self.relaxation = GumbelRelaxation()
        for site in self.sites:
            site.relaxation = self.relaxation
        self.multipliers = Multipliers(len(targets), settings.seed, settings.constraint)
        self._recomputed = tuple(recomputed)
        self.routed = model
        self.folder = Path(os.fspath(args.output_dir or "."))
        self._losses = ChunkedLoss(model)
        super().__init__(
            model=model,
            args=args,
            data_collator=collate,
            train_dataset=stream,
            callbacks=[_Bookkeeping(self), *callbacks],
        )
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        device = self.args.device
        self.multipliers.to(device)
        ends = [(target.low, target.high) for target in self.targets.values()]
        self._ends = torch.tensor(ends, device=device)
        # Per task: samples, sums of loss, Ω_MSR and penalty over the passes of a step.
        self._sums = torch.zeros(len(ends), 4, dtype=torch.float64, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)

    # ------------------------------------------------------------------ one step

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], None]:
        """The passes of a step. The weights of samples are ours: no token count is needed."""
        return super().get_batch_samples(*args, **kwargs)[0], None

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Forward and backward of one pass; recomputed layers see the same prompt lengths."""
        lengths = inputs["route_length"]
        previous = _state.set_limit(None if lengths is None else _state.Limit(lengths))
        try:
            return super().training_step(model, inputs, *args, **kw)
        finally:
            _state.set_limit(previous)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Mean over tasks of the mean over a task's samples of CE and penalty (global batch)."""
        # Trainer has just put everything into train mode.
        frozen_mode(self.routed, self._recomputed)
        step = self.state.global_step
        task = inputs["task"]
        heads = max(site.kv_heads for site in self.sites)
        noise = sample_noise(self.settings.seed, inputs["key"].tolist(), len(self.sites), heads)
        self.relaxation.begin(noise.to(task.device), self.annealing.at(step / self.settings.steps))
        loss = self._losses(model, inputs)
        ratio = sparsity_ratio(self.relaxation.end()).to(task.device)
        low, high = self._ends[task].unbind(1)
        penalty = self.multipliers(ratio, low, high, task)
        total = ((loss + penalty) * inputs["weight"]).sum()
        self._check_finite(total, step)
        with torch.no_grad():
            rows = torch.stack([torch.ones_like(loss), loss, ratio, penalty], 1).double()
            self._sums.index_add_(0, task, rows)
            self._total += total.double()
        # Trainer averages over passes and processes; the weights have summed already.
        total = total * (self.current_gradient_accumulation_steps * self.args.world_size)
        return (total, {"loss": total}) if return_outputs else total

    def _check_finite(self, value: Tensor, step: int) -> None:
        if not bool(torch.isfinite(value)):
            last = last_checkpoint(self.folder)
            raise TrainingDiverged(
                f"the loss is {value.item()} in step {step + 1}; training stopped and the routers "
                + (
                    f"of step {checkpoint_step(last)} are in {last}"
                    if last is not None
                    else "were not saved: no checkpoint had been written yet"
                )
                + ". Lower router_lr, or use a backbone dtype with more range"
            )

    # ------------------------------------------------------------------ optimiser

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """AdamW: routers descend, multipliers ascend at a constant rate without decay."""
        if self.optimizer is None:
            settings = self.settings
            groups = [
                {
                    "params": router_parameters(self.routed),
                    "lr": settings.router_lr,
                    "weight_decay": settings.weight_decay,
                },
                {
                    "params": list(self.multipliers.parameters()),
                    "lr": settings.lambda_lr,
                    "weight_decay": 0.0,
                    "maximize": True,
                },
            ]
            self.optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2))
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        """Warm-up and cosine for the routers, constant for the multipliers."""
        if self.lr_scheduler is None:
            rates: list[Callable[[int], float]] = [self.settings.router_rate, _constant]
            chosen = optimizer if optimizer is not None else self.create_optimizer()
            self.lr_scheduler = LambdaLR(chosen, rates)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ------------------------------------------------------------------ checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint holds routers and multipliers, never the frozen backbone."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_router(self.routed, folder)
        torch.save(self.multipliers.state_dict(), folder / _MULTIPLIERS)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.args.should_save:
            folder = self.folder / f"checkpoint-{self.state.global_step}"
            write_atomic(folder / COMPLETE, b"")

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        folder = Path(resume_from_checkpoint)
        load_router(self.routed, folder)
        state = torch.load(folder / _MULTIPLIERS, weights_only=True)
        self.multipliers.load_state_dict(state)

    # ------------------------------------------------------------------ what costs time for nothing

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Not counted: Trainer's estimate knows neither frozen nor streaming parts."""
        return 0

    # ------------------------------------------------------------------ records

    def finish_step(self) -> dict[str, Any]:
        """The record of the step that has just ended; sums start again."""
        sums = self.accelerator.reduce(self._sums, "sum").cpu()
        total = self.accelerator.reduce(self._total, "sum").item()
        self._sums.zero_()
        self._total.zero_()
        tasks = {}
        for index, (name, target) in enumerate(self.targets.items()):
            count, loss, ratio, penalty = sums[index].tolist()
            tasks[name] = {
                "samples": int(count),
                "lm_loss": loss / count if count else None,
                "msr": ratio / count if count else None,
                "penalty": penalty / count if count else None,
                "target": [target.low, target.high],
                "lambda1": self._before["linear"][index],
                "lambda2": self._before["quadratic"][index],
            }
        present = [task for task in tasks.values() if task["samples"]]
        record = {
            "step": self.state.global_step,
            "loss": total,
            "lm_loss": sum(task["lm_loss"] for task in present) / len(present),
            "msr": sum(task["msr"] for task in present) / len(present),
            "temperature": self.relaxation.temperature,
            "router_lr": self._before["router_lr"],
            "lambda_lr": self._before["lambda_lr"],
            "grad_norm": self._before["grad_norm"],
            "tasks": tasks,
        }
        return record

    def before_step(self) -> None:
        """What was in force in the step, and the multipliers' gradient of all processes."""
        for parameter in self.multipliers.parameters():
            if parameter.grad is not None and self.args.world_size > 1:
                parameter.grad.copy_(self.accelerator.reduce(parameter.grad, "mean"))
        groups = self.create_optimizer().param_groups
        self._before = {
            "linear": self.multipliers.linear.tolist(),
            "quadratic": self.multipliers.quadratic.tolist(),
            "router_lr": groups[0]["lr"],
            "lambda_lr": groups[1]["lr"],
            "grad_norm": self._norm,
        }

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self._norm = float(norm)
        self._check_finite(torch.tensor(self._norm), self.state.global_step)
        return norm


class _Bookkeeping(TrainerCallback):
    """Calls the trainer's own methods at the right places of Trainer's loop."""

    def __init__(self, trainer: RouterTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.before_step()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.multipliers.project()
        # Trainer clears the model's gradients only.
        self.trainer.multipliers.zero_grad(set_to_none=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        record = self.trainer.finish_step()
        if state.is_world_process_zero:
            self.trainer.metrics.append(record)
        if any(name != "none" for name in args.report_to):
            self.trainer.log(_flat(record))


def _flat(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under names like ``msr/lm_code``, for logging integrations."""
    flat = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
    for task, values in record["tasks"].items():
        flat |= {f"{k}/{task}": float(v) for k, v in values.items() if isinstance(v, (int, float))}
    return flat


def _constant(step: int) -> float:
    return 1.0


def frozen_mode(model: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
    """Evaluation mode everywhere, but for the flag of layers that are to be recomputed."""
    model.eval()
    for layer in layers:
        # The flag alone: `train()` would reach the dropout inside.
        layer.training = True


@contextlib.contextmanager
def training_only_routers(model: nn.Module, recompute: bool) -> Iterator[tuple[nn.Module, ...]]:
    """Make a model ready for router training, and put everything back afterwards.

    Router parameters become float32 and trainable, all others frozen. With ``recompute``, or
    where the model has gradient checkpointing on, its layers are checkpointed without reentrance.

    Yields:
        The layers that are recomputed.

    Raises:
        ValueError: Reentrant gradient checkpointing is on, or no layer can be recomputed.
    """
    sites = [site for _, site in _state.rewritten_sites(model)]
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    _refuse_reentrant(model)
    recompute = recompute or any(layer.gradient_checkpointing for layer in layers)
    if recompute and not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that support gradient checkpointing; leave "
            "gradient_checkpointing off"
        )
    routers = {id(parameter) for parameter in router_parameters(model)}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    saved = [(layer, dict(vars(layer))) for layer in layers]
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    try:
        for site in sites:
            _float32(site)
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in routers)
        for layer in layers if recompute else ():
            layer.gradient_checkpointing = True
            vars(layer)["_gradient_checkpointing_func"] = functools.partial(
                checkpoint, use_reentrant=False, context_fn=_recompute_contexts
            )
            for name, value in list(vars(layer).items()):
                # Some layers apply dropout themselves, by the flag that recomputing needs.
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
        yield tuple(layers) if recompute else ()
    finally:
        for site in sites:
            site.relaxation = None
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None
        for layer, attributes in saved:
            for name in [name for name in vars(layer) if name not in attributes]:
                delattr(layer, name)
            vars(layer).update(attributes)
        for module, mode in modes:
            module.training = mode
        if use_cache is not None:
            config.use_cache = use_cache


def _float32(site: ElasticSite) -> None:
    # In place of the parameter's data: the routers stay the same objects.
    for parameter in site.parameters():
        parameter.data = parameter.data.float()


def _recompute_contexts() -> tuple[Any, Any]:
    """Contexts of a checkpointed layer: the recomputation, which a device thread may run, sees
    the prompt lengths of the forward pass."""
    return contextlib.nullcontext(), _RouteLength(_state.current_limit())


class _RouteLength:
    """Context that limits what routers see in the thread that enters it."""

    def __init__(self, limit: _state.Limit | None) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.previous = _state.set_limit(self.limit)

    def __exit__(self, *exc: Any) -> None:
        _state.set_limit(self.previous)


def _refuse_reentrant(model: nn.Module) -> None:
    for module in model.modules():
        if not getattr(module, "gradient_checkpointing", False):
            continue
        function = getattr(module, "_gradient_checkpointing_func", None)
        keywords = getattr(function, "keywords", None) or {}
        if keywords.get("use_reentrant", function is not None and not keywords):
            raise ValueError(
                "this model has reentrant gradient checkpointing, which drops the constraint's "
                "gradient; switch it off and fit with gradient_checkpointing=True, which "
                "recomputes without reentrance"
            )


# ---------------------------------------------------------------------- checkpoints on disk


def checkpoint_step(folder: Path) -> int:
    """The step of a checkpoint folder ``checkpoint-N``."""
    return int(folder.name.rpartition("-")[2])


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to the end."""
    found = [path for path in folder.glob("checkpoint-*") if (path / COMPLETE).is_file()]
    return max(found, key=checkpoint_step, default=None)


def drop_incomplete(folder: Path) -> None:
    """Remove what an interrupted save has left."""
    for path in folder.glob("checkpoint-*"):
        if path.is_dir() and not (path / COMPLETE).is_file():
            shutil.rmtree(path)


_OWNED = {
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "activation_checkpointing",
    "remove_unused_columns",
    "train_sampling_strategy",
    "learning_rate",
    "save_only_model",
    "load_best_model_at_end",
}


def training_arguments(
    settings: FitSettings, folder: str | os.PathLike[str], **overrides: Any
) -> TrainingArguments:
    """Arguments for :class:`RouterTrainer`.

    Args:
        settings: The fit's settings.
        folder: Where checkpoints go.
        **overrides: Fields of ``TrainingArguments``: loggers, devices, mixed precision …

    Raises:
        ValueError: An override of what the settings decide, or a batch that does not divide.
    """
    owned = sorted(_OWNED & set(overrides))
    if owned:
        raise ValueError(
            f"{', '.join(owned)} cannot be set through training arguments: fit's own settings "
            "(steps, batch_size, micro_batch, router_lr, gradient_checkpointing, ...) decide them"
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    passes = settings.accumulation(processes)
    fields: dict[str, Any] = {
        "output_dir": os.fspath(folder),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size // (processes * passes),
        "gradient_accumulation_steps": passes,
        "max_grad_norm": settings.max_grad_norm,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "save_total_limit": 2,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "report_to": [],
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": settings.workers,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "disable_tqdm": True,
        "seed": settings.seed,
    }
    arguments = TrainingArguments(**{**fields, **overrides})
    # Several GPUs in one process would mean DataParallel, whose replicas lose the routes.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments
