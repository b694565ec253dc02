"""The configuration refuses what it does not mean, and its JSON says all it means."""

import ast
import dataclasses
import inspect
import itertools
import json
import math

import pytest

from elastic_compile import config as config_module
from elastic_compile.config import CONFIG_VERSION, ElasticConfig

NOT_DEFAULT = ElasticConfig(
    sink=16,
    local=256,
    block_size=128,
    pool_tokens=50,
    hidden_multiplier=6,
    reroute="each_call",
    route_bias=-0.1,
    kernel="cpu",
)


@pytest.mark.smoke
def test_defaults_are_the_papers():
    assert ElasticConfig().to_dict() == {
        "full": "fa",
        "sparse": "ssa",
        "sink": 128,
        "local": 2048,
        "block_size": 64,
        "pool_tokens": 100,
        "hidden_multiplier": 4,
        "reroute": "first",
        "route_bias": 0.0,
        "kernel": "auto",
        "version": CONFIG_VERSION,
    }


@pytest.mark.smoke
@pytest.mark.parametrize("config", [ElasticConfig(), NOT_DEFAULT], ids=["default", "changed"])
def test_round_trips(config, tmp_path):
    assert ElasticConfig.from_dict(config.to_dict()) == config
    assert ElasticConfig.from_json(config.to_json()) == config
    config.save(tmp_path / "config.json")
    assert ElasticConfig.load(tmp_path / "config.json") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_equal_configs_hash_equal_and_none_can_be_changed():
    assert hash(ElasticConfig(sink=16)) == hash(ElasticConfig(sink=16))
    assert len({ElasticConfig(), ElasticConfig(), ElasticConfig(sink=16)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        ElasticConfig().sink = 4
    # 0 and 0.0 are one value and must be one JSON.
    assert ElasticConfig(route_bias=0).to_json() == ElasticConfig().to_json()


def test_replace_checks_again():
    with pytest.raises(ValueError, match="ElasticConfig.sink is 0"):
        dataclasses.replace(ElasticConfig(), sink=0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("full", "xa", "full = 'xa' is not available in this version; allowed: 'fa'"),
        ("sparse", "xa", "sparse = 'xa' is not available in this version; allowed: 'ssa'"),
        ("sparse", "topk", "sparse = 'topk' is not available in this version; allowed: 'ssa'"),
        ("full", "flash", "full is 'flash'; allowed: 'fa'"),
        ("sparse", "fa", "both 'fa', so routing would change nothing"),
        ("full", "ssa", "both 'ssa', so routing would change nothing"),
        ("sink", 0, "sink is 0; allowed: 1 or more"),
        ("local", -5, "local is -5; allowed: 1 or more"),
        ("pool_tokens", 0, "pool_tokens is 0; allowed: 1 or more"),
        ("hidden_multiplier", 0, "hidden_multiplier is 0; allowed: 1 or more"),
        ("block_size", 48, "block_size is 48; allowed: 16, 32, 64, 128, 256"),
        ("block_size", 8, "block_size is 8; allowed: 16"),
        ("block_size", 512, "block_size is 512; allowed: 16"),
        ("reroute", "always", "reroute is 'always'; allowed: 'first', 'each_call'"),
        ("route_bias", math.nan, "route_bias is nan; allowed: a finite number"),
        ("route_bias", math.inf, "route_bias is inf; allowed: a finite number"),
        ("kernel", "cuda", "kernel is 'cuda'; allowed: 'auto'"),
        ("version", CONFIG_VERSION + 1, "newer elastic_compile.*upgrade"),
        ("version", 0, "version is 0; allowed"),
    ],
)
def test_a_wrong_value_names_the_field_and_what_is_allowed(field, value, words):
    with pytest.raises(ValueError, match=words):
        ElasticConfig(**{field: value})
    with pytest.raises(ValueError, match=words):
        ElasticConfig.from_dict({**ElasticConfig().to_dict(), field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sink", 16.0),
        ("local", "256"),
        ("pool_tokens", True),
        ("block_size", None),
        ("kernel", None),
        ("full", ["fa"]),
        ("route_bias", "0.1"),
        ("route_bias", True),
        ("version", "1"),
        ("version", True),
    ],
)
def test_a_wrong_type_names_the_field(field, value):
    with pytest.raises(TypeError, match=f"ElasticConfig.{field} must be"):
        ElasticConfig(**{field: value})


def test_unknown_and_missing_fields_are_named():
    data = ElasticConfig().to_dict()
    with pytest.raises(ValueError, match="unknown ElasticConfig field 'window'; allowed: full, "):
        ElasticConfig.from_dict({**data, "window": 3})
    del data["local"]
    with pytest.raises(ValueError, match="missing ElasticConfig field 'local'"):
        ElasticConfig.from_dict(data)
    with pytest.raises(TypeError, match="mapping of its fields, not list"):
        ElasticConfig.from_dict([1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        ElasticConfig(window=3)


def test_a_newer_file_is_called_newer_though_its_fields_are_unknown():
    data = {**ElasticConfig().to_dict(), "version": CONFIG_VERSION + 1, "window": 3}
    with pytest.raises(ValueError, match="newer elastic_compile"):
        ElasticConfig.from_dict(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a valid JSON document"),
        ("", "not a valid JSON document"),
        (ElasticConfig().to_json().replace("{", '{"sink": 4,', 1), "'sink' appears more than once"),
        (ElasticConfig().to_json().replace("0.0", "NaN"), "route_bias is nan"),
    ],
)
def test_bad_json_is_refused(text, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        ElasticConfig.from_json(text)
    with pytest.raises(ValueError, match=words):
        ElasticConfig.load(path)


def test_a_bad_file_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config\.json: not a valid JSON document"):
        ElasticConfig.load(path)
    with pytest.raises(FileNotFoundError, match="absent"):
        ElasticConfig.load(tmp_path / "absent.json")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    NOT_DEFAULT.save(path)

    def full_disk(*args):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        ElasticConfig().save(path)
    assert ElasticConfig.load(path) == NOT_DEFAULT
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_differences_are_listed():
    other = dataclasses.replace(ElasticConfig(), sink=16, kernel="cpu")
    assert ElasticConfig().differences(other) == {"sink": (128, 16), "kernel": ("auto", "cpu")}
    assert ElasticConfig().differences(ElasticConfig()) == {}


def test_every_field_is_documented():
    tree = ast.parse(inspect.getsource(config_module))
    (body,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "ElasticConfig"
    )
    documented = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(ElasticConfig)}


def test_json_is_readable():
    assert json.loads(ElasticConfig().to_json())["sink"] == 128
    assert ElasticConfig().to_json().count("\n") == len(dataclasses.fields(ElasticConfig)) + 1


def test_every_registered_implementation_can_be_named():
    from elastic_compile.kernels import _dispatch

    general = {name for name, entry in _dispatch._registry.items() if not entry.special}
    assert general <= set(config_module.KERNELS)
