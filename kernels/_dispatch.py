"""Which implementation serves a call: a deterministic function of its arguments.

An implementation is a module with ``supports(call) -> (ok, reason)``, ``forward(call) -> (out,
lse)`` and, where it has one, ``backward(call, grad_out, grad_lse, out, lse) -> (dq, dk, dv,
dsinks)``. Results may have any strides; the op lays them out. A new one is one
:func:`register` line below; its module is imported when a call on its device first considers it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from elastic_compile.kernels import _counters, triton_backward, triton_dual, triton_route
from elastic_compile.kernels._call import AttentionCall, RouteCall, compute_dtype

ENVIRONMENT_VARIABLE = "ELASTIC_COMPILE_KERNEL"
FUSED_ROUTER_DEVICES = ("cuda",)


@dataclass(frozen=True)
class Implementation:
    """One entry of the registry.

    Attributes:
        name: What ``kernel=`` and the counters call it.
        module: Import path, resolved on first use.
        devices: Device types it may run on; empty for any.
        special: True for a short cut that serves some calls only, so that passing it over is no
            fallback.
        differentiable: False where ``backward`` is left to the next implementation.
        backward: Module with the ``backward`` of this implementation, where ``module`` has none; it
            takes what ``module`` supports.
    """

    name: str
    module: str
    devices: tuple[str, ...] = ()
    special: bool = False
    differentiable: bool = True
    backward: str = ""

    def load(self) -> ModuleType:
        """Imports the module that implements this entry."""
        return importlib.import_module(self.module)

    def supports(self, call: AttentionCall) -> tuple[bool, str]:
        """Returns whether this entry can serve ``call``, and if not, why."""
        device = call.query.device.type
        if self.devices and device not in self.devices:
            return False, f"runs on {', '.join(self.devices)} only, the inputs are on {device}"
        ok, reason = self.load().supports(call)
        return bool(ok), str(reason)


_registry: dict[str, Implementation] = {}


def register(
    name: str,
    module: str,
    *,
    devices: tuple[str, ...] = (),
    special: bool = False,
    differentiable: bool = True,
    backward: str = "",
) -> None:
    """Appends an implementation to the priority list; earlier ones are preferred by ``"auto"``."""
    if name in _registry or name == "auto":
        raise ValueError(f"an implementation called {name!r} is already registered")
    _registry[name] = Implementation(name, module, devices, special, differentiable, backward)


def implementations() -> tuple[str, ...]:
    """Names of the registered implementations, best first."""
    return tuple(_registry)


def default_implementation(device_type: str) -> str:
    """Name of the implementation that ``"auto"`` prefers on a device type, short cuts apart."""
    for entry in _registry.values():
        if not entry.special and (not entry.devices or device_type in entry.devices):
            return entry.name
    raise ValueError(f"no implementation runs on {device_type!r}")


def select(
    call: AttentionCall, *, backward: bool = False
) -> tuple[Implementation, tuple[str, ...]]:
    """Chooses the implementation of a call.

    ``call.implementation`` names one, else the environment variable ``ELASTIC_COMPILE_KERNEL``
    does, else it is the first of the priority list that supports the call.

    Args:
        call: The arguments of the op.
        backward: Choose for the backward.

    Returns:
        The implementation, and what those that were passed over said (``"name: reason"``; short
        cuts and those of other devices are not listed).

    Raises:
        ValueError: The named implementation is unknown or cannot serve the call.
    """
    name = _name(call)
    origin = "kernel=" if call.implementation != "auto" else f"{ENVIRONMENT_VARIABLE}="
    if name != "auto":
        return _named(name, origin, call, backward), ()
    declined: list[str] = []
    for entry in _candidates(call, backward):
        ok, reason = entry.supports(call)
        if ok:
            return entry, tuple(declined)
        if not entry.special:
            declined.append(f"{entry.name}: {reason}")
    raise ValueError("no implementation serves this call: " + "; ".join(declined))


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Runs the chosen implementation and counts it."""
    entry, declined = select(call)
    _counters.count_call(entry.name)
    for reason in declined:
        _counters.count_fallback(reason)
    out, lse = entry.load().forward(call)
    return out, lse


