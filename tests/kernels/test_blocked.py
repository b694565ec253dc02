"""The blocked reference equals the reference, whatever the block."""

import pytest
import torch

from elastic_compile.kernels import blocked, reference
from elastic_compile.kernels._call import AttentionCall
from tests.kernels import cases

BATCH, HEADS, KV_HEADS, KEYS, SIZE = 2, 4, 2, 37, 16


def call(rows=KEYS, batch=BATCH, dtype=torch.float64, **options):
    tensors = [
        torch.randn(batch, heads, length, SIZE, dtype=dtype)
        for heads, length in ((HEADS, rows), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    ]
    documents = batch if "cu_seqlens" not in options else len(options["cu_seqlens"]) - 1
    route = torch.arange(documents * KV_HEADS).reshape(documents, KV_HEADS) % 2
    return AttentionCall(*tensors, route.to(torch.int32), 3, 7, **options)


OPTIONS = {
    "plain": {},
    "chunk": {"rows": 11},
    "more rows than keys": {"rows": 50},
    "padding": {"start": torch.tensor([0, 15])},
    "cache": {"rows": 11, "kv_len": torch.tensor([30, 21]), "start": torch.tensor([2, 0])},
    "cache of one length": {"rows": 11, "kv_len": torch.tensor(30)},
    "holes": {"key_mask": torch.arange(2 * KEYS).reshape(2, KEYS) % 3 > 0},
    "documents": {"batch": 1, "cu_seqlens": torch.tensor([0, 9, 30], dtype=torch.int32)},
    "softcap, sinks": {"softcap": 2.0, "sinks": torch.arange(HEADS, dtype=torch.float64)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)},
    "blocks": {
        "sparse_mode": "blocks",
        "block_size": 8,
        **cases.block_lists(BATCH, KV_HEADS, KEYS, torch.Generator().manual_seed(0), 8),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [1, 10, 1000], ids="{}-rows".format)
def test_equals_the_reference(poisoned_memory, monkeypatch, name, rows):
    case = call(**OPTIONS[name])
    monkeypatch.setattr(blocked, "_BLOCK_SCORES", rows * case.query.shape[0] * HEADS * KEYS)
    expected, expected_lse = reference.forward(case)
    out, lse = blocked.forward(case)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=0)

    upstream = torch.randn_like(expected), torch.randn_like(expected_lse)
    expected_grads = reference.backward(case, *upstream, expected, expected_lse)
    grads = blocked.backward(case, *upstream, out, lse)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert (grad is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(grad, wanted, atol=1e-12, rtol=0)


def test_gradients_keep_the_dtype_and_are_summed_in_float32(monkeypatch):
    case = call(dtype=torch.float16)
    monkeypatch.setattr(blocked, "_BLOCK_SCORES", 1)
    out, lse = blocked.forward(case)
    grads = blocked.backward(case, torch.ones_like(out), None, out, lse)
    exact = reference.backward(case, torch.ones_like(out), None, out, lse, torch.float64)
    assert lse.dtype == torch.float32
    for grad, wanted in zip(grads[:3], exact[:3], strict=True):
        assert grad.dtype == torch.float16
        assert torch.linalg.norm(grad.double() - wanted) < 1e-3 * torch.linalg.norm(wanted)
