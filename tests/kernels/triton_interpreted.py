"""Cases of the Triton prefill kernel in Triton's interpreter, against the oracle.

``test_triton_prefill`` runs this file in a process of its own, since the interpreter has to be
chosen before Triton is imported. It multiplies bfloat16 wrongly: float32 and float16 only;
tests/gpu runs every dtype.
"""

import dataclasses
import os

import pytest
import torch

from elastic_compile.kernels import _dispatch, _gpu, ops, triton_prefill
from elastic_compile.kernels._call import AttentionCall
from elastic_compile.kernels.triton_prefill import Config
from tests import oracle

assert os.environ.get("TRITON_INTERPRET") == "1"

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
# Blocks much smaller than sequences, so that every kind of block occurs.
PLAIN = Config(rows=16, keys=16, warps=4, stages=2)
OVERLAP = Config(rows=32, keys=16, warps=4, stages=2, overlap=True, split_sums=False)
PACKED = Config(rows=32, keys=16, warps=4, stages=2, overlap=True, pack=2)
POINTERS = Config(rows=16, keys=16, warps=4, stages=2, tma=False)


def inputs(batch=1, heads=4, kv_heads=2, rows=46, keys=46, size=64, value_size=None, dtype=None):
    """Query, key and value as Hugging Face makes them: transposed views of [B, S, H, D]."""

    def normal(heads, length, size):
        return torch.randn(batch, length, heads, size).to(dtype or torch.float32).transpose(1, 2)

    return (
        normal(heads, rows, size),
        normal(kv_heads, keys, size),
        normal(kv_heads, keys, value_size or size),
    )


def alternating(batch, kv_heads):
    """Routes in which neighbours differ: 0, 1, 0 ... and the next sample the other way round."""
    route = torch.arange(batch)[:, None] + torch.arange(kv_heads)[None]
    return (route % 2).to(torch.int32)


def check(tensors, route=None, config=PLAIN, sink=5, local=13, **options):
    """Runs the kernel and compares both results with the oracle."""
    query, key, value = tensors
    if route is None:
        route = alternating(query.shape[0], key.shape[1])
    for tensor in (key, value):
        for sample in range(tensor.shape[0]):
            tensor[sample, :, ~readable(tensor, options)[sample]] = torch.nan
    call = arguments(query, key, value, route, sink, local, **options)
    assert triton_prefill.supports(call) == (True, "")
    out, lse = triton_prefill.forward(call, config)
    expected, expected_lse = oracle.attention(
        query, key, value, route, sink=sink, local=local, **options
    )
    assert out.dtype == query.dtype and out.transpose(1, 2).is_contiguous()
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    difference = torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected)
    assert difference < TOLERANCE[query.dtype]
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert torch.all(out[empty] == 0)
    torch.testing.assert_close(
        lse[~empty].double(), expected_lse[~empty], atol=1e-5, rtol=TOLERANCE[query.dtype]
    )
    return out, empty


def arguments(query, key, value, route, sink, local, scale=None, **options):
    number, tensor = (None, scale) if isinstance(scale, torch.Tensor) else (scale, None)
    return AttentionCall(
        query, key, value, route, sink, local, scale=number, scale_tensor=tensor, **options
    )


def readable(tensor, options):
    """Keys that the kernel may look at, bool [B, Skv]."""
    batch, _, keys, _ = tensor.shape
    column = torch.arange(keys)[None].expand(batch, keys)
    found = column >= 0
    if options.get("start") is not None:
        found = found & (column >= options["start"][:, None])
    if options.get("kv_len") is not None:
        found = found & (column < options["kv_len"].reshape(-1, 1))
    if options.get("key_mask") is not None:
        found = found & options["key_mask"]
    return found


configs = pytest.mark.parametrize(
    "config", [PLAIN, OVERLAP, PACKED], ids=["plain", "overlap", "packed"]
)


@configs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_mixed_heads(poisoned_memory, config, dtype):
    check(inputs(heads=2, dtype=dtype), config=config)


@pytest.mark.parametrize(
    ("full_mode", "sparse_mode"),
    [("full", "full"), ("streaming", "streaming"), ("streaming", "full")],
)
def test_modes(poisoned_memory, full_mode, sparse_mode):
    check(inputs(keys=41, rows=41), full_mode=full_mode, sparse_mode=sparse_mode)


@configs
def test_left_padding(poisoned_memory, config):
    start = torch.tensor([0, 19])
    _, empty = check(inputs(batch=2, heads=4, rows=40, keys=40), config=config, start=start)
    assert empty.any()


