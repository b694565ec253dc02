"""Routed full and streaming attention for Hugging Face decoders, as a compiler pass.

``transform`` rewrites the attention sites of a model in place so that every key-value head runs
full or streaming attention as a small router decides from the prompt (Elastic Attention,
arXiv 2601.17367). Importing this package registers the ``elastic_compile`` torch operators,
which packages built with AOTInductor need before they are loaded; it needs neither Triton nor a
GPU. Everything else is imported on first use.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_compile._version import __version__

# In a checkout `passes`, `kernels` and `training` lie beside this folder, and `kernels` has no
# `__init__.py` (an unrelated distribution owns that top-level name), so an editable install
# cannot find it. In a wheel this does nothing. Not resolved: a strict editable install is links.
_here = Path(__file__).parent
if not (_here / "passes").is_dir() and (_here.parent / "passes").is_dir():
    __path__.append(str(_here.parent))
del _here

if TYPE_CHECKING:
    from elastic_compile._api import (
        counters,
        force_routes,
        is_transformed,
        last_routes,
        report,
        restore,
        route_length,
        sparsity,
        transform,
    )
    from elastic_compile._checkpoint import load_router, router_parameters, save_router
    from elastic_compile._graph_routers import GraphRouters, graph_routers
    from elastic_compile.config import ElasticConfig

_EXPORTS = {
    "ElasticConfig": "elastic_compile.config",
    "GraphRouters": "elastic_compile._graph_routers",
    "counters": "elastic_compile._api",
    "force_routes": "elastic_compile._api",
    "graph_routers": "elastic_compile._graph_routers",
    "is_transformed": "elastic_compile._api",
    "last_routes": "elastic_compile._api",
    "load_router": "elastic_compile._checkpoint",
    "report": "elastic_compile._api",
    "restore": "elastic_compile._api",
    "route_length": "elastic_compile._api",
    "router_parameters": "elastic_compile._checkpoint",
    "save_router": "elastic_compile._checkpoint",
    "sparsity": "elastic_compile._api",
    "transform": "elastic_compile._api",
}

__all__ = [
    "ElasticConfig",
    "GraphRouters",
    "__version__",
    "counters",
    "force_routes",
    "graph_routers",
    "is_transformed",
    "last_routes",
    "load_router",
    "report",
    "restore",
    "route_length",
    "router_parameters",
    "save_router",
    "sparsity",
    "transform",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


# Registers the operators: a loaded AOTInductor package or exported program calls them by name.
importlib.import_module("elastic_compile.kernels.ops")
# In an installed package an entry point does this.
importlib.import_module("elastic_compile._dynamo").announce()
