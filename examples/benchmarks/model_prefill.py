"""Time the prefill of whole models with more and more heads streaming, beside the untouched model.

    python examples/benchmarks/model_prefill.py --out examples/benchmarks/results/model_prefill.json

Needs a CUDA GPU. Weights are random, in the geometry of a published model: times do not depend on
them, and routes are forced. A row is the median time of one prefill with a KV cache and the logits
of the last position (time to the first token without the tokenizer). The untouched row is the
fastest of its variants, eager and compiled (all of them are in ``meta``), and the transformed rows
run in that variant unless told otherwise. Before anything is timed the transformed model, every
head full, is compared with the untouched one; both hold the same weights in memory once. With
``--resume`` a run that was cut short is taken up where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _results import Results, commit, versions

import elastic_compile
from elastic_compile import ElasticConfig
from elastic_compile._measure import spread_routes

GEOMETRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-4B": (
        "Qwen3Config",
        dict(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
    ),
    "Llama-3.1-8B": (
        "LlamaConfig",
        dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128256,
        ),
    ),
    "tiny": (
        "LlamaConfig",
        dict(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=1024,
        ),
    ),
}
KEY = ("geometry", "impl", "S", "msr")
PARITY = 5e-2
"""Largest relative difference of bfloat16 logits, norm over norm."""
SHORT = 8192
"""Tokens of the prompt on which the models are compared, which also warms up their kernels."""


def main() -> None:
    """Measure, print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--geometries", nargs="+", choices=GEOMETRIES, default=["Qwen3-4B", "Llama-3.1-8B"]
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072, 262144]
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.9, 1.0])
    parser.add_argument("--sink", type=int, default=128)
    parser.add_argument("--local", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3, help="up to 32,768 tokens; fewer beyond")
    parser.add_argument("--backends", nargs="+", default=["none", "inductor"])
    parser.add_argument(
        "--elastic-backends",
        nargs="+",
        help="of the transformed model; default: the untouched one's fastest at that length",
    )
    parser.add_argument("--commit", help="what the JSON calls the commit; default: git's HEAD")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every row")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides")
    parser.add_argument(
        "--resume", action="store_true", help="--append, and do not measure again what is there"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("model_prefill.py measures a CUDA GPU, and there is none")
    meta: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "versions": {**versions(), "transformers": transformers.__version__},
        "commit": args.commit or commit(),
        "dtype": "bf16",
        "sink": args.sink,
        "local": args.local,
        "rounds": args.rounds,
        "untouched_ms": {},
    }
    results = Results(args.out, meta, KEY, append=args.append or args.resume)
    print(f"{'geometry':14} {'impl':10} {'S':>7} {'Ω_MSR':>6} {'ms':>10} {'GiB':>6} speed-up")
    for name in args.geometries:
        measure(args, name, results, Device("cuda"))


class Variant(NamedTuple):
    """What was measured of one variant of a model."""

    ms: float
    peak_bytes: int


class Device(NamedTuple):
    """What times and memory are taken from; a CPU shows no memory."""

    name: str

    def start(self) -> float:
        """Seconds on a clock, when all that was asked for is done."""
        if self.name == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def forget(self) -> None:
        """Gives back what nothing uses."""
        gc.collect()
        if self.name == "cuda":
            torch.cuda.empty_cache()

    def watch(self) -> None:
        """Lets the peak of memory begin anew."""
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Most bytes in use since then."""
        return torch.cuda.max_memory_allocated() if self.name == "cuda" else 0


def build(name: str, positions: int, device: Device) -> Any:
    """A model with random weights."""
    kind, fields = GEOMETRIES[name]
    config = getattr(transformers, kind)(
        **fields, max_position_embeddings=positions, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    with torch.device(device.name):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> Tensor:
    """Logits [1, 1, vocabulary] of the last position; fills a cache, as generate does."""
    # A mask of ones, as generate makes it.
    mask = torch.ones_like(ids)
    logits: Tensor = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1).logits
    return logits


def twin(model: Any) -> Any:
    """A model of the same weights, in the same memory."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def timed(model: Any, ids: Tensor, rounds: int, device: Device, *, warm: bool) -> Variant:
    """Median time of a prefill, and the most bytes in use; ``warm``: nothing to warm up."""
    if not warm:
        prefill(model, ids)
    device.start()
    device.watch()
    times = []
    for _ in range(rounds):
        started = device.start()
        prefill(model, ids)
        times.append(1e3 * (device.start() - started))
    return Variant(median(times), device.peak())


