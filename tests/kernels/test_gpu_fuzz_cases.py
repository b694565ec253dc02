"""The random cases of the GPU tests, drawn and checked here on the CPU implementation."""

import dataclasses

import pytest
import torch

from tests.gpu import fuzzing


def test_the_kinds_hold_everything():
    kinds = [kind for seed in (1, 2) for kind in fuzzing.kinds(seed)]
    assert fuzzing.kinds(1) == fuzzing.kinds(1) != fuzzing.kinds(2)
    assert sum(kind.kernel == "gluon" for kind in kinds) == len(kinds) / 2
    for kernel in ("gluon", "triton"):
        own = [kind for kind in kinds if kind.kernel == kernel]
        for field, values in {
            "dtype": 2 if kernel == "gluon" else 3,
            "size": 4 if kernel == "gluon" else 5,
            "group": 6,
            "modes": 4,
            "layout": 2 if kernel == "gluon" else 3,
            "start": 2,
            "kv_len": 3,
            "mask": 2,
            "scale": 4 if kernel == "gluon" else 5,
        }.items():
            assert len({getattr(kind, field) for kind in own}) == values, (kernel, field)
    assert any(kind.softcap for kind in kinds) and any(kind.sinks for kind in kinds)


@pytest.mark.parametrize("kind", fuzzing.kinds(1)[:24], ids=lambda kind: str(kind.number))
def test_cases_on_the_cpu(poisoned_memory, kind):
    kind = dataclasses.replace(kind, dtype=torch.float32, kernel="triton")
    call = fuzzing.case(kind, kind.random, "cpu", largest=60)
    out, lse = fuzzing.run(call, "cpu")
    fuzzing.check(call, out, lse)


def test_a_wrong_element_is_noticed():
    kind = dataclasses.replace(
        fuzzing.kinds(1)[0], dtype=torch.float32, kv_len="none", start=False, mask=False
    )
    call = fuzzing.case(kind, kind.random, "cpu", largest=60)
    out, lse = fuzzing.run(call, "cpu")
    seen = (lse > -torch.inf).nonzero()[-1]
    out[tuple(seen)][0] += 1
    with pytest.raises(AssertionError, match="output"):
        fuzzing.check(call, out, lse)
    out[tuple(seen)][0] -= 1
    lse[tuple(seen)] += 0.1
    with pytest.raises(AssertionError, match="log-sum-exp"):
        fuzzing.check(call, out, lse)
    lse[tuple(seen)] = -torch.inf
    with pytest.raises(AssertionError, match="see nothing"):
        fuzzing.check(call, out, lse)
