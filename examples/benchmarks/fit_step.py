"""Time a step of a fit and its peak memory, random weights at a model's geometry.

    python examples/benchmarks/fit_step.py --out examples/benchmarks/results/fit_step.json

Needs a CUDA GPU. It is ``fit`` itself, with the preset ``paper`` (gradient checkpointing, one
sample a pass) but for length, steps and a batch of one: a prompt of bytes, the last 64 of them
scored. Forward, recomputation, backward, the penalty and the optimiser are all in a step. The first
step compiles and warms up; the time is the mean of the others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from _results import Results, commit, versions
from model_prefill import GEOMETRIES, Device, build

import elastic_compile
from elastic_compile import training

KEY = ("geometry", "S")
SCORED = 64


def main() -> None:
    """Measure, print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--geometries", nargs="+", choices=GEOMETRIES, default=["Qwen3-4B", "Llama-3.1-8B"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--commit", help="what the JSON calls the commit; default: git's HEAD")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every row")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("fit_step.py measures a CUDA GPU, and there is none")
    meta = {
        "card": torch.cuda.get_device_name(),
        "versions": {**versions(), "transformers": transformers.__version__},
        "commit": args.commit or commit(),
        "dtype": "bf16",
        "batch": 1,
    }
    results = Results(args.out, meta, KEY, append=args.append)
    print(f"{'geometry':14} {'S':>7} {'s a step':>9} {'GiB':>6} {'Ω_MSR':>6}")
    device = Device("cuda")
    for name in args.geometries:
        model = build(name, max(args.lengths), device)
        for length in args.lengths:
            row = measure(model, name, length, args.steps, device)
            results.add([row])
            print(
                f"{name:14} {length:7} {row['step_s']:9.2f} {row['peak_bytes'] / 2**30:6.1f} "
                f"{row['msr']:6.2f}",
                flush=True,
            )
        del model
        device.forget()


class Bytes:
    """A tokenizer whose tokens are the bytes of a text."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        """Token ids."""
        return {"input_ids": list(text.encode())}


def measure(model: Any, name: str, length: int, steps: int, device: Device) -> dict[str, Any]:
    """The row of one length."""
    text = "".join(chr(97 + int(i)) for i in torch.randint(26, (length,)))
    row = {"text": text, "task": "bytes", "scored_tokens": SCORED}
    device.forget()
    device.watch()
    with tempfile.TemporaryDirectory() as folder:
        result = training.fit(
            model,
            Bytes(),
            data=[row],
            out=folder,
            preset="paper",
            targets={"bytes": 0.7},
            length=length,
            steps=1 + steps,
            batch_size=1,
            progress=False,
            curves=False,
        )
    peak = device.peak()
    elastic_compile.restore(model)
    return {
        "geometry": name,
        "S": length,
        "step_s": round(result.seconds_per_step, 4),
        "peak_bytes": peak,
        "msr": round(result.records[-1]["msr"], 3),
    }


if __name__ == "__main__":
    main()