def rounds_at(length: int, rounds: int) -> tuple[int, bool]:
    """Rounds at a length, and whether they do without a call that warms up.

    A long prefill takes many seconds, and its kernels are those of shorter ones.
    """
    if length <= 32768:
        return rounds, False
    return (min(rounds, 2), False) if length <= 65536 else (1, True)


def fastest(
    model: Any, ids: Tensor, rounds: int, backends: list[str], device: Device
) -> tuple[str, dict[str, Variant]]:
    """Times the model's variants (not compiled, or by a backend).

    Returns:
        Name of the fastest, "" where none fits in memory, and what was measured of each.
    """
    found: dict[str, Variant] = {}
    count, warm = rounds_at(ids.shape[1], rounds)
    for backend in backends:
        model._compiled_call_impl = None
        if backend != "none":
            model.compile(backend=backend, dynamic=True)
        try:
            # A compiler may compile anew for a length: offsets beyond 32 bits, for one.
            only = warm and backend == "none"
            found[backend] = timed(model, ids, count, device, warm=only)
        except torch.OutOfMemoryError as error:
            print(f"{backend} at {ids.shape[1]}: {str(error).splitlines()[0]}", flush=True)
        if backend not in found:
            device.forget()
    model._compiled_call_impl = None
    best = min(found, key=lambda backend: found[backend].ms) if found else ""
    return best, found


def measure(args: argparse.Namespace, name: str, results: Results, device: Device) -> None:
    """All lengths of one geometry, untouched and transformed side by side.

    A card slows down as it warms up: what is compared has to be measured together.
    """
    lengths = [
        length for length in args.lengths if not args.resume or missing(args, name, length, results)
    ]
    if not lengths:
        return
    base = build(name, max(lengths), device)
    model = elastic_compile.transform(twin(base), ElasticConfig(sink=args.sink, local=args.local))
    kv_heads = [site.kv_heads for site in elastic_compile.report(model).rewritten]
    for index, length in enumerate(lengths):
        ids = torch.randint(base.config.vocab_size, (1, length), device=device.name)
        if index == 0:
            some = ids[:, :SHORT]
            check(prefill(model, some).float(), prefill(base, some).float(), name)
        row = results.row(geometry=name, impl="untouched", S=length) if args.resume else None
        if row is None:
            backend, found = fastest(base, ids, args.rounds, args.backends, device)
            if not found:
                continue
            variants = results.meta["untouched_ms"].setdefault(name, {})
            variants[str(length)] = {kind: round(ms, 3) for kind, (ms, _) in found.items()}
            milliseconds = found[backend].ms
            tell(results, name, "untouched", length, None, backend, found[backend], milliseconds)
        else:
            backend, milliseconds = row["backend"], row["ms"]
        for share in args.shares:
            if args.resume and results.row(geometry=name, impl="elastic", S=length, msr=share):
                continue
            backends = args.elastic_backends or [backend]
            with elastic_compile.force_routes(model, spread_routes(kv_heads, share)):
                best, own = fastest(model, ids, args.rounds, backends, device)
            if own:
                tell(results, name, "elastic", length, share, best, own[best], milliseconds)
    del base, model
    device.forget()


def missing(args: argparse.Namespace, name: str, length: int, results: Results) -> bool:
    """Whether a length's rows are not all there yet."""
    wanted = [("untouched", None), *(("elastic", share) for share in args.shares)]
    return any(
        results.row(geometry=name, impl=impl, S=length, msr=msr) is None for impl, msr in wanted
    )


def check(found: Tensor, wanted: Tensor, name: str) -> None:
    """Compares logits with every head full; exits where they differ."""
    error = float(torch.linalg.norm(found - wanted) / torch.linalg.norm(wanted))
    if not error < PARITY:
        sys.exit(f"{name}: with every head full the logits differ by {error:.2e}: nothing is timed")


def tell(
    results: Results,
    name: str,
    impl: str,
    length: int,
    msr: float | None,
    backend: str,
    found: Variant,
    base: float,
) -> None:
    """Print a row and write the file anew, so that a run that is cut short leaves what it has."""
    ms, peak = found
    results.add(
        [
            {
                "geometry": name,
                "impl": impl,
                "S": length,
                "msr": msr,
                "backend": backend,
                "ms": round(ms, 3),
                "peak_bytes": peak,
                "speedup": round(base / ms, 3),
            }
        ]
    )
    share = "-" if msr is None else f"{msr:.2f}"
    print(
        f"{name:14} {impl:10} {length:7} {share:>6} {backend:9} {ms:10.1f} {peak / 2**30:6.1f} "
        f"{base / ms:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
