"""A few small calls for compute-sanitizer: ``compute-sanitizer python -m tests.gpu.memcheck``.

Allocations are not pooled, so that an access past a tensor is one past an allocation.
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from elastic_compile.kernels import triton_prefill
from elastic_compile.kernels._call import AttentionCall


def main() -> None:
    """Odd lengths, padding, an unfilled cache, descriptors and pointers."""
    torch.manual_seed(0)
    for size, rows, keys, pointers in (
        (128, 201, 333, False),
        (64, 333, 333, True),
        (80, 1, 77, False),
    ):
        width = size + 1 if pointers else size
        tensors = [
            torch.randn(2, length, heads, width, device="cuda").to(torch.bfloat16)
            for heads, length in ((4, rows), (2, keys), (2, keys))
        ]
        query, key, value = (x.transpose(1, 2)[..., :size] for x in tensors)
        call = AttentionCall(
            query,
            key,
            value,
            torch.tensor([[0, 1], [1, 0]], dtype=torch.int32).cuda(),
            5,
            70,
            start=torch.tensor([0, 30]).cuda(),
            kv_len=torch.tensor([keys, keys - 9]).cuda(),
        )
        out, _ = triton_prefill.forward(call)
        assert not out.isnan().any()
    print("done")


if __name__ == "__main__":
    main()
