"""The short cut for calls in which every route means full attention.

Where the keys are no more than ``sink + local``, streaming heads see all of them, so one
scaled_dot_product_attention serves all heads, exactly. The sizes alone decide: no host sync, and
one traced graph for all lengths. The CPU kernel itself sees that all heads are full.
"""

from __future__ import annotations

from torch import Tensor

from elastic_compile.kernels import cpu
from elastic_compile.kernels._call import AttentionCall


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Calls whose modes cannot differ: all full, or no more keys than ``sink + local``."""
    if not call.uniform:
        return False, "routes differ in what they see"
    return cpu.supports(call)


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns output [B, Hq, Sq, Dv] and log-sum-exp [B, Hq, Sq]."""
    return cpu.forward(call)


def backward(
    call: AttentionCall, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of query, key, value and learned sinks (None without)."""
    return cpu.backward(call, grad_out, grad_lse, out, lse)
