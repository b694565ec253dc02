"""The Dynamo backend ``"elastic"``: ``torch.compile(model, backend="elastic", options={…})``.

It rewrites a copy of the graph that Dynamo captured and hands it to an inner backend. It keeps no
state of its own and may be called twice for one graph, as Dynamo does when an inner backend asks
for a restart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode

from elastic_compile._graph_routers import GraphRouters, routers_of
from elastic_compile._site import ElasticSite
from elastic_compile.config import ElasticConfig
from elastic_compile.passes.frontends import report_of
from elastic_compile.passes.rewrite import ElasticAttentionPass, PassResult

logger = logging.getLogger("elastic_compile")

OPTIONS = ("config", "inner", "router")


def elastic(
    graph_module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Rewrite the attention of a Dynamo graph, then compile it with an inner backend.

    Without a trained router every head is full: the model computes what it computed. Attention
    that continues a KV cache (decode) stays as it is, with the reason in the report.

    Args:
        graph_module: Dynamo's graph, which is not changed.
        example_inputs: Its inputs.
        options: ``inner``: name or function of the backend that compiles the rewritten graph
            (default ``"inductor"``). ``router``: folder of a trained router, or a
            :class:`elastic_compile.GraphRouters`. ``config``: an ``ElasticConfig`` or a dict of
            its fields; not beside a ``GraphRouters``, which has its own.

    Returns:
        The compiled function.

    Raises:
        ValueError: An unknown option, or a router that does not fit.
        TypeError: An option of the wrong type.
    """
    if unknown:
        raise ValueError(
            f"backend 'elastic' takes no {', '.join(sorted(unknown))}; what is meant for another "
            "backend goes into it: options={'inner': functools.partial(...)}"
        )
    inner, routers = _settings(dict(options or {}), example_inputs)
    module = _copy(graph_module)
    transformation = ElasticAttentionPass(config=routers.config)
    transformation(module)
    result: PassResult = module.meta.pop("elastic_compile")
    if not result.sites:
        return inner(graph_module, example_inputs)
    report = report_of(result, _device(example_inputs), checked=False)
    routers.add_report(_name(graph_module, result), report)
    logger.info("%s of %s attentions of a graph rewritten", result.rewritten, len(result.sites))
    if not result.rewritten:
        return inner(graph_module, example_inputs)
    live = _lift_routers(module, routers)
    tensors = [read() for read in live]
    mode = detect_fake_mode([n.meta.get("example_value") for n in module.graph.nodes])
    placeholders = module.graph.find_nodes(op="placeholder")[-len(live) :]
    for node, tensor in zip(placeholders, tensors, strict=True):
        fake = tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
        node.meta["example_value"] = fake
    module.graph.lint()
    module.recompile()
    compiled = inner(module, [*example_inputs, *tensors])

    def call(*args: Any) -> Any:
        return compiled(*args, *(read() for read in live))

    return call


def _settings(options: dict[str, Any], example_inputs: list[Any]) -> tuple[Any, GraphRouters]:
    wrong = sorted(set(options) - set(OPTIONS))
    if wrong:
        raise ValueError(
            f"unknown option {', '.join(map(repr, wrong))} of backend 'elastic'; it has "
            f"{', '.join(OPTIONS)}"
        )
    inner = options.get("inner", "inductor")
    if not isinstance(inner, str) and not callable(inner):
        raise TypeError(f"options['inner'] is a backend's name or function, not {inner!r}")
    if inner == "elastic" or inner is elastic:
        raise ValueError("options['inner'] cannot be 'elastic' itself")
    config = options.get("config")
    if isinstance(config, Mapping):
        config = ElasticConfig(**config)
    if config is not None and not isinstance(config, ElasticConfig):
        raise TypeError(f"options['config'] is an ElasticConfig or a dict, not {config!r}")
    router = options.get("router")
    if isinstance(router, GraphRouters):
        if config is not None and config != router.config:
            raise ValueError("options['config'] and the configuration of options['router'] differ")
        # So that it is found by the model too.
        parameters = [x for x in example_inputs if isinstance(x, nn.Parameter)]
        routers = routers_of(parameters, router, lambda: router)
    elif router is None or isinstance(router, (str, os.PathLike)):
        folder = None if router is None else os.path.abspath(router)
        parameters = [x for x in example_inputs if isinstance(x, nn.Parameter)]
        routers = routers_of(parameters, (folder, config), lambda: GraphRouters(config, folder))
    else:
        raise TypeError(
            f"options['router'] is a router folder or a GraphRouters, not {type(router).__name__}"
        )
    return lookup_backend(inner), routers


