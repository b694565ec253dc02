"""Arguments that mean nothing are refused with what to change."""

import pytest
import torch

from elastic_compile.kernels import ops
from tests.kernels.cases import alternating, inputs

SEED = torch.tensor(1)


def call(shapes=(1, 4, 2, 10, 12), route=None, **options):
    tensors = inputs(*shapes) if isinstance(shapes[0], int) else shapes
    if route is None:
        route = alternating(tensors[0].shape[0], tensors[1].shape[1])
    return ops.attention(*tensors, route, **{"sink": 2, "local": 3} | options)


INDPTR, INDICES = torch.zeros(1, 2, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
LISTS = {"block_indptr": INDPTR, "block_indices": INDICES}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink": -1}, "need sink >= 0 and local >= 1, got sink=-1"),
        ({"local": 0}, "need sink >= 0 and local >= 1"),
        ({"full_mode": "dense"}, "full_mode must be one of full, streaming, blocks, got 'dense'"),
        ({"sparse_mode": "window"}, "sparse_mode must be one of"),
        ({"route": torch.zeros(2, 2, dtype=torch.int32)}, "route must have shape"),
        ({"start": torch.tensor(3)}, r"start must have shape \[B\] = \[1\]"),
        ({"kv_len": torch.tensor([3, 4])}, r"kv_len must be 0-d or have shape \[B\] = \[1\]"),
        ({"kv_len": torch.tensor(13)}, "must stay within the 12 keys"),
        ({"start": torch.tensor([-1])}, "must stay within the 12 keys"),
        ({"key_mask": torch.ones(1, 10, dtype=torch.bool)}, r"= \[1, 12\], got \[1, 10\]"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \[Hq\] = \[4\], got \[2\]"),
        ({"scale": torch.zeros(1)}, "a scale tensor must be 0-d"),
        ({"dropout_p": 1.0, "dropout_seed": SEED}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"dropout_p": 0.1}, "dropout_p > 0 needs dropout_seed"),
        ({"dropout_p": 0.1, "dropout_seed": torch.tensor(1.0)}, "dropout_seed must be a 0-d int64"),
        ({"sparse_mode": "blocks"}, "'blocks' needs block_indptr and block_indices"),
        (LISTS, "neither full_mode nor sparse_mode is 'blocks'"),
        (LISTS | {"full_mode": "blocks", "block_size": 0}, "block_size must be at least 1"),
        (LISTS | {"full_mode": "blocks", "block_size": 8}, r"\[1, 2, 3\] .*, got \[1, 2, 2\]"),
        ({"cu_seqlens": torch.tensor([[0, 9]])}, r"cu_seqlens must be \[documents \+ 1\]"),
        (
            {"cu_seqlens": torch.tensor([0, 9]), "start": torch.tensor([0])},
            "drop start and kv_len",
        ),
    ],
)  # fmt: skip
def test_refused_values(options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"route": torch.zeros(1, 2, dtype=torch.int64)}, "route must be int32"),
        ({"start": torch.zeros(1)}, "start must be int32 or int64, got torch.float32"),
        ({"key_mask": torch.ones(1, 12, dtype=torch.int64)}, "key_mask must be bool"),
    ],
)
def test_refused_dtypes(options, message):
    with pytest.raises(TypeError, match=message):
        call(**options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2)])
def test_heads_that_do_not_divide(heads, kv_heads):
    # field case B37
    with pytest.raises(ValueError, match=f"the {heads} query heads must be a multiple of the 2 kv"):
        call((1, heads, kv_heads, 10, 12))


def test_shapes_that_disagree():
    query, key, value = inputs(2, 4, 2, 10, 12)
    with pytest.raises(ValueError, match="query must be 4-D"):
        call((query[0], key, value), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="key and value must agree in"):
        call((query, key, value[:, :, 1:]))
    with pytest.raises(ValueError, match="query and key must agree in B and D"):
        call((query[:1], key, value))
    with pytest.raises(ValueError, match="needs B == 1, got B = 2"):
        call((query, key, value), cu_seqlens=torch.tensor([0, 12]))


def test_dtypes_that_disagree():
    query, key, value = inputs(1, 4, 2, 10, 12)
    with pytest.raises(TypeError, match="must share one dtype, .*cast them first"):
        call((query.bfloat16(), key, value))
    with pytest.raises(TypeError, match="query must be float32, bfloat16, float16 or float64"):
        call((query.int(), key.int(), value.int()))


def test_exact_attention_masks():
    tensors = inputs(1, 4, 2, 10, 12)
    with pytest.raises(ValueError, match=r"\[1, 4, 10, 12\], got \[1, 2, 10, 12\]"):
        ops.exact_attention(*tensors, torch.ones(1, 2, 10, 12), reason="test")
    with pytest.raises(ValueError, match="attn_mask must be 4-D"):
        ops.exact_attention(*tensors, torch.ones(10, 12), reason="test")
    with pytest.raises(TypeError, match="attn_mask must be bool"):
        ops.exact_attention(*tensors, torch.ones(1, 1, 10, 12, dtype=torch.int32), reason="test")


def test_refused_while_compiling_too():
    def site(query, key, value, route):
        return ops.attention(query, key, value, route, sink=2, local=3)[0]

    compiled = torch.compile(site, backend="eager", fullgraph=True, dynamic=True)
    query, key, value = inputs(1, 3, 2, 10, 12)
    with pytest.raises(Exception, match="query heads must be a multiple of"):
        compiled(query, key, value, alternating(1, 2))
