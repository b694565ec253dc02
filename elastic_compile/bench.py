"""``python -m elastic_compile.bench MODEL``: what routing is worth to a model on this machine.

Times the untouched model and the transformed one with more and more heads streaming, in one process
on the same prompt: time to the first token, tokens per second after it, and memory. All numbers are
measured in this run; the untouched model is measured before and after, so that a machine that
slowed down or sped up in between shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import elastic_compile
from elastic_compile import _embedded, _files
from elastic_compile._measure import Memory, aligned, spread_routes
from elastic_compile.config import ElasticConfig

EMBEDDED = "smollm2"
UNTOUCHED = "untouched"
LENGTHS = (2048, 4096, 8192)
SHARES = (0.0, 0.5, 0.7, 0.9, 1.0)
NEW_TOKENS = 16
ROUNDS = 3
DRIFT = 0.1
"""The untouched model's times before and after may differ by this share without a warning."""


class BenchError(ValueError):
    """What was asked for cannot be measured; the text says why."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One prompt, answered once."""

    first: float
    """Seconds to the first token: the prefill."""
    per_token: float
    """Seconds for every later token."""
    peak_bytes: int | None
    """Most memory in use: of the device, or of the process above what it held before."""
    msr: float | None
    esr: float | None


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians of one variant at one length."""

    length: int
    variant: str
    ms_first: float
    tokens_per_second: float
    peak_bytes: int | None
    speedup: float
    """The untouched model's time to the first token over this one's."""
    msr: float | None
    esr: float | None
    runs: tuple[Run, ...]


class _Clock:
    """A logits processor that notes when each token's logits are there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        _wait(self.device)
        self.times.append(time.perf_counter())
        return scores


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def answer(model: Any, ids: Tensor, new_tokens: int, memory: Memory) -> Run:
    """Generate greedily from a prompt [1, S] and time it.

    Args:
        model: A causal language model; transformed or not.
        ids: The prompt, int64 [1, S], on the model's device.
        new_tokens: Tokens to add; at least 2.
        memory: Measures what the process takes, where the model is on the CPU.

    Returns:
        Times, memory and, of a transformed model, the sparsity of the prompt's prefill.
    """
    from transformers import LogitsProcessorList

    device = ids.device
    clock = _Clock(device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begun = 0 if cuda else memory.begin()
    _wait(device)
    started = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=LogitsProcessorList([clock]),
            return_dict_in_generate=True,
        )
    peak = torch.cuda.max_memory_allocated(device) if cuda else memory.end(begun)
    ratio = None
    if elastic_compile.is_transformed(model):
        cache = out.past_key_values if out.get("cache") is None else out.cache
        ratio = elastic_compile.sparsity(cache)
    return Run(
        first=clock.times[0] - started,
        per_token=(clock.times[-1] - clock.times[0]) / (len(clock.times) - 1),
        peak_bytes=peak,
        msr=None if ratio is None else ratio.msr,
        esr=None if ratio is None else ratio.esr,
    )


