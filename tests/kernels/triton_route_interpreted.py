"""Cases of the fused router in Triton's interpreter, against the torch functions in float64.

``test_triton_route`` runs this file in a process of its own, since the interpreter has to be chosen
before Triton is imported.
"""

import os

import pytest
import torch
from torch import nn

from elastic_compile.kernels import _dispatch, ops, triton_route
from elastic_compile.kernels._call import RouteCall
from elastic_compile.kernels.triton_route import Config
from elastic_compile.router import AttentionRouter, boundary_pool, decide

assert os.environ.get("TRITON_INTERPRET") == "1"

# Much smaller than the prompts, so that every loop runs several times.
SMALL = Config(block=16, chunk=16, scan=32, warps=4)
every_config = pytest.mark.parametrize("config", [SMALL, None], ids=["small", "chosen"])


def trained(size, multiplier=1, dtype=torch.float32):
    """A router whose last layer is not zero."""
    router = AttentionRouter(size, multiplier)
    nn.init.normal_(router.router[-1].weight)
    nn.init.normal_(router.router[-1].bias)
    return router.to(dtype).requires_grad_(False)


def weights_of(router):
    return list(router.parameters())


def keys(batch=2, heads=2, length=90, size=16, dtype=torch.float32):
    """Key states as Hugging Face makes them: a transposed view of [B, S, H, D]."""
    return torch.randn(batch, length, heads, size).to(dtype).transpose(1, 2)


def ask(batch, heads):
    return torch.full((batch, heads), -1, dtype=torch.int32)


def poison(tap, key_mask=None, end=None):
    """NaN wherever a token is not real."""
    column = torch.arange(tap.shape[2])
    real = torch.ones(tap.shape[0], tap.shape[2], dtype=torch.bool)
    if key_mask is not None:
        real = real & key_mask
    if end is not None:
        real = real & (column < end[:, None])
    tap.transpose(1, 2)[~real] = torch.nan
    return tap


def expected(router, tap, key_mask=None, end=None, pool_tokens=8):
    """Logits in float64 of what is given, [B, H, 2]."""
    exact = AttentionRouter(router.head_dim, router.hidden_multiplier, dtype=torch.float64)
    exact.load_state_dict(router.state_dict())
    return exact(boundary_pool(tap.double(), None, end, key_mask, pool_tokens)).detach()


def check(tap, router, key_mask=None, end=None, pool_tokens=8, config=SMALL, bias=0.0, forced=None):
    """Runs the kernel and compares the logits, and the routes where they are clear."""
    batch, heads = tap.shape[:2]
    forced = ask(1, heads) if forced is None else forced
    poison(tap, key_mask, end)
    call = RouteCall(tap, key_mask, end, forced, weights_of(router), pool_tokens, bias)
    assert triton_route.supports(call) == (True, "")
    logits = torch.full((batch, heads, 2), torch.nan)
    out = triton_route.forward(call, config, logits)
    wanted = expected(router, tap, key_mask, end, pool_tokens)
    torch.testing.assert_close(logits.double(), wanted, atol=2e-6, rtol=2e-6)
    assert out.dtype == torch.int32 and out.shape == (batch, heads) and out.is_contiguous()
    clear = (wanted[..., 1] + bias - wanted[..., 0]).abs() > 1e-5
    right = torch.where(forced >= 0, forced, decide(wanted, bias))
    assert torch.equal(out[clear], right[clear]) and clear.any()
    return out, logits


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16], ids=["w32", "w16"])
def test_without_a_mask(config, dtype, weights):
    check(keys(dtype=dtype), trained(16, 4, weights), config=config)


@every_config
@pytest.mark.parametrize("pool_tokens", [1, 15, 16, 17, 44, 45, 46, 89, 90, 91, 500], ids=str)
def test_pool_sizes(config, pool_tokens):
    """Ends apart, touching, overlapping, and longer than the prompt."""
    hole = torch.ones(2, 90, dtype=torch.bool)
    hole[1, 40:44] = False
    for mask in (None, hole):
        check(keys(), trained(16), mask, pool_tokens=pool_tokens, config=config)


