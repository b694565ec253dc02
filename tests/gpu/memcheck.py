"""A few small calls for compute-sanitizer: ``compute-sanitizer python -m tests.gpu.memcheck``.

Allocations are not pooled, so that an access past a tensor is one past an allocation. Each call is
compared with the float64 oracle; the exit code says whether all agreed. ``--tool racecheck`` and
``--tool synccheck`` take it too.
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import dataclasses
import functools
import sys
from collections.abc import Callable

import torch

from elastic_compile.kernels import gluon_prefill, ops, triton_prefill
from elastic_compile.kernels._call import AttentionCall
from elastic_compile.kernels.triton_prefill import Config
from elastic_compile.router import AttentionRouter, boundary_pool, decide
from tests.gpu import fuzzing

CASES = {
    "descriptors": dict(size=128, rows=201, keys=333, start=True, kv_len=True),
    "descriptors, values lag": dict(size=64, rows=333, keys=333, mask="left"),
    "pointers": dict(size=64, rows=333, keys=333, odd=True, start=True, mask="holes"),
    "float32, a number for all lengths": dict(
        size=128, rows=100, keys=150, dtype=torch.float32, kv_len="scalar"
    ),
    "large heads": dict(size=256, rows=150, keys=150, mask="right"),
    "one row": dict(size=80, rows=1, keys=77, group=4, kv_len=True),
    "softcap and learned sinks": dict(size=64, rows=90, keys=90, softcap=2.0, sinks=True),
    "tensor scale, no groups": dict(size=80, rows=130, keys=77, group=1, scale=True),
    "packed heads, pointers": dict(
        size=80, rows=150, keys=200, group=4, dtype=torch.float16, mask="holes", start=True,
        config=Config(rows=64, keys=32, warps=4, stages=2, tma=False, pack=4),
    ),
    "values lag, pointers": dict(
        size=64, rows=150, keys=200, odd=True, kv_len=True,
        config=Config(rows=32, keys=16, warps=4, stages=3, overlap=True, split_sums=False),
    ),
    "hopper": dict(kernel="gluon", size=128, rows=300, keys=300),
    "hopper, three consumers": dict(kernel="gluon", size=64, rows=300, keys=333, mask="both"),
    "hopper, mask": dict(kernel="gluon", size=128, rows=300, keys=333, mask="both", kv_len=True),
    "hopper, holes": dict(kernel="gluon", size=96, rows=200, keys=200, mask="holes", group=3),
}  # fmt: skip


def call_of(
    size, rows, keys, group=2, dtype=torch.bfloat16, odd=False, mask="", kv_len=None, **options
):
    """A call of two samples and two kv heads."""
    width = size + 1 if odd else size
    query, key, value = (
        torch.randn(2, length, heads, width, device="cuda").to(dtype).transpose(1, 2)[..., :size]
        for heads, length in ((2 * group, rows), (2, keys), (2, keys))
    )
    column = torch.arange(keys, device="cuda").expand(2, -1)
    masks = {
        "left": column >= 40,
        "right": column < 60,
        "both": (column >= 30) & (column < 170),
        "holes": column % 7 > 0,
    }
    given = {}
    if options.pop("start", False):
        given["start"] = torch.tensor([0, 30]).cuda()
    if kv_len is not None:
        given["kv_len"] = torch.tensor(keys - 9 if kv_len == "scalar" else [keys, keys - 9]).cuda()
    if options.pop("scale", False):
        given["scale_tensor"] = torch.tensor(-0.2).cuda()
    if options.pop("sinks", False):
        given["sinks"] = torch.randn(2 * group, device="cuda")
    if mask:
        given["key_mask"] = masks[mask].contiguous()
    route = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32).cuda()
    return AttentionCall(query, key, value, route, 5, 70, **given, **options)


def attention(kernel="triton", config=None, **options):
    """Raises AssertionError where a call's results are wrong."""
    call = call_of(**options)
    module = {"gluon": gluon_prefill, "triton": triton_prefill}[kernel]
    out, lse = module.forward(call, config)
    # Under the tools every kernel of the oracle's would take long.
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    tensors = {name: x.cpu() for name, x in fields.items() if isinstance(x, torch.Tensor)}
    fuzzing.check(dataclasses.replace(call, **tensors), out.cpu(), lse.cpu())


def router():
    """Raises AssertionError where a route is wrong."""
    router = AttentionRouter(128, device="cuda").requires_grad_(False)
    torch.nn.init.normal_(router.router[-1].weight)
    tap = torch.randn(2, 301, 8, 128, device="cuda").transpose(1, 2)
    mask = torch.arange(301, device="cuda").expand(2, -1) % 5 > 1
    forced = torch.full((1, 8), -1, dtype=torch.int32, device="cuda")
    weights = list(router.parameters())
    found = ops.route(tap, weights, forced, key_mask=mask, pool_tokens=100)
    wanted = decide(router(boundary_pool(tap, None, None, mask, 100)))
    assert torch.equal(found, wanted), "routes"


def runs() -> dict[str, Callable[[], None]]:
    """All calls, by name: what raises AssertionError or returns."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    found: dict[str, Callable[[], None]] = {
        name: functools.partial(attention, **options)
        for name, options in CASES.items()
        if hopper or options.get("kernel") != "gluon"
    }
    return found | {"router": router}


def main() -> int:
    """Returns the number of calls that went wrong."""
    torch.manual_seed(0)
    wrong = 0
    for name, run in runs().items():
        said = "right"
        try:
            run()
        except AssertionError as error:
            said, wrong = f"WRONG: {error}", wrong + 1
        print(f"{name}: {said}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
