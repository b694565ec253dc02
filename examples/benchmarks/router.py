"""Time a layer's router: pooling, both MLPs and the decision, fused and as torch operations.

    python examples/benchmarks/router.py --out examples/benchmarks/results/router.json

Needs a CUDA GPU. Times are medians of queued calls, without the host. The routes of both are
compared first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _results import Results, commit, versions
from prefill import timed

from elastic_compile.kernels import ops
from elastic_compile.router import AttentionRouter, boundary_pool, decide

POOL = 100


def main() -> None:
    """Measure, print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192, 131072, 1048576])
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.05, help="time spent on each number")
    parser.add_argument("--commit", help="what the JSON calls the commit; default: git's HEAD")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("router.py measures a CUDA GPU, and there is none")
    torch.manual_seed(0)
    meta = {
        "card": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": args.commit or commit(),
        "kv_heads": args.kv_heads,
        "pool_tokens": POOL,
    }
    results = Results(args.out, meta, ("impl", "D", "S", "B", "mask"))
    print(f"{'D':>4} {'S':>8} {'B':>2} {'mask':12} {'fused ms':>9} {'torch ms':>9}")
    for size in args.head_sizes:
        router = AttentionRouter(size, device="cuda").requires_grad_(False)
        torch.nn.init.normal_(router.router[-1].weight)
        for length in args.lengths:
            for batch in (1, 4) if length <= 131072 else (1,):
                results.add(measure(args, router, length, batch))


def measure(
    args: argparse.Namespace, router: AttentionRouter, length: int, batch: int
) -> list[dict[str, Any]]:
    """The rows of one head size, length and batch."""
    shape = (batch, length, args.kv_heads, router.head_dim)
    tap = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    forced = torch.full((1, args.kv_heads), -1, dtype=torch.int32, device="cuda")
    ones = torch.ones(batch, length, dtype=torch.bool, device="cuda")
    left = torch.arange(length, device="cuda").expand(batch, -1) >= length // 2
    weights = list(router.parameters())
    found = []
    for name, mask in (("none", None), ("ones", ones), ("left padded", left)):

        def fused(mask: Tensor | None = mask) -> Tensor:
            return ops.route(tap, weights, forced, key_mask=mask, pool_tokens=POOL)

        def modules(mask: Tensor | None = mask) -> Tensor:
            routes = decide(router(boundary_pool(tap, None, None, mask, POOL)))
            return torch.where(forced >= 0, forced, routes)

        if not torch.equal(fused(), modules()):
            sys.exit(f"routes differ at {length} tokens, mask: {name}; nothing is timed")
        times = {}
        for impl, run in (("fused", fused), ("torch", modules)):
            times[impl] = timed(run, args.seconds)[0]
            found.append(
                {
                    "impl": impl,
                    "D": router.head_dim,
                    "S": length,
                    "B": batch,
                    "mask": name,
                    "ms": round(times[impl], 4),
                }
            )
        print(
            f"{router.head_dim:4} {length:8} {batch:2} {name:12} {times['fused']:9.4f} "
            f"{times['torch']:9.4f}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