@pytest.mark.parametrize("size", [8, 20, 24, 80, 128], ids=str)
@pytest.mark.parametrize("multiplier", [1, 3, 4], ids=str)
def test_head_and_hidden_sizes(size, multiplier):
    for config in (SMALL, None):
        check(keys(1, size=size, length=40), trained(size, multiplier), config=config)


def spans(*ranges, length=90):
    """A mask whose samples are real from the first to the second number, bool [B, length]."""
    column = torch.arange(length)
    return torch.stack([(column >= low) & (column < high) for low, high in ranges])


@every_config
def test_padding(config):
    """None, left, right, both, little, one token, no token."""
    ranges = [(0, 90), (61, 90), (0, 13), (30, 55), (87, 90), (0, 1), (89, 90), (40, 40)]
    for pool_tokens in (3, 8, 40):
        _, logits = check(
            keys(8), trained(16), spans(*ranges), pool_tokens=pool_tokens, config=config
        )
    assert logits.isfinite().all()


@every_config
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.95], ids=str)
def test_holes(config, share):
    for length in (90, 333):
        mask = torch.rand(4, length) < share
        mask[2, :60] = False
        mask[3, 30:] = False
        check(keys(4, length=length), trained(16), mask, config=config)


@every_config
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_what_lies_behind_the_end_is_not_seen(config, dtype):
    end = torch.tensor([200, 90, 50, 3, 0, -7], dtype=dtype)
    for mask in (None, spans((0, 90), (20, 90), (45, 90), (0, 90), (0, 90), (0, 90))):
        check(keys(6), trained(16), mask, end, config=config)


def test_prompts_shorter_than_a_block():
    for length in (1, 2, 15, 16, 17):
        for mask in (None, torch.ones(2, length, dtype=torch.bool)):
            check(keys(length=length), trained(16), mask, config=None)


def test_strides():
    tap = keys()
    router = trained(16)
    mask = torch.rand(2, 90) < 0.8
    end = torch.tensor([70, 80])
    wanted, _ = check(tap, router, mask, end)
    wide = torch.randn(2, 2, 90, 32)[..., ::2].copy_(tap)
    turned = torch.empty(16, 90, 2, 2).permute(3, 2, 1, 0).copy_(tap)
    for view in (tap.contiguous(), wide, turned):
        assert torch.equal(check(view, router, mask, end)[0], wanted)
    columns = mask.T.contiguous().T
    assert columns.stride() == (1, 2)
    spread = torch.empty(2, 180, dtype=torch.bool)[:, ::2].copy_(mask)
    for view in (columns, spread):
        assert torch.equal(check(tap, router, view, end)[0], wanted)
    every_other = torch.tensor([70, 0, 80, 0])[::2]
    assert torch.equal(check(tap, router, mask, every_other)[0], wanted)
    with torch.no_grad():
        for layer in router.task[0], router.router[2]:
            layer.weight = nn.Parameter(layer.weight.T.contiguous().T, requires_grad=False)
    assert not router.task[0].weight.is_contiguous()
    assert torch.equal(check(tap, router, mask, end)[0], wanted)


def test_a_mask_and_an_end_for_all_samples():
    tap, router = keys(3), trained(16)
    one = check(tap, router, spans((20, 80)), torch.tensor([70]))[0]
    for mask in (spans((20, 80)).expand(3, 90), spans(*[(20, 80)] * 3)):
        assert torch.equal(check(tap, router, mask, torch.tensor([70, 70, 70]))[0], one)


def test_forced_routes():
    tap, router = keys(3, 4), trained(16)
    _, logits = check(tap, router)
    margins = (logits[..., 0] - logits[..., 1]).flatten().sort().values
    bias = float(margins[5:7].mean())  # half of the heads are sparse
    free, _ = check(tap, router, bias=bias)
    assert 0 < free.sum() < free.numel()
    for forced in (
        torch.tensor([[-1, 0, 1, -1]], dtype=torch.int32),
        torch.tensor([[-1, 0, 1, -1], [-1] * 4, [1, 1, 0, 0]], dtype=torch.int32),
    ):
        out, _ = check(tap, router, forced=forced, bias=bias)
        assert torch.equal(out, torch.where(forced >= 0, forced, free))
    spread = torch.full((3, 8), 5, dtype=torch.int32)[:, ::2].copy_(forced)
    assert torch.equal(check(tap, router, forced=spread, bias=bias)[0], out)


