"""The Hopper prefill kernel: what the Triton kernel's tests check, on the ways that it has."""

import pytest
import torch

from elastic_compile.kernels import _gpu, gluon_prefill, ops, reference
from elastic_compile.kernels._call import AttentionCall
from tests.gpu.test_prefill import (
    LOCAL,
    SINK,
    TOLERANCE,
    alternating,
    attend,
    check,
    difference,
    inputs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

sizes = pytest.mark.parametrize("size", [64, 128])
half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def gluon(tensors, route=None, **options):
    return check(tensors, route, kernel="gluon", **options)


def make(**options):
    return inputs(**{"size": 128} | options)


@half
@pytest.mark.parametrize("size", [40, 64, 72, 80, 96, 112, 128])
def test_head_sizes(poisoned_memory, dtype, size):
    gluon(make(size=size, dtype=dtype))


@sizes
@pytest.mark.parametrize("rows", [128, 129, 191, 192, 700])
def test_row_counts(poisoned_memory, size, rows):
    gluon(make(size=size, rows=rows, keys=rows))


@sizes
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_query_heads_to_a_kv_head(poisoned_memory, size, group):
    gluon(make(size=size, heads=2 * group))


@pytest.mark.parametrize(
    ("full_mode", "sparse_mode"),
    [("full", "full"), ("streaming", "streaming"), ("streaming", "full")],
)
@sizes
def test_modes(poisoned_memory, size, full_mode, sparse_mode):
    gluon(make(size=size, rows=600, keys=600), full_mode=full_mode, sparse_mode=sparse_mode)


@pytest.mark.parametrize(
    ("sink", "local"), [(0, 1), (0, 128), (128, 128), (200, 1), (4, 290), (130, 64)], ids=str
)
@sizes
def test_windows(poisoned_memory, size, sink, local):
    gluon(make(size=size, batch=1, rows=700, keys=700), sink=sink, local=local)


@half
@sizes
def test_padding_and_a_static_cache(poisoned_memory, size, dtype):
    query, key, value = make(size=size, batch=3, rows=150, keys=500, dtype=dtype)
    start = torch.tensor([0, 77, 300]).cuda()
    kv_len = torch.tensor([500, 431, 300]).cuda()
    for sample in range(3):
        for tensor in (key, value):
            tensor[sample, :, : start[sample]] = torch.nan
            tensor[sample, :, kv_len[sample] :] = torch.nan
    empty = gluon((query, key, value), start=start, kv_len=kv_len)
    assert empty[2].all() and not empty[:2].any()


def test_a_chunk_after_cached_keys(poisoned_memory):
    query, key, value = make(rows=200, keys=900)
    for tensor in (key, value):
        tensor[:, :, 870:] = torch.nan
    gluon((query, key, value), kv_len=torch.tensor(870).cuda())
    gluon(make(rows=200, keys=877))


def test_more_rows_than_keys(poisoned_memory):
    assert gluon(make(rows=300, keys=170)).any()


@sizes
@pytest.mark.parametrize("sparse_mode", ["full", "streaming"])
def test_holes(poisoned_memory, size, sparse_mode):
    query, key, value = make(size=size, rows=500, keys=500)
    mask = torch.rand(2, 500, device="cuda") > 0.3
    for tensor in (key, value):
        tensor.transpose(1, 2)[~mask] = torch.nan
    start = torch.tensor([0, 40]).cuda()
    gluon((query, key, value), key_mask=mask, start=start, sparse_mode=sparse_mode)


@sizes
@pytest.mark.parametrize("sparse_mode", ["full", "streaming"])
def test_a_mask_that_only_pads(poisoned_memory, size, sparse_mode):
    """Left, right, both, none, all, and one sample with a hole beside them."""
    ranges = [(0, 700), (331, 700), (0, 333), (200, 500), (7, 7), (0, 700)]
    query, key, value = make(size=size, batch=6, rows=700, keys=700)
    column = torch.arange(700, device="cuda")
    mask = torch.stack([(column >= low) & (column < high) for low, high in ranges])
    mask[-1, 300:310] = False
    for tensor in (key, value):
        tensor.transpose(1, 2)[~mask] = torch.nan
    start = torch.tensor([low for low, _ in ranges]).cuda()
    empty = gluon((query, key, value), key_mask=mask, start=start, sparse_mode=sparse_mode)
    assert empty[4].all() and not empty[0].any()


def test_masks_that_are_not_contiguous(poisoned_memory):
    mask = torch.rand(600, 2, device="cuda") > 0.3
    gluon(make(rows=300, keys=300), key_mask=mask.t()[:, ::2])
    one = torch.rand(2, 1, device="cuda") > 0.3
    gluon(make(rows=300, keys=300), key_mask=one.expand(2, 300))


def test_scales(poisoned_memory):
    for scale in (0.2, -0.1, 0.0):
        gluon(make(), scale=scale)


def test_one_kv_head_with_odd_strides(poisoned_memory):
    query, key, value = make(batch=1, heads=4, kv_heads=1)
    odd = key.as_strided(key.shape, (7, 3, key.stride(2), 1))
    assert _gpu.tma_fits(odd)
    gluon((query, odd, value))


def test_heads_first_in_memory(poisoned_memory):
    gluon([tensor.contiguous() for tensor in make(rows=400, keys=400)])


@sizes
def test_many_heads_and_samples(poisoned_memory, size):
    """More units than one scan of the routes holds, more chunks than programs."""
    tensors = make(size=size, batch=70, heads=32, kv_heads=16, rows=200, keys=200)
    route = (torch.rand(70, 16) < 0.4).to(torch.int32).cuda()
    out, _ = attend(tensors, route, sink=2, local=9, kernel="gluon")
    call = AttentionCall(*tensors, route, 2, 9)
    assert difference(out, reference.forward(call, torch.float64)[0]) < TOLERANCE[out.dtype]


@sizes
def test_long_rows_keep_their_accuracy(size):
    """8,192 keys with drifting means, so that the running maximum moves."""
    length = 8192
    query, key, value = make(size=size, batch=1, rows=length, keys=length)
    drift = torch.linspace(-2, 2, length, device="cuda")[:, None].bfloat16()
    key = key + drift * query[:, :1, -1:]
    route = alternating(1, 2)
    rows = slice(length - 64, length)
    tail = AttentionCall(query[:, :, rows], key, value, route, SINK, LOCAL)
    wanted, wanted_lse = reference.forward(tail, torch.float64)
    out, lse = gluon_prefill.forward(AttentionCall(query, key, value, route, SINK, LOCAL))
    assert difference(out[:, :, rows], wanted) < TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(lse[:, :, rows].double(), wanted_lse, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rows": 128, "keys": 4096}, "gluon"),
        ({"rows": 128, "keys": 4095}, "triton"),
        ({}, "triton"),
        ({"rows": 128, "keys": 8192, "size": 64}, "gluon"),
        ({"rows": 128, "keys": 8191, "size": 64}, "triton"),
        ({"keys": 8192, "size": 32}, "triton"),
        ({"keys": 8192, "dtype": torch.float32}, "triton"),
        ({"keys": 8192, "rows": 127}, "triton"),
        ({"keys": 8192, "value_size": 96}, "triton"),
    ],
    ids=str,
)
def test_it_is_chosen_where_it_can_serve(counts, options, name):
    attend(make(**options), kernel="auto")
    assert counts() == {"calls": {name: 1}, "backward": {}, "fallbacks": {}}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "a softcap"),
        ({"sinks": torch.zeros(4)}, "learned sinks"),
        ({"scale": torch.tensor(0.1)}, "a tensor scale"),
        ({"dropout_p": 0.1, "dropout_seed": torch.tensor(1)}, "dropout"),
        ({"sparse_mode": "blocks"}, "block lists"),
    ],
)
def test_what_it_lacks_is_declined_with_the_reason(options, reason):
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    scale = options.pop("scale", None)
    call = AttentionCall(
        *make(keys=8192), alternating(2, 2), SINK, LOCAL, scale_tensor=scale, **options
    )
    ok, said = gluon_prefill.supports(call)
    assert not ok and reason in said


