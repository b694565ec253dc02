"""Time causal prefill of mixed full and streaming heads beside other implementations.

    python examples/benchmarks/prefill.py --out examples/benchmarks/results/prefill.json

Needs a CUDA GPU. Rows of the operator are called ``elastic``, with the kernel that served them;
``triton`` is the same with the Triton kernel asked for by name, where another one served. All
implementations run in one process on the same tensors, laid out as Hugging Face models make them
([B, S, H, D], transposed). Results are compared before anything is printed. Times are medians of
queued calls, without the host, the better of two turns through all implementations. TFLOP/s count
4 D FLOP for every visible query-key pair; the floor is that work at the rate of a large matrix
product, or one pass over inputs and output at the bandwidth of a device copy, both measured in this
run, if that is longer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).parent))

import peers
from _results import Results, Row, commit, versions

from elastic_compile.kernels import _counters, ops, reference
from elastic_compile.kernels._call import AttentionCall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = ("sdpa", "sdpa-flash", "fa3", "flex", "gather")
PARITY = 1e-2
TAIL = 64
TURNS = 2
LONG = 0.3
CYCLES = 2e9
"""Of a device that sleeps, a second, at most."""
KEY = ("impl", "D", "S", "B", "sparse_kv_heads")
MOST_TOKENS = 1 << 19


def main() -> None:
    """Measure, print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1 << n for n in range(10, 19)], help="tokens"
    )
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--sparse", type=int, nargs="+", default=[0, 2, 4, 6, 8])
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 4],
        help="samples; more than one are padded on the left. Skipped beyond 524,288 tokens in all",
    )
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
        "--mask-lengths",
        type=int,
        nargs="*",
        default=[8192, 32768],
        help="lengths at which flex and gather are timed",
    )
    parser.add_argument("--sink", type=int, default=128)
    parser.add_argument("--local", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each number")
    parser.add_argument("--commit", help="what the JSON calls the commit; default: git's HEAD")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every shape")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides")
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
    print(
        f"{'impl':12} {'D':>4} {'B x S':>11} {'streaming':>9} {'ms':>9} {'TFLOP/s':>8} {'floor':>8}"
    )
    results = Results(args.out, meta, KEY, append=args.append)
    rows: list[Row] = []
    for size in args.head_sizes:
        for batch in args.batches:
            for length in args.lengths:
                if batch * length <= MOST_TOKENS:
                    found = measure(args, size, batch, length, rate, bandwidth)
                    results.add(found)
                    rows += found
                    torch.cuda.empty_cache()
    print_ratios(rows, args.sink, args.local)


