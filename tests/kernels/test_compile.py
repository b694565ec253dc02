"""The ops under torch.compile and export: opaque, one graph for all lengths, true fake kernels."""

from dataclasses import fields

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from elastic_compile.kernels import ops
from elastic_compile.kernels._call import AttentionCall, ExactCall
from tests.kernels import cases
from tests.kernels.cases import alternating, inputs

OPTIONS = {"sink": 4, "local": 64}
ATTENTION = torch.ops.elastic_compile.attention.default
EXACT = torch.ops.elastic_compile.exact_attention.default


def leaves(*shape, **more):
    return [tensor.requires_grad_() for tensor in inputs(*shape, **more)]


def flat(kind, **named):
    """Arguments in schema order; absent ones at their defaults."""
    named = {field.name: named.get(field.name, field.default) for field in fields(kind)}
    return tuple(named.values())


def attention_arguments(tensors, documents=None, **more):
    query, key, value = tensors
    route = alternating(documents or query.shape[0], key.shape[1])
    return flat(AttentionCall, query=query, key=key, value=value, route=route, **OPTIONS, **more)


@pytest.mark.parametrize(
    ("kind", "op"), [(AttentionCall, ATTENTION), (ExactCall, EXACT)], ids=["attention", "exact"]
)
def test_schema_lists_the_fields_of_the_call(kind, op):
    arguments = op._schema.arguments
    assert [argument.name for argument in arguments] == [field.name for field in fields(kind)]
    for argument, field in zip(arguments, fields(kind), strict=True):
        if argument.has_default_value():
            assert argument.default_value == field.default


OPCHECK = {
    "training": lambda: attention_arguments(leaves(2, 4, 2, 90, 90)),
    "values of another size": lambda: attention_arguments(leaves(1, 4, 2, 80, 80, 16, 24)),
    "transposed": lambda: attention_arguments(
        [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs(2, 4, 4, 70, 70)]
    ),
    "static cache": lambda: attention_arguments(
        inputs(2, 4, 2, 1, 90, dtype=torch.bfloat16), kv_len=torch.tensor(70)
    ),
    "padding and extras": lambda: attention_arguments(
        leaves(2, 4, 2, 75, 75),
        start=torch.tensor([0, 5]),
        key_mask=torch.rand(2, 75) > 0.1,
        scale_tensor=torch.tensor(0.2, requires_grad=True),
        softcap=3.0,
        sinks=torch.zeros(4, requires_grad=True),
        dropout_p=0.1,
        dropout_seed=torch.tensor(3),
    ),
    "blocks": lambda: attention_arguments(
        leaves(1, 4, 2, 70, 70), sparse_mode="blocks", **cases.block_lists(1, 2, 70)
    ),
    "packed": lambda: attention_arguments(
        leaves(1, 4, 2, 70, 70), 2, cu_seqlens=torch.tensor([0, 30, 70], dtype=torch.int32)
    ),
    "keys all seen": lambda: attention_arguments(leaves(1, 4, 2, 9, 20, dtype=torch.float16)),
}


@pytest.mark.parametrize("arguments", OPCHECK.values(), ids=OPCHECK.keys())
def test_opcheck_attention(arguments):
    opcheck(ATTENTION, arguments())


EXACT_OPCHECK = {
    "bool": lambda: {"attn_mask": torch.rand(1, 1, 30, 40) > 0.3},
    "additive": lambda: {
        "attn_mask": torch.randn(1, 4, 30, 40, requires_grad=True),
        "softcap": 2.0,
        "sinks": torch.zeros(4, requires_grad=True),
    },
    "causal": lambda: {"attn_mask": None, "is_causal": True, "scale": 0.2},
}


@pytest.mark.parametrize("options", EXACT_OPCHECK.values(), ids=EXACT_OPCHECK.keys())
def test_opcheck_exact_attention(options):
    query, key, value = leaves(2, 4, 2, 30, 40)
    call = flat(ExactCall, query=query, key=key, value=value, reason="test", **options())
    opcheck(EXACT, call)


def test_opcheck_backwards():
    call = attention_arguments(inputs(2, 4, 2, 90, 90), sinks=torch.randn(4))
    out, lse = ATTENTION(*call)
    opcheck(
        torch.ops.elastic_compile.attention_backward.default,
        (torch.randn_like(out), torch.randn_like(lse), out, lse, *call),
    )
    query, key, value = inputs(2, 4, 2, 30, 40)
    mask = torch.randn(2, 1, 30, 40)
    call = flat(ExactCall, query=query, key=key, value=value, reason="test", attn_mask=mask)
    out, lse = EXACT(*call)
    for mask_grad in (False, True):
        opcheck(
            torch.ops.elastic_compile.exact_attention_backward.default,
            (torch.randn_like(out), None, out, lse, mask_grad, *call),
        )


