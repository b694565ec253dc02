"""The random cases of the GPU tests: drawn here, and checked on the CPU implementation."""

import dataclasses
import functools
import random

import pytest
import torch

from tests.gpu import fuzzing
from tests.gpu.fuzzing import KINDS, MANY, Limits

SMALL = Limits(rows=80, keys=110, batch=3, kv_heads=3)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_kinds_hold_everything(seed):
    kinds = fuzzing.kinds(seed)
    assert [kind.number for kind in kinds] == list(range(KINDS))
    assert kinds == fuzzing.kinds(seed) != fuzzing.kinds(seed + 1)
    gluon = [kind for kind in kinds if kind.kernel == "gluon"]
    triton = [kind for kind in kinds if kind.kernel == "triton"]
    assert len(gluon) == KINDS / 3 and len(gluon) + len(triton) == KINDS
    forced = [kind.config for kind in triton if kind.config is not None]
    for flag in ("overlap", "tma", "split_sums"):
        assert {getattr(config, flag) for config in forced} == {False, True}
    for field, counts in {
        "dtype": (3, 2),
        "size": (7, 5),
        "group": (6, 6),
        "rows": (5, 1),
        "modes": (4, 4),
        "covered": (2, 2),
        "layout": (6, 3),
        "start": (3, 3),
        "kv_len": (3, 3),
        "mask": (3, 3),
        "softcap": (2, 1),
        "scale": (5, 4),
    }.items():
        for own, count in zip((triton, gluon), counts, strict=True):
            assert len({getattr(kind, field) for kind in own}) == count, field
    assert {kind.sinks and (kind.sinks == kind.dtype) for kind in triton} == {None, False, True}
    assert {(k.value_size > k.size) - (k.value_size < k.size) for k in triton} == {-1, 0, 1}
    # What the Hopper kernel declines is not asked of it.
    assert all(kind.rows == MANY and kind.config is None for kind in gluon)
    assert all(kind.value_size == kind.size and 32 < kind.size <= 128 for kind in gluon)
    assert all(kind.layout not in ("odd", "expanded", "spread") for kind in gluon)
    assert all(kind.sinks is None for kind in gluon)


def test_the_cases_hold_everything():
    """At the sizes of the GPU: lengths on every side, padding of every kind, NaN in what hides."""
    seen = set()
    for number in range(2 * KINDS):
        kind, call = fuzzing.case(number, "cpu")
        batch, _, rows, _ = call.query.shape
        held = call.key.shape[2]
        assert call.uniform == (kind.covered or "streaming" not in kind.modes)
        assert rows >= 128 or kind.kernel == "triton"
        filled = torch.tensor(held) if call.kv_len is None else call.kv_len
        seen.add("chunk" if rows < filled.max() else "all" if rows == filled.max() else "over")
        seen.add(f"batch {batch}")
        column = torch.arange(held)
        real = (column < filled.expand(batch)[:, None]).clone()
        if call.start is not None:
            real &= column >= call.start[:, None]
        if call.key_mask is not None:
            for row in call.key_mask:
                ends = int(row.any()) and row.nonzero().flatten()[[0, -1]].diff() + 1 == row.sum()
                left, right = not row[0], not row[-1]
                seen.add("hole" if row.any() and not ends else f"padded {left} {right}")
            seen.add(f"mask of stride {call.key_mask.stride(1)}")
            real &= call.key_mask
        seen.update(["nothing real"] * (not real.any(1).all()))
        shown = real.any(0, keepdim=True) if kind.layout == "expanded" else real
        for tensor in (call.key, call.value):
            poisoned = tensor.isnan().all(3).all(1)
            assert torch.equal(poisoned, ~shown.expand(batch, -1))
        assert not call.query.isnan().any()
        last = call.query.stride(3), call.query.data_ptr() % 16
        seen.add(f"strides {last[0]}, unaligned {bool(last[1])}")
        seen.update(["shared"] * (batch > 1 and call.key.stride(0) == 0))
    assert seen >= {
        *("chunk", "all", "over", "hole", "nothing real", "shared"),
        *(f"batch {n}" for n in (1, 2, 3, 4)),
        *(f"padded {left} {right}" for left in (False, True) for right in (False, True)),
        *("mask of stride 1", "mask of stride 2"),
        *("strides 1, unaligned False", "strides 1, unaligned True", "strides 2, unaligned False"),
    }