@configs
def test_chunk_in_a_static_cache(poisoned_memory, config):
    # The second sample's chunk begins before its first key; the third has no key at all.
    check(
        inputs(batch=3, heads=4, kv_heads=2, rows=21, keys=60),
        config=config,
        start=torch.tensor([7, 20, 9]),
        kv_len=torch.tensor([55, 33, 9]),
    )


def test_filled_length_as_a_number(poisoned_memory):
    check(inputs(rows=9, keys=44), kv_len=torch.tensor(37, dtype=torch.int32))


def test_more_rows_than_keys(poisoned_memory):
    _, empty = check(inputs(rows=40, keys=22), config=OVERLAP)
    assert empty.any()


@configs
def test_holes(poisoned_memory, config):
    mask = torch.rand(2, 45) > 0.3
    mask[1, :20] = False
    check(
        inputs(batch=2, heads=4, rows=45, keys=45),
        config=config,
        key_mask=mask,
        start=torch.tensor([0, 2]),
    )


def spanning(*ranges, length):
    """A mask whose samples are real from the first to the second number, bool [B, length]."""
    column = torch.arange(length)
    return torch.stack([(column >= low) & (column < high) for low, high in ranges])


@pytest.mark.parametrize(
    "config",
    [PLAIN, PACKED, POINTERS, None],
    ids=["plain", "packed", "pointers", "chosen"],
)
def test_a_mask_that_only_pads(poisoned_memory, config):
    """Left, right, both, none, all, and one sample with a hole beside them."""
    ranges = [(0, 70), (31, 70), (0, 33), (20, 50), (7, 7), (0, 70)]
    mask = spanning(*ranges, length=70)
    mask[-1, 30:34] = False
    start = torch.tensor([low for low, _ in ranges])
    _, empty = check(
        inputs(batch=6, heads=4 if config is PACKED else 2, rows=70, keys=70),
        config=config,
        key_mask=mask,
        start=start,
    )
    assert empty[4].all() and not empty[0].any()


@configs
def test_a_mask_over_a_static_cache(poisoned_memory, config):
    """What lies beyond the filled length is neither real nor a hole, whatever the mask says."""
    mask = spanning((0, 90), (9, 90), (0, 40), (0, 90), length=90)
    mask[3, 10] = False
    check(
        inputs(batch=4, heads=4, rows=24, keys=90),
        config=config,
        key_mask=mask,
        start=torch.tensor([0, 9, 0, 0]),
        kv_len=torch.tensor([70, 61, 64, 80]),
    )


def test_spans_are_found_over_several_blocks(monkeypatch):
    monkeypatch.setattr(_gpu, "_SPAN_BLOCK", 16)
    mask = spanning((0, 70), (31, 70), (0, 33), (20, 50), (7, 7), (0, 70), length=70)
    mask[5, 40] = False
    found = []
    real = _gpu.find_spans

    def spy(*arguments):
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(_gpu, "find_spans", spy)
    start = torch.tensor([0, 31, 0, 20, 7, 0])
    check(inputs(batch=6, heads=2, rows=70, keys=70), key_mask=mask, start=start)
    assert found[0].tolist() == [[70, 0], [70, 0], [33, 0], [50, 0], [7, 0], [70, 1]]


@pytest.mark.parametrize(
    ("group", "pack"), [(1, 4), (2, 1), (2, 2), (4, 2), (4, 4), (6, 4), (7, 2)], ids=str
)
def test_query_heads_to_a_kv_head(poisoned_memory, group, pack):
    """No tile packs more heads than divide the group."""
    config = dataclasses.replace(OVERLAP, pack=pack)
    check(inputs(heads=2 * group, rows=27, keys=27), config=config, local=9)


@pytest.mark.parametrize(
    ("size", "value_size"), [(80, 80), (128, 128), (64, 40), (20, 96)], ids=str
)
def test_head_sizes(poisoned_memory, size, value_size):
    tensors = inputs(heads=2, rows=35, keys=35, size=size, value_size=value_size)
    check(tensors, config=OVERLAP)


def test_pointers_instead_of_descriptors(poisoned_memory):
    check(
        inputs(batch=2, heads=2, size=20, rows=30, keys=44),
        config=POINTERS,
        start=torch.tensor([0, 9]),
        kv_len=torch.tensor([44, 39]),
    )


def test_one_query_row(poisoned_memory):
    tensors = inputs(batch=2, rows=1, keys=70)
    check(tensors, config=None, start=torch.tensor([0, 31]), kv_len=torch.tensor([64, 70]))


