"""What the integration tests share: calls that work on every transformers version, and oracles.

The oracles use the *untouched* model under explicit boolean masks, built here pair by pair from
the definition of a streaming head. They share nothing with the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import elastic_compile
from tests.families import ALL, Family, build, pad, tokens

# Far below every length used, so that sparse and full routes differ.
SINK = 4
LOCAL = 8
POOL = 6
LENGTH = 40


# --- calling models -------------------------------------------------------------------------------


def cache_argument(model: nn.Module) -> str:
    """Name of the cache argument: `cache` now, `past_key_values` in older transformers."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache a model returned."""
    found = getattr(output, "cache", None)
    return found if found is not None else output.past_key_values


def new_cache(model: Any, kind: str, length: int = 96) -> Any:
    """An empty cache of `kind` "dynamic" or "static" (room for `length` tokens)."""
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids [B, S] that count real tokens only, as `generate` makes them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def run(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """One forward call; without `cache` none is made, unless `use_cache` is given."""
    if cache is not None:
        kwargs[cache_argument(model)] = cache
        kwargs.setdefault("use_cache", True)
    else:
        kwargs.setdefault("use_cache", False)
    return model(ids, attention_mask=mask, **kwargs)


def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **kw: Any) -> Any:
    """Logits [B, S, vocabulary] of one forward call."""
    return run(model, ids, mask, **kw).logits


@torch.no_grad()
def generate(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    new: int = 8,
    cache: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """New tokens [rows, new]; greedy unless told otherwise."""
    kwargs.setdefault("do_sample", False)
    if cache is not None:
        kwargs[cache_argument(model)] = cache
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **kwargs)
    return out[:, ids.shape[1] :]