def _copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph with what backends read beside it; modules are shared."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(graph_module.graph, mapping)
    end = next(iter(graph_module.graph.find_nodes(op="output")))
    graph.output(output).meta.update(end.meta)
    for old, new in mapping.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied = fx.GraphModule(graph_module, graph)
    copied.meta = dict(graph_module.meta)
    for name, value in vars(graph_module).items():
        if name not in vars(copied):
            copied.__dict__[name] = value
    return copied


def _name(graph_module: fx.GraphModule, result: PassResult) -> str:
    """The same for the same graph, so that a second call of the backend counts once."""
    shapes = [
        str(node.meta.get("example_value", "")) if node.op == "placeholder" else ""
        for node in graph_module.graph.nodes
    ]
    text = json.dumps([str(graph_module.graph), shapes, repr(result)])
    return hashlib.sha256(text.encode()).hexdigest()


def _device(example_inputs: list[Any]) -> torch.device:
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


class _Live:
    """A site whose tensors are given with each call; everything else is the site's own."""

    def __init__(self, site: ElasticSite, tensors: tuple[Tensor, ...], names: tuple[str, ...]):
        self.routed_for = site
        self.tensors = dict(zip(names, tensors, strict=True))
        self.forced = self.tensors["forced"]
        self.route_bias = self.tensors["route_bias"]
        self.relaxation = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.routed_for, name)

    def __call__(self, pooled: Tensor) -> Tensor:
        x = pooled.to(self.tensors["task.0.weight"].dtype)
        for part in ("task", "router"):
            for name, module in getattr(self.routed_for, part).named_children():
                if isinstance(module, nn.Linear):
                    key = f"{part}.{name}"
                    x = F.linear(x, self.tensors[f"{key}.weight"], self.tensors[f"{key}.bias"])
                else:
                    x = module(x)
        return x


class _WithRouter:
    """A run-time function of a site as a function of the site's tensors."""

    def __init__(self, function: Callable[..., Any], site: ElasticSite, names: tuple[str, ...]):
        self.function, self.site, self.names = function, site, names
        # What FX prints and looks up.
        self.__name__ = self.__qualname__ = f"elastic_{function.__name__}"
        self.__module__ = __name__

    def __call__(self, tensors: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        return self.function(_Live(self.site, tuple(tensors), self.names), *args, **kwargs)


def _tensor(site: ElasticSite, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if name == "route_bias":
            return torch.tensor(site.route_bias, device=site.forced.device)
        if name == "forced":
            if site.forced.shape[0] != 1:
                raise ValueError(
                    "under backend 'elastic' routes are forced for all samples alike, [layers, kv "
                    "heads]; elastic_compile.transform(model) takes them per sample"
                )
            return site.forced
        return site.get_parameter(name).detach()

    return read


def _lift_routers(module: fx.GraphModule, routers: GraphRouters) -> list[Callable[[], Tensor]]:
    """Turn the graph's router modules into inputs. Returns what reads them at each call."""
    graph = module.graph
    readers: list[Callable[[], Tensor]] = []
    found = [(_submodule(module, str(n.target)), n) for n in graph.find_nodes(op="get_attr")]
    sites = [(made, node) for made, node in found if isinstance(made, ElasticSite)]
    # In the order of the layers, which is that of a transformed model's routers.
    for made, node in sorted(sites, key=lambda pair: pair[0].index):
        site = routers.site(made, str(node.target).rpartition(".")[0])
        names = (*(name for name, _ in made.named_parameters()), "forced", "route_bias")
        inputs = []
        for name in names:
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                new = graph.placeholder(f"{node.target}.{name}".replace(".", "_"))
            new._dynamo_source = ConstantSource(source_name=f"elastic_{new.name}")
            if "." in name:
                # A parameter stays where it is: CUDA graphs need not copy it.
                new.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            inputs.append(new)
            readers.append(_tensor(site, name))
        for user in list(node.users):
            user.target = _WithRouter(user.target, site, names)
            user.args = (tuple(inputs), *user.args[1:])
        graph.erase_node(node)
        module.delete_submodule(str(node.target))
    return readers


def _submodule(module: fx.GraphModule, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