def measure(
    args: argparse.Namespace, size: int, batch: int, length: int, rate: float, bandwidth: float
) -> list[Row]:
    """The rows of one head size, batch and length."""
    query, key, value = (
        torch.randn(batch, length, heads, size, device="cuda", dtype=DTYPES[args.dtype]).transpose(
            1, 2
        )
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )

    def routes(sparse: int) -> Tensor:
        # Spread over the heads, as a router would.
        route = torch.zeros(batch, args.kv_heads, dtype=torch.int32, device="cuda")
        step = args.kv_heads / max(sparse, 1)
        route[:, [int(i * step) for i in range(sparse)]] = 1
        return route

    def checked(run: Callable[[], Tensor], sparse: int) -> Callable[[], Tensor]:
        check(run(), AttentionCall(query, key, value, routes(sparse), args.sink, args.local), real)
        return run

    # Batches are padded on the left, each sample by another eighth; one sample never is.
    pads = torch.arange(batch, device="cuda") * length // 8
    real = None if batch == 1 else torch.arange(length, device="cuda") >= pads[:, None]
    padding: dict[str, Tensor] = {} if real is None else {"key_mask": real, "start": pads.int()}

    def elastic(sparse: int, kernel: str = "auto") -> Callable[[], Tensor]:
        route = routes(sparse)
        return lambda: ops.attention(
            query, key, value, route, sink=args.sink, local=args.local, kernel=kernel, **padding
        )[0]

    def made(peer: Any, sparse: int) -> tuple[Callable[[], Tensor], float]:
        make, run = peer(query, key, value, routes(sparse), args.sink, args.local)
        mask = make()
        return lambda: run(mask), timed(make, args.seconds)[0]

    # name, streaming kv heads, what to time, and the time of what is made before.
    runs: list[tuple[str, int, Callable[[], Tensor], float]] = []
    served = serving(elastic(0))
    for sparse in args.sparse:
        runs.append(("elastic", sparse, elastic(sparse), 0.0))
        if served != "triton":
            runs.append(("triton", sparse, elastic(sparse, "triton"), 0.0))
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
            if name in args.peers and length in args.mask_lengths:
                for sparse in args.sparse:
                    runs.append((name, sparse, *made(peer, sparse)))

    for _name, sparse, run, _prepared in runs:
        checked(run, sparse)
    # In turns, each half of the time: a card slows down as it warms up.
    turns = [
        [timed(run, args.seconds / TURNS) for _name, _sparse, run, _prepared in runs]
        for _ in range(TURNS)
    ]
    found = []
    for (name, sparse, _run, prepared), times in zip(runs, zip(*turns, strict=True), strict=True):
        full_heads = streamed = 0
        for pad in pads.tolist():
            full_heads += full_pairs(length - pad)
            streamed += streaming_pairs(length - pad, args.sink, args.local)
        pairs = full_heads * (args.kv_heads - sparse) + streamed * sparse
        flop = 4 * size * pairs * args.heads // args.kv_heads
        bytes_moved = 2 * size * length * batch * 2 * (args.heads + args.kv_heads)
        milliseconds = min(ms for ms, _peak in times)
        peak = max(peak for _ms, peak in times)
        row = {
            "impl": name,
            "D": size,
            "S": length,
            "B": batch,
            "kv_heads": args.kv_heads,
            "sparse_kv_heads": sparse,
            "ms": round(milliseconds, 4),
            "prepare_ms": round(prepared, 4),
            "tflops": round(flop / milliseconds / 1e9, 1),
            "floor_ms": round(max(flop / rate, bytes_moved / bandwidth) * 1e3, 4),
            "peak_bytes": peak,
        }
        if name == "elastic":
            row["kernel"] = served
        found.append(row)
        print(
            f"{name:12} {size:4} {batch} x {length:7} {sparse:4} of {args.kv_heads} "
            f"{milliseconds:9.3f} {row['tflops']:9.1f} {row['floor_ms']:9.3f}"
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


def serving(run: Callable[[], Any]) -> str:
    """Name of the implementation that serves the operator's call in ``run``."""
    before = _counters.snapshot()["calls"]
    run()
    after = _counters.snapshot()["calls"]
    return next(name for name, count in after.items() if count > before.get(name, 0))


def timed(run: Callable[[], Any], seconds: float) -> tuple[float, int]:
    """Median milliseconds of queued calls, and the most memory in use during one.

    A call of more than ``LONG`` seconds is timed once, by the host, and had better been run before.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated()
    if once > LONG:
        return 1e3 * once, peak
    started = time.perf_counter()
    run()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    count = calls(time.perf_counter() - started, seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    # The host queues all calls while the device is busy, so that gaps between them do not count.
    torch.cuda._sleep(int(min(2 * host * count, 0.5) * CYCLES) + 1_000_000)
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return times[count // 2], peak


def calls(once: float, seconds: float) -> int:
    """How many calls of ``once`` seconds to time in about ``seconds``: 5 to 200."""
    return min(max(int(seconds / max(once, 1e-6)), 5), 200)


def print_ratios(rows: list[Row], sink: int, local: int) -> None:
    """Beside torch SDPA, and beside the kernel's own rate with every head full.

    The ratio is the time over what the visible pairs would take at that rate: 1 is no overhead.
    """
    print("\n  D       S     SDPA ms: elastic ms (speed-up, ratio) at streaming kv heads")
    for base in rows:
        if base["impl"] != "sdpa" or base["B"] != 1:
            continue
        size, length = base["D"], base["S"]
        own = [
            row
            for row in rows
            if (row["impl"], row["D"], row["S"], row["B"]) == ("elastic", size, length, 1)
        ]
        full = next((row["ms"] for row in own if row["sparse_kv_heads"] == 0), None)
        cells = []
        for row in own:
            cell = f"{row['sparse_kv_heads']}: {row['ms']:.3f} ({base['ms'] / row['ms']:.2f}x"
            if full is not None:
                pairs = visible_share(row["sparse_kv_heads"], row["kv_heads"], length, sink, local)
                cell += f", {row['ms'] / (pairs * full):.3f}"
            cells.append(cell + ")")
        print(f"{size:3} {length:7} {base['ms']:11.3f}: {'  '.join(cells)}")


def visible_share(sparse: int, kv_heads: int, length: int, sink: int, local: int) -> float:
    """Visible pairs over those of full heads."""
    streamed = streaming_pairs(length, sink, local) / full_pairs(length)
    return (kv_heads - sparse + sparse * streamed) / kv_heads


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


if __name__ == "__main__":
    main()
