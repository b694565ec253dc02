"""The short cut on a GPU for calls in which every route means full attention: torch's own SDPA.

Where the keys are no more than ``sink + local`` and nothing is padded, a short prompt costs what
the untouched model pays. Which of torch's kernels serves it is torch's own choice.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from elastic_compile.kernels._call import AttentionCall

_aten = torch.ops.aten


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Plain causal calls, of a whole prompt or one token, for which torch has a fused kernel."""
    if not call.uniform:
        return False, "routes differ in what they see"
    given = {
        "start": call.start,
        "kv_len": call.kv_len,
        "key_mask": call.key_mask,
        "cu_seqlens": call.cu_seqlens,
        "softcap": call.softcap,
        "sinks": call.sinks,
        "scale_tensor": call.scale_tensor,
        "dropout_p": call.dropout_p or None,
    }
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        return False, f"{', '.join(extra)} is not supported"
    queries, held, size = call.query.shape[2], call.key.shape[2], call.query.shape[3]
    if queries not in (1, held):
        return False, "queries that follow cached keys are not supported"
    if size != call.value.shape[3] or size % 8:
        return False, "head sizes that differ or are no multiple of 8 are not supported"
    if _choice(call) not in _KERNELS:
        return False, "torch has no fused kernel with a log-sum-exp for it"
    return True, ""


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns output [B, Hq, Sq, D] and log-sum-exp [B, Hq, Sq]."""
    return _KERNELS[_choice(call)](call)


def _causal(call: AttentionCall) -> bool:
    # One row sees all keys; torch would align it with the first.
    return call.query.shape[2] > 1


def _choice(call: AttentionCall) -> SDPBackend:
    chosen = torch._fused_sdp_choice(
        call.query,
        call.key,
        call.value,
        None,
        0.0,
        _causal(call),
        scale=call.scale,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
    )
    return SDPBackend(chosen)


def _cudnn(call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, None, True, 0.0, _causal(call), False, scale=call.scale
    )
    return out, lse.reshape(call.query.shape[:3])


def _flash(call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        call.query, call.key, call.value, 0.0, _causal(call), False, scale=call.scale
    )
    return out, lse


_KERNELS = {SDPBackend.CUDNN_ATTENTION: _cudnn, SDPBackend.FLASH_ATTENTION: _flash}
