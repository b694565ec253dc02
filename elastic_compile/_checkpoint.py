"""Router folders: trained routers and the configuration they were trained for.

A folder holds ``elastic_config.json`` and the weights file it names. The JSON is written last and
names the weights by their hash, so an interrupted save leaves the previous router in force.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as dump_safetensors
from torch import Tensor, nn

from elastic_compile import _state
from elastic_compile._files import dump_json, read_json, write_atomic
from elastic_compile._version import __version__
from elastic_compile.config import ElasticConfig
from elastic_compile.router import AttentionRouter

CONFIG_FILE = "elastic_config.json"
FORMAT_VERSION = 1
LIBRARY = "elastic_compile"

_FIELDS = (
    "library",
    "library_version",
    "format_version",
    "base_model",
    "geometry",
    "config",
    "weights",
    "sha256",
)
_SITE_FIELDS = ("site", "kv_heads", "head_dim")
_WEIGHTS_PATTERN = "router-*.safetensors"
# Wrappers put these into module paths; a router belongs to the model inside.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEFT_PREFIX = "base_model.model."


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all routers: what training updates.

    Args:
        model: A transformed model.

    Returns:
        The live parameters, in module order of the sites.

    Raises:
        ValueError: The model is not transformed.
    """
    return [
        parameter
        for _, site in _state.rewritten_sites(model)
        for _, parameter in _named_parameters(site)
    ]


def save_router(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save all routers of a model and its configuration to a folder.

    Nothing of the backbone is saved, nor the ``kernel`` setting, which belongs to the machine.
    Files appear whole or not at all: if the call is interrupted, the folder still loads as it did
    before.

    Args:
        model: A transformed model with at least one rewritten site.
        folder: Made if absent; a router already there is replaced, other files stay.

    Raises:
        ValueError: The model is not transformed, has no rewritten site or has routers on the meta
            device.
        NotADirectoryError: ``folder`` is a file.
    """
    sites = _sites(model)
    tensors = {
        f"{path}.elastic_router.{name}": parameter.detach().cpu().contiguous().clone()
        for path, site in sites.items()
        for name, parameter in _materialised(path, site)
    }
    weights = dump_safetensors(tensors, metadata={"format": "pt"})
    digest = hashlib.sha256(weights).hexdigest()
    name = _WEIGHTS_PATTERN.replace("*", digest[:16])
    state = _state.get_state(model)
    document = {
        "library": LIBRARY,
        "library_version": __version__,
        "format_version": FORMAT_VERSION,
        "base_model": _model_name(model),
        "geometry": _geometry(sites),
        # The kernel is the machine's choice: a folder trained on a GPU must load on a laptop.
        "config": dataclasses.replace(state.config, kernel="auto").to_dict(),
        "weights": name,
        "sha256": digest,
    }
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; a router is saved to a folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / name, weights)
    write_atomic(folder / CONFIG_FILE, dump_json(document))
    for old in folder.glob(_WEIGHTS_PATTERN):
        if old.name != name:
            old.unlink()


def load_router(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load routers saved by ``save_router`` into a transformed model.

    Values are copied into the parameters that are there, cast to their dtype and device: a
    compiled model uses them from its next call on and compiles nothing. The folder is checked
    whole first; on any error the model is unchanged.

    Args:
        model: A model transformed with the folder's configuration; only ``kernel`` may differ.
        folder: A router folder.

    Raises:
        FileNotFoundError: The folder or one of its files is absent.
        ValueError: The model is not transformed, or has other sites or another configuration than
            the routers were trained for; or the folder is damaged, incomplete or written by a
            newer version. The message says which and what to do.
    """
    folder = Path(folder)
    document, config = _read_document(folder)
    sites = _sites(model)
    _check_config(_state.get_state(model).config, config, folder)
    _check_geometry(sites, document, folder)
    tensors = _read_weights(folder, document)
    parameters = {
        f"{path}.elastic_router.{name}": parameter
        for path, site in sites.items()
        for name, parameter in _materialised(path, site)
    }
    _check_tensors(parameters, tensors, folder)
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])


def read_router_config(folder: str | os.PathLike[str]) -> ElasticConfig:
    """The configuration a router was trained for, to transform a model with.

    Args:
        folder: A router folder.

    Returns:
        Its configuration.

    Raises:
        FileNotFoundError: The folder or its ``elastic_config.json`` is absent.
        ValueError: The file is damaged, incomplete or written by a newer version.
    """
    return _read_document(Path(folder))[1]


def read_router(
    folder: str | os.PathLike[str],
) -> tuple[ElasticConfig, dict[str, tuple[int, int]], dict[str, Tensor]]:
    """All of a router folder, checked.

    Args:
        folder: A router folder.

    Returns:
        Its configuration; (kv heads, head size) of every site; the tensors by name.

    Raises:
        FileNotFoundError: The folder or one of its files is absent.
        ValueError: The folder is damaged, incomplete or written by a newer version.
    """
    folder = Path(folder)
    document, config = _read_document(folder)
    geometry = {s["site"]: (s["kv_heads"], s["head_dim"]) for s in document["geometry"]}
    return config, geometry, _read_weights(folder, document)


def require_same_config(
    config: ElasticConfig, trained: ElasticConfig, folder: str | os.PathLike[str]
) -> None:
    """Refuse a configuration that the router in ``folder`` was not trained for.

    Raises:
        ValueError: They differ in more than ``kernel``, which is the machine's choice.
    """
    trained = dataclasses.replace(trained, kernel=config.kernel)
    differences = config.differences(trained)
    if differences:
        pairs = ", ".join(
            f"{name} {ours!r} (the router: {theirs!r})"
            for name, (ours, theirs) in differences.items()
        )
        raise ValueError(
            f"config and the router in {os.fspath(folder)!r} disagree: {pairs}; leave config out "
            "to use the router's own"
        )


