"""Time attention under straight-through routes, forward and backward, beside its peers.

    python examples/benchmarks/training.py --out examples/benchmarks/results/training.json

Needs a CUDA GPU. ``elastic`` is ``attention_train`` with the Triton kernels, ``sdpa_blocked`` what
a fit in float32 uses; the peers compute full and streaming attention of all heads and mix them
(``peers.mixtures``). Half of the kv heads stream. Outputs and gradients are compared with the
first implementation's before a row is printed. Times are medians of queued calls, without the host;
the backward's is that of both less the forward's. Rates count 4 D FLOP forward and 10 D backward
for every pair that the work needs: all causal pairs forward, those of the chosen modes backward.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import peers
from _results import Results, Row, commit, versions
from prefill import DTYPES, full_pairs, streaming_pairs, timed

from elastic_compile import _relaxed
from elastic_compile.kernels import ops

PEERS = ("two_sdpa", "sdpa_flex", "flex")
OURS = ("elastic", "sdpa_blocked")
DENSE = "sdpa"
PARITY = 2e-2
KEY = ("impl", "D", "S", "B")


def main() -> None:
    """Measure, print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1 << n for n in range(12, 17)], help="tokens"
    )
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--batch", type=int, default=1, help="samples")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--sparse", type=int, help="streaming kv heads; default: half of them")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--mask-limit", type=int, default=32768, help="longest row for which two_sdpa has a mask"
    )
    parser.add_argument("--sink", type=int, default=128)
    parser.add_argument("--local", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each number")
    parser.add_argument("--commit", help="what the JSON calls the commit; default: git's HEAD")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every row")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("training.py measures a CUDA GPU, and there is none")
    args.sparse = args.kv_heads // 2 if args.sparse is None else args.sparse
    meta = {
        "card": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": args.commit or commit(),
        "dtype": args.dtype,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "sparse_kv_heads": args.sparse,
        "sink": args.sink,
        "local": args.local,
    }
    print(json.dumps(meta, indent=2))
    print(
        f"{'impl':13} {'D':>4} {'B x S':>11} {'fwd ms':>9} {'bwd ms':>9} {'step ms':>9} {'GiB':>6}"
    )
    results = Results(args.out, meta, KEY, append=args.append)
    for size in args.head_sizes:
        for length in args.lengths:
            measure(args, size, length, results)
            torch.cuda.empty_cache()


def measure(args: argparse.Namespace, size: int, length: int, results: Results) -> list[Row]:
    """The rows of one head size and length, each added as soon as it is known."""
    torch.manual_seed(0)
    leaves = [
        torch.randn(args.batch, length, heads, size, device="cuda", dtype=DTYPES[args.dtype])
        .transpose(1, 2)
        .requires_grad_()
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    ]
    route = torch.zeros(args.batch, args.kv_heads, device="cuda")
    # Spread over the heads, as a router would.
    step = args.kv_heads / max(args.sparse, 1)
    route[:, [int(i * step) for i in range(args.sparse)]] = 1
    leaves.append(route.requires_grad_())
    grad = torch.randn_like(leaves[0])

    rows = []
    kv_group = args.batch * args.heads // args.kv_heads
    every = full_pairs(length) * args.kv_heads * kv_group
    streamed = streaming_pairs(length, args.sink, args.local) * args.sparse
    chosen = (streamed + full_pairs(length) * (args.kv_heads - args.sparse)) * kv_group
    wanted: list[Tensor] | None = None
    for name, make in implementations(args, length).items():
        # FlexAttention compiles here, which takes minutes: whoever waits should know.
        print(f"{name} at {length} ...", file=sys.stderr, flush=True)
        attend = make()
        found = differentiate(attend, leaves, grad)
        if wanted is None:
            # Not on the device, whose peak of memory is measured.
            wanted = [tensor.cpu() for tensor in found]
        # What has no routes is not compared.
        if name != DENSE:
            compare(name, found, wanted)
        del found
        forward = timed(lambda attend=attend: attend(*leaves), args.seconds)[0]
        both, peak = timed(lambda attend=attend: differentiate(attend, leaves, grad), args.seconds)
        back = both - forward
        row = {
            "impl": name,
            "D": size,
            "S": length,
            "B": args.batch,
            "fwd_ms": round(forward, 4),
            "bwd_ms": round(back, 4),
            "step_ms": round(both, 4),
            "fwd_tflops": round(4 * size * every / forward / 1e9, 1),
            "bwd_tflops": round(10 * size * (every if name == DENSE else chosen) / back / 1e9, 1),
            "peak_bytes": peak,
        }
        rows.append(row)
        results.add([row])
        print(
            f"{name:13} {size:4} {args.batch} x {length:7} {forward:9.3f} {back:9.3f} {both:9.3f} "
            f"{peak / 2**30:6.1f}  {row['fwd_tflops']:.0f} / {row['bwd_tflops']:.0f} TFLOP/s",
            flush=True,
        )
    return rows


def implementations(args: argparse.Namespace, length: int) -> dict[str, Callable[[], peers.Mix]]:
    """What makes what is timed, by name; ours first, those that compile last."""

    def elastic(query: Tensor, key: Tensor, value: Tensor, route: Tensor) -> Tensor:
        return ops.attention_train(
            query, key, value, route, sink=args.sink, local=args.local, kernel="triton"
        )[0]

    def blocked(query: Tensor, key: Tensor, value: Tensor, route: Tensor) -> Tensor:
        return _relaxed.mix_blocked(query, key, value, route, sink=args.sink, local=args.local)

    def dense(query: Tensor, key: Tensor, value: Tensor, route: Tensor) -> Tensor:
        return peers.sdpa(query, key, value)()

    makers = peers.mixtures(length, args.sink, args.local, torch.device("cuda"))
    runs: dict[str, Callable[[], peers.Mix]] = {
        "elastic": lambda: elastic,
        "sdpa_blocked": lambda: blocked,
        DENSE: lambda: dense,
    }
    for name in args.peers:
        if name != "two_sdpa" or length <= args.mask_limit:
            runs[name] = makers[name]
    return runs


def differentiate(attend: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Any]:
    """Output, and gradients of query, key, value and routes (None where they do not matter)."""
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad, allow_unused=True)]


def compare(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    """Exit where an output or a gradient differs from the first implementation's."""
    for what, one, other in zip(
        ("output", "query", "key", "value", "route"), found, wanted, strict=True
    ):
        exact = other.to(one.device).double()
        relative = (torch.linalg.norm(one.double() - exact) / torch.linalg.norm(exact)).item()
        # The route's gradient is a small difference of large sums.
        if not relative < PARITY * (10 if what == "route" else 1):
            sys.exit(f"{name}: {what} differs from {OURS[0]}'s by {relative:.2e}")


if __name__ == "__main__":
    main()
