"""The ``torch.library`` definitions: schemas, fake kernels and autograd of the opaque ops.

Schemas list the fields of the classes in ``_call`` in order, all positional
because ``register_autograd`` takes no keyword-only tensors. Backwards are ops of their own: the
body of a custom op runs below autograd and cannot re-enter it. No argument is named ``kernel``,
which Inductor passes on as a keyword of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from elastic_compile.kernels import _counters, _dispatch, _exact, _validate
from elastic_compile.kernels._call import (
    AttentionCall,
    ExactCall,
    RouteCall,
    compute_dtype,
    new_outputs,
)

_ATTENTION_ARGS = (
    "Tensor query, Tensor key, Tensor value, Tensor route, SymInt sink, SymInt local, "
    'str full_mode="full", str sparse_mode="streaming", '
    "float? scale=None, Tensor? scale_tensor=None, Tensor? start=None, Tensor? kv_len=None, "
    "Tensor? key_mask=None, Tensor? cu_seqlens=None, Tensor? block_indptr=None, "
    "Tensor? block_indices=None, SymInt block_size=64, float? softcap=None, Tensor? sinks=None, "
    'float dropout_p=0.0, Tensor? dropout_seed=None, str implementation="auto"'
)
_EXACT_ARGS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, str reason, "
    "float? scale=None, Tensor? scale_tensor=None, float? softcap=None, Tensor? sinks=None, "
    "bool is_causal=False, float dropout_p=0.0, Tensor? dropout_seed=None"
)
_ROUTE_ARGS = (
    "Tensor tap, Tensor? key_mask, Tensor? end, Tensor forced, Tensor[] weights, "
    "SymInt pool_tokens, float route_bias=0.0"
)
_GRADS = "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, "

_Call = AttentionCall | ExactCall


def _define(name: str, arguments: str, results: int) -> Any:
    schema = f"({arguments}) -> ({', '.join(['Tensor'] * results)})"
    return torch.library.custom_op(f"elastic_compile::{name}", mutates_args=(), schema=schema)


@_define("attention", _ATTENTION_ARGS, 2)
def attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Body of ``elastic_compile::attention``."""
    call = AttentionCall(*args)
    _validate.check_attention(call)
    if _has_no_pairs(call):
        return _nothing_seen(call)
    return _conform(call, *_dispatch.forward(call))


@_define("attention_backward", _GRADS + _ATTENTION_ARGS, 4)
def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Body of ``elastic_compile::attention_backward``: dq, dk, dv, dsinks ([0] without sinks)."""
    call = AttentionCall(*args)
    if _has_no_pairs(call):
        return _like_inputs(call, torch.zeros_like)
    *grads, sinks = _dispatch.backward(call, grad_out, grad_lse, out, lse)
    return (*(grad.contiguous() for grad in grads), _present(call, sinks))


@_define("attention_train", _ATTENTION_ARGS, 3)
def attention_train(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Body of ``elastic_compile::attention_train``: out, lse and the other route's output."""
    call = _hard_call(args)
    _validate.check_attention(call)
    if _has_no_pairs(call):
        return (*_nothing_seen(call), _nothing_seen(call)[0])
    out, lse, other = _dispatch.forward_both(call)
    return (*_conform(call, out, lse), _conform(call, other, lse)[0])


@_define("attention_train_backward", _GRADS + "Tensor other, " + _ATTENTION_ARGS, 5)
def attention_train_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    other: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    """Body of its backward: dq, dk, dv, dsinks ([0] without sinks), droute."""
    call, route = _hard_call(args), args[3]
    if _has_no_pairs(call):
        return (*_like_inputs(call, torch.zeros_like), torch.zeros_like(route))
    *grads, sinks = _dispatch.backward(call, grad_out, grad_lse, out, lse)
    gain = _dispatch.route_gradient(call, grad_out, out, other)
    return (*(grad.contiguous() for grad in grads), _present(call, sinks), gain.to(route.dtype))


