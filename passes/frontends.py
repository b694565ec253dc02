"""Rewriting a whole-model graph that the caller already has (an exported program's module)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from elastic_compile import _state
from elastic_compile._report import REWRITTEN, SKIPPED, Report, SiteReport
from elastic_compile._site import ASK_ROUTER, ElasticSite
from elastic_compile._state import ElasticState
from elastic_compile.config import ElasticConfig
from elastic_compile.kernels import ops
from elastic_compile.passes.pipeline import NoSiteError
from elastic_compile.passes.rewrite import ElasticAttentionPass, PassResult
from elastic_compile.passes.selfcheck import _TOLERANCE, SelfCheckError


def transform(
    module: fx.GraphModule,
    config: ElasticConfig,
    example_inputs: Any = None,
    allow_unrewritten: bool = False,
) -> Report:
    """Rewrite every eligible attention of a whole-model graph in place. See ``elastic_compile``."""
    with torch.inference_mode(False), contextlib.ExitStack() as undo:
        expected = None
        if example_inputs is not None:
            expected = _run(module, example_inputs)
        elastic = ElasticAttentionPass(config=config)
        elastic(module)
        undo.callback(_reverse, module, elastic)
        result: PassResult = module.meta["elastic_compile"]
        if not result.rewritten and not allow_unrewritten:
            raise NoSiteError(_why_nothing(result))
        routers = [m for m in module.modules() if isinstance(m, ElasticSite)]
        for index, router in enumerate(routers):
            router.index = index
        checked = False
        if expected is not None and routers:
            _check(module, routers, example_inputs, expected)
            checked = True
        report = report_of(result, _device(module), checked)
        module.__dict__[_state.ATTRIBUTE] = ElasticState(config, report)
        undo.pop_all()
    return report


def restore(module: fx.GraphModule) -> None:
    """Undo :func:`transform`: the graph attends as before and its routers are gone."""
    state: ElasticState = module.__dict__.pop(_state.ATTRIBUTE)
    _reverse(module, ElasticAttentionPass(config=state.config))


def _reverse(module: fx.GraphModule, elastic: ElasticAttentionPass) -> None:
    elastic(module, reverse=True)


def report_of(result: PassResult, device: torch.device, checked: bool) -> Report:
    """The report of what the pass did with a whole-model graph."""
    return Report(
        tuple(
            SiteReport(
                path=site.path,
                cls=site.cls,
                status=REWRITTEN if site.rewritten else SKIPPED,
                checked=checked and site.rewritten,
                reason=site.reason,
                kv_heads=site.kv_heads,
                head_dim=site.head_dim,
                implementation=ops.default_implementation(device.type)
                if site.rewritten
                else "as loaded",
            )
            for site in result.sites
        )
    )


def _why_nothing(result: PassResult) -> str:
    if not result.sites:
        return (
            "no attention found in the graph: no call of scaled_dot_product_attention (attention "
            "written out as matrix products is not recognised, and a program decomposed to core "
            "ATen holds none: export without decompositions). Nothing was changed; "
            "allow_unrewritten=True returns the graph as it is"
        )
    reasons = dict.fromkeys(f"{site.path or site.node}: {site.reason}" for site in result.sites)
    listed = "\n  ".join(list(reasons)[:8])
    return (
        f"0 of {len(result.sites)} attentions of the graph can be rewritten. Nothing was changed; "
        f"allow_unrewritten=True returns the graph as it is. Reasons:\n  {listed}"
    )


def _device(module: fx.GraphModule) -> torch.device:
    tensor = next(iter([*module.parameters(), *module.buffers()]), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _run(module: fx.GraphModule, example_inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        if isinstance(example_inputs, Mapping):
            output = module(**example_inputs)
        elif isinstance(example_inputs, (tuple, list)):
            output = module(*example_inputs)
        else:
            output = module(example_inputs)
    return [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]


def _check(
    module: fx.GraphModule, routers: list[ElasticSite], example_inputs: Any, expected: list[Tensor]
) -> None:
    for router in routers:
        router.forced.zero_()
    try:
        got = _run(module, example_inputs)
    finally:
        for router in routers:
            router.forced.fill_(ASK_ROUTER)
            _state.forget(router)
    for ours, theirs in zip(got, expected, strict=True):
        if theirs.is_meta or not theirs.is_floating_point():
            continue
        # Rows that see nothing (padding) may hold anything, NaN included.
        known = theirs.isfinite()
        ours, reference = ours.double()[known], theirs.double()[known]
        if not reference.numel():
            continue
        tolerance = _TOLERANCE[theirs.dtype] * max(4, len(routers))
        error = float((ours - reference).abs().max()) / max(float(reference.abs().max()), 1e-6)
        if not error <= tolerance:
            raise SelfCheckError(
                f"the rewritten graph differs from the untouched one (relative error {error:.3g}). "
                "Nothing was changed"
            )
