"""Boundary pooling against a loop over real tokens, the incremental pool against one shot, and
the router's shape, size, start and decisions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic_compile.router import (
    AttentionRouter,
    PoolState,
    boundary_pool,
    decide,
    pool_read,
    pool_start,
    pool_update,
)


def pooled_by_hand(keys, start, end, key_mask, pool_tokens):
    """The definition: list the real tokens of each sample and average the two ends in float64."""
    batch, heads, length, size = keys.shape
    out = torch.zeros(batch, heads, size, dtype=torch.float64)
    for b in range(batch):
        low = 0 if start is None else int(start[b])
        high = length if end is None else int(end[b])
        real = [
            j
            for j in range(length)
            if low <= j < high and (key_mask is None or bool(key_mask[b, j]))
        ]
        ends = sorted(set(real[:pool_tokens]) | set(real[-pool_tokens:]))
        if ends:
            out[b] = keys[b][:, ends].double().mean(1)
    return out


def poison(keys, start, end, key_mask, pool_tokens):
    """NaN in every column that must not be read into the mean."""
    keys = keys.clone()
    for b in range(keys.shape[0]):
        low = 0 if start is None else int(start[b])
        high = keys.shape[2] if end is None else int(end[b])
        real = [
            j
            for j in range(keys.shape[2])
            if low <= j < high and (key_mask is None or bool(key_mask[b, j]))
        ]
        ends = set(real[:pool_tokens]) | set(real[-pool_tokens:])
        keys[b][:, [j for j in range(keys.shape[2]) if j not in ends]] = math.nan
    return keys


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("bounds", ["none", "start", "end", "both", "mask", "all"])
def test_boundary_pool_is_the_mean_of_both_ends(length, bounds):
    batch, pool_tokens = 3, 8
    keys = torch.randn(batch, 2, length, 4)
    start = end = key_mask = None
    if bounds in ("start", "both", "all"):
        start = torch.tensor([0, length // 3, length])  # the last sample is empty
    if bounds in ("end", "both", "all"):
        end = torch.tensor([length, length - length // 4, length])
    if bounds in ("mask", "all"):
        key_mask = torch.rand(batch, length) < 0.7
    expected = pooled_by_hand(keys, start, end, key_mask, pool_tokens)
    keys = poison(keys, start, end, key_mask, pool_tokens)
    pooled = boundary_pool(keys, start, end, key_mask, pool_tokens)
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-5, atol=1e-6)


def test_each_token_counts_once_when_the_ends_overlap():
    # Tokens 0..11 with ends of 8: the middle 4 lie in both, and a double count would pull the
    # mean of a ramp with a heavy middle.
    keys = torch.zeros(1, 1, 12, 1)
    keys[0, 0, 4:8, 0] = 12.0
    assert boundary_pool(keys, pool_tokens=8).item() == pytest.approx(4.0)


def test_a_short_prompt_is_pooled_whole():
    keys = torch.randn(2, 3, 50, 4)
    torch.testing.assert_close(boundary_pool(keys), keys.mean(2))


def test_the_middle_of_a_long_prompt_does_not_matter():
    keys = torch.randn(1, 2, 500, 4)
    changed = keys.clone()
    changed[:, :, 100:400] = 1e9
    assert torch.equal(boundary_pool(keys), boundary_pool(changed))
    changed[:, :, 400] += 1.0
    assert not torch.equal(boundary_pool(keys), boundary_pool(changed))


def test_an_empty_sample_pools_to_zero():
    keys = torch.full((3, 1, 6, 2), math.nan)
    start, end = torch.tensor([6, 4, 0]), torch.tensor([6, 2, 0])
    assert torch.equal(boundary_pool(keys, start, end), torch.zeros(3, 1, 2))
    nothing = torch.zeros(3, 6, dtype=torch.bool)
    assert torch.equal(boundary_pool(keys, key_mask=nothing), torch.zeros(3, 1, 2))


def test_padding_side_and_batch_mates_do_not_change_a_sample():
    tokens = torch.randn(1, 2, 30, 4)
    alone = boundary_pool(tokens, pool_tokens=8)
    left = torch.cat([torch.full((1, 2, 9, 4), math.nan), tokens], 2)
    right = torch.cat([tokens, torch.full((1, 2, 9, 4), math.nan)], 2)
    together = boundary_pool(
        torch.cat([left, right]), torch.tensor([9, 0]), torch.tensor([39, 30]), pool_tokens=8
    )
    assert torch.equal(together, alone.expand(2, -1, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_float32(dtype):
    # In bfloat16 256 + 1 is 256: a running sum of ones stops there.
    keys = torch.ones(1, 1, 2000, 2, dtype=dtype)
    pooled = boundary_pool(keys, pool_tokens=900)
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, torch.ones(1, 1, 2))


def test_strided_keys_and_int32_bounds():
    base = torch.randn(2, 20, 3, 4)
    start = torch.tensor([0, 5], dtype=torch.int32)
    keys = base.transpose(1, 2)
    torch.testing.assert_close(
        boundary_pool(keys, start, pool_tokens=4),
        boundary_pool(keys.contiguous(), start.long(), pool_tokens=4),
    )


def test_pooling_reads_a_constant_number_of_columns():
    reads = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 4:
                reads.append(result.shape[2])
            return result

    keys = torch.randn(1, 2, 5000, 4)
    with Watch():
        boundary_pool(keys, key_mask=torch.ones(1, 5000, dtype=torch.bool), pool_tokens=10)
    assert reads and max(reads) <= 20


def test_pooling_is_differentiable_and_zero_outside_the_ends():
    keys = torch.randn(1, 1, 12, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: boundary_pool(k, pool_tokens=3), (keys,))
    boundary_pool(keys, pool_tokens=3).sum().backward()
    expected = torch.zeros(12, dtype=torch.float64)
    expected[:3] = expected[-3:] = 1 / 6
    torch.testing.assert_close(keys.grad[0, 0, :, 0], expected)


@pytest.mark.parametrize("bounds", ["none", "bounds", "mask"])
def test_pooling_compiles_to_one_graph_for_all_lengths(bounds):
    compiled = torch.compile(boundary_pool, fullgraph=True, dynamic=True, backend="eager")

    def arguments(batch, length):
        keys = torch.randn(batch, 2, length, 4)
        if bounds == "bounds":
            return keys, torch.arange(batch) * 2, torch.full((batch,), length - 1), None, 8
        if bounds == "mask":
            return keys, None, None, torch.rand(batch, length) < 0.8, 8
        return keys, None, None, None, 8

    compiled(*arguments(3, 30))  # sizes all different: equal ones would be taken for one size
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, length in [(2, 9), (3, 17), (5, 200), (2, 8), (4, 16)]:
            args = arguments(batch, length)
            torch.testing.assert_close(compiled(*args), boundary_pool(*args))


def test_pooling_does_not_wait_for_the_device():
    # On meta tensors every read of a value raises.
    keys = torch.empty(2, 3, 40, 8, device="meta")
    start = torch.empty(2, dtype=torch.int32, device="meta")
    mask = torch.empty(2, 40, dtype=torch.bool, device="meta")
    assert boundary_pool(keys, start, start, mask).shape == (2, 3, 8)
    state = pool_update(pool_start(keys), keys, start, start, mask)
    state = pool_update(state, keys[:, :, :1], start, start, mask[:, :1])
    assert pool_read(state).shape == (2, 3, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(pool_tokens=0), ValueError, "pool_tokens is 0"),
        (dict(key_mask=torch.ones(1, 4, dtype=torch.int64)), TypeError, "must be bool"),
    ],
)
def test_wrong_pool_arguments_say_what_is_wrong(arguments, error, words):
    with pytest.raises(error, match=words):
        boundary_pool(torch.randn(1, 1, 4, 2), **arguments)
    with pytest.raises(ValueError, match="pool_tokens is 0"):
        pool_start(torch.randn(1, 1, 4, 2), 0)


@st.composite
def chunked_prompts(draw):
    """Lengths of the chunks of one batch, its left padding, and a seed for holes and values."""
    chunks = draw(st.lists(st.integers(1, 13), min_size=1, max_size=7))
    total = sum(chunks)
    padding = draw(st.lists(st.integers(0, total), min_size=1, max_size=3))
    holes = draw(st.booleans())
    return chunks, padding, holes, draw(st.integers(0, 2**16)), draw(st.integers(1, 9))


@settings(max_examples=120, deadline=None)
@given(chunked_prompts())
def test_any_chunking_pools_as_one_shot(case):
    chunks, padding, holes, seed, pool_tokens = case
    generator = torch.Generator().manual_seed(seed)
    batch, total = len(padding), sum(chunks)
    keys = torch.randn(batch, 2, total, 3, generator=generator, dtype=torch.float64)
    start = torch.tensor(padding)
    mask = torch.rand(batch, total, generator=generator) < 0.7 if holes else None
    expected = pooled_by_hand(keys, start, None, mask, pool_tokens)
    keys = poison(keys, start, None, mask, total)  # only padding and holes

    state = pool_start(keys, pool_tokens)
    past = 0
    for chunk in chunks:
        columns = slice(past, past + chunk)
        state = pool_update(
            state,
            keys[:, :, columns],
            start - past,
            None,
            None if mask is None else mask[:, columns],
        )
        past += chunk
        so_far = boundary_pool(
            keys[:, :, :past], start, None, None if mask is None else mask[:, :past], pool_tokens
        )
        torch.testing.assert_close(pool_read(state), so_far, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pool_read(state), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool_tokens", [1, 3, 20])
def test_token_by_token_pools_as_one_shot(pool_tokens):
    keys = torch.randn(3, 2, 24, 4)
    start, end = torch.tensor([0, 5, 24]), torch.tensor([24, 20, 24])
    mask = torch.rand(3, 24) < 0.7
    keys = torch.where(mask[:, None, :, None], keys, math.nan)
    state = pool_start(keys, pool_tokens)
    for j in range(24):
        state = pool_update(state, keys[:, :, j : j + 1], start - j, end - j, mask[:, j : j + 1])
        one_shot = boundary_pool(keys[:, :, : j + 1], start, end, mask[:, : j + 1], pool_tokens)
        torch.testing.assert_close(pool_read(state), one_shot)


@pytest.mark.parametrize("length", [1, 25])
def test_pool_state_has_fixed_shapes_and_leaves_its_input_alone(length):
    keys = torch.randn(2, 3, 25, 4, dtype=torch.bfloat16)
    state = pool_start(keys, 8)
    before = [tensor.clone() for tensor in state]
    after = pool_update(state, keys[:, :, :length])
    for name, old, kept, new in zip(PoolState._fields, state, before, after, strict=True):
        assert torch.equal(old, kept), name
        assert (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride()), name
        assert new.shape[0] == 2, name
    assert after.head_sum.dtype == torch.float32


def test_pool_state_rows_can_be_reordered():
    keys = torch.randn(3, 2, 40, 4)
    order = torch.tensor([2, 0, 0])
    first, second = keys[:, :, :25], keys[:, :, 25:]
    state = pool_update(pool_start(keys, 8), first)
    moved = PoolState(*(tensor.index_select(0, order) for tensor in state))
    pooled = pool_read(pool_update(moved, second[order]))
    torch.testing.assert_close(pooled, boundary_pool(keys[order], pool_tokens=8))


def test_pool_update_compiles_to_one_graph_for_all_chunk_lengths():
    compiled = torch.compile(pool_update, fullgraph=True, dynamic=True, backend="eager")
    keys = torch.randn(3, 2, 120, 4)
    state = compiled(pool_start(keys, 8), keys[:, :, :20])
    with torch.compiler.set_stance("fail_on_recompile"):
        state = compiled(state, keys[:, :, 20:25])
        state = compiled(state, keys[:, :, 25:])
    torch.testing.assert_close(pool_read(state), boundary_pool(keys, pool_tokens=8))


@pytest.mark.smoke
def test_router_has_the_papers_size_and_layers():
    router = AttentionRouter(128)
    assert sum(parameter.numel() for parameter in router.parameters()) == 263_682
    kinds = [type(module).__name__ for module in (*router.task, *router.router)]
    assert kinds == ["Linear", "SiLU", "Linear", "Linear", "SiLU", "Linear", "SiLU", "Linear"]
    assert next(iter(router.state_dict())) == "task.0.weight"
    assert router.router[-1].weight.shape == (2, 128)
    assert AttentionRouter(64, 6).task[0].out_features == 384


@pytest.mark.smoke
def test_untrained_router_ties_and_every_head_is_full():
    logits = AttentionRouter(16)(torch.randn(2, 3, 16) * 100)
    assert torch.equal(logits, torch.zeros(2, 3, 2))
    routes = decide(logits)
    assert routes.dtype == torch.int32
    assert torch.equal(routes, torch.zeros(2, 3, dtype=torch.int32))


def test_heads_are_routed_one_by_one_with_shared_weights():
    router = AttentionRouter(8)
    nn.init.normal_(router.router[-1].weight)
    pooled = torch.randn(2, 5, 8)
    logits = router(pooled)
    assert logits.shape == (2, 5, 2)
    torch.testing.assert_close(logits[1, 3], router(pooled[1:, 3:4])[0, 0])
    swapped = router(pooled[:, [1, 0, 2, 3, 4]])
    torch.testing.assert_close(swapped[:, 0], logits[:, 1])


def test_router_matches_the_formula():
    router = AttentionRouter(8, 2).double()
    nn.init.normal_(router.router[-1].weight)
    weights = {name: value.detach() for name, value in router.state_dict().items()}

    def affine(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def silu(x):
        return x / (1 + torch.exp(-x))

    x = torch.randn(2, 3, 8, dtype=torch.float64)
    task = affine(silu(affine(x, "task.0")), "task.2")
    hidden = affine(silu(affine(task, "router.0")), "router.2")
    torch.testing.assert_close(router(x), affine(silu(hidden), "router.4"))


def test_router_casts_the_pooled_keys_to_its_own_dtype():
    router = AttentionRouter(8, dtype=torch.bfloat16)
    assert router(torch.randn(1, 2, 8)).dtype == torch.bfloat16
    assert AttentionRouter(8)(torch.randn(1, 2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_router_starts_to_learn_from_zero():
    router = AttentionRouter(8)
    router(torch.randn(2, 3, 8))[..., 1].sum().backward()
    assert router.router[-1].weight.grad.abs().sum() > 0


def test_router_on_meta_then_materialised_is_full_attention():
    router = AttentionRouter(8, device="meta")
    assert router(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 2)
    router = router.to_empty(device="cpu")
    for parameter in router.parameters():
        nn.init.constant_(parameter, math.nan)
    router.reset_parameters()
    assert torch.equal(router(torch.randn(1, 2, 8)), torch.zeros(1, 2, 2))
    assert router.task[0].weight.abs().sum() > 0


@pytest.mark.parametrize("sizes", [(0, 4), (8, 0), (-1, 4)])
def test_router_refuses_empty_sizes(sizes):
    with pytest.raises(ValueError, match="head_dim >= 1"):
        AttentionRouter(*sizes)


def test_decide_takes_the_larger_logit_and_the_bias_moves_it():
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]])
    assert decide(logits).tolist() == [[1, 0, 0]]
    assert decide(logits, 0.25).tolist() == [[1, 0, 1]]
    assert decide(logits, -1.0).tolist() == [[0, 0, 0]]  # 1 - 1 ties with 0
    assert decide(logits, torch.tensor(1.5)).tolist() == [[1, 1, 1]]


def test_decide_keeps_a_small_bias_in_bfloat16():
    logits = torch.tensor([[[64.0, 64.0]]], dtype=torch.bfloat16)
    assert decide(logits, 1e-3).tolist() == [[1]]


def test_decide_sends_nan_to_full():
    assert decide(torch.full((1, 2, 2), math.nan)).tolist() == [[0, 0]]