def backward(
    call: AttentionCall, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Runs the backward of the chosen implementation and counts it."""
    entry, _ = select(call, backward=True)
    _counters.count_backward(entry.name)
    module = entry.load() if entry.differentiable else importlib.import_module(entry.backward)
    query, key, value, sinks = module.backward(call, grad_out, grad_lse, out, lse)
    return query, key, value, sinks


def forward_both(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Output and log-sum-exp under the routes, and the output under the opposite routes."""
    if call.uniform:
        out, lse = forward(call)
        return out, lse, out.clone()
    name = _name(call)
    if name == "auto":
        # Short cuts of the plain op have neither this forward nor a backward.
        name = default_implementation(call.query.device.type)
    if name == "triton" and _registry[name].supports(call)[0] and triton_dual.supports(call)[0]:
        _counters.count_call(name)
        return triton_dual.forward(call)
    out, lse = forward(call)
    other, _ = forward(replace(call, route=1 - call.route))
    return out, lse, other


def route_gradient(call: AttentionCall, grad_out: Tensor, out: Tensor, other: Tensor) -> Tensor:
    """<dO, O_sparse - O_full>, summed over the rows and query heads of a kv head.

    Float [documents, Hkv]. The other output minus the chosen one is O_sparse - O_full but for its
    sign.
    """
    sums: Callable[[Tensor, Tensor], Tensor] = _row_sums
    if out.is_cuda and select(call, backward=True)[0].name == "triton":
        sums = triton_backward.row_sums
    difference = sums(grad_out, other) - sums(grad_out, out)
    batch, _, rows = difference.shape
    difference = difference.view(batch, call.route.shape[1], -1, rows).sum(2)
    if call.cu_seqlens is None:
        total = difference.sum(2)
    else:
        position = torch.arange(rows, device=out.device) + (call.key.shape[2] - rows)
        first, end = call.cu_seqlens[:-1, None], call.cu_seqlens[1:, None]
        inside = (position >= first) & (position < end)
        total = inside.to(difference.dtype) @ difference[0].mT
    return total * (1 - 2 * call.route)


def _row_sums(grad: Tensor, out: Tensor) -> Tensor:
    dtype = compute_dtype(out.dtype)
    return torch.einsum("bhsd,bhsd->bhs", grad.to(dtype), out.to(dtype))


def route(call: RouteCall) -> Tensor:
    """Runs the fused router.

    Raises:
        ValueError: It cannot serve the call.
    """
    ok, reason = triton_route.supports(call)
    if not ok:
        raise ValueError(
            f"the fused router cannot serve this call: {reason}. Ask ops.fuses_routes first"
        )
    return triton_route.forward(call)


def fuses_routes(device: torch.device, implementation: str) -> bool:
    """Whether routers on a device are fused where attention is asked of ``implementation``.

    As in :func:`select`, ``ELASTIC_COMPILE_KERNEL`` names one in place of ``"auto"``.
    """
    if device.type not in FUSED_ROUTER_DEVICES:
        return False
    if implementation == "auto":
        implementation = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if implementation not in ("auto", "triton", "gluon"):
        return False
    return triton_route.runs_on(device)[0]


def _name(call: AttentionCall) -> str:
    if call.implementation != "auto":
        return call.implementation
    return os.environ.get(ENVIRONMENT_VARIABLE) or "auto"


def _named(name: str, origin: str, call: AttentionCall, backward: bool) -> Implementation:
    entry = _registry.get(name)
    if entry is None:
        known = ", ".join(("auto", *_registry))
        raise ValueError(f"{origin}{name!r} is no implementation; known: {known}")
    ok, reason = entry.supports(call)
    if ok and backward and not entry.differentiable and not entry.backward:
        ok, reason = False, "it has no backward"
    if not ok:
        raise ValueError(
            f"{origin}{name!r} cannot serve this call: {reason}. A named implementation never "
            "falls back; use kernel='auto' to let another take over"
        )
    return entry


def _candidates(call: AttentionCall, backward: bool) -> Iterator[Implementation]:
    device = call.query.device.type
    for entry in _registry.values():
        if (not entry.devices or device in entry.devices) and (
            entry.differentiable or entry.backward or not backward
        ):
            yield entry


register("dense", "elastic_compile.kernels.dense", devices=("cpu",), special=True)
register("cpu", "elastic_compile.kernels.cpu", devices=("cpu",))
register(
    "sdpa",
    "elastic_compile.kernels.sdpa_cuda",
    devices=("cuda",),
    special=True,
    differentiable=False,
)
register(
    "gluon",
    "elastic_compile.kernels.gluon_prefill",
    devices=("cuda",),
    special=True,
    differentiable=False,
)
register(
    "triton",
    "elastic_compile.kernels.triton_prefill",
    devices=("cuda",),
    differentiable=False,
    backward="elastic_compile.kernels.triton_backward",
)
register("blocked", "elastic_compile.kernels.blocked", devices=("cuda",))
register("reference", "elastic_compile.kernels.reference")
