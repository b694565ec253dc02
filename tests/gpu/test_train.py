"""The Triton kernels for training: both outputs, every gradient, and how they behave on a GPU."""

import pytest
import torch

from elastic_compile.kernels import ops, triton_backward
from elastic_compile.kernels._call import AttentionCall
from tests import oracle
from tests.gpu.test_prefill import alternating, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SINK, LOCAL = 20, 90
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

sizes = pytest.mark.parametrize("size", [64, 128])


def off(found, wanted):
    """Distance over the norm of what is wanted, of all elements and of the worst head."""
    wrong, wanted = found.double() - wanted, wanted
    whole = wrong.norm() / wanted.norm().clamp_min(1e-9)
    heads = wrong.flatten(2).norm(dim=2) / wanted.flatten(2).norm(dim=2).clamp_min(
        1e-3 * wanted.norm()
    )
    return max(whole.item(), heads.max().item())


def check(tensors, *, sink=SINK, local=LOCAL, **options):
    """Results and gradients of ``attention_train`` beside the oracle's in float64."""
    query, key, _ = tensors
    dtype = query.dtype
    route = alternating(query.shape[0], key.shape[1]).cuda()
    extra = [name for name in ("sinks", "scale") if isinstance(options.get(name), torch.Tensor)]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    leaves += [route.float().requires_grad_()]
    leaves += [options[name].clone().requires_grad_() for name in extra]
    named = options | dict(zip(extra, leaves[4:], strict=True))
    out, lse = ops.attention_train(*leaves[:4], sink=sink, local=local, kernel="triton", **named)
    torch.manual_seed(0)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0)
    found = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))

    exact = [x.detach().double().requires_grad_() for x in leaves[:3]]
    exact += [options[name].double().requires_grad_() for name in extra]
    named = options | dict(zip(extra, exact[3:], strict=True))
    wanted, wanted_lse = oracle.attention(*exact[:3], route, sink=sink, local=local, **named)
    with torch.no_grad():
        other, _ = oracle.attention(*exact[:3], 1 - route, sink=sink, local=local, **named)
    seen = torch.isfinite(wanted_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert off(out, wanted) < TOLERANCE[dtype]
    torch.testing.assert_close(lse[seen].double(), wanted_lse[seen], atol=2e-3, rtol=1e-4)
    total = (wanted * grad).sum() + (wanted_lse * grad_lse)[seen].sum()
    expected = torch.autograd.grad(total, exact)
    for one, two in zip(found[:3], expected[:3], strict=True):
        assert torch.isfinite(one).all()
        assert off(one, two) < 3 * TOLERANCE[dtype]
    for one, two in zip(found[4:], expected[3:], strict=True):
        assert (one.double() - two).norm() < 5 * TOLERANCE[dtype] * (1 + two.norm())
    product = torch.einsum("bhsd,bhsd->bhs", grad.double(), other - wanted.detach())
    group = query.shape[1] // key.shape[1]
    gain = product.sum(2).unflatten(1, (-1, group)).sum(2) * (1 - 2 * route)
    noise = (grad.double().square().sum((2, 3)) * wanted.square().mean()).sqrt()
    noise = noise.unflatten(1, (-1, group)).norm(dim=2)
    assert ((found[3].double() - gain).abs() < 3 * TOLERANCE[dtype] * (1 + noise)).all()
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).split(".")[1])
@pytest.mark.parametrize(
    ("size", "value_size"),
    [(16, 16), (40, 24), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)],
)
def test_head_sizes(poisoned_memory, dtype, size, value_size):
    check(inputs(batch=1, rows=300, keys=300, size=size, value_size=value_size, dtype=dtype))


@sizes
@pytest.mark.parametrize(
    ("rows", "keys"), [(1, 300), (127, 127), (129, 400), (513, 513), (300, 200)]
)
def test_shapes(poisoned_memory, size, rows, keys):
    check(inputs(batch=2, rows=rows, keys=keys, size=size))


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_query_heads_to_a_kv_head(poisoned_memory, group):
    check(inputs(heads=2 * group, size=128))


@sizes
@pytest.mark.parametrize(("sink", "local"), [(0, 1), (0, 128), (128, 128), (200, 5), (4, 900)])
def test_windows(poisoned_memory, size, sink, local):
    check(inputs(batch=1, rows=600, keys=600, size=size), sink=sink, local=local)


@sizes
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"scale": -0.2},
        {"scale": torch.tensor(0.3)},
        {"full_mode": "streaming", "sparse_mode": "full"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(poisoned_memory, size, options):
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    check(inputs(size=size), **options)


@sizes
def test_padding_and_a_static_cache(poisoned_memory, size):
    query, key, value = inputs(batch=3, rows=150, keys=500, size=size)
    start = torch.tensor([0, 77, 300]).cuda()
    kv_len = torch.tensor([500, 431, 300]).cuda()
    for sample in range(3):
        for tensor in (key, value):
            tensor[sample, :, : start[sample]] = torch.nan
            tensor[sample, :, kv_len[sample] :] = torch.nan
    check((query, key, value), start=start, kv_len=kv_len)


@sizes
def test_masks(poisoned_memory, size):
    query, key, value = inputs(batch=4, rows=300, keys=300, size=size)
    column = torch.arange(300, device="cuda")
    mask = torch.stack([column >= 0, column >= 90, column < 200, column % 3 > 0])
    for tensor in (key, value):
        tensor.transpose(1, 2)[~mask] = torch.nan
    check((query, key, value), key_mask=mask)


def leaves_of(length, heads=32, kv_heads=8, size=128):
    tensors = inputs(batch=1, heads=heads, kv_heads=kv_heads, rows=length, keys=length, size=size)
    route = alternating(1, kv_heads).float().cuda()
    return [x.requires_grad_() for x in (*tensors, route)]


def test_results_repeat_to_the_bit():
    leaves = leaves_of(3000)
    runs = []
    for _ in range(5):
        out, _ = ops.attention_train(*leaves, sink=SINK, local=LOCAL, kernel="triton")
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for run in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(run, runs[0], strict=True))


def test_nothing_waits_for_the_host():
    leaves = leaves_of(600)
    mask = torch.ones(1, 600, dtype=torch.bool, device="cuda")

    def step():
        out, _ = ops.attention_train(
            *leaves, sink=SINK, local=LOCAL, key_mask=mask, kernel="triton"
        )
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_long_rows_keep_their_accuracy():
    """The last 64 rows of 8,192 against float64, and the keys that only they see."""
    length, rows = 8192, 64
    query, key, value, _ = (x.detach() for x in leaves_of(length, heads=4, kv_heads=2))
    route = alternating(1, 2).cuda()
    call = AttentionCall(query, key, value, route, SINK, LOCAL)
    out, lse = ops.attention(query, key, value, route, sink=SINK, local=LOCAL, kernel="triton")
    grad = torch.zeros_like(out)
    grad[:, :, -rows:] = torch.randn_like(grad[:, :, -rows:])
    found = triton_backward.backward(call, grad, None, out, lse)
    exact = [x.double().requires_grad_() for x in (query[:, :, -rows:], key, value)]
    wanted, _ = oracle.attention(*exact, route, sink=SINK, local=LOCAL)
    expected = torch.autograd.grad(wanted, exact, grad[:, :, -rows:].double())
    assert not found[0][:, :, :-rows].any()
    assert off(found[0][:, :, -rows:], expected[0]) < 3 * TOLERANCE[torch.bfloat16]
    for one, two in zip(found[1:3], expected[1:], strict=True):
        assert off(one, two) < 3 * TOLERANCE[torch.bfloat16]
