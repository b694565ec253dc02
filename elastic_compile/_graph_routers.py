"""The routers of a model that ``torch.compile(model, backend="elastic")`` rewrites.

A compiler backend gets graphs, not the model, so the routers live beside it and are shared by all
of its graphs. They behave like a transformed model towards the functions that steer routes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from elastic_compile import _checkpoint, _dynamo, _state
from elastic_compile._report import REWRITTEN, Report, SiteReport
from elastic_compile._site import ElasticSite
from elastic_compile.config import ElasticConfig

_dynamo.announce(load=True)

ROUTER = "elastic_router"


class GraphRouters(nn.Module):
    """Routers of the graphs that the backend ``"elastic"`` rewrites, made as graphs arrive.

    Given as ``options={"router": GraphRouters(...)}`` it is shared by every graph compiled with it.
    ``report``, ``force_routes``, ``router_parameters``, ``save_router`` and ``load_router`` take it
    in place of a transformed model once a graph has been compiled. Weights are read at each call:
    loading or changing them compiles nothing.

    Args:
        config: Sink, window and router settings; None: the defaults, or the folder's own.
        router: Folder of a trained router (``save_router``); every site is looked up in it.

    Raises:
        FileNotFoundError: The folder or one of its files is absent.
        ValueError: The folder is damaged, or ``config`` and the folder disagree.
    """

    def __init__(
        self, config: ElasticConfig | None = None, router: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        if config is not None and not isinstance(config, ElasticConfig):
            raise TypeError(f"config must be an ElasticConfig, not {type(config).__name__}")
        self.folder = None if router is None else os.fspath(router)
        self._trained: dict[str, Tensor] = {}
        self._geometry: dict[str, tuple[int, int]] = {}
        if router is not None:
            trained, self._geometry, self._trained = _checkpoint.read_router(router)
            if config is not None:
                _checkpoint.require_same_config(config, trained, router)
            config = config or trained
        self._reports: dict[str, Report] = {}
        self._lock = threading.Lock()
        self.__dict__[_state.ATTRIBUTE] = _state.ElasticState(config or ElasticConfig(), Report(()))

    @property
    def config(self) -> ElasticConfig:
        """Settings of every router."""
        state: _state.ElasticState = self.__dict__[_state.ATTRIBUTE]
        return state.config

    @property
    def graphs(self) -> tuple[Report, ...]:
        """One report a compiled graph with attention in it, in the order of compilation."""
        return tuple(self._reports.values())

    def site(self, made: ElasticSite, path: str) -> ElasticSite:
        """The router of the attention at ``path``; ``made`` becomes it where there is none.

        Raises:
            ValueError: The router folder has no such site, or the site's geometry has changed.
        """
        name = f"{path}.{ROUTER}" if path else ROUTER
        geometry = (made.kv_heads, made.key_dim)
        with self._lock:
            try:
                known: Any = self.get_submodule(name)
            except AttributeError:
                known = None
            if isinstance(known, ElasticSite):
                if (known.kv_heads, known.key_dim, known.head_dim) != (*geometry, made.head_dim):
                    raise ValueError(
                        f"{path}: these routers are of another model ({known.kv_heads} kv heads of "
                        f"size {known.key_dim}, here {geometry[0]} of size {geometry[1]}); use one "
                        "GraphRouters a model"
                    )
                return known
            if self.folder is not None:
                self._fill(made, path, geometry)
            parent: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(ROUTER, made)
            for index, (_, site) in enumerate(_state.rewritten_sites(self)):
                site.index = index
            return made

    def _fill(self, site: ElasticSite, path: str, geometry: tuple[int, int]) -> None:
        if self._geometry.get(path) != geometry:
            has = ", ".join(list(self._geometry)[:3])
            raise ValueError(
                f"the router in {self.folder} has no site {path!r} with {geometry[0]} kv heads of "
                f"size {geometry[1]} (it has {has}, …): compile the model that it was trained for, "
                "not a module around or inside it"
            )
        with torch.no_grad():
            for name, parameter in site.named_parameters():
                parameter.copy_(self._trained[f"{path}.{ROUTER}.{name}"])

    def add_report(self, graph: str, report: Report) -> None:
        """Keep the report of a graph. ``graph`` names it: the backend may see a graph twice."""
        with self._lock:
            self._reports[graph] = report
            state: _state.ElasticState = self.__dict__[_state.ATTRIBUTE]
            state.report = self._merged()

    def _merged(self) -> Report:
        """All graphs as one report: every distinct outcome of a site once, the rewritten first."""
        rows: dict[tuple[str, str, str], SiteReport] = {}
        for report in self._reports.values():
            for row in report.sites:
                rows.setdefault((row.path, row.status, row.reason), row)
        rewritten = [row for row in rows.values() if row.status == REWRITTEN]
        return Report((*rewritten, *(row for row in rows.values() if row.status != REWRITTEN)))


_OF_PARAMETER = WeakIdKeyDictionary()
"""Parameter of a model -> {settings: the routers that the backend made for its graphs}."""


def routers_of(parameters: Sequence[Tensor], settings: Any, make: Any) -> GraphRouters:
    """The routers of the model that ``parameters`` belong to, made on first sight."""
    for parameter in parameters:
        found = _OF_PARAMETER.get(parameter, {}).get(settings)
        if found is not None:
            break
    else:
        found = make()
    for parameter in parameters:
        _OF_PARAMETER.setdefault(parameter, {})[settings] = found
    assert isinstance(found, GraphRouters)
    return found


def graph_routers(model: nn.Module) -> GraphRouters:
    """The routers that ``torch.compile(model, backend="elastic")`` made for ``model``.

    Args:
        model: A compiled model, or the model inside, after its first compiled call.

    Returns:
        The newest, where the model was compiled with several settings.

    Raises:
        ValueError: No graph of the model has been compiled by the backend.
    """
    for parameter in model.parameters():
        known = list(_OF_PARAMETER.get(parameter, {}).values())
        if known:
            found: GraphRouters = known[-1]
            return found
    raise ValueError(
        f"no graph of this {type(getattr(model, '_orig_mod', model)).__name__} was compiled by the "
        'backend "elastic" yet: call torch.compile(model, backend="elastic") and run it once'
    )
