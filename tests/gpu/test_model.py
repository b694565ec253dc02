"""A transformed model on a GPU: the kernel inside compiled graphs, equal to the untouched model."""

import pytest
import torch

import elastic_compile
from elastic_compile.kernels import _counters
from tests.families import build, tokens

pytestmark = pytest.mark.gpu
LAYERS = 2


def models(dtype):
    """An untouched tiny Llama and a transformed one with the same weights."""
    base, model = (build("llama", LAYERS).to("cuda", dtype).eval() for _ in range(2))
    config = elastic_compile.ElasticConfig(sink=4, local=8, pool_tokens=6)
    model = elastic_compile.transform(model, config)
    _counters.reset()  # the transform checks every site
    return base, model


def count(counts, name="triton"):
    found = counts()
    assert found["fallbacks"] == {}
    assert set(found["calls"]) <= {name}
    return found["calls"].get(name, 0)


def difference(found, wanted):
    return torch.linalg.norm((found - wanted).float()) / torch.linalg.norm(wanted.float())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled_prefill(counts, dtype):
    base, model = models(dtype)
    function = torch.compile(model, fullgraph=True, dynamic=True)
    # Fused operations round bfloat16 less often.
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for calls, length in enumerate((40, 64, 101), 1):
        ids = tokens(2, length).cuda()
        found = function(ids, use_cache=False).logits
        wanted = base(ids, use_cache=False).logits
        assert difference(found, wanted) < tolerance
        assert count(counts) == calls * LAYERS
    with elastic_compile.force_routes(model, "sparse"):
        sparse = function(ids, use_cache=False).logits
        eager = model(ids, use_cache=False).logits
    assert difference(sparse, wanted) > 0.2
    assert difference(sparse, eager) < tolerance


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_compiled_generate_gives_the_same_tokens(counts, cache):
    base, model = models(torch.float32)
    ids = tokens(2, 40).cuda()
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    if cache == "static":
        options["cache_implementation"] = "static"
    wanted = base.generate(ids, **options)
    model.compile(fullgraph=True, dynamic=True)
    assert torch.equal(model.generate(ids, **options), wanted)
    assert count(counts) >= 12 * LAYERS
    with elastic_compile.force_routes(model, "sparse"):
        assert not torch.equal(model.generate(ids, **options), wanted)


def test_gradients_reach_the_weights():
    base, model = models(torch.float32)
    ids = tokens(2, 40).cuda()
    for candidate in (base, model):
        candidate(ids, use_cache=False).logits.square().mean().backward()
    for name, weight in base.named_parameters():
        found = model.get_parameter(name).grad
        scale = weight.grad.abs().max()
        assert (found - weight.grad).abs().max() <= 1e-3 * scale, name
