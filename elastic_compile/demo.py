"""``python -m elastic_compile.demo``: the whole path on a real pretrained model, on any machine.

Loads SmolLM2-135M-Instruct, transforms a copy, shows that with every head full it computes what
the untouched model computes, compiles it, lets it answer a passkey prompt, trains routers for a few
steps, answers again with a ready router, and times prefill with more and more heads streaming.
Every number printed is measured in this run.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elastic_compile
from elastic_compile import _embedded, _files
from elastic_compile._measure import Measured, Memory, aligned, measure, spread_routes
from elastic_compile.config import ElasticConfig

PASSKEY_LENGTH = 2048
LOGITS_LENGTH = 1024
NEW_TOKENS = 8
KEY = "71432"
DEPTH = 0.25
"""Where in the filler the key lies: out of reach of both the sink and the local window."""
LENGTHS, LONG_LENGTHS = (4096,), (4096, 8192)
SHARES = (0.0, 0.5, 0.9, 1.0)
ROUNDS = 3
MINUTES, LONG_MINUTES = 8.0, 30.0
FIT_STEPS, FIT_BATCH, FIT_LENGTH = 4, 2, 512
"""The short fit. Samples are longer than sink + local, or both kinds of head would be the same."""
FIT_TASKS = ("niah_single", "lm_code")
ROUTED_TASKS = ("niah_single", "niah_multikey", "lm_code", "lm_prose")
ROUTED_LENGTH = 2048
READY_ROUTER = Path(elastic_compile.__file__).parents[1] / "examples" / "smollm2" / "router"
"""There in a checkout, not in an installed wheel."""
LOGITS_TOLERANCE = 1e-4
"""Largest allowed difference of float32 logits, as a share of the largest logit."""


class DemoError(RuntimeError):
    """The demo cannot go on; the text says why."""


# ------------------------------------------------------------------ telling and measuring


class Progress:
    """Prints what is happening, with the seconds since the start."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self.started = time.perf_counter()
        self._write = write or functools.partial(print, flush=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def step(self, text: str) -> None:
        """A new step begins."""
        self._write(f"[{self.elapsed:6.1f} s] {text}")

    def detail(self, text: str) -> None:
        """A result of the current step."""
        for line in text.splitlines() or [""]:
            self._write(f"           {line}".rstrip())


def quickest_threads(counts: Sequence[int], work: Callable[[], None] | None = None) -> int:
    """The thread count that this machine is fastest with right now.

    Threads that wait for each other on a busy machine make small operations many times slower.

    Args:
        counts: Candidates; an earlier one wins unless a later one takes a tenth less time.
        work: What to time; None: large and small matrix products as in the model.

    Returns:
        One of ``counts``. Torch's own setting is as before.
    """
    work = work or _products()
    before = torch.get_num_threads()
    best, fastest = counts[0], float("inf")
    try:
        for count in counts:
            torch.set_num_threads(count)
            work()
            times = []
            for _ in range(3):
                started = time.perf_counter()
                work()
                times.append(time.perf_counter() - started)
            if statistics.median(times) < 0.9 * fastest:
                best, fastest = count, statistics.median(times)
    finally:
        torch.set_num_threads(before)
    return best


def _products() -> Callable[[], None]:
    weight, large, small = torch.randn(576, 1536), torch.randn(2048, 576), torch.randn(16, 576)

    def work() -> None:
        torch.mm(large, weight)
        for _ in range(30):
            torch.mm(small, weight)

    return work


# ------------------------------------------------------------------ prompts and routes


def passkey_prompt(tokenizer: Any, length: int, key: str = KEY, depth: float = DEPTH) -> Tensor:
    """A long dull text with a key hidden in it and the question for the key.

    Args:
        tokenizer: Of the model.
        length: Most tokens.
        key: What to find.
        depth: Where it lies, as a share of the filler before it.

    Returns:
        Token ids [1, at most ``length``].
    """
    head = tokenizer(
        "There is an important pass key hidden in a lot of irrelevant text. Find it and "
        "memorize it.\n"
    ).input_ids
    parts = [
        tokenizer(text, add_special_tokens=False).input_ids
        for text in (
            "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
            "again.\n",
            f"The pass key is {key}. Remember it. {key} is the pass key.\n",
            "What is the pass key? The pass key is",
        )
    ]
    filler, needle, question = parts
    count = (length - len(head) - len(needle) - len(question)) // len(filler)
    before = round(count * depth)
    return torch.tensor([head + filler * before + needle + filler * (count - before) + question])


# ------------------------------------------------------------------ equality with the untouched


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a model computes on the demo's prompt."""

    logits: Tensor
    """Of every position of the shortened prompt, [S, vocabulary]."""
    tokens: list[int]
    """Greedy answer to the whole prompt."""
    step_logits: Tensor
    """Of every answered token, [new tokens, vocabulary]."""
    answer: Measured
    """Cost of the answer: prefill and decoding."""


def generate(model: nn.Module, ids: Tensor, new_tokens: int = NEW_TOKENS) -> tuple[Tensor, Tensor]:
    """Greedy decoding on a dynamic cache.

    Args:
        model: A causal language model.
        ids: Prompt [1, S].
        new_tokens: Most tokens to add.

    Returns:
        New tokens [n] and their logits [n, vocabulary].
    """
    out = _generate(model, ids, new_tokens)
    return out.sequences[0, ids.shape[1] :], torch.cat(out.logits)


def _generate(model: nn.Module, ids: Tensor, new_tokens: int = NEW_TOKENS) -> Any:
    return model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def record(
    model: nn.Module, ids: Tensor, memory: Memory, logits_length: int = LOGITS_LENGTH
) -> Recording:
    """Logits, greedy answer, time and memory of a model on one prompt [1, S]."""
    with torch.no_grad():
        logits = model(ids[:, :logits_length], use_cache=False).logits[0]
    (tokens, step_logits), cost = measure(memory, lambda: generate(model, ids))
    return Recording(logits, tokens.tolist(), step_logits, cost)


def differences(expected: Recording, got: Recording) -> list[str]:
    """Why two recordings are not equal up to float32 rounding; empty when they are."""
    problems = []
    if expected.tokens != got.tokens:
        problems.append(f"greedy tokens differ: {expected.tokens} and {got.tokens}")
    for name in ("logits", "step_logits"):
        a, b = getattr(expected, name), getattr(got, name)
        if a.shape != b.shape:
            problems.append(f"{name} have shapes {list(a.shape)} and {list(b.shape)}")
            continue
        allowed = LOGITS_TOLERANCE * float(a.abs().max())
        error = float((a - b).abs().max())
        if not error <= allowed:  # also when it is NaN
            problems.append(f"{name} differ by {error:.3g}, more than {allowed:.3g}")
    return problems


# ------------------------------------------------------------------ compiling


class GraphSpy:
    """A Dynamo backend that counts graphs and the attention op in them, then compiles them.

    Args:
        inner: The backend that compiles.
    """

    def __init__(self, inner: str) -> None:
        self.inner = inner
        self.ops: list[int] = []
        """Attention ops in the graph of every call; a backend may be called twice for one graph."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        attention = torch.ops.elastic_compile.attention.default
        self.ops.append(sum(node.target is attention for node in graph.graph.nodes))
        compile_ = torch._dynamo.lookup_backend(self.inner)
        return compile_(graph, inputs)


def graph_count() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


BACKENDS = {
    "eager": "Dynamo's graph, run with torch's own kernels",
    "aot_eager": "the graph after AOTAutograd, run with torch's own kernels",
    "inductor": "generated C++",
}
"""Choices of ``--backend``. Inductor is not the default: generating and compiling the C++ of two
graphs of 30 layers takes longer on two cores than all other steps together."""


def check_backend(name: str) -> None:
    """Fail at once, not after minutes, where a backend cannot work.

    Raises:
        DemoError: Inductor without a C++ compiler.
    """
    if name != "inductor":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DemoError(
            f"--backend inductor needs a C++ compiler ({reason}); install one, for instance g++, "
            "or leave --backend out"
        ) from error


# ------------------------------------------------------------------ timing prefill


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant of the timing table."""

    length: int
    variant: str
    seconds: float
    """Median of the runs."""
    runs: tuple[float, ...]
    cpu_seconds: float
    """Median processor time of all threads."""
    speedup: float
    """The untouched model's median time over this one's."""
    msr: float | None
    esr: float | None
    extra_bytes: int | None
    """Most memory that a run added."""


def time_prefill(
    untouched: nn.Module,
    model: nn.Module,
    ids: Tensor,
    memory: Memory,
    *,
    shares: Sequence[float] = SHARES,
    rounds: int = ROUNDS,
    may_go_on: Callable[[float], bool] = lambda seconds: True,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Time one prefill of the untouched model and of the transformed one at several sparsities.

    Every round runs every variant once, so that a machine that speeds up or slows down does so
    for all of them. Both models run eagerly.

    Args:
        untouched: The model before the transform.
        model: The transformed one.
        ids: Prompt [1, S].
        memory: Measures what a run adds.
        shares: Shares of heads that stream.
        rounds: Most rounds.
        may_go_on: Asked after every round with the seconds that it took.
        tell: Told about every run.

    Returns:
        A row for the untouched model, then one a share.
    """
    kv_heads = [site.kv_heads for site in elastic_compile.report(model).rewritten]
    variants: list[tuple[str, float | None]] = [
        ("untouched", None),
        *((f"{share:.0%} streaming", share) for share in shares),
    ]
    costs: dict[str, list[Measured]] = {name: [] for name, _ in variants}
    ratios: dict[str, elastic_compile._api.Sparsity] = {}
    for index in range(rounds):
        started = time.perf_counter()
        for name, share in variants:
            runner = untouched if share is None else model
            forced = (
                nullcontext()
                if share is None
                else elastic_compile.force_routes(model, spread_routes(kv_heads, share))
            )
            with forced, torch.compiler.set_stance("force_eager"):
                _, cost = measure(memory, lambda runner=runner: _prefill(runner, ids))  # type: ignore[misc]
            costs[name].append(cost)
            if share is not None:
                ratios[name] = elastic_compile.sparsity(model)
            tell(f"round {index + 1}: {name} {cost.seconds:.2f} s")
        if not may_go_on(time.perf_counter() - started):
            break
    base = statistics.median(cost.seconds for cost in costs["untouched"])
    rows = []
    for name, _ in variants:
        seconds = statistics.median(cost.seconds for cost in costs[name])
        extra = [cost.extra_bytes for cost in costs[name] if cost.extra_bytes is not None]
        ratio = ratios.get(name)
        rows.append(
            Row(
                length=ids.shape[1],
                variant=name,
                seconds=seconds,
                runs=tuple(cost.seconds for cost in costs[name]),
                cpu_seconds=statistics.median(cost.cpu_seconds for cost in costs[name]),
                speedup=base / seconds,
                msr=None if ratio is None else ratio.msr,
                esr=None if ratio is None else ratio.esr,
                extra_bytes=max(extra) if extra else None,
            )
        )
    return rows


def _prefill(model: nn.Module, ids: Tensor) -> None:
    # The cache is filled, as generate would; only the last position's logits are made.
    model(ids, use_cache=True, logits_to_keep=1)


def format_table(rows: Sequence[Row]) -> str:
    """Timing rows as one aligned table."""
    heads = (
        *("tokens", "heads", "median s", "runs s", "cpu s", "speed-up"),
        *("Ω_MSR", "Ω_ESR", "extra MiB"),
    )
    cells = [
        (
            str(row.length),
            row.variant,
            f"{row.seconds:.2f}",
            " ".join(f"{run:.2f}" for run in row.runs),
            f"{row.cpu_seconds:.2f}",
            f"{row.speedup:.2f}×",
            "–" if row.msr is None else f"{row.msr:.3f}",
            "–" if row.esr is None else f"{row.esr:.3f}",
            "–" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.0f}",
        )
        for row in rows
    ]
    return aligned([heads, *cells], left=(1, 3))


# ------------------------------------------------------------------ the steps


@dataclasses.dataclass
class Demo:
    """What the steps hand to each other."""

    long: bool = False
    rounds: int = ROUNDS
    minutes: float = MINUTES
    backend: str = "eager"
    fit_steps: int = FIT_STEPS
    router: Path | None = None
    """Folder of a trained router; None: the one of the checkout, where there is one."""
    config: ElasticConfig = _embedded.CONFIG
    progress: Progress = dataclasses.field(default_factory=Progress)
    memory: Memory = dataclasses.field(default_factory=Memory)
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What ``--json`` writes."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """Checks that failed; any makes the exit status 1."""
    tokenizer: Any = None
    untouched: nn.Module | None = None
    model: nn.Module | None = None
    expected: Recording | None = None

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The untouched and the transformed model."""
        assert self.untouched is not None and self.model is not None
        return self.untouched, self.model

    def check(self, problems: Sequence[str], good: str) -> None:
        """Tell the outcome of a check and keep its failures."""
        self.failures += problems
        self.progress.detail(good if not problems else "FAILED: " + "; ".join(problems))


def load(demo: Demo) -> None:
    """Load the embedded model and its tokenizer."""
    demo.progress.step(f"loading {_embedded.NAME} (its weights are unpacked to float32)")
    demo.untouched = _embedded.load_model(torch.float32)
    demo.tokenizer = _embedded.load_tokenizer()
    config: Any = demo.untouched.config
    demo.progress.detail(
        f"{sum(p.numel() for p in demo.untouched.parameters()) / 1e6:.1f}M parameters, "
        f"{config.num_hidden_layers} layers of {config.num_attention_heads} query and "
        f"{config.num_key_value_heads} kv heads"
    )
    demo.results["model"] = _embedded.NAME


def run_untouched(demo: Demo) -> None:
    """Record what the untouched model computes."""
    assert demo.untouched is not None
    ids = passkey_prompt(demo.tokenizer, PASSKEY_LENGTH)
    demo.progress.step(f"untouched model: a passkey prompt of {ids.shape[1]} tokens")
    demo.expected = record(demo.untouched, ids, demo.memory)
    _tell_answer(demo, "untouched", demo.expected.tokens, demo.expected.answer)


def transform(demo: Demo) -> None:
    """Transform a copy of the model."""
    config = demo.config
    demo.progress.step(f"transform (sink {config.sink}, local {config.local})")
    # A copy, only so that both can be timed side by side: transform works in place.
    model = demo.model = copy.deepcopy(demo.untouched)
    assert model is not None
    started = time.perf_counter()
    elastic_compile.transform(model, config)
    report = elastic_compile.report(model)
    demo.progress.detail(f"{report.summary()} in {time.perf_counter() - started:.1f} s")
    problems = [f"{site.path} was not checked" for site in report.rewritten if not site.checked]
    problems += [f"{site.path}: {site.reason}" for site in report.skipped]
    demo.check(problems, "every site was compared with the module that it replaces")
    demo.results["transform"] = {
        "summary": report.summary(),
        "sites": [dataclasses.asdict(site) for site in report.sites],
        "config": config.to_dict(),
    }


def check_equal(demo: Demo) -> None:
    """Compare the transformed model, all heads full, with the recording."""
    assert demo.expected is not None and demo.model is not None
    ids = passkey_prompt(demo.tokenizer, PASSKEY_LENGTH)
    demo.progress.step("transformed model, untrained router (every head full): the same prompt")
    got = record(demo.model, ids, demo.memory)
    _tell_answer(demo, "transformed", got.tokens, got.answer)
    error = max(
        float((a - b).abs().max())
        for a, b in (
            (demo.expected.logits, got.logits),
            (demo.expected.step_logits, got.step_logits),
        )
        if a.shape == b.shape
    )
    demo.results["largest_logit_difference"] = error
    demo.check(
        differences(demo.expected, got),
        f"equal: greedy tokens the same, logits of {len(got.logits)} positions differ by "
        f"{error:.2g} at most",
    )


def compile_and_answer(demo: Demo) -> None:
    """Compile the transformed model and let it answer the prompt, full and streaming."""
    model = demo.model
    assert demo.expected is not None and model is not None
    ids = passkey_prompt(demo.tokenizer, PASSKEY_LENGTH)
    demo.progress.step("model.compile(fullgraph=True, dynamic=True), then generate")
    demo.progress.detail(f"backend {demo.backend!r}: {BACKENDS[demo.backend]}")
    spy = GraphSpy(demo.backend)
    model.compile(backend=spy, fullgraph=True, dynamic=True)
    before = graph_count()
    elastic_compile.counters(reset=True)
    (tokens, _), first = measure(demo.memory, lambda: generate(model, ids))
    graphs = graph_count() - before
    demo.progress.detail(f"{first.seconds:.1f} s with compiling")
    (again, _), second = measure(demo.memory, lambda: generate(model, ids))
    _tell_answer(demo, "compiled", again.tolist(), second)
    sites = len(elastic_compile.report(model).rewritten)
    fallbacks = elastic_compile.counters()["fallbacks"]
    problems = []
    for name, got in (("first", tokens.tolist()), ("second", again.tolist())):
        if got != demo.expected.tokens:
            problems.append(f"the {name} compiled answer differs: {got}")
    if KEY not in demo.tokenizer.decode(again):
        problems.append(f"the answer is not the key {KEY}")
    if graphs != 2:
        problems.append(f"{graphs} graphs were compiled, not one for prefill and one for decode")
    if set(spy.ops) != {sites}:
        problems.append(f"attention ops per graph are {spy.ops}, not {sites} each")
    if fallbacks:
        problems.append(f"fallbacks: {fallbacks}")
    demo.check(
        problems,
        f"{graphs} graphs (prefill, decode), {sites} attention ops in each, 0 fallbacks; the "
        "tokens are the untouched model's",
    )
    with elastic_compile.force_routes(model, "sparse"):
        (streamed, _), third = measure(demo.memory, lambda: generate(model, ids))
    _tell_answer(demo, "compiled, every head streaming", streamed.tolist(), third)
    if KEY not in demo.tokenizer.decode(streamed):
        demo.progress.detail(
            "(no head sees the key: which heads may stream is for routers to learn)"
        )
    more = graph_count() - before - graphs
    demo.check(
        [f"forcing routes compiled {more} more graphs"] if more else [],
        "forcing routes compiled nothing anew",
    )
    demo.results["compiled"] = {
        "backend": demo.backend,
        "graphs": graphs,
        "attention_ops_per_graph": spy.ops,
        "fallbacks": fallbacks,
        "first_answer_seconds": first.seconds,
        "answer_seconds": second.seconds,
        "streaming_answer_seconds": third.seconds,
    }


def fit_briefly(demo: Demo) -> None:
    """Train the routers for a few steps; the backbone must not move."""
    from elastic_compile.training import fit

    untouched, model = demo.models()
    if not demo.fit_steps:
        return
    demo.progress.step(
        f"fit: {demo.fit_steps} steps of {FIT_BATCH} samples with up to {FIT_LENGTH} tokens (a "
        "router takes some hundreds)"
    )
    before = [p.detach().clone() for p in elastic_compile.router_parameters(model)]
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.compiler.set_stance("force_eager"),
    ):
        result = fit(
            model,
            demo.tokenizer,
            data=["builtin:" + ",".join(FIT_TASKS)],
            out=folder,
            length=FIT_LENGTH,
            steps=demo.fit_steps,
            batch_size=FIT_BATCH,
            save_every=demo.fit_steps,
            progress=False,
            curves=False,
            training_args={"use_cpu": True},
        )
    problems = []
    weights = dict(model.named_parameters())
    if any(not torch.equal(p, weights[name]) for name, p in untouched.named_parameters()):
        problems.append("the fit changed the backbone")
    after = list(elastic_compile.router_parameters(model))
    if all(map(torch.equal, before, after)):
        problems.append("the fit changed no router")
    # With few samples a step has not every task: the table has each one's last.
    demo.progress.detail(result.summary())
    pace = result.seconds_per_step
    demo.check(
        problems,
        "the routers moved, the backbone did not"
        + ("" if pace is None else f"; {pace:.1f} s a step"),
    )
    demo.results["fit"] = {
        "steps": demo.fit_steps,
        "seconds_per_step": pace,
        "records": result.records,
    }


def answer_routed(demo: Demo) -> None:
    """Load a trained router into the compiled model: sparsity by task, and an answer."""
    from elastic_compile.training._evaluate import evaluate
    from elastic_compile.training.data import Encoder
    from elastic_compile.training.tasks import load_sources

    folder = demo.router or READY_ROUTER
    if demo.router is None and not folder.is_dir():
        demo.progress.step(
            "a trained router comes with the checkout; --router FOLDER names another"
        )
        return
    model = demo.model
    assert demo.expected is not None and model is not None
    demo.progress.step(f"a trained router, {folder.parent.name}/{folder.name}")
    try:
        elastic_compile.load_router(model, folder)
    except (OSError, ValueError) as error:
        raise DemoError(f"the router was not loaded: {error}") from error
    sources = load_sources(
        ["builtin:" + ",".join(ROUTED_TASKS)],
        Encoder(demo.tokenizer, ROUTED_LENGTH),
        split="test",
    )
    with torch.compiler.set_stance("force_eager"):
        scores = evaluate(
            model, sources, samples=1, batch_size=1, modes=("routed",), progress=False
        )
    shares = {name: task.mean_msr() for name, task in scores.tasks.items()}
    demo.progress.detail(
        f"share of streaming heads (Ω_MSR), one prompt of up to {ROUTED_LENGTH} tokens a task: "
        + ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    )
    ids = passkey_prompt(demo.tokenizer, PASSKEY_LENGTH)
    graphs = graph_count()
    out, cost = measure(demo.memory, lambda: _generate(model, ids))
    more = graph_count() - graphs
    # The cache has the routes of a compiled call.
    cache = out.past_key_values if out.get("cache") is None else out.cache
    routed = elastic_compile.sparsity(cache)
    tokens = out.sequences[0, ids.shape[1] :]
    _tell_answer(demo, "compiled, routed", tokens.tolist(), cost)
    problems = []
    if KEY not in demo.tokenizer.decode(tokens):
        problems.append(f"the routed answer is not the key {KEY}")
    if more:
        problems.append(f"loading a router compiled {more} more graphs")
    if not 0 < routed.msr < 1:
        problems.append(f"the router's Ω_MSR is {routed.msr:.3f}: it tells no heads apart")
    demo.check(
        problems,
        f"the key is found with {routed.msr:.0%} of the heads streaming (Ω_ESR {routed.esr:.3f}); "
        "loading a router compiled nothing anew",
    )
    demo.results["routed"] = {
        "router": folder.name,
        "msr": shares,
        "answer_msr": routed.msr,
        "answer_esr": routed.esr,
    }


def time_variants(demo: Demo) -> None:
    """Time prefill beside the untouched model and print the table."""
    untouched, model = demo.models()
    rows: list[Row] = []
    for length in LONG_LENGTHS if demo.long else LENGTHS:
        demo.progress.step(
            f"prefill of {length} tokens, eagerly, up to {demo.rounds} rounds over the untouched "
            f"model and {len(SHARES)} shares of streaming heads"
        )
        ids = passkey_prompt(demo.tokenizer, length)

        def may_go_on(seconds: float) -> bool:
            return demo.progress.elapsed + seconds < demo.minutes * 60

        rows += time_prefill(
            untouched,
            model,
            ids,
            demo.memory,
            rounds=demo.rounds,
            may_go_on=may_go_on,
            tell=demo.progress.detail,
        )
        if len(rows[-1].runs) < demo.rounds:
            demo.progress.detail(f"stopped after {len(rows[-1].runs)}: the time is up")
    demo.progress.step("prefill: time, sparsity, and the memory that it adds to the models'")
    demo.progress.detail(format_table(rows))
    if not demo.memory.available:
        demo.progress.detail("this system does not show the peak memory of a part of a run")
    demo.results["prefill"] = [dataclasses.asdict(row) for row in rows]


def _tell_answer(demo: Demo, name: str, tokens: Sequence[int], cost: Measured) -> None:
    text = demo.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    memory = "" if cost.extra_bytes is None else f", {cost.extra_bytes / 2**20:.0f} MiB extra"
    demo.progress.detail(f"{name}: {text!r} ({cost.seconds:.1f} s{memory})")
    demo.results.setdefault("answers", {})[name] = {
        "text": text,
        "tokens": list(tokens),
        "seconds": cost.seconds,
        "extra_bytes": cost.extra_bytes,
    }


STEPS: tuple[Callable[[Demo], None], ...] = (
    load,
    run_untouched,
    transform,
    check_equal,
    compile_and_answer,
    fit_briefly,
    answer_routed,
    time_variants,
)


def run(demo: Demo, steps: Sequence[Callable[[Demo], None]] = STEPS) -> int:
    """Run the steps; returns the exit status: 0, or 1 when a check failed."""
    demo.results |= {
        "versions": {
            "elastic_compile": elastic_compile.__version__,
            "torch": torch.__version__,
            "transformers": _transformers_version(),
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
    }
    versions, machine = demo.results["versions"], demo.results["machine"]
    demo.progress.step(
        f"torch {versions['torch']}, transformers {versions['transformers']}, "
        f"threads: {machine['threads']} of {machine['cores']} cores ({machine['cpu']})"
    )
    for step in steps:
        step(demo)
    demo.memory.begin()  # reads the mark of the last step
    demo.results["seconds"] = demo.progress.elapsed
    demo.results["highest_bytes"] = demo.memory.highest or None
    demo.results["failures"] = demo.failures
    highest = f", {demo.memory.highest / 2**30:.1f} GiB at most" if demo.memory.highest else ""
    outcome = "all checks passed" if not demo.failures else "FAILED:\n" + "\n".join(demo.failures)
    demo.progress.step(f"done in {demo.progress.elapsed / 60:.1f} minutes{highest}; {outcome}")
    return 1 if demo.failures else 0


def _transformers_version() -> str:
    import transformers

    return transformers.__version__


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: Its arguments; None: those of the process.

    Returns:
        Exit status: 0; 1 when a check failed; 2 when something is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m elastic_compile.demo", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--long", action="store_true", help="also time prefill of 8,192 tokens")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads (default: one, or as many as torch would use, whichever is faster now)",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help="most timing rounds (default 3)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="start no further timing round that would end later (default 8; 30 with --long)",
    )
    parser.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="eager",
        help="what runs the compiled graphs (default eager; inductor compiles for minutes)",
    )
    parser.add_argument(
        "--fit",
        type=int,
        default=FIT_STEPS,
        metavar="STEPS",
        help=f"training steps of the short fit (default {FIT_STEPS}; 0: none)",
    )
    parser.add_argument(
        "--router",
        type=Path,
        metavar="FOLDER",
        help="a trained router (default: the checkout's examples/smollm2/router)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all results there as JSON")
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads is {options.threads}; allowed: 1 or more")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; allowed: 1 or more")
    if options.fit < 0:
        parser.error(f"--fit is {options.fit}; allowed: 0 or more")
    if options.router is not None and not options.router.is_dir():
        parser.error(f"--router: {options.router} is no folder")
    logging.getLogger("elastic_compile").setLevel(logging.WARNING)
    minutes = options.minutes or (LONG_MINUTES if options.long else MINUTES)
    demo = Demo(options.long, options.rounds, minutes, options.backend, options.fit, options.router)
    with _threads(options.threads or quickest_threads([1, torch.get_num_threads()])):
        try:
            check_backend(options.backend)
            status = run(demo)
        except (DemoError, _embedded.EmbeddedModelError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.json:
        _files.write_atomic(options.json, _files.dump_json(demo.results))
    return status


if __name__ == "__main__":
    sys.exit(main())