@_define("exact_attention", _EXACT_ARGS, 2)
def exact_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Body of ``elastic_compile::exact_attention``."""
    call = ExactCall(*args)
    _validate.check_exact(call)
    _counters.count_call("exact")
    _counters.count_fallback(call.reason)
    if _has_no_pairs(call):
        return _nothing_seen(call)
    return _conform(call, *_exact.forward(call))


@_define("exact_attention_backward", _GRADS + "bool mask_grad, " + _EXACT_ARGS, 5)
def exact_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mask_grad: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    """Body of its backward: dq, dk, dv, dsinks ([0] without sinks), dmask ([0] unless asked)."""
    call = ExactCall(*args)
    _counters.count_backward("exact")
    if _has_no_pairs(call):
        return (
            *_like_inputs(call, torch.zeros_like),
            _mask_like(call, mask_grad, torch.zeros_like),
        )
    *grads, sinks, mask = _exact.backward(call, grad_out, grad_lse, mask_grad)
    return (
        *(grad.contiguous() for grad in grads),
        _present(call, sinks),
        call.query.new_empty(0) if mask is None else mask.contiguous(),
    )


@_define("route", _ROUTE_ARGS, 1)
def route(*args: Any) -> Tensor:
    """Body of ``elastic_compile::route``; integers, so it has no backward."""
    call = RouteCall(*args)
    _validate.check_route(call)
    return _dispatch.route(call)


@route.register_fake
def _(*args: Any) -> Tensor:
    call = RouteCall(*args)
    _validate.check_route(call)
    return call.tap.new_empty(call.tap.shape[:2], dtype=torch.int32)


@attention.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    call = AttentionCall(*args)
    _validate.check_attention(call)
    return new_outputs(call)


@attention_train.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _hard_call(args)
    _validate.check_attention(call)
    return (*new_outputs(call), new_outputs(call)[0])


@attention_train_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    other: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    route = torch.empty_like(args[3], memory_format=torch.contiguous_format)
    return (*_like_inputs(_hard_call(args), torch.empty_like), route)


@exact_attention.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    call = ExactCall(*args)
    _validate.check_exact(call)
    return new_outputs(call)


@attention_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return _like_inputs(AttentionCall(*args), torch.empty_like)


@exact_attention_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mask_grad: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    call = ExactCall(*args)
    return (*_like_inputs(call, torch.empty_like), _mask_like(call, mask_grad, torch.empty_like))


def _hard_call(args: Sequence[Any]) -> AttentionCall:
    """The call whose routes are those that relaxed ones stand for."""
    call = AttentionCall(*args)
    if not call.route.is_floating_point():
        raise TypeError(
            f"route is {call.route.dtype}; attention_train takes floating routes, 0.0 or 1.0: "
            "call attention with whole ones"
        )
    return replace(call, route=(call.route > 0.5).to(torch.int32))


def _nothing_seen(call: _Call) -> tuple[Tensor, Tensor]:
    out, lse = new_outputs(call)
    return out.zero_(), lse.fill_(-torch.inf)


def _has_no_pairs(call: _Call) -> bool:
    return call.query.shape[2] * call.key.shape[2] * call.query.shape[0] == 0


def _conform(call: _Call, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    _, heads, queries, size = out.shape
    if out.stride() != (queries * heads * size, size, heads * size, 1):
        out = out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return out, lse.to(compute_dtype(call.query.dtype)).contiguous()


def _present(call: _Call, grad: Tensor | None) -> Tensor:
    """Ops have a fixed number of tensor results: an absent one is [0]."""
    return call.query.new_empty(0) if grad is None else grad.contiguous()


def _like_inputs(call: _Call, make: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    sinks = call.query.new_empty(0) if call.sinks is None else call.sinks
    return tuple(
        make(tensor, memory_format=torch.contiguous_format)
        for tensor in (call.query, call.key, call.value, sinks)
    )


def _mask_like(call: ExactCall, wanted: bool, make: Callable[..., Tensor]) -> Tensor:
    if not wanted or call.attn_mask is None:
        return call.query.new_empty(0)
    return make(call.attn_mask, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.constants = tuple(None if isinstance(x, Tensor) else x for x in inputs)


def _restore(ctx: Any) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    out, lse, *tensors = ctx.saved_tensors
    pairs = zip(tensors, ctx.constants, strict=True)
    return out, lse, tuple(constant if tensor is None else tensor for tensor, constant in pairs)


def _attention_autograd(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
    out, lse, args = _restore(ctx)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    query, key, value, sinks = attention_backward(grad_out, grad_lse, out, lse, *args)
    found = {"query": query, "key": key, "value": value, "sinks": sinks}
    return _in_schema_order(ctx, AttentionCall, args, found)


def _save_train(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, lse, other = output
    _save(ctx, (*inputs, other), (out, lse))


def _train_autograd(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_other: Tensor | None
) -> Any:
    out, lse, (*args, other) = _restore(ctx)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    query, key, value, sinks, route = attention_train_backward(
        grad_out, grad_lse, out, lse, other, *args
    )
    found = {"query": query, "key": key, "value": value, "sinks": sinks, "route": route}
    return _in_schema_order(ctx, AttentionCall, tuple(args), found)


def _exact_autograd(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
    out, lse, args = _restore(ctx)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    mask_grad = ctx.needs_input_grad[3]
    query, key, value, sinks, mask = exact_attention_backward(
        grad_out, grad_lse, out, lse, mask_grad, *args
    )
    found = {"query": query, "key": key, "value": value, "sinks": sinks, "attn_mask": mask}
    return _in_schema_order(ctx, ExactCall, args, found)


def _in_schema_order(
    ctx: Any,
    kind: type[AttentionCall] | type[ExactCall],
    args: tuple[Any, ...],
    found: dict[str, Tensor],
) -> tuple[Tensor | None, ...]:
    call = kind(*args)
    if call.scale_tensor is not None:
        # d(scale * q.k)/d(scale), read off the query's gradient: sum(dq * q) / scale.
        dtype = compute_dtype(call.query.dtype)
        total = (found["query"].to(dtype) * call.query.to(dtype)).sum()
        found["scale_tensor"] = (total / call.scale_tensor).to(call.scale_tensor.dtype)
    # The dispatcher drops trailing arguments that equal their defaults, here as well.
    names = [field.name for field in fields(kind)][: len(ctx.needs_input_grad)]
    return tuple(
        found.get(name) if needed else None
        for name, needed in zip(names, ctx.needs_input_grad, strict=True)
    )


attention.register_autograd(_attention_autograd, setup_context=_save)
attention_train.register_autograd(_train_autograd, setup_context=_save_train)
exact_attention.register_autograd(_exact_autograd, setup_context=_save)
