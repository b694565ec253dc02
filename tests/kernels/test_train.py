"""``attention_train`` against the mixture of both modes' outputs, by float64 autograd."""

import pytest
import torch

from elastic_compile.kernels import _counters, ops
from tests import oracle
from tests.kernels.cases import KERNELS, alternating, inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SINK, LOCAL = 3, 20


def mixture(query, key, value, route, **options):
    """(1 - r) O_full + r O_sparse; log-sum-exp of the chosen mode, without a gradient of r."""
    group = query.shape[1] // key.shape[1]
    outs, lses = [], []
    for choice in (0, 1):
        whole = torch.full(route.shape, choice, dtype=torch.int32)
        out, lse = oracle.attention(query, key, value, whole, **options)
        outs.append(out)
        lses.append(lse)
    if "cu_seqlens" in options:
        lengths = options["cu_seqlens"].diff().tolist()
        share = torch.zeros(query.shape[2], route.shape[1], dtype=route.dtype)
        first = int(options["cu_seqlens"][0])
        rows = torch.arange(first, first + sum(lengths)) - (key.shape[2] - query.shape[2])
        share = share.index_copy(0, rows, route.repeat_interleave(torch.tensor(lengths), 0))
        share = share.t()[None]
    else:
        share = route[:, :, None].expand(-1, -1, query.shape[2])
    share = share.repeat_interleave(group, 1)
    out = (1 - share)[..., None] * outs[0] + share[..., None] * outs[1]
    return out, torch.where(share.detach() > 0.5, lses[1], lses[0])


def check(tensors, *, kernel="auto", documents=None, atol=2e-5, dtype=torch.float32, **options):
    """Compares output, log-sum-exp and every gradient; returns the route's."""
    options = {"sink": SINK, "local": LOCAL} | options
    documents = documents or tensors[0].shape[0]
    extra = [name for name in ("sinks", "scale") if isinstance(options.get(name), torch.Tensor)]
    route = alternating(documents, tensors[1].shape[1])
    leaves = [*tensors, route.float(), *(options[name] for name in extra)]

    def run(function, dtype, **more):
        own = [leaf.detach().to(dtype).clone().requires_grad_() for leaf in leaves]
        named = options | dict(zip(extra, own[4:], strict=True))
        out, lse = function(*own[:4], **named, **more)
        torch.manual_seed(1)
        upstream = torch.randn(out.shape, dtype=torch.float64)
        upstream_lse = torch.randn(lse.shape, dtype=torch.float64)
        seen = lse != -torch.inf
        total = (out.double() * upstream).sum()
        total = total + (lse.double()[seen] * upstream_lse[seen]).sum()
        return [out, lse, *torch.autograd.grad(total, own)]

    found = run(ops.attention_train, dtype, kernel=kernel)
    expected = run(mixture, torch.float64)
    # A route's gradient is a sum over all rows.
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        scale = 20 if number == 5 else 1
        torch.testing.assert_close(one.double(), other, rtol=atol, atol=scale * atol)
    return found[5]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(2, 2, 1), (4, 2, 90), (7, 1, 131)])
def test_lengths_and_groups(kernel, heads, kv_heads, length):
    found = check(inputs(2, heads, kv_heads, length, length), kernel=kernel)
    assert found.any() == (length > SINK + LOCAL)


@pytest.mark.parametrize(
    "options",
    [
        {"start": torch.tensor([0, 31])},
        {"kv_len": torch.tensor([100, 77])},
        {"softcap": 1.5},
        {"sinks": torch.randn(4)},
        {"scale": torch.tensor(0.3), "softcap": 2.0},
        {"full_mode": "streaming", "sparse_mode": "full"},
        {"full_mode": "full", "sparse_mode": "full"},
        {"dropout_p": 0.3, "dropout_seed": torch.tensor(11)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options):
    tensors = inputs(2, 4, 2, 60, 100)
    column = torch.arange(100)
    hidden = column < options.get("start", torch.zeros(2))[:, None]
    hidden = hidden | (column >= options.get("kv_len", torch.full((2,), 100))[:, None])
    for tensor in tensors[1:]:
        tensor.transpose(1, 2)[hidden] = torch.nan
    check(tensors, **options)


def test_masked_keys():
    tensors = inputs(2, 4, 2, 90, 90)
    mask = torch.rand(2, 90) > 0.3
    for tensor in tensors[1:]:
        tensor.transpose(1, 2)[~mask] = torch.nan
    check(tensors, key_mask=mask)


def test_packed_documents():
    ends = torch.tensor([0, 70, 70, 150, 193], dtype=torch.int32)
    found = check(inputs(1, 4, 2, 200, 200), documents=4, cu_seqlens=ends)
    assert not found[1].any() and found[[0, 2, 3]].all()
    check(inputs(1, 4, 2, 120, 200), documents=4, cu_seqlens=ends.clamp(80))


def test_half_precision_routes_and_inputs():
    tensors = [tensor.bfloat16() for tensor in inputs(1, 4, 2, 90, 90)]
    found = check(tensors, dtype=torch.bfloat16, atol=2e-2)
    assert found.dtype == torch.bfloat16


def test_nothing_to_see():
    query, key, value = inputs(1, 4, 2, 0, 0)
    route = alternating(1, 2).float().requires_grad_()
    out, _ = ops.attention_train(query, key, value, route, sink=1, local=2)
    out.sum().backward()
    assert out.shape == query.shape and route.grad.tolist() == [[0.0, 0.0]]


def test_whole_routes_are_refused():
    query, key, value = inputs(1, 4, 2, 30, 30)
    with pytest.raises(TypeError, match="floating routes"):
        ops.attention_train(query, key, value, alternating(1, 2), sink=1, local=2)


def test_short_calls_run_once():
    query, key, value = inputs(1, 4, 2, 30, 30)
    _counters.reset()
    ops.attention_train(query, key, value, alternating(1, 2).float(), sink=SINK, local=27)
    assert sum(_counters.snapshot()["calls"].values()) == 1
    ops.attention_train(query, key, value, alternating(1, 2).float(), sink=SINK, local=26)
    assert sum(_counters.snapshot()["calls"].values()) == 3


@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck(sinks):
    tensors = inputs(1, 4, 2, 40, 40)
    route = alternating(1, 2).float().requires_grad_()
    more = [None] * 9 + [torch.randn(4)] if sinks else []
    args = [*(x.requires_grad_() for x in tensors), route, 2, 9, "full", "streaming"]
    if sinks:
        args += [None, None, None, None, None, None, None, None, 64, None, more[-1]]
    torch.library.opcheck(torch.ops.elastic_compile.attention_train.default, tuple(args))


def test_compiled_without_a_graph_per_length():
    import torch._dynamo

    torch._dynamo.reset()
    counter = torch._dynamo.utils.counters
    counter.clear()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(query, key, value, route):
        return ops.attention_train(query, key, value, route, sink=SINK, local=LOCAL)[0]

    for length in (40, 77, 130):
        tensors = [x.requires_grad_() for x in inputs(1, 4, 2, length, length)]
        route = alternating(1, 2).float().requires_grad_()
        leaves = (*tensors, route)
        found = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
        plain = ops.attention_train(*leaves, sink=SINK, local=LOCAL)[0]
        for one, other in zip(
            found, torch.autograd.grad(plain.square().sum(), leaves), strict=True
        ):
            torch.testing.assert_close(one, other)
    assert counter["stats"]["unique_graphs"] == 1
