"""``exact_attention`` under masks of every shape, against the oracle."""

import pytest
import torch
from torch.nn import functional as F

from elastic_compile.kernels import ops
from tests import oracle
from tests.kernels.cases import inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def agree(tensors, mask, atol=1e-5, **options):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    exact = [tensor.detach().double().clone().requires_grad_() for tensor in tensors]
    masks = [mask, mask]
    if mask is not None and mask.is_floating_point():
        masks = [mask.clone().requires_grad_(), mask.double().requires_grad_()]
        leaves.append(masks[0])
        exact.append(masks[1])
    if "sinks" in options:
        leaves.append(options["sinks"].clone().requires_grad_())
        exact.append(options["sinks"].double().requires_grad_())
    sinks = [{}, {}] if "sinks" not in options else [{"sinks": leaves[-1]}, {"sinks": exact[-1]}]
    out, lse = ops.exact_attention(*leaves[:3], masks[0], reason="test", **options | sinks[0])
    target, target_lse = oracle.exact_attention(*exact[:3], masks[1], **options | sinks[1])
    torch.testing.assert_close(out.double(), target, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), target_lse, rtol=1e-5, atol=atol)
    upstream = torch.randn(target.shape, dtype=torch.float64)
    seen = target_lse != -torch.inf

    def total(out, lse):
        return (out.double() * upstream).sum() + lse.double()[seen].sum()

    found = torch.autograd.grad(total(out, lse), leaves)
    expected = torch.autograd.grad(total(target, target_lse), exact)
    for gradient, correct in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), correct, rtol=5 * atol, atol=5 * atol)
    return out


SHAPES = ((2, 4, 70, 90), (1, 1, 70, 90), (2, 1, 1, 90), (2, 4, 70, 1), (1, 4, 1, 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_bool_masks(shape):
    mask = torch.rand(shape) > 0.4
    agree(inputs(2, 4, 2, 70, 90), mask)
    agree(inputs(2, 4, 2, 70, 90), mask, is_causal=True, sinks=torch.randn(4), softcap=2.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_additive_masks(shape):
    mask = torch.randn(shape)
    agree(inputs(2, 4, 2, 70, 90), mask)
    agree(inputs(2, 4, 2, 70, 90), mask, is_causal=True, sinks=torch.randn(4), softcap=2.0)


def test_infinite_and_lowest_additive_masks():
    # field case B27: -inf empties a row, the lowest number does not
    hidden = torch.rand(1, 1, 12, 9) > 0.5
    hidden[..., 3, :] = True
    out = agree(inputs(1, 2, 2, 12, 9), torch.zeros(1, 1, 12, 9).masked_fill(hidden, -torch.inf))
    assert not out[:, :, 3].any()
    lowest = torch.zeros(1, 1, 12, 9).masked_fill(hidden, torch.finfo(torch.float32).min)
    tensors = inputs(1, 2, 2, 12, 9)
    out = agree(tensors, lowest)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=lowest)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    agree(tensors, lowest, softcap=2.0)


def test_fully_masked_rows():
    # field case B09
    mask = torch.ones(1, 1, 6, 10, dtype=torch.bool)
    mask[..., -1, :] = False
    out = agree(inputs(1, 2, 2, 6, 10, 64), mask)
    assert not out[:, :, -1].any() and out[:, :, :-1].any()


def test_causality_is_counted_from_the_first_row():
    # field case B12
    query, key, value = inputs(1, 2, 2, 4, 132)
    out = agree((query, key, value), None, is_causal=True)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_unread_keys_may_hold_nan():
    query, key, value = inputs(2, 4, 2, 20, 40)
    key[:, :, 30:] = value[:, :, 30:] = torch.nan
    mask = (torch.arange(40) < 30).expand(2, 1, 20, 40)
    agree((query, key, value), mask)


def test_a_mask_finer_than_the_inputs_is_not_rounded():
    query, key, value = inputs(1, 2, 2, 20, 40, dtype=torch.bfloat16)
    mask = 200 + torch.randn(1, 1, 20, 40)
    _, lse = ops.exact_attention(query, key, value, mask, reason="test")
    _, expected = oracle.exact_attention(query, key, value, mask)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=0)


def test_many_rows_and_half_precision():
    agree(inputs(1, 2, 1, 600, 300), torch.rand(1, 1, 600, 300) > 0.3)
    agree(inputs(1, 2, 1, 300, 300), torch.randn(1, 2, 300, 300))
    agree(inputs(1, 2, 1, 300, 300), torch.randn(1, 2, 1, 300))
    for dtype in (torch.bfloat16, torch.float16):
        tensors = inputs(1, 4, 2, 70, 70, dtype=dtype)
        agree(tensors, torch.rand(1, 1, 70, 70) > 0.3, atol=4 * torch.finfo(dtype).eps)


def test_value_size_differs_and_scales():
    tensors = inputs(1, 4, 2, 30, 30, 32, 20)
    mask = torch.rand(1, 1, 30, 30) > 0.3
    plain, _ = ops.exact_attention(*tensors, mask, scale=0.4, reason="test")
    tensor, _ = ops.exact_attention(*tensors, mask, scale=torch.tensor(0.4), reason="test")
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=0.4, enable_gqa=True)
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-5)


def test_any_strides():
    query, key, value = inputs(1, 4, 2, 30, 30)
    mask = torch.rand(1, 1, 30, 30) > 0.3
    views = [tensor.mT.contiguous().mT for tensor in (query, key, value)]
    agree(views, mask.mT)
    agree((query, key[:, :1].expand(1, 2, 30, 32), value), mask.expand(1, 4, 30, 30))


def test_dropout_draws_what_attention_draws():
    query, key, value = inputs(1, 4, 2, 50, 50)
    options = {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)}
    out, _ = ops.exact_attention(query, key, value, None, is_causal=True, reason="test", **options)
    routed, _ = ops.attention(
        query, key, value, torch.zeros(1, 2, dtype=torch.int32), sink=0, local=1, **options
    )
    torch.testing.assert_close(out, routed, rtol=0, atol=1e-5)


def test_every_call_is_a_fallback(counts):
    tensors = inputs(1, 2, 2, 5, 5)
    for _ in range(2):
        ops.exact_attention(*tensors, None, reason="a caller's mask")
    ops.exact_attention(*tensors, None, reason="another reason")
    assert counts() == {
        "calls": {"exact": 3},
        "backward": {},
        "fallbacks": {"a caller's mask": 2, "another reason": 1},
    }