@torch.no_grad()
def decode_logits(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    cache: Any,
    prefill: int,
    *,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [B, S, vocabulary] of a prefill of `prefill` tokens and one step per other token."""
    rows = []
    cuts = [(0, prefill)] + [(i, i + 1) for i in range(prefill, ids.shape[1])]
    for low, high in cuts:
        # Contiguous, as `generate` makes them: compiled models guard on strides.
        where = None if position_ids is None else position_ids[:, low:high].contiguous()
        seen = None if mask is None else mask[:, :high].contiguous()
        extra = {} if where is None else {"position_ids": where}
        rows.append(run(model, ids[:, low:high].contiguous(), seen, cache, **extra).logits)
    return torch.cat(rows, dim=1)


# --- the models under test ------------------------------------------------------------------------


def elastic_config(**fields: Any) -> Any:
    """The configuration of these tests: windows much shorter than the prompts."""
    return elastic_compile.ElasticConfig(
        **{"sink": SINK, "local": LOCAL, "pool_tokens": POOL, **fields}
    )


class Pair:
    """An untouched model and a transformed one with equal weights."""

    def __init__(self, name: str, layers: int = 2, config: dict | None = None, **build_kw: Any):
        self.family: Family = ALL[name]
        self.layers = layers
        self.rewritten = self.family.rewritten(layers)
        self.base = build(name, layers, **build_kw)
        self.model = elastic_compile.transform(
            build(name, layers, **build_kw),
            elastic_config(**(config or {})),
            allow_unrewritten=not self.rewritten,
        )

    @property
    def kv_heads(self) -> int:
        """Key/value heads per rewritten site, as reported."""
        counts = {s.kv_heads for s in rewritten_rows(self.model)}
        assert len(counts) == 1
        return counts.pop()

    def routes(self, kind: str) -> torch.Tensor:
        """Routes [rewritten sites, kv heads] int64: "full", "sparse" or "mixed"."""
        shape = (len(self.rewritten), self.kv_heads)
        if kind == "full":
            return torch.zeros(shape, dtype=torch.int64)
        if kind == "sparse":
            return torch.ones(shape, dtype=torch.int64)
        return torch.arange(shape[0] * shape[1]).reshape(shape) % 2


def site_rows(model: Any) -> list[Any]:
    """The report's rows."""
    return list(elastic_compile.report(model).sites)


def rewritten_rows(model: Any) -> list[Any]:
    """The report's rows of rewritten sites."""
    return [s for s in site_rows(model) if s.status == "rewritten"]


def routers(model: nn.Module) -> list[nn.Module]:
    """The router modules in module order."""
    from elastic_compile._state import rewritten_sites

    return [site for _, site in rewritten_sites(model)]


@contextmanager
def random_routers(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Routers whose choice depends on the prompt, for the length of a block.

    Weights are random and biases zero. They are also small: SiLU is then nearly linear, so that
    the sign of the two logits' difference, and with it the route, follows the pooled keys instead
    of SiLU's positive mean.
    """
    generator = torch.Generator().manual_seed(seed)
    saved: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for router in routers(model):
                for parameter in router.parameters():
                    saved.append((parameter, parameter.detach().clone()))
                    if parameter.ndim < 2:
                        parameter.zero_()
                    else:
                        noise = torch.randn(parameter.shape, generator=generator)
                        parameter.copy_(noise * (1.2 / parameter.shape[-1] ** 0.5))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def routes_of(model_or_cache: Any) -> torch.Tensor:
    """`last_routes` as int64 [B, rewritten sites, kv heads]."""
    return elastic_compile.last_routes(model_or_cache).to(torch.int64)


# --- counters -------------------------------------------------------------------------------------


@contextmanager
def counting() -> Iterator[dict[str, Any]]:
    """Differences of the counters over a block: {"calls": int, "fallbacks": {reason: int}}."""
    before = elastic_compile.counters()
    delta: dict[str, Any] = {}
    yield delta
    after = elastic_compile.counters()
    delta["calls"] = sum(after["calls"].values()) - sum(before["calls"].values())
    reasons = {
        reason: count - before["fallbacks"].get(reason, 0)
        for reason, count in after["fallbacks"].items()
    }
    delta["fallbacks"] = {reason: count for reason, count in reasons.items() if count}


# --- oracles --------------------------------------------------------------------------------------


def visible_pairs(
    real: Sequence[int] | torch.Tensor, sparse: bool, sink: int = SINK, local: int = LOCAL
) -> torch.Tensor:
    """Which key each query of one sequence may see: bool [S, S].

    A streaming head sees a real key at or before the query if the key is one of the `sink` first
    columns counted from the first real token, or at most `local` - 1 columns before the query.
    """
    real = [bool(r) for r in real]
    size = len(real)
    first = real.index(True)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for query in range(size):
        for key in range(query + 1):
            near = (key - first < sink) or (query - key < local)
            seen[query, key] = real[key] and (near or not sparse)
    return seen


def layer_mask(mask: torch.Tensor, routes: torch.Tensor, query_heads: int, **kw: Any) -> Any:
    """Visible pairs of one layer: bool [B, query heads, S, S], for routes [B, kv heads].

    The rows of padding queries see themselves: no test looks at them, and a softmax over nothing
    would spread NaN.
    """
    batch, kv_heads = routes.shape
    group = query_heads // kv_heads
    out = []
    for b in range(batch):
        by_route = [visible_pairs(mask[b], sparse, **kw) for sparse in (False, True)]
        for table in by_route:
            table |= torch.diag(mask[b] == 0)
        out.append(torch.stack([by_route[int(routes[b, h // group])] for h in range(query_heads)]))
    return torch.stack(out)


@torch.no_grad()
def streaming_oracle(
    pair: Pair, ids: torch.Tensor, routes: torch.Tensor, mask: torch.Tensor | None = None, **kw: Any
) -> torch.Tensor:
    """Logits of the untouched model whose rewritten layers run under explicit masks.

    Args:
        pair: The models.
        ids: [B, S].
        routes: [rewritten sites, kv heads] or [B, rewritten sites, kv heads].
        mask: Padding mask [B, S] or None.
        kw: `sink`, `local` of the mask, or arguments of the model.
    """
    window = {key: kw.pop(key) for key in ("sink", "local") if key in kw}
    model, batch = pair.base, ids.shape[0]
    real = torch.ones_like(ids) if mask is None else mask
    if routes.ndim == 2:
        routes = routes.expand(batch, *routes.shape)
    modules = dict(
        zip(pair.family.attending(pair.layers), pair.family.attention_modules(model), strict=True)
    )
    heads = model.config.num_attention_heads
    handles = []
    for index, layer in enumerate(pair.rewritten):
        allowed = layer_mask(real, routes[:, index], heads, **window)
        if model.config._attn_implementation == "eager":
            low = torch.finfo(model.dtype).min
            allowed = torch.zeros(allowed.shape).masked_fill(~allowed, low)

        def replace(module: nn.Module, args: tuple, kwargs: dict, allowed: Any = allowed) -> Any:
            assert "attention_mask" in kwargs
            return args, {**kwargs, "attention_mask": allowed}

        handles.append(modules[layer].register_forward_pre_hook(replace, with_kwargs=True))
    try:
        return logits(model, ids, mask, **kw)
    finally:
        for handle in handles:
            handle.remove()


# --- comparisons ----------------------------------------------------------------------------------


def error(actual: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """Largest absolute difference over real tokens; NaN counts as infinite."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.double() - expected.double()).abs()
    if mask is not None:
        difference = difference[mask.bool()]
    worst = difference.max()
    return float("inf") if worst.isnan() else worst.item()


def prompts(batch: int = 3, length: int = LENGTH, side: str | None = None, seed: int = 0) -> Any:
    """(ids, mask): `batch` random prompts; with a side, of different lengths and padded there."""
    if side is None:
        return tokens(batch, length, seed), None
    rows = [tokens(1, length - 7 * b, seed + b)[0] for b in range(batch)]
    return pad(rows, side)


def each_thread(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of all calls, each run in a thread of its own, started together."""
    import threading

    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def work(index: int) -> None:
        barrier.wait()
        try:
            results[index] = calls[index]()
        except BaseException as problem:
            results[index] = problem

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# --- sparsity -------------------------------------------------------------------------------------


def msr(sparsity: Any) -> tuple[list[float], float]:
    """Ω_MSR per layer and overall."""
    return [float(x) for x in sparsity.msr_per_layer], float(sparsity.msr)


def esr(sparsity: Any) -> tuple[list[float], float]:
    """Ω_ESR per layer and overall."""
    return [float(x) for x in sparsity.esr_per_layer], float(sparsity.esr)
