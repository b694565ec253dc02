"""The fused router on a GPU, against the torch functions in float64."""

import pytest
import torch
from torch import nn

import elastic_compile
from elastic_compile import ElasticConfig, _fused_router, _state
from elastic_compile.kernels import triton_route
from elastic_compile.kernels._call import RouteCall
from elastic_compile.router import AttentionRouter, boundary_pool, decide
from tests.families import build, tokens

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def trained(size, multiplier=4, dtype=torch.float32):
    """A router whose last layer is not zero."""
    router = AttentionRouter(size, multiplier, device="cuda")
    nn.init.normal_(router.router[-1].weight)
    nn.init.normal_(router.router[-1].bias)
    return router.to(dtype).requires_grad_(False)


def check(router, tap, key_mask=None, end=None, pool_tokens=100):
    """Compares logits, and routes where they are clear; what is not real is NaN."""
    batch, heads, length, size = tap.shape
    real = torch.ones(batch, length, dtype=torch.bool, device="cuda")
    if key_mask is not None:
        real &= key_mask
    if end is not None:
        real &= torch.arange(length, device="cuda") < end[:, None]
    tap.transpose(1, 2)[~real] = torch.nan
    forced = torch.full((1, heads), -1, dtype=torch.int32, device="cuda")
    call = RouteCall(tap, key_mask, end, forced, list(router.parameters()), pool_tokens)
    assert triton_route.supports(call) == (True, "")
    logits = torch.full((batch, heads, 2), torch.nan, device="cuda")
    out = triton_route.forward(call, None, logits)
    exact = AttentionRouter(size, router.hidden_multiplier, dtype=torch.float64, device="cuda")
    exact.load_state_dict(router.state_dict())
    with torch.no_grad():
        wanted = exact(boundary_pool(tap.double(), None, end, key_mask, pool_tokens))
    torch.testing.assert_close(logits.double(), wanted, atol=1e-5, rtol=1e-5)
    clear = (wanted[..., 1] - wanted[..., 0]).abs() > 1e-4
    assert torch.equal(out[clear], decide(wanted)[clear]) and clear.any()


def keys(batch, heads, length, size, dtype):
    return torch.randn(batch, length, heads, size, device="cuda").to(dtype).transpose(1, 2)


@every_dtype
@pytest.mark.parametrize("size", [64, 80, 128])
def test_without_a_mask(dtype, size):
    for length in (1, 99, 150, 200, 5000):
        check(trained(size), keys(2, 8, length, size, dtype))


@every_dtype
def test_weights_of_every_dtype(dtype):
    check(trained(128, dtype=dtype), keys(2, 8, 300, 128, torch.bfloat16))


def test_padding_and_holes():
    length = 131072
    column = torch.arange(length, device="cuda")
    mask = torch.stack(
        [column >= 120_000, column < 900, (column > 50) & (column % 3 > 0), column > length]
    )
    end = torch.tensor([length + 5, 700, 100_000, length], device="cuda")
    tap = keys(4, 2, length, 128, torch.bfloat16)
    check(trained(128), tap.clone(), mask)
    check(trained(128), tap, mask, end)


def test_nothing_waits_and_a_captured_graph_follows():
    router, tap = trained(128), keys(1, 8, 3000, 128, torch.bfloat16)
    mask = torch.ones(1, 3000, dtype=torch.bool, device="cuda")
    forced = torch.full((1, 8), -1, dtype=torch.int32, device="cuda")
    call = RouteCall(tap, mask, None, forced, list(router.parameters()), 100)
    triton_route.forward(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_route.forward(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_route.forward(call)
    for _ in range(3):
        tap.normal_()
        mask[:, : int(torch.randint(2000, ()))] = False
        nn.init.normal_(router.router[-1].bias)
        graph.replay()
        assert torch.equal(out, triton_route.forward(call))


def test_a_model_decides_as_its_modules_do(monkeypatch):
    config = ElasticConfig(sink=4, local=8, pool_tokens=6)
    model = elastic_compile.transform(build("llama", 2).cuda().eval(), config)
    generator = torch.Generator().manual_seed(3)
    for parameter in elastic_compile.router_parameters(model):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
    ids = tokens(2, 60).cuda()
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    sites = [site for _, site in _state.rewritten_sites(model)]
    calls = []
    real = _fused_router.decide

    def spy(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(_fused_router, "decide", spy)
    with torch.no_grad():
        model(ids, attention_mask=mask)
        assert len(calls) == 2
        found = torch.stack([_state.last_call(site).route for site in sites])
        monkeypatch.setattr(_fused_router, "serves", lambda *arguments: False)
        model(ids, attention_mask=mask)
        wanted = torch.stack([_state.last_call(site).route for site in sites])
    assert len(calls) == 2 and torch.equal(found, wanted) and 0 < wanted.sum() < wanted.numel()
