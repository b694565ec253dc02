"""``python -m elastic_compile.explain MODEL``: what the transform would do, without weights.

The model is built on the meta device from its configuration alone, so an 8B model takes seconds
and no memory. Sites are found and rewritten exactly as in ``transform``; what needs weights, the
self-check, is left out and shown as ``checked: no``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from elastic_compile._report import REWRITTEN, Report

EMBEDDED = "smollm2"
BY_DEVICE = "by device"


class ExplainError(ValueError):
    """A model or router that cannot be explained; the text says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would become of a model."""

    model: str
    """As the user named it."""
    cls: str
    """Class of the model."""
    report: Report
    """All attention sites; ``implementation`` of a rewritten one is left to the device."""
    routed_heads: int
    """Kv heads that get a route, over all rewritten sites."""
    router_parameters: int
    """Trainable parameters of all routers."""
    router: str | None
    """The router folder that was checked against the model."""
    config: dict[str, Any]
    """The configuration, the router's own where one was given."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for ``--json``."""
        values = dataclasses.asdict(self)
        values["sites"] = values.pop("report")["sites"]
        values["summary"] = self.report.summary()
        return values

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.cls}", "", str(self.report)]
        if self.routed_heads:
            sink, local = self.config["sink"], self.config["local"]
            lines.append(
                f"{self.routed_heads} kv heads get a route (sink {sink}, local {local}); "
                f"{self.router_parameters:,} router parameters"
            )
        if self.router is not None:
            lines.append(f"the router in {self.router} fits this model")
        return "\n".join(lines)


def explain(model: str, router: str | os.PathLike[str] | None = None) -> Explanation:
    """Find out what ``transform`` would do with a model, from its configuration.

    Args:
        model: A hub id, a local folder with a ``config.json``, or ``"smollm2"`` for the embedded
            model (``elastic_compile._embedded``).
        router: Folder of a trained router, checked against the model.

    Returns:
        The sites and what becomes of them.

    Raises:
        ExplainError: There is no such model, it is no causal language model, it cannot run
            without weights, or the router is not one of this model.
        EmbeddedModelError: ``"smollm2"`` without its package; the text says how to install it.
    """
    from elastic_compile import _api, _checkpoint, _state
    from elastic_compile.config import ElasticConfig

    config = ElasticConfig()
    try:
        if router is not None:
            config = _checkpoint.read_router_config(router)
        elif model == EMBEDDED:
            from elastic_compile import _embedded

            config = _embedded.CONFIG
        built = _build(model)
        try:
            _api.transform(built, config, allow_unrewritten=True)
        except Exception as error:
            raise ExplainError(
                f"{model}: {type(built).__name__} cannot be run without its weights, so its sites "
                f"cannot be found this way ({_first_line(error)}); load the model, then "
                "elastic_compile.transform(model) and print(elastic_compile.report(model))"
            ) from error
        if router is not None:
            # Memory for the routers alone: loading checks every name, shape and value.
            for _, site in _state.rewritten_sites(built):
                site.to_empty(device="cpu")
            _checkpoint.load_router(built, router)
    except (OSError, ValueError) as error:
        if isinstance(error, ExplainError):
            raise
        raise ExplainError(str(error)) from error
    report = _api.report(built)
    sites = tuple(
        dataclasses.replace(site, implementation=BY_DEVICE) if site.status == REWRITTEN else site
        for site in report.sites
    )
    return Explanation(
        model=model,
        cls=type(built).__name__,
        report=Report(sites),
        routed_heads=sum(site.kv_heads for site in report.rewritten),
        router_parameters=sum(p.numel() for p in _checkpoint.router_parameters(built)),
        router=None if router is None else os.fspath(router),
        config=config.to_dict(),
    )


def _build(name: str) -> torch.nn.Module:
    """The model on the meta device."""
    from transformers import AutoModelForCausalLM

    config = _read_config(name)
    try:
        with torch.device("meta"):
            # The dtype moves no site, but fp32 experts have no meta kernel.
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise ExplainError(f"{name}: {_first_line(error)}") from error
        raise ExplainError(
            f"{name} is no causal language model: transformers has no AutoModelForCausalLM for "
            f"{type(config).__name__}"
        ) from error
    except ImportError as error:
        raise ExplainError(f"{name}: {_first_line(error)}") from error
    return model.eval()


def _read_config(name: str) -> Any:
    from transformers import AutoConfig

    if name == EMBEDDED:
        from elastic_compile import _embedded

        return _embedded.load_config()
    if os.path.isdir(name):
        if not (Path(name) / "config.json").is_file():
            raise ExplainError(f"the folder {name} has no config.json, so it holds no model")
    elif os.path.exists(name):
        raise ExplainError(f"{name} is a file; give the model's folder or its hub id")
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:
        if os.path.isdir(name):
            raise ExplainError(f"{Path(name) / 'config.json'}: {_first_line(error)}") from error
        raise ExplainError(
            f"{name!r} is no folder here, and its configuration cannot be read from the Hugging "
            f"Face hub or its cache: {_first_line(error)}\n(offline, give a folder that holds the "
            f"model's config.json, or the word {EMBEDDED!r} for the embedded model)"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: Its arguments; None: those of the process.

    Returns:
        Exit status: 0, or 1 where no site can be rewritten, or 2 after an error.
    """
    from elastic_compile._embedded import EmbeddedModelError

    parser = argparse.ArgumentParser(
        prog="python -m elastic_compile.explain", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"hub id, folder with a config.json, or {EMBEDDED!r}"
    )
    parser.add_argument("--router", metavar="FOLDER", help="a trained router to check against it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    # What transformers tells of generation settings and missing parts is not about attention.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        explanation = explain(options.model, options.router)
    except (ExplainError, EmbeddedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(explanation.to_dict(), indent=2, ensure_ascii=False))
    else:
        print(explanation)
    return 0 if explanation.report.rewritten else 1


if __name__ == "__main__":
    sys.exit(main())