def test_a_case_does_not_depend_on_others():
    first = [fuzzing.case(n, "cpu", limits=SMALL)[1] for n in (7, 7 + KINDS, 7)]
    assert torch.equal(first[0].query, first[2].query)
    assert first[0].query.shape != first[1].query.shape


@pytest.mark.parametrize("number", range(KINDS))
def test_cases_on_the_cpu(poisoned_memory, number):
    _, call = fuzzing.case(number, "cpu", limits=SMALL)
    fuzzing.check(call, *fuzzing.run(call, "cpu"))


@functools.cache
def plain():
    """A call of mixed heads, with padding and options."""
    kind = dataclasses.replace(
        fuzzing.kinds(1)[0],
        dtype=torch.bfloat16,
        size=64,
        value_size=64,
        rows=MANY,
        modes=("full", "streaming"),
        covered=False,
        layout="bshd",
        kv_len="none",
        start=torch.int32,
        mask="none",
        softcap=True,
        sinks=torch.float32,
        scale="number",
    )
    limits = Limits(700, 700, batch=1, kv_heads=2)
    drawn = (fuzzing.call(kind, random.Random(n), "cpu", limits) for n in range(99))
    call = next(
        c for c in drawn if c.key.shape[1] == 2 and c.key.shape[2] == c.query.shape[2] > 300
    )
    route = torch.tensor([[0, 1]], dtype=torch.int32)
    return dataclasses.replace(
        call, route=route, sink=30, local=200, start=torch.tensor([9], dtype=torch.int32)
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(sink=31),
        dict(local=199),
        dict(route=torch.tensor([[1, 1]], dtype=torch.int32)),
        dict(start=torch.tensor([10], dtype=torch.int32)),
        dict(start=torch.tensor([8], dtype=torch.int32)),
        dict(kv_len=torch.tensor(300)),
        dict(softcap=None),
        dict(sinks=None),
        dict(scale=None),
    ],
    ids=lambda change: next(iter(change)),
)
def test_results_of_another_call_are_noticed(change):
    """A token too many or too few in the sink or the window, among hundreds of rows of bfloat16."""
    call = plain()
    fuzzing.check(call, *fuzzing.run(call, "cpu"))
    with pytest.raises(AssertionError):
        fuzzing.check(call, *fuzzing.run(dataclasses.replace(call, **change), "cpu"))


def scaled_row(out, lse, seen, empty):
    out[seen] *= 1.05


def one_nan(out, lse, seen, empty):
    out[seen][0] = torch.nan


def shifted_lse(out, lse, seen, empty):
    lse[seen] += 1e-3


def nothing_seen(out, lse, seen, empty):
    lse[seen] = -torch.inf


def something_seen(out, lse, seen, empty):
    out[empty][0] = 1e-3


def nan_lse(out, lse, seen, empty):
    lse[seen] = torch.nan


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (scaled_row, "a row of the output"),
        (one_nan, "a row of the output"),
        (shifted_lse, "log-sum-exp"),
        (nan_lse, "log-sum-exp"),
        (nothing_seen, "which rows see nothing"),
        (something_seen, "rows that see nothing"),
    ],
)
def test_one_wrong_row_is_noticed(spoil, said):
    call = plain()
    out, lse = fuzzing.run(call, "cpu")
    seen, empty = (tuple(where.nonzero()[-1]) for where in (lse > -torch.inf, lse == -torch.inf))
    spoil(out, lse, seen, empty)
    with pytest.raises(AssertionError, match=said):
        fuzzing.check(call, out, lse)
