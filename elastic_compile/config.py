"""The configuration of a transformed model: strict, versioned and saved as JSON."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elastic_compile._files import dump_json, parse_json, read_json, write_atomic

CONFIG_VERSION = 1
"""Version of the field set below; raised when a field is added, removed or changes meaning."""

FULL_MODES = ("fa",)
SPARSE_MODES = ("ssa",)
REROUTE_MODES = ("first", "each_call")
KERNELS = ("auto", "reference", "cpu", "blocked", "triton", "gluon")

# The paper's other modes: known names, so that they fail as unavailable and not as a typo.
_RESERVED = {"full": ("xa",), "sparse": ("xa", "topk")}

FullMode = Literal["fa"]
SparseMode = Literal["ssa"]
Reroute = Literal["first", "each_call"]


@dataclass(frozen=True)
class ElasticConfig:
    """What a head of each class computes and how heads are routed.

    Immutable and hashable; every field is checked on construction. Defaults are those of Elastic
    Attention (arXiv 2601.17367), in the configuration it calls FA-SSA. Lengths are in tokens.
    Change a field with ``dataclasses.replace``.

    Raises:
        ValueError: A field has a value that is not allowed, or two fields contradict each other.
        TypeError: A field has the wrong type.
    """

    full: FullMode = "fa"
    """Attention of heads routed to class 0. ``"fa"``: causal full attention."""

    sparse: SparseMode = "ssa"
    """Attention of heads routed to class 1. ``"ssa"``: sink tokens and a local window."""

    sink: int = 128
    """First real tokens of a sequence that every query of a streaming head sees; at least 1."""

    local: int = 2048
    """Newest tokens, its own included, that a query of a streaming head sees; at least 1."""

    block_size: int = 64
    """Edge of a block in block-sparse modes; a power of two from 16 to 256. Streaming heads are
    exact to the token and do not use it."""

    pool_tokens: int = 100
    """Real tokens at each end of the prompt whose mean the router sees; at least 1."""

    hidden_multiplier: int = 4
    """Hidden width of both router MLPs in head sizes; at least 1. Fixed once trained."""

    reroute: Reroute = "first"
    """When routes are decided. ``"first"``: by the first call with several tokens, as in the
    paper. ``"each_call"``: again by every call with several tokens (chunked prefill, a new
    question to a cached document, a further chat turn)."""

    route_bias: float = 0.0
    """Added to every sparse logit; finite. Above 0 more heads are sparse, below 0 fewer."""

    kernel: str = "auto"
    """Implementation of the attention operator. ``"auto"`` picks one for the device and inputs;
    any other name is used always, or the call fails."""

    version: int = CONFIG_VERSION
    """Version of this field set."""

    def __post_init__(self) -> None:
        _check_version(self.version)
        if str(self.full) == str(self.sparse):
            raise ValueError(
                f"ElasticConfig.full and ElasticConfig.sparse are both {self.full!r}, so routing "
                f"would change nothing; allowed: full in {FULL_MODES}, sparse in {SPARSE_MODES}"
            )
        _check_choice("full", self.full, FULL_MODES)
        _check_choice("sparse", self.sparse, SPARSE_MODES)
        _check_choice("reroute", self.reroute, REROUTE_MODES)
        _check_choice("kernel", self.kernel, KERNELS)
        for name in ("sink", "local", "pool_tokens", "hidden_multiplier", "block_size"):
            _check_positive(name, getattr(self, name))
        if not 16 <= self.block_size <= 256 or self.block_size & (self.block_size - 1):
            raise ValueError(
                f"ElasticConfig.block_size is {self.block_size}; allowed: 16, 32, 64, 128, 256"
            )
        object.__setattr__(self, "route_bias", _finite("route_bias", self.route_bias))

    def differences(self, other: "ElasticConfig") -> dict[str, tuple[Any, Any]]:
        """Fields in which two configurations differ.

        Args:
            other: The configuration to compare with.

        Returns:
            Field name to (value here, value in ``other``), in field order; empty when equal.
        """
        pairs = {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def to_dict(self) -> dict[str, Any]:
        """All fields, the version included, as plain values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """All fields, the version included, as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration to a JSON file, whole or not at all.

        Args:
            path: Target file; an existing one is replaced.
        """
        write_atomic(path, dump_json(self.to_dict()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ElasticConfig":
        """Rebuild a configuration from ``to_dict``.

        Args:
            data: Every field, and nothing else: a default filled in for a forgotten field would
                change what a trained router computes.

        Returns:
            The configuration.

        Raises:
            ValueError: A field is unknown, missing or not allowed, or the version is not one this
                release reads.
            TypeError: ``data`` is no mapping or a field has the wrong type.
        """
        if not isinstance(data, Mapping):
            raise TypeError(
                f"an ElasticConfig is read from a mapping of its fields, not {type(data).__name__}"
            )
        # A newer version may have fields unknown here: that is the cause to name.
        if "version" in data:
            _check_version(data["version"])
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(str(name) for name in data if name not in names)
        if unknown:
            raise ValueError(
                f"unknown ElasticConfig field {', '.join(map(repr, unknown))}; "
                f"allowed: {', '.join(names)}"
            )
        missing = [name for name in names if name not in data]
        if missing:
            raise ValueError(
                f"missing ElasticConfig field {', '.join(map(repr, missing))}; a saved "
                "configuration holds every field (ElasticConfig(...) fills in defaults)"
            )
        return cls(**data)

    @classmethod
    def from_json(cls, text: str) -> "ElasticConfig":
        """Rebuild a configuration from ``to_json``.

        Args:
            text: A JSON object of every field.

        Returns:
            The configuration.

        Raises:
            ValueError: The text is not JSON, or as in ``from_dict``.
            TypeError: As in ``from_dict``.
        """
        return cls.from_dict(parse_json(text, "ElasticConfig"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ElasticConfig":
        """Read a file written by ``save``.

        Args:
            path: A JSON file.

        Returns:
            The configuration.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: As in ``from_json``.
            TypeError: As in ``from_dict``.
        """
        return cls.from_dict(read_json(path))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_version(version: object) -> None:
    if not _is_int(version):
        raise TypeError(f"ElasticConfig.version must be an int, not {version!r}")
    assert isinstance(version, int)
    if version > CONFIG_VERSION:
        raise ValueError(
            f"ElasticConfig.version is {version}, written by a newer elastic_compile; this one "
            f"reads version {CONFIG_VERSION}: upgrade elastic_compile"
        )
    if version != CONFIG_VERSION:
        raise ValueError(f"ElasticConfig.version is {version}; allowed: {CONFIG_VERSION}")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    choices = ", ".join(map(repr, allowed))
    if not isinstance(value, str):
        raise TypeError(f"ElasticConfig.{name} must be a string, not {value!r}; allowed: {choices}")
    if value in _RESERVED.get(name, ()):
        raise ValueError(
            f"ElasticConfig.{name} = {value!r} is not available in this version; allowed: {choices}"
        )
    if value not in allowed:
        raise ValueError(f"ElasticConfig.{name} is {value!r}; allowed: {choices}")


def _check_positive(name: str, value: object) -> None:
    if not _is_int(value):
        raise TypeError(f"ElasticConfig.{name} must be an int, not {value!r}")
    assert isinstance(value, int)
    if value < 1:
        raise ValueError(f"ElasticConfig.{name} is {value}; allowed: 1 or more")


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"ElasticConfig.{name} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"ElasticConfig.{name} is {value}; allowed: a finite number")
    return float(value)
