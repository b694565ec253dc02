"""Work and memory of the CPU kernel, counted on its operations rather than timed."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_compile.kernels import cpu
from elastic_compile.kernels._call import AttentionCall
from tests.kernels.cases import inputs

SINK, LOCAL, SIZE = 16, 128, 8
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Meter(TorchDispatchMode):
    """Counts the scores computed, and the elements of the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.scores = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                # Views own nothing; an expanded one may look large.
                made = tensor.untyped_storage().nbytes() // tensor.element_size()
                known = any(
                    isinstance(arg, torch.Tensor)
                    and arg.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                    for arg in args
                )
                self.largest = max(self.largest, 0 if known else made)
        if func is FLASH:
            query, key = args[:2]
            scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
            self.scores += scores // 2 if args[4:5] == (True,) else scores
        elif func is torch.ops.aten.bmm.default and args[0].shape[2] == SIZE:
            self.scores += out.numel()
        return out


def call(rows, keys, route, heads=4, kv_heads=2, **options):
    query, key, value = inputs(1, heads, kv_heads, rows, keys, SIZE)
    routes = torch.full((1, kv_heads), route, dtype=torch.int32)
    return AttentionCall(query, key, value, routes, SINK, LOCAL, **options)


def measure(arguments, backward=False):
    out, lse = cpu.forward(arguments)
    with Meter() as meter:
        if backward:
            cpu.backward(arguments, torch.ones_like(out), None, out, lse)
        else:
            cpu.forward(arguments)
    return meter


def visible(rows, keys, route):
    position = torch.arange(keys - rows, keys)
    full = position + 1
    return int((full if route == 0 else full.clamp(max=SINK + LOCAL)).sum()) * 4


def test_the_meter_sees_a_dense_mask():
    with Meter() as meter:
        torch.zeros(1, 1, 300, 1).expand(1, 1, 300, 400).contiguous()
    assert meter.largest == 300 * 400


@pytest.mark.parametrize("variant", ("plain", "hole", "softcap"))
@pytest.mark.parametrize("backward", (False, True))
def test_streaming_work_is_linear(variant, backward):
    scores = []
    for length in (1024, 2048, 3072):
        arguments = call(length, length, 1)
        if variant == "hole":
            mask = torch.ones(1, length, dtype=torch.bool)
            mask[:, 500] = False
            arguments = replace(arguments, key_mask=mask)
        if variant == "softcap":
            arguments = replace(arguments, softcap=5.0)
        scores.append(measure(arguments, backward).scores)
    first, second = scores[1] - scores[0], scores[2] - scores[1]
    assert first > 0 and abs(second - first) <= 0.1 * first
    matmuls = 2 if backward else 1  # a backward's two products over the head size
    assert scores[2] <= 1.7 * matmuls * visible(3072, 3072, 1)


def test_full_work_is_half_the_square():
    for rows in (2048, 64, 1):
        scores = measure(call(rows, 2048, 0)).scores
        assert scores == pytest.approx(visible(rows, 2048, 0), rel=0.05)


def test_decoding_reads_what_is_visible():
    for keys in (1000, 8000):
        assert measure(call(1, keys, 1)).scores == 4 * (SINK + LOCAL)
        assert measure(call(1, keys, 0)).scores == 4 * keys


@pytest.mark.parametrize("route", (0, 1))
@pytest.mark.parametrize("backward", (False, True))
def test_memory_is_linear(route, backward):
    small, large = (measure(call(s, s, route), backward).largest for s in (1024, 4096))
    assert large <= 4.2 * small
    assert large <= (1 << 21) + 4096 * 4 * SIZE


@pytest.mark.parametrize("route", (0, 1))
def test_grouped_keys_are_never_repeated(route):
    # field case B73
    arguments = call(1, 8000, route, heads=32, kv_heads=1)
    assert measure(arguments).largest <= 32 * (SINK + LOCAL + 8)
    arguments = call(300, 8000, route, heads=16, kv_heads=1)
    assert measure(arguments).largest < 16 * 8000 * SIZE / 2
