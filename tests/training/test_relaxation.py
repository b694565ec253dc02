"""Gumbel-Softmax, straight-through routes, temperature schedules, and attention under them."""

import math

import pytest
import torch

from elastic_compile import _relaxed
from elastic_compile.kernels import ops
from elastic_compile.training import relaxation
from elastic_compile.training.relaxation import GumbelRelaxation, Temperature


def test_cosine_is_that_of_the_released_code():
    tau = Temperature("cosine", 1.5, 1.0, 0.6)
    assert [tau.at(p) for p in (0.0, 0.3, 0.6, 0.61, 1.0)] == pytest.approx([1.5, 1.25, 1, 1, 1])
    assert tau.at(0.15) == pytest.approx(1.25 + 0.25 * math.sqrt(0.5))


def test_exponential_is_that_of_the_paper():
    tau = Temperature("exponential", 1.5, 1.0)
    assert tau.at(0.0) == 1.5
    assert tau.at(0.5) == pytest.approx(1.5 * math.exp(-0.3))
    assert tau.at(1.0) == 1.0, "1.5 exp(-0.6) = 0.823 is below the end"
    assert Temperature("exponential", 1.5, 0.5).at(1.0) == pytest.approx(1.5 * math.exp(-0.6))


def test_constant_temperature():
    assert [Temperature("constant", 0.7, 0.7).at(p) for p in (0, 0.5, 1)] == [0.7] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("linear", 1.5, 1.0), "allowed: cosine, exponential, constant"),
        (("cosine", 1.0, 1.5), "0 < end <= start"),
        (("cosine", 1.0, 0.0), "0 < end <= start"),
        (("cosine", 1.5, 1.0, 0.0), "share is 0.0"),
    ],
)
def test_bad_schedules(fields, message):
    with pytest.raises(ValueError, match=message):
        Temperature(*fields)


def test_gumbel_noise():
    u = torch.tensor([0.0, 0.5, 1 - 2**-24])
    g = relaxation.gumbel(u, 1e-10)
    assert g[1] == pytest.approx(-math.log(math.log(2)), abs=1e-6)
    assert torch.isfinite(g).all() and g[0] < -3 and g[2] > 15
    sample = relaxation.sample_noise(0, range(500), 10, 10).flatten()
    assert sample.mean() == pytest.approx(0.5772, abs=0.02)
    assert sample.var() == pytest.approx(math.pi**2 / 6, abs=0.04)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_a_head_is_sparse_as_often_as_its_logits_say(temperature):
    """P(sparse) = sigmoid(z1 - z0), whatever the temperature."""
    noise = relaxation.sample_noise(1, range(2000), 1, 4)[:, 0]
    logits = torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 30.0]]).expand(2000, 4, 2)
    share = relaxation.straight_through(logits, noise, temperature).mean(0)
    expected = torch.tensor([0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2)), 1.0])
    assert (share - expected).abs().max() < 0.035


def test_the_forward_is_hard_and_the_gradient_soft():
    torch.manual_seed(0)
    logits = torch.randn(50, 7, 2, requires_grad=True)
    noise = relaxation.gumbel(torch.rand(50, 7, 2))
    route = relaxation.straight_through(logits, noise, 0.8)
    assert set(route.flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(route.bool(), (logits + noise).argmax(-1) == 1)
    weight = torch.randn(50, 7)
    (gradient,) = torch.autograd.grad((route * weight).sum(), logits)
    soft = ((logits + noise) / 0.8).softmax(-1)[..., 1].detach()
    slope = weight * soft * (1 - soft) / 0.8
    assert torch.allclose(gradient, torch.stack([-slope, slope], -1), atol=1e-6)


def test_ties_go_to_full():
    route = relaxation.straight_through(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), 1.0)
    assert not route.any()


def test_noise_belongs_to_the_sample():
    whole = relaxation.sample_noise(3, [10, 11, 12], 4, 2)
    assert torch.equal(whole[1:2], relaxation.sample_noise(3, [11], 4, 2))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, relaxation.sample_noise(4, [10, 11, 12], 4, 2))


class _Site:
    def __init__(self, index, kv_heads, route_bias=0.0):
        self.index, self.kv_heads, self.route_bias = index, kv_heads, route_bias


def test_routes_are_kept_once_and_only_while_recording():
    relax = GumbelRelaxation()
    noise = relaxation.sample_noise(0, [0, 1], 2, 3)
    relax.begin(noise, 1.0)
    logits = torch.randn(2, 3, 2)
    relax(_Site(1, 2), logits[:, :2])
    first = relax(_Site(0, 3), logits)
    routes = relax.end()
    assert [r.shape for r in routes] == [(2, 3), (2, 2)] and torch.equal(routes[0], first)
    # A recomputed layer: the same routes, not counted again.
    assert torch.equal(relax(_Site(0, 3), logits), first)
    assert relax.routes == {}
    assert torch.equal(relaxation.sparsity_ratio(routes), torch.cat(routes, 1).mean(1)), (
        "the share of all pairs, not the mean of the layers' shares"
    )


def test_route_bias_counts_while_training():
    relax = GumbelRelaxation()
    relax.begin(torch.zeros(1, 1, 2, 2), 1.0)
    logits = torch.zeros(1, 2, 2)
    assert relax(_Site(0, 2, 0.1), logits).tolist() == [[1.0, 1.0]]
    assert relax(_Site(0, 2, -0.1), logits).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "sink", "local"),
    [
        (2, 6, 2, 300, 5, 37),
        (1, 4, 4, 257, 16, 64),
        (2, 4, 2, 40, 8, 4),
        (1, 3, 1, 70, 1, 1),
        (1, 2, 1, 300, 8, 299),
        (1, 2, 2, 12, 8, 8),
    ],
)
@pytest.mark.parametrize("path", ["op", "blocked"])
def test_relaxed_attention(path, batch, heads, kv_heads, length, sink, local):
    """Both paths against (1 - r) * full + r * sparse by a mask, in float64, gradients included."""
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    query = draw(batch, heads, length, 8)
    key, value = draw(batch, kv_heads, length, 8), draw(batch, kv_heads, length, 8)
    route = torch.randint(0, 2, (batch, kv_heads)).double().requires_grad_()
    grad = torch.randn(batch, heads, length, 8, dtype=torch.float64)
    place = torch.arange(length)
    causal = place[:, None] >= place
    seen = causal & ((place < sink) | (place[:, None] - place < local))
    group = heads // kv_heads

    def masked(visible):
        keys = key.repeat_interleave(group, 1)
        scores = (query @ keys.mT * 8**-0.5).masked_fill(~visible, -math.inf)
        return scores.softmax(-1) @ value.repeat_interleave(group, 1)

    weight = route.repeat_interleave(group, 1)[:, :, None, None]
    expected = (1 - weight) * masked(causal) + weight * masked(seen)
    inputs = (query, key, value, route)
    wanted = torch.autograd.grad(expected, inputs, grad)
    if path == "op":
        actual = ops.attention_train(query, key, value, route, sink=sink, local=local)[0]
    else:
        actual = _relaxed.mix_blocked(query, key, value, route, sink=sink, local=local)
    found = torch.autograd.grad(actual, inputs, grad)
    assert (actual - expected).abs().max() < 1e-12
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-11
    if length > sink + local:
        assert wanted[3].abs().max() > 1e-3
