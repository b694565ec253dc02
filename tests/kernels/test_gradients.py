"""Gradients of every mode and input against float64 autograd through the oracle."""

import pytest
import torch

from elastic_compile.kernels import ops
from tests import oracle
from tests.kernels import cases
from tests.kernels.cases import KERNELS, alternating, inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(tensors, route, *, kernel, atol=2e-5, through_lse=True, **options):
    """Compares the gradients of query, key, value and any sinks or tensor scale; returns them."""
    extra = [name for name in ("sinks", "scale") if isinstance(options.get(name), torch.Tensor)]
    leaves = [*tensors, *(options[name] for name in extra)]

    def gradients(function, dtype, **more):
        own = [leaf.detach().to(dtype).clone().requires_grad_() for leaf in leaves]
        named = options | dict(zip(extra, own[3:], strict=True))
        out, lse = function(*own[:3], route, **named, **more)
        torch.manual_seed(1)
        upstream = torch.randn(out.shape, dtype=torch.float64)
        upstream_lse = torch.randn(lse.shape, dtype=torch.float64)
        total = (out.double() * upstream).sum()
        if through_lse:
            seen = lse != -torch.inf
            total = total + (lse.double()[seen] * upstream_lse[seen]).sum()
        return torch.autograd.grad(total, own)

    found = gradients(ops.attention, tensors[0].dtype, kernel=kernel)
    expected = gradients(oracle.attention, torch.float64)
    for leaf, gradient, target in zip(leaves, found, expected, strict=True):
        assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
        torch.testing.assert_close(gradient.double(), target, rtol=atol, atol=atol)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", (1, 15, 127, 128, 129, 507, 1025))
def test_odd_lengths(kernel, length):
    # field cases B40, B42
    check(inputs(1, 2, 1, length, length), alternating(1, 1) + 1, kernel=kernel, sink=4, local=33)
    check(inputs(1, 2, 2, length, length), alternating(1, 2), kernel=kernel, sink=4, local=64)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", (1, 5, 64, 70))
def test_chunks_on_a_cache(kernel, rows):
    tensors = inputs(2, 4, 2, rows, 190)
    tensors[1][:, :, 180:] = tensors[2][:, :, 180:] = torch.nan
    tensors[1][0, :, :20] = tensors[2][0, :, :20] = torch.nan
    found = check(
        tensors,
        alternating(2, 2),
        kernel=kernel,
        sink=3,
        local=40,
        start=torch.tensor([20, 0]),
        kv_len=torch.tensor([180, 179]),
    )
    assert not found[1][:, :, 180:].any() and not found[1][0, :, :20].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", (64, 80, 96, 112, 128, 192, 256))
def test_head_sizes(kernel, size):
    # field case B35
    check(inputs(1, 2, 2, 150, 150, size), alternating(1, 2), kernel=kernel, sink=2, local=50)
    check(inputs(1, 2, 2, 1, 150, size), alternating(1, 2), kernel=kernel, sink=2, local=50)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value_size", (16, 48))
def test_value_size_differs(kernel, value_size):
    tensors = inputs(1, 4, 2, 140, 140, 32, value_size)
    check(tensors, alternating(1, 2), kernel=kernel, sink=2, local=50)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", (1, 2, 4, 7))
def test_group_sizes(kernel, group):
    # field case B79
    for rows in (1, 100):
        tensors = inputs(1, 2 * group, 2, rows, 100, 16)
        check(tensors, alternating(1, 2), kernel=kernel, sink=2, local=30)