def test_nothing_waits_for_the_host():
    tensors = make()
    mask = torch.arange(300, device="cuda") >= torch.tensor([[0], [9]]).cuda()
    options = dict(
        route=alternating(2, 2),
        start=torch.tensor([0, 9]).cuda(),
        kv_len=torch.tensor(290).cuda(),
        key_mask=mask,
        kernel="gluon",
    )
    attend(tensors, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(tensors, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_follows_routes_and_lengths():
    tensors = make(rows=500, keys=500)
    route, kv_len = alternating(2, 2), torch.tensor(500).cuda()
    attend(tensors, route, kv_len=kv_len, kernel="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(tensors, route, kv_len=kv_len, kernel="gluon")
    for length in (500, 450):
        kv_len.fill_(length)
        route.copy_(1 - route)
        graph.replay()
        again, _ = attend(tensors, route, kv_len=kv_len, kernel="gluon")
        assert torch.equal(out, again)


def test_no_compilation_per_length():
    from elastic_compile.kernels._gluon_prefill import prefill

    def compiled():
        return len(prefill.device_caches[torch.cuda.current_device()][0])

    def run(batch, length):
        tensors = make(batch=batch, rows=length, keys=length)
        start = torch.zeros(batch, dtype=torch.int64).cuda()
        attend(tensors, start=start, kernel="gluon")

    run(2, 512)
    before = compiled()
    for batch, length in ((2, 1000), (2, 1001), (3, 4096), (1, 999)):
        run(batch, length)
    assert compiled() == before


def test_no_memory_beside_the_results():
    tensors = make(batch=1, heads=32, kv_heads=8, rows=16384, keys=16384)
    route = alternating(1, 8)
    out, lse = attend(tensors, route, kernel="gluon")
    held = sum(x.numel() * x.element_size() for x in (*tensors, out, lse))
    results = sum(x.numel() * x.element_size() for x in (out, lse))
    del out, lse
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(tensors, route, kernel="gluon")
    assert torch.cuda.max_memory_allocated() - before < results + 0.05 * held


def test_results_repeat():
    """A race would show as a difference."""
    tensors = make(batch=1, heads=32, kv_heads=8, rows=3000, keys=3000)
    mask = torch.rand(1, 3000, device="cuda") > 0.1
    for options in ({}, {"kv_len": torch.tensor(2900).cuda()}, {"key_mask": mask}):
        first = attend(tensors, kernel="gluon", **options)
        for _ in range(20):
            again = attend(tensors, kernel="gluon", **options)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31():
    length, heads = 300_000, 64
    if torch.cuda.get_device_properties(0).total_memory < 30 << 30:
        pytest.skip("needs 30 GiB of GPU memory")
    query, key, value = make(batch=1, heads=heads, kv_heads=heads, rows=length, keys=length)
    route = torch.ones(1, heads, dtype=torch.int32).cuda()
    out, lse = ops.attention(query, key, value, route, sink=4, local=64, kernel="gluon")
    rows = slice(length - 80, length)
    tail = AttentionCall(query[:, -2:, rows], key[:, -2:], value[:, -2:], route[:, -2:], 4, 64)
    wanted, wanted_lse = reference.forward(tail, torch.float64)
    assert difference(out[:, -2:, rows], wanted) < 4e-3
    torch.testing.assert_close(lse[:, -2:, rows].double(), wanted_lse, atol=1e-4, rtol=1e-5)