def test_the_configuration_that_is_chosen(poisoned_memory):
    check(inputs(heads=2, rows=150, keys=150, dtype=torch.float16), config=None, local=20)


@pytest.mark.parametrize(
    ("sink", "local"), [(0, 1), (0, 16), (16, 16), (17, 3), (40, 1), (3, 60)], ids=str
)
def test_windows_on_and_off_block_borders(poisoned_memory, sink, local):
    check(inputs(heads=2, rows=49, keys=49), config=OVERLAP, sink=sink, local=local)


@pytest.mark.parametrize(
    "scale",
    [-0.3, 0.0, torch.tensor(0.2), torch.tensor(-0.2, dtype=torch.float64), torch.tensor(0.0)],
    ids=str,
)
def test_scales(poisoned_memory, scale):
    check(inputs(heads=2, rows=20, keys=33), scale=scale)


@configs
def test_softcap_and_learned_sinks(poisoned_memory, config):
    tensors = inputs(batch=2, heads=4, rows=34, keys=34)
    sinks = torch.tensor([30.0, 0.5, -2.0, 4.0])
    check(tensors, config=config, softcap=1.5, sinks=sinks, start=torch.tensor([0, 12]))


def test_strides():
    query, _, value = inputs(heads=2, rows=30, keys=30)
    wide = torch.randn(1, 2, 30, 128)
    spread = wide[..., ::2]
    assert spread.stride(3) == 2
    check((query.contiguous(), spread, value), config=OVERLAP)
    route = torch.tensor([[1, 1], [0, 1]], dtype=torch.int32).T[:, :1].expand(2, 2).T
    assert route.stride() != (2, 1)
    check(inputs(batch=2, heads=2, rows=30, keys=30), route=route)


@pytest.mark.parametrize("width", [16, 32])
def test_the_schedule_covers_every_head_once(poisoned_memory, monkeypatch, width):
    """With routes read in one go, and in two."""
    monkeypatch.setattr(_gpu, "scan_width", lambda units: width)
    tensors = inputs(batch=5, heads=4, kv_heads=4, rows=17, keys=17, size=16)
    route = (torch.rand(5, 4) < 0.4).to(torch.int32)
    check(tensors, route=route, sink=2, local=6)


def test_through_the_operator(poisoned_memory, counts, monkeypatch):
    entry = _dispatch.Implementation("triton", "elastic_compile.kernels.triton_prefill")
    monkeypatch.setitem(_dispatch._registry, "triton", entry)
    query, key, value = inputs(heads=2, rows=20, keys=40)
    route = alternating(1, 2)
    out, _ = ops.attention(query, key, value, route, sink=5, local=13, kernel="triton")
    expected, _ = oracle.attention(query, key, value, route, sink=5, local=13)
    assert torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected) < 2e-6
    assert counts()["calls"] == {"triton": 1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(dropout_p=0.1, dropout_seed=torch.tensor(1)), "dropout"),
        (dict(cu_seqlens=torch.tensor([0, 20, 46])), "packed documents"),
        (dict(sparse_mode="blocks"), "block lists"),
    ],
)
def test_what_it_lacks_is_declined_with_the_reason(options, reason):
    call = arguments(*inputs(), alternating(1, 2), 5, 13, **options)
    ok, said = triton_prefill.supports(call)
    assert not ok and reason in said


def test_other_dtypes_and_large_heads_are_declined():
    for tensors, reason in (
        (inputs(size=257), "head sizes above 256"),
        (inputs(dtype=torch.float64), "float64"),
        (inputs(dtype=torch.bfloat16), "interpreter"),
    ):
        ok, said = triton_prefill.supports(arguments(*tensors, alternating(1, 2), 5, 13))
        assert not ok and reason in said


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("full_streams", [False, True])
def test_units_are_sorted_by_route(monkeypatch, width, full_streams):
    monkeypatch.setattr(_gpu, "scan_width", lambda units: width)
    for route in (torch.rand(7, 6) < 0.4, torch.zeros(3, 8), torch.ones(3, 8), torch.ones(1, 1)):
        route = route.to(torch.int32)
        order = _gpu.sort_units(route.T.contiguous().T, full_streams=full_streams).tolist()
        streams = (route.flatten() != 0) != full_streams
        first, then = (streams == value for value in (False, True))
        wanted = [*first.nonzero()[:, 0].tolist(), *then.nonzero()[:, 0].tolist()]
        assert order == [*wanted, int(first.sum())]