def test_the_bias_moves_decisions():
    tap, router = keys(4, 4), trained(16)
    for bias in (-100.0, -0.3, 0.3, 100.0):
        out, _ = check(tap, router, bias=bias)
    assert out.all()
    assert not check(tap, router, bias=-100.0)[0].any()


def test_ties_and_nan_are_full():
    tap, router = keys(), trained(16)
    nn.init.zeros_(router.router[-1].weight)
    nn.init.zeros_(router.router[-1].bias)
    call = RouteCall(tap, None, None, ask(1, 2), weights_of(router), 8)
    assert not triton_route.forward(call).any()
    nn.init.constant_(router.router[-1].bias, torch.nan)
    logits = torch.zeros(2, 2, 2)
    assert not triton_route.forward(call, SMALL, logits).any() and logits.isnan().all()
    router = trained(16)
    tap[0, 1, 3] = torch.inf  # a real token
    call = RouteCall(tap, None, None, ask(1, 2), weights_of(router), 8, 50.0)
    assert triton_route.forward(call).tolist() == [[1, 0], [1, 1]]


def test_results_repeat_and_do_not_depend_on_the_batch():
    tap, router = keys(4), trained(16)
    _, logits = check(tap, router)
    for sample in range(4):
        assert torch.equal(check(tap[sample : sample + 1], router)[1], logits[sample : sample + 1])


def test_through_the_operator(monkeypatch):
    tap, router = keys(), trained(16)
    mask = spans((0, 90), (30, 90))
    wanted, _ = check(tap, router, mask)
    router.requires_grad_(True)
    tap.requires_grad_(True)
    found = ops.route(tap, weights_of(router), ask(1, 2), key_mask=mask, pool_tokens=8)
    assert torch.equal(found, wanted) and not found.requires_grad
    arguments = (tap, mask, None, ask(1, 2), weights_of(router), 8, 0.0)
    raw = torch.ops.elastic_compile.route(*arguments)
    assert torch.equal(raw, wanted) and not raw.requires_grad
    with torch.no_grad():
        checks = torch.library.opcheck(torch.ops.elastic_compile.route.default, arguments)
    assert set(checks.values()) == {"SUCCESS"}


def test_one_graph_for_all_lengths():
    router = trained(16)

    def function(tap, mask):
        return ops.route(tap, weights_of(router), ask(1, 2), key_mask=mask, pool_tokens=8)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    # More samples than heads: dimensions of equal size would share a symbol.
    compiled(keys(3), spans((0, 90), (30, 90), (0, 9)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, length in ((4, 91), (3, 200), (5, 16)):
            tap, mask = keys(batch, length=length), torch.rand(batch, length) < 0.8
            assert torch.equal(compiled(tap, mask), function(tap, mask))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(tap=keys(dtype=torch.float64)), "dtype torch.float64"),
        (dict(tap=keys(size=1025)), "head sizes above 1024"),
        (dict(weights=weights_of(trained(16, dtype=torch.float64))), "weights of dtype"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_lacks_is_declined_with_the_reason(change, reason):
    arguments = dict(
        tap=keys(),
        key_mask=None,
        end=None,
        forced=ask(1, 2),
        weights=weights_of(trained(16)),
        pool_tokens=8,
    )
    call = RouteCall(**arguments | change)
    ok, said = triton_route.supports(call)
    assert not ok and reason in said
    with pytest.raises(ValueError, match="cannot serve this call"):
        _dispatch.route(call)


def test_nothing_to_route():
    assert ops.route(keys(0), weights_of(trained(16)), ask(1, 2), pool_tokens=8).shape == (0, 2)
