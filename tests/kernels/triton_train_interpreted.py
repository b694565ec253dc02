"""Cases of the Triton kernels for training in Triton's interpreter, against the oracle.

``test_triton_train`` runs this file in a process of its own, since the interpreter has to be
chosen before Triton is imported. float32 and float16 only: tests/gpu runs every dtype.
"""

import os

import pytest
import torch

from elastic_compile.kernels import _dispatch, triton_backward, triton_dual
from elastic_compile.kernels._call import AttentionCall
from elastic_compile.kernels.triton_prefill import Config
from tests import oracle
from tests.kernels.triton_interpreted import alternating, inputs, readable

assert os.environ.get("TRITON_INTERPRET") == "1"

# Blocks much smaller than sequences, so that every kind of block occurs; some larger than others.
PLAIN = Config(16, 16, 4, 1), triton_backward.Config(16, 16, 4, 1, 16, 16, 4, 1, True)
WIDE = Config(32, 16, 4, 1, pack=2), triton_backward.Config(32, 16, 4, 1, 16, 32, 4, 1, True)
DEEP = (
    Config(16, 32, 4, 1, tma=False, split_sums=False),
    triton_backward.Config(16, 32, 4, 1, 32, 16, 4, 1),
)
CONFIGS = {"plain": PLAIN, "wide": WIDE, "deep": DEEP}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def close(found, wanted, tolerance, name):
    assert found.shape == wanted.shape, name
    error = (found.double() - wanted).abs().max()
    assert error <= tolerance * (1 + wanted.abs().max()), f"{name}: {error:.1e}"


def check(tensors, configs=PLAIN, sink=5, local=13, **options):
    """Runs the forward and the backward and compares all results with the oracle's."""
    query, key, value = tensors
    route = alternating(query.shape[0], key.shape[1])
    for tensor in (key, value):
        for sample in range(tensor.shape[0]):
            tensor[sample, :, ~readable(tensor, options)[sample]] = torch.nan
    scale = options.get("scale")
    fields = {name: value for name, value in options.items() if name != "scale"}
    fields["scale_tensor" if isinstance(scale, torch.Tensor) else "scale"] = scale
    call = AttentionCall(query, key, value, route, sink, local, **fields)
    assert triton_dual.supports(call) == (True, "")
    out, lse, other = triton_dual.forward(call, configs[0])
    torch.manual_seed(0)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = triton_backward.backward(call, grad_out, grad_lse, out, lse, configs[1])

    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    sinks = options.get("sinks")
    exact = {name: x for name, x in options.items() if name != "sinks"}
    if sinks is not None:
        leaves.append(sinks.double().requires_grad_())
        exact["sinks"] = leaves[3]
    wanted, wanted_lse = oracle.attention(*leaves[:3], route, sink=sink, local=local, **exact)
    opposite, _ = oracle.attention(*leaves[:3], 1 - route, sink=sink, local=local, **exact)
    seen = torch.isfinite(wanted_lse)
    total = (wanted * grad_out).sum() + (wanted_lse * grad_lse)[seen].sum()
    tolerance = TOLERANCE[query.dtype]
    assert torch.equal(torch.isfinite(lse), seen)
    close(out, wanted, tolerance, "output")
    close(other, opposite, tolerance, "other output")
    close(lse[seen], wanted_lse[seen], tolerance, "log-sum-exp")
    expected = torch.autograd.grad(total, leaves)
    for name, one, two in zip(("query", "key", "value", "sinks"), grads, expected, strict=False):
        close(one, two, 4 * tolerance, name)
    product = torch.einsum("bhsd,bhsd->bhs", grad_out.double(), opposite - wanted)
    group = query.shape[1] // key.shape[1]
    gain = product.sum(2).unflatten(1, (-1, group)).sum(2) * (1 - 2 * route)
    sums = triton_backward.row_sums(grad_out, other) - triton_backward.row_sums(grad_out, out)
    found = sums.sum(2).unflatten(1, (-1, group)).sum(2) * (1 - 2 * route)
    close(found, gain, 20 * tolerance, "route")


@pytest.mark.parametrize(
    ("name", "rows", "keys"), [("plain", 46, 46), ("wide", 33, 70), ("deep", 60, 37)]
)
def test_shapes(name, rows, keys):
    check(inputs(1, rows=rows, keys=keys, size=16), CONFIGS[name])


@pytest.mark.parametrize(
    ("name", "sink", "local"),
    [("plain", 0, 1), ("wide", 20, 7), ("deep", 33, 5)],
)
def test_windows(name, sink, local):
    check(inputs(1, heads=2, rows=66, keys=66, size=16), CONFIGS[name], sink=sink, local=local)


@pytest.mark.parametrize(
    "options",
    [
        {"start": torch.tensor([0, 17])},
        {"kv_len": torch.tensor([44, 38])},
        {"key_mask": torch.arange(48)[None] < torch.tensor([[48], [20]])},
        {"key_mask": torch.arange(48) % 5 > torch.tensor([[1], [9]])},
        {"softcap": 1.5, "sinks": torch.tensor([0.5, 2.0])},
        {"scale": -0.2, "full_mode": "streaming", "sparse_mode": "full"},
        {"scale": torch.tensor(0.3), "start": torch.tensor([3, 9])},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options):
    check(
        inputs(2, heads=2, rows=37, keys=48, size=16),
        DEEP if "start" in options else PLAIN,
        **options,
    )


def test_odd_head_sizes_and_groups():
    check(inputs(1, heads=6, rows=35, keys=35, size=40, value_size=24), WIDE)


def test_half_precision():
    check(inputs(1, heads=2, rows=35, keys=35, size=16, dtype=torch.float16))


def test_tensors_with_odd_strides():
    query, key, value = inputs(1, heads=2, rows=35, keys=35, size=16)
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query, key, value)]
    assert odd[0].stride(3) != 1
    check(odd)


@pytest.mark.parametrize("kernel", ["triton", "auto"])
def test_the_operator_uses_both(monkeypatch, kernel):
    """The registry's "triton" serves both directions where it is named or the device's own."""
    entry = _dispatch._registry["triton"]
    monkeypatch.setitem(
        _dispatch._registry, "triton", _dispatch.replace(entry, devices=("cpu", "cuda"))
    )
    calls = []
    for module, name in ((triton_dual, "forward"), (triton_backward, "backward")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, o=original, n=name: calls.append(n) or o(*a))
    from elastic_compile.kernels import ops

    leaves = [x.requires_grad_() for x in inputs(1, rows=40, keys=40, size=16)]
    route = torch.tensor([[0.0, 1.0]], requires_grad=True)

    def gradients(kernel):
        out, _ = ops.attention_train(*leaves, route, sink=2, local=9, kernel=kernel)
        return torch.autograd.grad(out.square().sum(), (*leaves, route))

    expected = gradients("cpu")
    assert calls == []
    for name in ("dense", "cpu"):
        monkeypatch.delitem(_dispatch._registry, name)
    found = gradients(kernel)
    assert calls == ["forward", "backward"]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
