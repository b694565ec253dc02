"""When a site's router runs as one fused operator, and the call of it.

The operator computes what ``boundary_pool``, the router's modules and ``decide`` compute, without
calling the modules: it serves a site only while they are what they were made as and nobody
listens to them. Everything here can be traced, and nothing reads a tensor's value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from elastic_compile._site import ElasticSite
from elastic_compile.kernels import ops

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TASK = (nn.Linear, nn.SiLU, nn.Linear)
_ROUTER = (nn.Linear, nn.SiLU, nn.Linear, nn.SiLU, nn.Linear)


def serves(site: ElasticSite, tap: Tensor, key_mask: Tensor | None, end: Tensor | None) -> bool:
    """Whether the fused operator gives what the site's own modules would.

    Args:
        site: The site's router.
        tap: Key hidden states before rotary embedding, [B, H, S, D].
        key_mask: bool [B, S], True = real, or None.
        end: Exclusive column up to which the router may look, int [B], or None.
    """
    # Under torch.compile(backend="elastic") a site is not the module itself.
    if type(site) is not ElasticSite or site.relaxation is not None or site.reroute != "first":
        return False
    device = tap.device
    if type(tap) is not Tensor or tap.dtype not in _DTYPES or not _fuses(device, site.kernel):
        return False
    for tensor in (key_mask, end, site.forced):
        if tensor is not None and (type(tensor) is not Tensor or tensor.device != device):
            return False
    return isinstance(site.route_bias, float | int) and _is_plain(site, tap)


def decide(site: ElasticSite, tap: Tensor, key_mask: Tensor | None, end: Tensor | None) -> Tensor:
    """Routes of a call that the operator serves, forced ones included: int32 [B, H]."""
    task, router = site.task, site.router
    linears = (task[0], task[2], router[0], router[2], router[4])
    return ops.route(
        tap,
        [tensor for linear in linears for tensor in (linear.weight, linear.bias)],  # type: ignore[misc]
        site.forced,
        key_mask=key_mask,
        end=end,
        pool_tokens=site.pool_tokens,
        route_bias=site.route_bias,
    )


# Asked once a trace, and then for real: Dynamo would follow the questions to the driver and the
# environment, and some releases call every trace an export.
@torch.compiler.assume_constant_result
def _fuses(device: torch.device, kernel: str) -> bool:
    # An exported program is not for this machine alone.
    return not torch.compiler.is_exporting() and ops.fuses_routes(device, kernel)


def _is_plain(site: ElasticSite, tap: Tensor) -> bool:
    """Whether the modules are those of an ``AttentionRouter``, with weights the operator reads."""
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return False
    if not _unobserved(site):
        return False
    size = tap.shape[3]
    hidden = site.hidden_multiplier * size
    weight_shapes = ((hidden, size), (size, hidden), (hidden, size), (size, hidden), (2, size))
    dtype = None
    index = 0
    for part, kinds in ((site.task, _TASK), (site.router, _ROUTER)):
        if type(part) is not nn.Sequential or len(part) != len(kinds) or not _unobserved(part):
            return False
        for place, kind in enumerate(kinds):
            layer = part[place]
            if type(layer) is not kind or not _unobserved(layer):
                return False
            if kind is not nn.Linear:
                continue
            weight, bias = layer.weight, layer.bias
            dtype = dtype or weight.dtype
            for tensor, shape in ((weight, weight_shapes[index]), (bias, weight_shapes[index][:1])):
                # Not a subclass (quantised, distributed), nor a weight kept elsewhere (offloaded).
                if type(tensor) is not nn.Parameter and type(tensor) is not Tensor:
                    return False
                if tensor.dtype != dtype or dtype not in _DTYPES or tensor.device != tap.device:
                    return False
                if tensor.shape != shape:
                    return False
            index += 1
    return True


def _unobserved(module: nn.Module) -> bool:
    """Whether calling a module runs its class's ``forward`` and nothing else."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and "forward" not in module.__dict__