def bench(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    config: ElasticConfig | None = None,
    router: str | Path | None = None,
    shares: Sequence[float] = SHARES,
    new_tokens: int = NEW_TOKENS,
    rounds: int = ROUNDS,
    backend: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[list[Row], float]:
    """Time a model untouched and transformed; it is restored in the end.

    Args:
        model: A causal language model that is not transformed.
        prompts: Token ids, int64 [1, S] each, of different lengths, on the model's device.
        config: Of the transform; None: the router's, or the default.
        router: Folder of a trained router; adds the variant ``"routed"``.
        shares: Shares of streaming heads to force, from 0 to 1.
        new_tokens: Tokens to generate for each prompt; at least 2.
        rounds: Runs of each variant, after one that warms up.
        backend: ``torch.compile`` backend that both models are compiled with; None: not compiled.
        tell: Told about every variant.

    Returns:
        A row for the untouched model and one a variant, for each prompt; and the largest change of
        the untouched model's median time between the beginning and the end, as a share.

    Raises:
        BenchError: The model is transformed already.
    """
    if elastic_compile.is_transformed(model):
        raise BenchError("the model is transformed already; elastic_compile.restore(model) first")
    memory = Memory()

    def runs() -> list[list[Run]]:
        """For each prompt, without the run that warms up."""
        return [
            [answer(model, ids, new_tokens, memory) for _ in range(rounds + 1)][1:]
            for ids in prompts
        ]

    with _compiled(model, backend):
        before = runs()
    tell(f"{UNTOUCHED}: measured")
    elastic_compile.transform(model, config, router=router)
    tell(elastic_compile.report(model).summary())
    kv_heads = [site.kv_heads for site in elastic_compile.report(model).rewritten]
    variants: list[tuple[str, Any]] = [("routed", None)] if router is not None else []
    variants += [(f"{share:.0%} streaming", spread_routes(kv_heads, share)) for share in shares]
    measured: dict[str, list[list[Run]]] = {}
    try:
        with _compiled(model, backend):
            for name, routes in variants:
                forced = (
                    nullcontext() if routes is None else elastic_compile.force_routes(model, routes)
                )
                with forced:
                    measured[name] = runs()
                tell(f"{name}: measured")
    finally:
        elastic_compile.restore(model)
    with _compiled(model, backend):
        after = runs()
    tell(f"{UNTOUCHED}: measured again")
    rows = []
    drift = 0.0
    for index, ids in enumerate(prompts):
        length = ids.shape[1]
        early, late = _median(before[index]), _median(after[index])
        drift = max(drift, abs(late - early) / early)
        base = [*before[index], *after[index]]
        rows.append(_row(length, UNTOUCHED, base, base))
        rows += [_row(length, name, found[index], base) for name, found in measured.items()]
    return rows, drift


@contextmanager
def _compiled(model: Any, backend: str | None) -> Iterator[None]:
    """Compile the model for a block; a compiled form of the caller's is back afterwards."""
    before = model._compiled_call_impl
    if backend is not None:
        model.compile(backend=backend, dynamic=True)
    try:
        yield
    finally:
        model._compiled_call_impl = before


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(run.first for run in runs)


def _row(length: int, variant: str, runs: Sequence[Run], base: Sequence[Run]) -> Row:
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return Row(
        length=length,
        variant=variant,
        ms_first=1e3 * _median(runs),
        tokens_per_second=1 / statistics.median(run.per_token for run in runs),
        peak_bytes=max(peaks) if peaks else None,
        speedup=_median(base) / _median(runs),
        msr=runs[0].msr,
        esr=runs[0].esr,
        runs=tuple(runs),
    )


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as one aligned table."""
    table = [
        ("tokens", "heads", "TTFT ms", "speed-up", "tokens/s", "memory MiB", "Ω_MSR", "Ω_ESR"),
        *(
            (
                str(row.length),
                row.variant,
                f"{row.ms_first:.1f}",
                f"{row.speedup:.2f}×",
                f"{row.tokens_per_second:.2f}",
                "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
                "-" if row.msr is None else f"{row.msr:.3f}",
                "-" if row.esr is None else f"{row.esr:.3f}",
            )
            for row in rows
        ),
    ]
    return aligned(table, left=(1,))


# ------------------------------------------------------------------ the command


def _load(name: str, dtype: str, device: str, random_weights: bool) -> Any:
    import transformers

    kind = getattr(torch, dtype)
    model: Any
    if name == EMBEDDED:
        model = _embedded.load_model(kind)
        return model.to(device)
    if random_weights:
        config = transformers.AutoConfig.from_pretrained(name)
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=kind)
    return model.to(device).eval()


def _random_prompts(model: Any, lengths: Sequence[int], device: str) -> list[Tensor]:
    """Where routes are forced, what a token means does not matter to the time."""
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().weight.shape[0]
    return [torch.randint(size, (1, n), generator=generator).to(device) for n in lengths]


def _text_prompts(name: str, file: Path, lengths: Sequence[int], device: str) -> list[Tensor]:
    from transformers import AutoTokenizer

    tokenizer: Any = (
        _embedded.load_tokenizer() if name == EMBEDDED else AutoTokenizer.from_pretrained(name)
    )
    ids = tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    if ids.shape[1] < max(lengths):
        raise BenchError(
            f"{file} has {ids.shape[1]} tokens, --lengths asks for {max(lengths)}: use a longer "
            "text or shorter lengths"
        )
    return [ids[:, :n].to(device) for n in lengths]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastic_compile.bench", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id, folder, or 'smollm2' for the embedded model")
    add("--router", type=Path, metavar="FOLDER", help="a trained router: its choice is timed too")
    add(
        "--prompt",
        type=Path,
        metavar="FILE",
        help="text for the prompts (default: random tokens)",
    )
    add("--sink", type=int, help="sink tokens (default: the router's, or the configuration's)")
    add("--local", type=int, help="window in tokens (default: likewise)")
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="S")
    add("--shares", type=float, nargs="+", default=list(SHARES), metavar="Ω")
    add("--new-tokens", type=int, default=NEW_TOKENS, metavar="N")
    add("--rounds", type=int, default=ROUNDS, metavar="N", help="runs of each variant (default 3)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: by device")
    add("--device", help="default: cuda where there is one, else cpu")
    add("--backend", metavar="NAME", help="compile both models with this torch.compile backend")
    add(
        "--random-weights",
        action="store_true",
        help="build the model from its configuration alone: times need no trained weights",
    )
    add("--json", metavar="FILE", help="write every run there as JSON")
    return parser


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name, low in (("lengths", 2), ("new_tokens", 2), ("rounds", 1)):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value < low:
                parser.error(f"--{name.replace('_', '-')} is {value}; allowed: {low} or more")
    if any(not 0 <= share <= 1 for share in options.shares):
        parser.error("--shares are shares of streaming heads, from 0 to 1")
    if options.router is not None:
        if options.sink is not None or options.local is not None:
            parser.error("--router brings its own windows; leave --sink and --local out")
        if not options.router.is_dir():
            parser.error(f"--router: {options.router} is no folder")
        if options.random_weights:
            parser.error("--router and --random-weights: a trained router fits no random model")
        if options.prompt is None:
            parser.error("what a router chooses depends on the prompt: --prompt FILE names a text")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: Its arguments; None: those of the process.

    Returns:
        Exit status: 0, or 2 when the model or router cannot be used.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(options, parser)
    logging.getLogger("elastic_compile").setLevel(logging.WARNING)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    given = {k: v for k in ("sink", "local") if (v := getattr(options, k)) is not None}
    config = ElasticConfig(**given) if given else None
    if config is None and options.router is None and options.model == EMBEDDED:
        config = _embedded.CONFIG
    try:
        model = _load(options.model, dtype, device, options.random_weights)
        if options.prompt is None:
            prompts = _random_prompts(model, options.lengths, device)
        else:
            prompts = _text_prompts(options.model, options.prompt, options.lengths, device)
        rows, drift = bench(
            model,
            prompts,
            config=config,
            router=options.router,
            shares=options.shares,
            new_tokens=options.new_tokens,
            rounds=options.rounds,
            backend=options.backend,
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except (ValueError, OSError, ImportError, _embedded.EmbeddedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_rows(rows))
    if drift > DRIFT:
        print(
            f"the untouched model's time changed by {drift:.0%} during the run: other work on "
            "this machine? Treat small differences as noise"
        )
    if options.json:
        name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
        meta = {
            "model": options.model,
            "device": name,
            "dtype": dtype,
            "backend": options.backend,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "elastic_compile": elastic_compile.__version__,
            "drift": drift,
        }
        found = {"meta": meta, "rows": [dataclasses.asdict(row) for row in rows]}
        _files.write_atomic(options.json, _files.dump_json(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