@pytest.mark.parametrize("kernel", KERNELS)
def test_softcap_sinks_and_scale(kernel):
    for scale in (0.3, torch.tensor(0.3)):
        check(
            inputs(2, 4, 2, 90, 90),
            alternating(2, 2),
            kernel=kernel,
            sink=2,
            local=30,
            softcap=1.5,
            sinks=torch.randn(4),
            scale=scale,
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_keys(kernel):
    tensors = inputs(2, 4, 2, 150, 150)
    mask = torch.rand(2, 150) > 0.3
    for tensor in tensors[1:]:
        tensor.masked_fill_(~mask[:, None, :, None], torch.nan)
    for options in ({}, {"sinks": torch.randn(4)}, {"softcap": 2.0}):
        found = check(
            tensors, alternating(2, 2), kernel=kernel, sink=2, local=30, key_mask=mask, **options
        )
        assert not found[2].masked_select(~mask[:, None, :, None]).any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout(kernel):
    check(
        inputs(2, 4, 2, 90, 100),
        alternating(2, 2),
        kernel=kernel,
        sink=2,
        local=30,
        start=torch.tensor([0, 17]),
        dropout_p=0.3,
        dropout_seed=torch.tensor(2**45 + 11),
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_documents(kernel):
    check(
        inputs(1, 4, 2, 200, 200),
        alternating(4, 2),
        kernel=kernel,
        sink=3,
        local=20,
        cu_seqlens=torch.tensor([0, 70, 70, 150, 193], dtype=torch.int32),
    )


@pytest.mark.parametrize("length", (65, 200, 507))
@pytest.mark.parametrize("full_mode", ("full", "streaming"))
def test_block_lists(length, full_mode):
    # field cases B39, B42
    check(
        inputs(2, 2, 2, length, length),
        alternating(2, 2),
        kernel="reference",
        sink=3,
        local=40,
        full_mode=full_mode,
        sparse_mode="blocks",
        **cases.block_lists(2, 2, length),
    )


def test_causality_as_a_block_list_has_the_gradients_of_full():
    # field case B39
    length = 300
    lists = cases.block_lists(1, 2, length, keep=1.0)
    grads = []
    for options in ({}, {"full_mode": "blocks", "sparse_mode": "blocks", **lists}):
        torch.manual_seed(0)
        leaves = [tensor.requires_grad_() for tensor in inputs(1, 4, 2, length, length)]
        out, _ = ops.attention(*leaves, alternating(1, 2) * 0, sink=0, local=1, **options)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for full, blocks in zip(*grads, strict=True):
        torch.testing.assert_close(full, blocks, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_keys_than_queries(kernel):
    # field cases B11, B12
    tensors = inputs(1, 2, 2, 64, 3)
    found = check(tensors, alternating(1, 2), kernel=kernel, sink=1, local=2)
    assert not found[0][:, :, :61].any()
    assert found[0][:, :, 62:].any(-1).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_keys_nobody_sees_have_no_gradient(kernel):
    # field case B41
    tensors = inputs(1, 2, 1, 10, 300)
    route = torch.ones(1, 1, dtype=torch.int32)
    found = check(tensors, route, kernel=kernel, sink=4, local=20)
    for gradient in found[1:]:
        assert not gradient[:, :, 4:271].any() and gradient[:, :, 271:].any(-1).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_see_nothing_give_no_gradient_whatever_they_hold(kernel):
    # field case B09
    tensors = inputs(1, 2, 2, 40, 40)
    for tensor in tensors:
        tensor[:, :, :10] = torch.nan
    leaves = [tensor.requires_grad_() for tensor in tensors]
    sinks = torch.zeros(2, requires_grad=True)
    out, lse = ops.attention(
        *leaves, alternating(1, 2), sink=2, local=8, start=torch.tensor([10]), sinks=sinks,
        kernel=kernel,
    )  # fmt: skip
    assert not out[:, :, :10].any() and (lse[:, :, :10] == -torch.inf).all()
    upstream = torch.ones_like(out)
    upstream[:, :, :10] = torch.nan
    for gradient in torch.autograd.grad(out, [*leaves, sinks], upstream):
        assert gradient.isfinite().all() and gradient.any()
        if gradient.dim() == 4:
            assert not gradient[:, :, :10].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(kernel, dtype):
    tensors = inputs(1, 4, 2, 130, 130, dtype=dtype)
    atol = 8 * torch.finfo(dtype).eps
    check(tensors, alternating(1, 2), kernel=kernel, sink=2, local=40, atol=atol)


@pytest.mark.parametrize("kernel", KERNELS)
def test_float64(kernel):
    tensors = inputs(2, 4, 2, 75, 75, dtype=torch.float64)
    check(tensors, alternating(2, 2), kernel=kernel, sink=2, local=20, atol=1e-12)


def test_only_the_lse_needs_a_gradient():
    tensors = [tensor.requires_grad_() for tensor in inputs(1, 2, 2, 30, 30)]
    _, lse = ops.attention(*tensors, alternating(1, 2), sink=2, local=8)
    query, key, value = torch.autograd.grad(lse.sum(), tensors)
    assert query.any() and key.any() and not value.any()


def test_double_backward_is_refused():
    tensors = [tensor.requires_grad_() for tensor in inputs(1, 2, 2, 30, 30)]
    out, _ = ops.attention(*tensors, alternating(1, 2), sink=2, local=8)
    (gradient,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()
