"""What a transform costs: seconds and memory, on weights that do not exist (the meta device).

    cd examples/benchmarks && python transform_cost.py --out results/transform_cost.json

The default geometry is Qwen3-8B's: 36 layers, 32 query heads, 8 kv heads of 128. Seconds are wall
clock and CPU of this process; memory is the growth of its peak resident size over the transform.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from importlib.metadata import version
from pathlib import Path

import torch
from _results import commit
from transformers import Qwen3Config, Qwen3ForCausalLM

import elastic_compile
from elastic_compile.passes import capture


def peak() -> int:
    """Peak resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure once, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    traced = []
    original = capture.capture

    def count(site, *arguments):
        traced.append(type(site).__name__)
        return original(site, *arguments)

    capture.capture = count
    before, wall, cpu = peak(), time.perf_counter(), time.process_time()
    elastic_compile.transform(model)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    row = {
        "model": "Qwen3-8B geometry, meta weights",
        "layers": options.layers,
        "rewritten": len(elastic_compile.report(model).rewritten),
        "captures": len(traced),
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "extra_peak_mib": round((peak() - before) / 2**20),
    }
    meta = {
        "card": "cpu",
        "threads": options.threads,
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "commit": commit(),
    }
    found = {"meta": meta, "rows": [row]}
    print(json.dumps(found, indent=2))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