class Site(nn.Module):
    """Projections around the op, so that compilers fuse and lay out what surrounds it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, (4 + 2 + 2) * 16, bias=False)
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, hidden, route, start, past=None):
        batch, rows, _ = hidden.shape
        heads = self.qkv(hidden).view(batch, rows, 8, 16).transpose(1, 2)
        query, key, value = heads.split((4, 2, 2), 1)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        attended, _ = ops.attention(query * 1.1, key, value, route, start=start, **OPTIONS)
        return self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_one_graph_for_every_length(backend, counts):
    # field cases B16, B17, B18, B59: lengths on both sides of sink + local, with gradients
    site = Site()
    compiled = torch.compile(site, backend=backend, fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for length in (40, 68, 69, 100, 128, 333):
        hidden = torch.randn(2, length, 64)
        arguments = (hidden, alternating(2, 2), torch.tensor([0, 11]))
        site.zero_grad()
        expected = site(*arguments)
        expected.square().sum().backward()
        target = [parameter.grad.clone() for parameter in site.parameters()]
        site.zero_grad()
        out = compiled(*arguments)
        out.square().sum().backward()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for parameter, gradient in zip(site.parameters(), target, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 1 and not stats["graph_break"]
    assert counts()["calls"] == {"dense": 4, "cpu": 8}
    assert counts()["fallbacks"] == {}


def test_one_graph_for_every_decode_step():
    # field case B82
    site = Site().requires_grad_(False)
    compiled = torch.compile(site, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for length in (30, 64, 90, 91, 200):
        past = torch.randn(2, 2, 2, length, 16)
        arguments = (torch.randn(2, 1, 64), alternating(2, 2), torch.tensor([0, 11]), past)
        torch.testing.assert_close(compiled(*arguments), site(*arguments), rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_graph_holds_one_opaque_op_each_way():
    targets = []

    def spy(graph, example_inputs):
        targets.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=spy, bw_compiler=spy)
    site = torch.compile(Site(), backend=backend, fullgraph=True, dynamic=True)
    site(torch.randn(2, 100, 64), alternating(2, 2), torch.tensor([0, 3])).sum().backward()
    forward, backward = targets
    assert forward.count("elastic_compile.attention.default") == 1
    assert backward.count("elastic_compile.attention_backward.default") == 1
    assert not any("softmax" in target for target in forward + backward)


def test_routes_move_the_compiled_result():
    site = Site().requires_grad_(False)
    compiled = torch.compile(site, backend="aot_eager", fullgraph=True, dynamic=True)
    hidden, start = torch.randn(1, 200, 64), torch.tensor([0])
    outs = [compiled(hidden, torch.full((1, 2), r, dtype=torch.int32), start) for r in (0, 1)]
    assert (outs[0] - outs[1]).abs().max() > 1e-3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_scale_that_the_compiler_made_symbolic():
    def site(query, key, value, route, scale):
        return ops.attention(query, key, value, route, scale=scale, **OPTIONS)[0]

    compiled = torch.compile(site, backend="aot_eager", fullgraph=True, dynamic=True)
    tensors = inputs(1, 4, 2, 80, 80)
    for scale in (0.1, 0.2, torch.tensor(0.3)):
        out = compiled(*tensors, alternating(1, 2), scale)
        torch.testing.assert_close(out, site(*tensors, alternating(1, 2), scale))


def test_autocast_callers_cast_first():
    site = Site()

    def step(hidden, route):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return site(hidden, route, None)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    hidden, route = torch.randn(1, 90, 64), alternating(1, 2)
    out = compiled(hidden, route)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, step(hidden, route), rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError, match="under autocast too"):
        query, key, value = inputs(1, 4, 2, 9, 9)
        ops.attention(query.bfloat16(), key, value, route, **OPTIONS)


def test_exact_attention_compiles_with_gradients(counts):
    def site(query, key, value, mask):
        return ops.exact_attention(query, key, value, mask, reason="test")[0]

    compiled = torch.compile(site, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (20, 33, 50):
        grads = []
        for function in (site, compiled):
            torch.manual_seed(0)
            tensors = leaves(2, 4, 2, length, length)
            mask = torch.randn(1, 4, length, length, requires_grad=True)
            out = function(*tensors, mask)
            grads.append(torch.autograd.grad(out.square().sum(), [*tensors, mask]))
        for eager, graph in zip(*grads, strict=True):
            torch.testing.assert_close(eager, graph)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert counts()["fallbacks"] == {"test": 6}


def test_export_keeps_the_op_and_the_lengths():
    # field case B59
    site = Site().requires_grad_(False)
    length = torch.export.Dim("length", min=2, max=1024)
    arguments = (torch.randn(2, 50, 64), alternating(2, 2), torch.tensor([0, 3]))
    shapes = {"hidden": {1: length}, "route": None, "start": None}
    program = torch.export.export(site, arguments, dynamic_shapes=shapes)
    assert [n.target for n in program.graph.nodes].count(ATTENTION) == 1
    for rows in (7, 8, 200):
        changed = (torch.randn(2, rows, 64), *arguments[1:])
        torch.testing.assert_close(program.module()(*changed), site(*changed))


def test_results_of_the_ops_are_their_fakes():
    for make in OPCHECK.values():
        call = make()
        with FakeTensorMode() as mode:
            fakes = ATTENTION(*(mode.from_tensor(x) if torch.is_tensor(x) else x for x in call))
        for fake, real in zip(fakes, ATTENTION(*call), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (
                real.shape,
                real.stride(),
                real.dtype,
            )
