"""Attention and mask implementations that transformed Hugging Face models are switched to.

A dense [B, 1, S, S] mask at 128K tokens is 16 GiB of bools. A transformed model therefore builds
no mask at all for its plain causal layers: its sites receive the caller's 2-D padding mask, or
None. Every other layer (sliding, chunked, packed, prefix …) gets the exact dense mask it always
got, and attends through the implementation that the model was loaded with.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)

SDPA = "elastic_compile"
EAGER = "elastic_compile_eager"
OTHER = "elastic_compile_other"
NAMES = (SDPA, EAGER, OTHER)

LEFT_ALONE = "elastic_left_alone"
"""Attribute of a skipped site that builds or drops its mask itself: what it is given is its own."""


def implementation_for(original: str | None) -> str:
    """Name that a model loaded with ``original`` is switched to while transformed.

    Layers that stay as they are keep computing what ``original`` computes: ``sdpa`` itself (which
    in some transformers releases ignores a soft-cap), eager's formula, or, for Flash and Flex,
    the same mathematics through SDPA, and through eager's formula where SDPA lacks a term.
    """
    if original in (None, "eager"):
        return EAGER
    return SDPA if original == "sdpa" else OTHER


def honours_every_term(implementation: str) -> bool:
    """Whether soft-cap and learned sinks that a module passes on are part of its attention."""
    return implementation != SDPA


def is_unpadded_marker(mask: Tensor) -> bool:
    """Whether ``mask`` is the all-ones mask that :class:`DecoderHook` made.

    It is recognised by its strides: a [B, S] view of one element, all zero strides. Reading
    strides needs no device synchronisation and works while tracing.
    """
    return mask.dim() == 2 and all(stride == 0 for stride in mask.stride())


def unpadded_marker(batch: int, length: int, device: torch.device) -> Tensor:
    """An all-ones bool mask [batch, length] that :func:`is_unpadded_marker` recognises."""
    return torch.ones((), dtype=torch.bool, device=device).expand(batch, length)


def fit_mask(mask: Tensor, length: int) -> Tensor:
    """Crop or extend a 2-D mask [B, M] to [B, length]; columns it does not have are masked."""
    missing = length - mask.shape[1]
    if isinstance(missing, int):
        if missing == 0:
            return mask
        return mask[:, :length] if missing < 0 else nn.functional.pad(mask, (0, missing))
    # One expression for every symbolic length, so that no length is a graph of its own.
    return nn.functional.pad(mask, (0, length))[:, :length]


def elastic_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Mask builder registered for transformed models (``AttentionMaskInterface``).

    Returns:
        For the plain causal rule: the 2-D padding mask, bool [B, kv_length], or None when nothing
        is padded. For every other rule: the dense mask of ``sdpa_mask``.
    """
    # A mask of more tokens than the first layer has cached (it caches none: linear attention) says
    # nothing that a site could use; the model gets what it always did.
    longer = (
        isinstance(kv_length, int)
        and attention_mask is not None
        and not is_unpadded_marker(attention_mask)
        and attention_mask.shape[1] > kv_length
    )
    if mask_function is causal_mask_function and not use_vmap and kv_offset == 0 and not longer:
        if attention_mask is None or is_unpadded_marker(attention_mask):
            return None
        return fit_mask(attention_mask, kv_length)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **kwargs,
    )


def causal_mask_4d(
    mask: Tensor | None, past: int | Tensor, q_length: int, kv_length: int, device: torch.device
) -> Tensor:
    """The dense bool mask [B or 1, 1, q_length, kv_length] that a 2-D mask (or None) stands for.

    Query i sees key j where ``j <= past + i`` and, with a mask, ``mask[b, j]``.
    """
    query = torch.arange(q_length, device=device)[:, None] + past
    visible = (torch.arange(kv_length, device=device)[None, :] <= query)[None, None]
    if mask is None:
        return visible
    return visible & fit_mask(mask.to(torch.bool), kv_length)[:, None, None, :]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as the additive float mask of eager attention (masked = finfo.min)."""
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _eager_function(module: nn.Module) -> Callable | None:
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None


def exact_interface_attention(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What the untouched model computes at an ``AttentionInterface`` call, dense mask given.

    Args:
        implementation: :data:`SDPA`, :data:`EAGER` or :data:`OTHER`.
        module: The attention module.
        query: [B, Hq, S, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, Dv].
        attention_mask: Bool or additive, broadcastable to [B, Hq, S, T]; None: causal if the
            module is.
        **kwargs: The call's other arguments.

    Returns:
        Output [B, S, Hq, Dv] and, from eager's formula, the weights.
    """
    causal = _is_causal(module, kwargs)
    terms = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    function = None
    if implementation == EAGER or (implementation == OTHER and terms):
        function = _eager_function(module)
    if function is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is None and query.shape[2] > 1 and causal:
        past = key.shape[2] - query.shape[2]
        attention_mask = causal_mask_4d(None, past, query.shape[2], key.shape[2], query.device)
    if attention_mask is not None:
        attention_mask = additive(attention_mask, query.dtype)
    return function(module, query, key, value, attention_mask, **kwargs)


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def registered_attention(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`exact_interface_attention` under the names that transformed models are switched to.

    Raises:
        ValueError: The model is not transformed, but its configuration names ``implementation``.
    """
    lost = attention_mask is None and 1 < query.shape[2] != key.shape[2]
    lost = lost and _is_causal(module, kwargs) and not hasattr(module, LEFT_ALONE)
    if lost or (attention_mask is not None and attention_mask.dim() == 2):
        # Only a rewritten site can read these: the model around this module is no transformed one.
        raise ValueError(
            f"{type(module).__name__} belongs to a model whose configuration names the attention "
            f"implementation {implementation!r} but which is not transformed (was its "
            "configuration taken from a transformed model?); call "
            'model.set_attn_implementation("sdpa"), or elastic_compile.transform after that'
        )
    return exact_interface_attention(
        implementation, module, query, key, value, attention_mask, **kwargs
    )


def register() -> None:
    """Register the implementations with transformers; a second call changes nothing."""
    for name in NAMES:
        AttentionInterface.register(name, functools.partial(registered_attention, name))
        AttentionMaskInterface.register(name, elastic_mask)


# At import: a pickled model is loaded in processes that never called `transform`.
register()
