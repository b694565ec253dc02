"""A few small calls for compute-sanitizer: ``compute-sanitizer python -m tests.gpu.memcheck``.

Allocations are not pooled, so that an access past a tensor is one past an allocation. Each call is
compared with the reference; the exit code says whether all agreed.
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import sys

import torch

from elastic_compile.kernels import gluon_prefill, ops, reference, triton_prefill
from elastic_compile.kernels._call import AttentionCall
from elastic_compile.router import AttentionRouter, boundary_pool, decide

CASES = {
    "descriptors": dict(size=128, rows=201, keys=333, start=True, kv_len=True),
    "descriptors, values lag": dict(size=64, rows=333, keys=333, mask="left"),
    "pointers": dict(size=64, rows=333, keys=333, odd=True, start=True, mask="holes"),
    "float32": dict(size=128, rows=100, keys=150, dtype=torch.float32),
    "large heads": dict(size=256, rows=150, keys=150, mask="right"),
    "one row": dict(size=80, rows=1, keys=77, group=4, kv_len=True),
    "softcap and learned sinks": dict(size=64, rows=90, keys=90, softcap=2.0, sinks=True),
    "hopper": dict(kernel="gluon", size=128, rows=300, keys=300),
    "hopper, mask": dict(kernel="gluon", size=128, rows=300, keys=333, mask="both", kv_len=True),
    "hopper, holes": dict(kernel="gluon", size=96, rows=200, keys=200, mask="holes", group=3),
}


def call_of(size, rows, keys, group=2, dtype=torch.bfloat16, odd=False, mask="", **options):
    """A call of two samples and two kv heads."""
    width = size + 1 if odd else size
    options.pop("kernel", None)
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
    if options.pop("kv_len", False):
        given["kv_len"] = torch.tensor([keys, keys - 9]).cuda()
    if options.pop("sinks", False):
        given["sinks"] = torch.randn(2 * group, device="cuda")
    if mask:
        given["key_mask"] = masks[mask].contiguous()
    route = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32).cuda()
    return AttentionCall(query, key, value, route, 5, 70, **given, **options)


def attention(options):
    """Relative error of a call."""
    call = call_of(**options)
    module = gluon_prefill if options.get("kernel") == "gluon" else triton_prefill
    out, _ = module.forward(call)
    wanted, _ = reference.forward(call, torch.float64)
    return (torch.linalg.norm(out.double() - wanted) / torch.linalg.norm(wanted)).item()


def router():
    """Share of routes that differ."""
    router = AttentionRouter(128, device="cuda").requires_grad_(False)
    torch.nn.init.normal_(router.router[-1].weight)
    tap = torch.randn(2, 301, 8, 128, device="cuda").transpose(1, 2)
    mask = torch.arange(301, device="cuda").expand(2, -1) % 5 > 1
    forced = torch.full((1, 8), -1, dtype=torch.int32, device="cuda")
    weights = list(router.parameters())
    found = ops.route(tap, weights, forced, key_mask=mask, pool_tokens=100)
    wanted = decide(router(boundary_pool(tap, None, None, mask, 100)))
    return (found != wanted).float().mean().item()


def main() -> int:
    """Returns the number of calls that went wrong."""
    torch.manual_seed(0)
    wrong = 0
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for name, options in CASES.items():
        if options.get("kernel") == "gluon" and not hopper:
            continue
        error = attention(options)
        right = error < 4e-3
        wrong += not right
        print(f"{name}: {error:.1e}{'' if right else ' WRONG'}", flush=True)
    error = router()
    wrong += error > 0
    print(f"router: {error}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
