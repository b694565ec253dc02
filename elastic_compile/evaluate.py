"""``python -m elastic_compile.evaluate``: what a router costs and saves.

One forward pass a sample and mode: loss of the scored tokens and exact match, beside full and
all-streaming attention, and Ω_MSR, per task. Built-in tasks use their test split.

Example:
    python -m elastic_compile.evaluate --model smollm2 --router my-router \\
        --data builtin:niah_single,lm_code --samples 100 --out evaluation.json
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_compile._files import dump_json, write_atomic
from elastic_compile.fit import add_model_arguments, load_model


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m elastic_compile.evaluate",
        description="Compare routed attention with full and with all-streaming attention.",
    )
    add_model_arguments(result)
    result.add_argument("--router", required=True, help="router folder")
    result.add_argument("--samples", type=int, default=192, help="samples a task (default: 192)")
    result.add_argument("--batch-size", type=int, default=8, help="samples a forward pass")
    result.add_argument("--seed", type=int, default=0, help="of the built-in tasks")
    result.add_argument("--out", help="JSON file for all results, sample by sample")
    result.set_defaults(length=4096)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from elastic_compile import transform
    from elastic_compile._embedded import EmbeddedModelError
    from elastic_compile.training import evaluate
    from elastic_compile.training.data import Encoder
    from elastic_compile.training.tasks import load_sources

    try:
        model, tokenizer = load_model(args.model, args.dtype, args.device)
        encoder = Encoder(tokenizer, args.length, args.chat_template, args.truncate)
        sources = load_sources(args.data, encoder, split="test", seed=args.seed, prose=args.prose)
        transform(model, router=args.router)
        result = evaluate(
            model,
            sources,
            samples=args.samples,
            batch_size=args.batch_size,
            progress=not args.quiet,
        )
        if args.out:
            document = {
                "length": args.length,
                "seed": args.seed,
                "data": args.data,
                **result.to_dict(),
            }
            write_atomic(Path(args.out), dump_json(document))
    except (ValueError, OSError, ImportError, EmbeddedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
