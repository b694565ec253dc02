"""Time causal prefill of mixed full and streaming heads beside other implementations.

    python examples/benchmarks/prefill.py --out examples/benchmarks/results/prefill.json

Needs a CUDA GPU. All implementations run in one process on the same tensors, laid out as Hugging
Face models make them ([B, S, H, D], transposed). Results are compared before anything is printed.
Times are medians of queued calls, without the host. TFLOP/s count 4 D FLOP for every visible
query-key pair; the floor is that work at the rate of a large matrix product, or one pass over
inputs and output at the bandwidth of a device copy, both measured in this run, if that is longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).parent))

import peers

from elastic_compile.kernels import ops, reference
from elastic_compile.kernels._call import AttentionCall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = ("sdpa", "sdpa-flash", "fa3", "flex", "gather")
PARITY = 1e-2
TAIL = 64


def main() -> None:
    """Measure, print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--sparse", type=int, nargs="+", default=[0, 2, 6, 8])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=list(PEERS),
        help="what to compare with; flex and gather compile for every shape",
    )
    parser.add_argument(
        "--longest-mask", type=int, default=32768, help="no block mask for longer sequences"
    )
    parser.add_argument("--sink", type=int, default=128)
    parser.add_argument("--local", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each number")
    parser.add_argument("--commit", help="what the JSON calls the commit; default: git's HEAD")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("prefill.py measures a CUDA GPU, and there is none")
    if any(not 0 <= n <= args.kv_heads for n in args.sparse):
        sys.exit(f"--sparse counts streaming kv heads: 0 to {args.kv_heads}")

    torch.manual_seed(0)
    rate, bandwidth = ceilings(DTYPES[args.dtype], args.seconds)
    meta = {
        "card": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": args.commit or commit(),
        "dtype": args.dtype,
        "heads": args.heads,
        "sink": args.sink,
        "local": args.local,
        "matmul_tflops": round(rate / 1e12, 1),
        "copy_tb_per_s": round(bandwidth / 1e12, 2),
    }
    print(json.dumps(meta, indent=2))
    print(f"{'impl':12} {'D':>4} {'S':>7} {'streaming':>9} {'ms':>9} {'TFLOP/s':>8} {'floor':>8}")
    rows = []
    for size in args.head_sizes:
        for length in args.lengths:
            rows += measure(args, size, length, rate, bandwidth)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        head = json.dumps(meta, indent=2).replace("\n", "\n  ")
        args.out.write_text(f'{{\n  "meta": {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def measure(
    args: argparse.Namespace, size: int, length: int, rate: float, bandwidth: float
) -> list[dict[str, Any]]:
    """The rows of one head size and length."""
    query, key, value = (
        torch.randn(
            args.batch, length, heads, size, device="cuda", dtype=DTYPES[args.dtype]
        ).transpose(1, 2)
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )

    def routes(sparse: int) -> Tensor:
        # Spread over the heads, as a router would.
        route = torch.zeros(args.batch, args.kv_heads, dtype=torch.int32, device="cuda")
        step = args.kv_heads / max(sparse, 1)
        route[:, [int(i * step) for i in range(sparse)]] = 1
        return route

    def checked(run: Callable[[], Tensor], sparse: int) -> Callable[[], Tensor]:
        check(run(), AttentionCall(query, key, value, routes(sparse), args.sink, args.local), real)
        return run

    # Batches are padded on the left, each sample by another eighth; one sample never is.
    pads = torch.arange(args.batch, device="cuda") * length // 8
    real = None if args.batch == 1 else torch.arange(length, device="cuda") >= pads[:, None]
    padding: dict[str, Tensor] = {} if real is None else {"key_mask": real, "start": pads.int()}

    def elastic(sparse: int) -> Callable[[], Tensor]:
        route = routes(sparse)
        return lambda: ops.attention(
            query, key, value, route, sink=args.sink, local=args.local, **padding
        )[0]

    def made(peer: Any, sparse: int) -> tuple[Callable[[], Tensor], float]:
        make, run = peer(query, key, value, routes(sparse), args.sink, args.local)
        mask = make()
        return lambda: run(mask), timed(make, args.seconds)[0]

    # name, streaming kv heads, what to time, and the time of what is made before.
    runs: list[tuple[str, int, Callable[[], Tensor], float]] = []
    for sparse in args.sparse:
        runs.append(("elastic", sparse, elastic(sparse), 0.0))
    if real is None:
        dense = {
            "sdpa": peers.sdpa(query, key, value),
            "sdpa-flash": peers.sdpa(query, key, value, SDPBackend.FLASH_ATTENTION),
            "fa3": peers.fa3(query, key, value),
        }
        for name, function in dense.items():
            if name in args.peers and function is not None:
                runs.append((name, 0, function, 0.0))
        for name, peer in (("flex", peers.flex), ("gather", peers.gather)):
            # A block mask for every head takes S² / 16,384 entries each, and as long to make.
            if name in args.peers and length <= args.longest_mask:
                for sparse in args.sparse:
                    runs.append((name, sparse, *made(peer, sparse)))

    found = []
    for name, sparse, run, prepared in runs:
        checked(run, sparse)
        full_heads = streamed = 0
        for pad in pads.tolist():
            full_heads += full_pairs(length - pad)
            streamed += streaming_pairs(length - pad, args.sink, args.local)
        pairs = full_heads * (args.kv_heads - sparse) + streamed * sparse
        flop = 4 * size * pairs * args.heads // args.kv_heads
        bytes_moved = 2 * size * length * args.batch * 2 * (args.heads + args.kv_heads)
        milliseconds, peak = timed(run, args.seconds)
        row = {
            "impl": name,
            "D": size,
            "S": length,
            "B": args.batch,
            "kv_heads": args.kv_heads,
            "sparse_kv_heads": sparse,
            "ms": round(milliseconds, 4),
            "prepare_ms": round(prepared, 4),
            "tflops": round(flop / milliseconds / 1e9, 1),
            "floor_ms": round(max(flop / rate, bytes_moved / bandwidth) * 1e3, 4),
            "peak_bytes": peak,
        }
        found.append(row)
        print(
            f"{name:12} {size:4} {length:7} {sparse:5} of {args.kv_heads} {milliseconds:9.3f} "
            f"{row['tflops']:8.1f} {row['floor_ms']:8.3f}"
            + (f" + {prepared:.1f} ms for the mask" if prepared else ""),
            flush=True,
        )
    return found


def check(out: Tensor, call: AttentionCall, real: Tensor | None) -> None:
    """Compare some rows with the reference in float64; exit where they differ.

    ``real``, bool [B, S], says which tokens are not padding.
    """
    length = call.query.shape[2]
    for end in (length, length // 2 + 37, TAIL + 5):
        rows = slice(end - TAIL, end)
        part = AttentionCall(
            call.query[:, :, rows], call.key[:, :, :end], call.value[:, :, :end], call.route,
            call.sink, call.local,
            key_mask=None if real is None else real[:, :end],
            start=None if real is None else real.to(torch.uint8).argmax(1).int(),
        )  # fmt: skip
        wanted, _ = reference.forward(part, torch.float64)
        error = torch.linalg.norm(out[:, :, rows].double() - wanted) / torch.linalg.norm(wanted)
        if not error < PARITY:
            sys.exit(f"wrong result at rows before {end} of {length}: relative error {error:.2e}")


def timed(run: Callable[[], Any], seconds: float) -> tuple[float, int]:
    """Median milliseconds of queued calls, and the most memory in use during one."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    run()
    end.record()
    torch.cuda.synchronize()
    count = min(max(int(seconds * 2e3 / begin.elapsed_time(end)), 5), 200)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    # The host queues all calls while the device is busy, so that gaps between them do not count.
    torch.cuda._sleep(20_000_000)
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return times[count // 2], peak


def ceilings(dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """FLOP/s of an 8192-cubed matrix product, and bytes/s of a copy, read and written."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    product = timed(lambda: left @ right, seconds)[0]
    source = torch.randn(1 << 30, device="cuda", dtype=dtype)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), seconds)[0]
    return 2 * 8192**3 / product * 1e3, 2 * source.numel() * source.element_size() / copy * 1e3


def full_pairs(length: int) -> int:
    """Visible pairs of a full head."""
    return length * (length + 1) // 2


def streaming_pairs(length: int, sink: int, local: int) -> int:
    """Visible pairs of a streaming head: min(p + 1, sink + local) keys for the row at p."""
    dense = min(length, sink + local)
    return dense * (dense + 1) // 2 + (length - dense) * (sink + local)


def versions() -> dict[str, str]:
    """Versions that matter to the times."""
    import triton

    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def commit() -> str:
    """git's HEAD, or "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
