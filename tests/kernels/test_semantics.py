"""What a query sees, to the token, and what it must never read."""

import pytest
import torch
from torch.nn import functional as F

from elastic_compile.kernels import ops
from tests import oracle
from tests.kernels import cases
from tests.kernels.cases import KERNELS, alternating, inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FULL, SPARSE = (torch.full((1, 2), route, dtype=torch.int32) for route in (0, 1))


def agree(tensors, route, *, kernel, atol=1e-5, **options):
    """Compares with the oracle and returns the output."""
    out, lse = ops.attention(*tensors, route, kernel=kernel, **options)
    expected, expected_lse = oracle.attention(*tensors, route, **options)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=atol)
    return out


@pytest.mark.parametrize("kernel", KERNELS)
def test_streaming_is_not_full(kernel):
    tensors = inputs(1, 4, 2, 400, 400)
    full = agree(tensors, FULL, kernel=kernel, sink=4, local=64)
    sparse = agree(tensors, SPARSE, kernel=kernel, sink=4, local=64)
    # Rows 0 ... 67 see every key either way.
    torch.testing.assert_close(full[:, :, :68], sparse[:, :, :68], rtol=0, atol=1e-5)
    assert ((full - sparse)[:, :, 68:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("kernel", ("auto", *KERNELS))
def test_streaming_that_spans_the_keys_is_full(kernel):
    tensors = inputs(2, 4, 2, 100, 100)
    options = {"sink": 30, "local": 70, "start": torch.tensor([0, 11])}
    agree(tensors, alternating(2, 2), kernel=kernel, **options)
    out, _ = ops.attention(*tensors, alternating(2, 2), kernel=kernel, **options)
    full, _ = ops.attention(*tensors, alternating(2, 2) * 0, kernel="reference", **options)
    torch.testing.assert_close(out, full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ("auto", *KERNELS))
@pytest.mark.parametrize("rows", (100, 1))
def test_one_key_more_than_sink_and_local_is_hidden(kernel, rows):
    query, key, value = inputs(1, 4, 2, rows, 100)
    for sink in (30, 29):
        agree((query, key, value), SPARSE, kernel=kernel, sink=sink, local=70)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("decode", (False, True))
def test_window_and_sink_boundaries(kernel, decode):
    # field case B28: query 20, window 8, sink 2
    query, key, value = inputs(1, 2, 2, 32, 32)
    if decode:
        query, key, value = query[:, :, 20:21], key[:, :, :21], value[:, :, :21]
    row = 0 if decode else 20

    def out(j):
        changed = value.clone()
        changed[:, :, j] += 1000.0
        return ops.attention(query, key, changed, SPARSE, sink=2, local=8, kernel=kernel)[0][
            :, :, row
        ]

    base = ops.attention(query, key, value, SPARSE, sink=2, local=8, kernel=kernel)[0][:, :, row]
    moved = {j for j in range(key.shape[2]) if not torch.equal(base, out(j))}
    assert moved == {0, 1, *range(13, 21)}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_future_is_never_seen(kernel):
    # field case B15
    tensors = inputs(1, 4, 2, 100, 100)
    options = {"sink": 4, "local": 16, "kernel": kernel}
    before, _ = ops.attention(*tensors, alternating(1, 2), **options)
    for tensor in tensors:
        tensor[:, :, 50:] += 1.0
    after, _ = ops.attention(*tensors, alternating(1, 2), **options)
    assert torch.equal(before[:, :, :50], after[:, :, :50])
    assert (before[:, :, 50:] != after[:, :, 50:]).any(-1).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_start_at_the_first_real_token(kernel):
    # field cases B06, B07: a left-padded row equals its run alone
    query, key, value = inputs(2, 4, 2, 512, 512)
    route = alternating(2, 2)
    options = {"sink": 4, "local": 64, "kernel": kernel}
    out, lse = ops.attention(query, key, value, route, start=torch.tensor([100, 0]), **options)
    alone, alone_lse = ops.attention(
        query[:1, :, 100:], key[:1, :, 100:], value[:1, :, 100:], route[:1], **options
    )
    torch.testing.assert_close(out[:1, :, 100:], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse[:1, :, 100:], alone_lse, rtol=0, atol=1e-5)
    assert not out[0, :, :100].any() and (lse[0, :, :100] == -torch.inf).all()
    second, _ = ops.attention(query[1:], key[1:], value[1:], route[1:], **options)
    torch.testing.assert_close(out[1:], second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_cached_steps_equal_one_call(kernel):
    # field cases B03, B30, B69
    query, key, value = inputs(1, 4, 2, 300, 300)
    route = alternating(1, 2)
    options = {"sink": 4, "local": 64, "kernel": kernel}
    whole, _ = ops.attention(query, key, value, route, **options)
    room = torch.full((1, 2, 40, 32), torch.nan)
    for begin, end in ((0, 127), (127, 128), (128, 129), (129, 200), (200, 300)):
        sliced, _ = ops.attention(
            query[:, :, begin:end], key[:, :, :end], value[:, :, :end], route, **options
        )
        static, _ = ops.attention(
            query[:, :, begin:end],
            torch.cat([key[:, :, :end], room], 2),
            torch.cat([value[:, :, :end], room], 2),
            route,
            kv_len=torch.tensor(end),
            **options,
        )
        torch.testing.assert_close(sliced, whole[:, :, begin:end], rtol=0, atol=1e-5)
        torch.testing.assert_close(static, whole[:, :, begin:end], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("keys", (64, 65))
@pytest.mark.parametrize("rows", (1, 64))
def test_tail_of_a_block(kernel, keys, rows):
    # field case B44
    agree(inputs(1, 4, 2, rows, keys), alternating(1, 2), kernel=kernel, sink=2, local=20)


@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_keys_in_the_middle(kernel):
    # right padding, then decoding: the hole is at keys 30 ... 39
    query, key, value = inputs(2, 4, 2, 60, 60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, 30:40] = False
    key[0, :, 30:40] = value[0, :, 30:40] = torch.nan
    for rows in (60, 7, 1):
        agree(
            (query[:, :, -rows:], key, value), alternating(2, 2), kernel=kernel, sink=2, local=25,
            key_mask=mask,
        )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_key_masked(kernel):
    # field case B09
    tensors = inputs(2, 2, 2, 6, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0] = False
    mask[1, :5] = False
    out = agree(
        tensors, alternating(2, 2), kernel=kernel, sink=2, local=3, key_mask=mask,
        sinks=torch.randn(2),
    )  # fmt: skip
    assert not out[0].any() and not out[1, :, 0].any() and out[1, :, 1].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", (250, 90, 1))
def test_packed_documents(kernel, rows):
    query, key, value = inputs(1, 4, 2, rows, 250)
    bounds = torch.tensor([0, 3, 120, 120, 244], dtype=torch.int32)
    key[:, :, 244:] = value[:, :, 244:] = torch.nan
    agree(
        (query, key, value), alternating(4, 2), kernel=kernel, sink=3, local=30, cu_seqlens=bounds
    )


def test_packed_documents_equal_documents_alone():
    query, key, value = inputs(1, 4, 2, 250, 250)
    route = alternating(2, 2)
    bounds = torch.tensor([0, 120, 250], dtype=torch.int32)
    options = {"sink": 3, "local": 30}
    packed, _ = ops.attention(query, key, value, route, cu_seqlens=bounds, **options)
    for document, rows in enumerate((slice(0, 120), slice(120, 250))):
        alone, _ = ops.attention(
            *(tensor[:, :, rows] for tensor in (query, key, value)),
            route[document : document + 1],
            **options,
        )
        torch.testing.assert_close(packed[:, :, rows], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("block_size", (32, 64, 128, 256))
@pytest.mark.parametrize("rows", (600, 64, 1))
def test_block_lists(block_size, rows):
    # field cases B01, B69, B71: lists differ by sample and head, positions are absolute
    lists = cases.block_lists(2, 2, 600, block_size=block_size)
    tensors = inputs(2, 4, 2, rows, 600)
    options = {"sink": 0, "local": 1, "block_size": block_size, "start": torch.tensor([0, 70])}
    for modes in ({"sparse_mode": "blocks"}, {"full_mode": "blocks"}):
        agree(tensors, alternating(2, 2), kernel="reference", **options, **modes, **lists)


def test_block_lists_of_packed_documents():
    lists = cases.block_lists(3, 2, 300)
    bounds = torch.tensor([0, 100, 164, 300], dtype=torch.int32)
    agree(
        inputs(1, 4, 2, 300, 300), alternating(3, 2), kernel="reference", sink=2, local=9,
        full_mode="streaming", sparse_mode="blocks", cu_seqlens=bounds, **lists,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value_size", (16, 32, 80))
@pytest.mark.parametrize("rows", (100, 1))
def test_extras(kernel, value_size, rows):
    tensors = inputs(2, 6, 2, rows, 100, 32, value_size)
    for options in (
        {"scale": 0.7},
        {"scale": torch.tensor(0.7)},
        {"softcap": 2.0, "scale": 3.0},
        {"sinks": torch.tensor([5.0, -5.0, 0.0, 1.0, 2.0, -1.0])},
        {"softcap": 2.0, "sinks": torch.randn(6)},
        {"full_mode": "streaming"},
        {"sparse_mode": "full"},
        {"full_mode": "streaming", "sparse_mode": "full"},
    ):
        agree(tensors, alternating(2, 2), kernel=kernel, sink=4, local=24, **options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides(kernel):
    # field case B53
    query, key, value = inputs(2, 4, 2, 90, 90)
    route = alternating(2, 2)
    options = {"sink": 4, "local": 24, "kernel": kernel}
    expected, _ = ops.attention(query, key, value, route, **options)
    views = (
        query.transpose(1, 2).contiguous().transpose(1, 2),
        key.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat([value, value], 3)[..., :32],
    )
    assert not any(view.is_contiguous() for view in views)
    out, _ = ops.attention(*views, route, **options)
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    one_head = key[:, :1].expand(2, 2, 90, 32)
    agree((query, one_head, one_head), route, kernel=kernel, sink=4, local=24)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_beyond_float16(kernel):
    # field case B77
    for rows in (200, 1):
        query, key, value = inputs(1, 2, 2, rows, 200, 128, dtype=torch.float16)
        query, key = query * 60, key * 60
        assert (query.float() @ key.float().mT).abs().max() > 65504
        agree((query, key, value), alternating(1, 2), kernel=kernel, sink=4, local=64, atol=5e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_is_float32(kernel):
    # field case B78
    query, key, value = inputs(1, 4, 4, 128, 128)
    out, _ = ops.attention(query, key, value, alternating(1, 4) * 0, sink=0, local=1, kernel=kernel)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_queries_or_no_keys(kernel):
    for batch, rows, keys in ((1, 0, 5), (1, 3, 0), (0, 3, 5)):
        tensors = [tensor.requires_grad_() for tensor in inputs(batch, 2, 2, rows, keys)]
        route = torch.zeros(batch, 2, dtype=torch.int32)
        out, lse = ops.attention(*tensors, route, sink=2, local=3, kernel=kernel)
        assert out.shape == (batch, 2, rows, 32) and not out.any()
        assert (lse == -torch.inf).all()
        gradients = torch.autograd.grad(out.sum(), tensors)
        assert [g.shape for g in gradients] == [t.shape for t in tensors]
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout(kernel):
    # field case B61
    tensors = inputs(2, 4, 2, 120, 120)
    route = alternating(2, 2)
    seed = torch.tensor(2**50 + 12345)
    options = {"sink": 4, "local": 24, "dropout_p": 0.25, "dropout_seed": seed}
    out = agree(tensors, route, kernel=kernel, **options)
    again, _ = ops.attention(*tensors, route, kernel=kernel, **options)
    assert torch.equal(out, again)
    other, _ = ops.attention(*tensors, route, kernel=kernel, **options | {"dropout_seed": seed + 1})
    assert not torch.allclose(out, other, atol=1e-3)
    chunk, _ = ops.attention(tensors[0][:, :, 70:], *tensors[1:], route, kernel=kernel, **options)
    torch.testing.assert_close(chunk, out[:, :, 70:], rtol=0, atol=1e-5)


def test_dropout_keeps_the_stated_share_and_the_mean():
    query, key, _ = inputs(1, 8, 8, 256, 256)
    ones = torch.ones(1, 8, 256, 1)
    for p in (0.1, 0.5):
        out, _ = ops.attention(
            query * 0, key, ones, torch.zeros(1, 8, dtype=torch.int32), sink=0, local=1,
            dropout_p=p, dropout_seed=torch.tensor(7),
        )  # fmt: skip
        # The last row's output is the kept share / (1 - p): 8 heads of 256 draws.
        late = out[:, :, 128:]
        assert abs(late.mean() - 1) < 0.01
        assert 0.5 < late.var() / (p / (1 - p) / 192) < 2
        assert torch.corrcoef(late[0, :, :, 0])[0, 1:].abs().max() < 0.5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", ("full", "streaming"))
@pytest.mark.parametrize("scale", (-0.5, 0.0))
def test_a_scale_that_is_not_positive(kernel, mode, scale):
    # torch's CPU kernel masks with -inf before it scales
    tensors = inputs(2, 4, 2, 100, 130)
    options = {"sink": 4, "local": 24, "full_mode": mode, "kernel": kernel}
    agree(tensors, alternating(2, 2), scale=scale, **options)
    agree(tensors, alternating(2, 2), scale=torch.tensor(scale), **options)