def _named_parameters(site: AttentionRouter) -> list[tuple[str, nn.Parameter]]:
    """What belongs to the router itself, not to what training hangs onto a site."""
    return [
        (name, parameter)
        for name, parameter in site.named_parameters()
        if "." not in name or name.split(".")[0] in ("task", "router")
    ]


def _materialised(path: str, site: AttentionRouter) -> list[tuple[str, nn.Parameter]]:
    parameters = _named_parameters(site)
    if any(parameter.is_meta for _, parameter in parameters):
        raise ValueError(
            f"the router of {path} is on the meta device and has no values; give the model memory "
            "first (for instance model.to_empty(device=...)), then save or load routers"
        )
    return parameters


def _sites(model: nn.Module) -> dict[str, AttentionRouter]:
    sites: dict[str, AttentionRouter] = {
        _canonical(path): site for path, site in _state.rewritten_sites(model)
    }
    if not sites:
        raise ValueError(
            "the model has no rewritten attention site, so no router; elastic_compile.report(model)"
            " says why each site was left alone"
        )
    return sites


def _canonical(path: str) -> str:
    """A module's path as in the bare model."""
    path = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
    return path.removeprefix(_PEFT_PREFIX)


def _geometry(sites: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"site": path, "kv_heads": site.kv_heads * site.shards, "head_dim": site.head_dim}
        for path, site in sites.items()
    ]


def _model_name(model: nn.Module) -> str:
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    # A local folder says nothing elsewhere, and may say too much.
    return Path(name).name if os.path.isdir(name) else name


def _read_document(folder: Path) -> tuple[dict[str, Any], ElasticConfig]:
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise FileNotFoundError(f"no router folder {folder}")
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG_FILE}: not a router folder, or a save that never finished"
        )
    document = read_json(path)
    if not isinstance(document, dict) or document.get("library") != LIBRARY:
        raise ValueError(f"{path}: not written by {LIBRARY}")
    version = document.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"{path}: format_version is {version!r}; allowed: {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {version}, written by {LIBRARY} "
            f"{document.get('library_version')}; this is {__version__} and reads up to version "
            f"{FORMAT_VERSION}: upgrade {LIBRARY}"
        )
    _check_keys(path, "key", document, _FIELDS)
    for name in ("library_version", "base_model", "weights", "sha256"):
        if not isinstance(document[name], str):
            raise ValueError(f"{path}: {name} must be a string, not {document[name]!r}")
    # A path would let a folder from elsewhere read any file.
    if Path(document["weights"]).name != document["weights"]:
        raise ValueError(f"{path}: weights must be a file name, not {document['weights']!r}")
    geometry = document["geometry"]
    if not isinstance(geometry, list) or not all(isinstance(site, dict) for site in geometry):
        raise ValueError(f"{path}: geometry must be a list of sites")
    for site in geometry:
        _check_keys(path, "geometry key", site, _SITE_FIELDS)
    try:
        config = ElasticConfig.from_dict(document["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return document, config


def _check_keys(path: Path, what: str, found: dict[str, Any], expected: tuple[str, ...]) -> None:
    for problem, names in (
        ("unknown", [name for name in found if name not in expected]),
        ("missing", [name for name in expected if name not in found]),
    ):
        if names:
            raise ValueError(f"{path}: {problem} {what} {', '.join(map(repr, names))}")


def _check_config(mine: ElasticConfig, theirs: ElasticConfig, folder: Path) -> None:
    # Not saved, see save_router.
    fields = {k: pair for k, pair in mine.differences(theirs).items() if k != "kernel"}
    if fields:
        conflicts = ", ".join(
            f"{k} {a!r} in the model, {b!r} there" for k, (a, b) in fields.items()
        )
        raise ValueError(
            f"the router in {folder} is for another configuration: {conflicts}. Transform the "
            "model with the router's: elastic_compile.transform(model, router=folder)"
        )


def _check_geometry(
    sites: Mapping[str, AttentionRouter], document: dict[str, Any], folder: Path
) -> None:
    mine, theirs = _geometry(sites), document["geometry"]
    if mine == theirs:
        return
    base = document["base_model"] or "an unnamed model"
    start = f"the router in {folder} was trained on {base} and does not fit this model: "
    if len(mine) != len(theirs):
        raise ValueError(f"{start}{len(theirs)} sites there, {len(mine)} rewritten here")
    here, there = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
    raise ValueError(f"{start}site {_describe(there)} there is {_describe(here)} here")


def _describe(site: dict[str, Any]) -> str:
    return f"{site['site']} ({site['kv_heads']} kv heads of size {site['head_dim']})"


def _read_weights(folder: Path, document: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / document["weights"]
    if not path.is_file():
        raise FileNotFoundError(f"{folder} lacks {path.name}, which its {CONFIG_FILE} names")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != document["sha256"]:
        raise ValueError(
            f"{path}: damaged or truncated ({len(data)} bytes; the hash is not the one in "
            f"{CONFIG_FILE}); copy or save the router again"
        )
    try:
        return load_safetensors(data)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from None


def _check_tensors(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    for problem, names in (
        ("unknown", sorted(tensors.keys() - parameters.keys())),
        ("missing", sorted(parameters.keys() - tensors.keys())),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise ValueError(f"the router in {folder} has {problem} tensors: {shown}")
    for key, parameter in parameters.items():
        tensor = tensors[key]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"the router in {folder}: {key} has shape {tuple(tensor.shape)}, this model's has "
                f"{tuple(parameter.shape)}"
            )
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ValueError(
                f"the router in {folder}: {key} has values that are not finite numbers"
            )
