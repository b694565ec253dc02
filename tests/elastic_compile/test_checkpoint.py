"""Router folders: what is written, that nothing is ever half-written or half-loaded, and what each
kind of wrong folder is told. The model is a stand-in with two sites and no attention."""

import dataclasses
import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from elastic_compile import _checkpoint
from elastic_compile._checkpoint import (
    CONFIG_FILE,
    FORMAT_VERSION,
    load_router,
    read_router_config,
    router_parameters,
    save_router,
)
from elastic_compile._version import __version__
from elastic_compile.config import ElasticConfig
from elastic_compile.router import AttentionRouter, boundary_pool, decide

CONFIG = ElasticConfig(sink=16, local=64, pool_tokens=4, hidden_multiplier=2)


class Site(AttentionRouter):
    def __init__(self, head_dim, kv_heads, multiplier, dtype=None):
        super().__init__(head_dim, multiplier, dtype=dtype)
        self.kv_heads = kv_heads
        self.shards = 1
        self.register_buffer("forced", torch.full((1, kv_heads), -1), persistent=False)


class Attention(nn.Module):
    def __init__(self, head_dim, kv_heads, multiplier, dtype):
        super().__init__()
        self.k_proj = nn.Linear(8, kv_heads * head_dim)
        self.elastic_router = Site(head_dim, kv_heads, multiplier, dtype)

    def forward(self, x):
        site = self.elastic_router
        keys = self.k_proj(x).view(*x.shape[:2], site.kv_heads, site.head_dim).transpose(1, 2)
        return site(boundary_pool(keys, pool_tokens=4))


class Model(nn.Module):
    """A backbone parameter, two sites, and what ``_state`` would know."""

    def __init__(
        self, config=CONFIG, layers=2, head_dim=8, kv_heads=3, dtype=None, transformed=True
    ):
        super().__init__()
        self.layers = nn.ModuleList(
            Attention(head_dim, kv_heads, config.hidden_multiplier, dtype) for _ in range(layers)
        )
        self.elastic_config = config if transformed else None
        self.config = type("Config", (), {"name_or_path": "someone/tiny"})()

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers])


@pytest.fixture(autouse=True)
def stand_in_state(monkeypatch):
    def base(model):
        for module in model.modules():
            if isinstance(module, Model) and module.elastic_config is not None:
                return module
        raise ValueError("this Model is not transformed; call elastic_compile.transform(model)")

    class State:
        def __init__(self, model):
            self.config = base(model).elastic_config

    monkeypatch.setattr(_checkpoint._state, "get_state", State)
    monkeypatch.setattr(
        _checkpoint._state,
        "rewritten_sites",
        lambda model: [
            (name.rpartition(".")[0], module)
            for name, module in base(model).named_modules()
            if isinstance(module, Site)
        ],
    )


def randomise(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model, before):
    after = model.state_dict()
    return all(torch.equal(after[name], value) for name, value in before.items())


def edit(folder, **changes):
    """Change top-level values of the JSON; None removes one."""
    path = folder / CONFIG_FILE
    document = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del document[name]
        else:
            document[name] = value
    path.write_text(json.dumps(document))


def rewrite_tensors(folder, change):
    """Replace the tensors by changed ones, with the hash of the new file."""
    document = json.loads((folder / CONFIG_FILE).read_text())
    path = folder / document["weights"]
    data = save(change(load_file(path)))
    path.write_bytes(data)
    edit(folder, sha256=hashlib.sha256(data).hexdigest())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "made" / "on demand"
    save_router(randomise(Model(), 1), folder)
    return folder


@pytest.mark.smoke
def test_round_trip_restores_every_router_and_nothing_else(folder):
    saved, model = randomise(Model(), 1), randomise(Model(), 2)
    backbone = model.layers[0].k_proj.weight.clone()
    assert load_router(model, folder) is None
    for ours, theirs in zip(router_parameters(model), router_parameters(saved), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(model.layers[0].k_proj.weight, backbone)


def test_the_folder_says_what_it_is(folder):
    document = json.loads((folder / CONFIG_FILE).read_text())
    assert set(os.listdir(folder)) == {CONFIG_FILE, document["weights"]}
    tensors = load_file(folder / document["weights"])
    assert "layers.0.elastic_router.task.0.weight" in tensors
    assert len(tensors) == len(router_parameters(Model()))
    assert not any("k_proj" in name or "forced" in name for name in tensors)
    assert document["library_version"] == __version__
    assert document["format_version"] == FORMAT_VERSION
    assert document["base_model"] == "someone/tiny"
    assert document["geometry"][1] == {"site": "layers.1", "kv_heads": 3, "head_dim": 8}
    assert read_router_config(folder) == CONFIG


def test_a_local_base_model_is_named_without_its_path(tmp_path):
    model = Model()
    (tmp_path / "my-model").mkdir()
    model.config.name_or_path = str(tmp_path / "my-model")
    save_router(model, tmp_path / "router")
    assert json.loads((tmp_path / "router" / CONFIG_FILE).read_text())["base_model"] == "my-model"


def test_router_parameters_are_the_live_routers_only():
    model = Model()
    parameters = router_parameters(model)
    assert all(isinstance(parameter, nn.Parameter) for parameter in parameters)
    assert {id(parameter) for parameter in parameters} == {
        id(parameter) for layer in model.layers for parameter in layer.elastic_router.parameters()
    }
    assert parameters[0] is model.layers[0].elastic_router.task[0].weight


def test_what_training_hangs_onto_a_site_is_not_the_routers(folder, tmp_path):
    model = Model()
    model.layers[0].elastic_router.relaxation = nn.Linear(2, 2)
    assert len(router_parameters(model)) == len(router_parameters(Model()))
    load_router(model, folder)
    save_router(model, tmp_path / "again")
    load_router(Model(), tmp_path / "again")


def test_loading_keeps_the_parameters_and_casts_to_their_dtype(folder):
    model = Model(dtype=torch.bfloat16)
    before = router_parameters(model)
    load_router(model, folder)
    for old, new, saved in zip(
        before, router_parameters(model), router_parameters(randomise(Model(), 1)), strict=True
    ):
        assert old is new
        assert torch.equal(new, saved.to(torch.bfloat16))


def test_a_compiled_model_takes_the_new_routers_with_no_new_graph(folder):
    model = randomise(Model(), 2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(2, 9, 8)
    before = compiled(x)
    load_router(compiled, folder)
    with torch.compiler.set_stance("fail_on_recompile"):
        after = compiled(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(x))
    assert decide(after).float().std() > 0


@pytest.mark.parametrize(
    "wrapped", ["_orig_mod.{}", "base_model.model.{}", "_fsdp_wrapped_module.{}", "{}._orig_mod"]
)
def test_wrapped_models_share_folders_with_bare_ones(wrapped, folder, tmp_path, monkeypatch):
    bare = _checkpoint._state.rewritten_sites
    with monkeypatch.context() as patch:
        patch.setattr(
            _checkpoint._state,
            "rewritten_sites",
            lambda model: [(wrapped.format(path), site) for path, site in bare(model)],
        )
        model = Model()
        load_router(model, folder)
        save_router(model, tmp_path / "wrapped")
    load_router(Model(), tmp_path / "wrapped")


def test_saving_again_replaces_the_router_and_keeps_other_files(folder):
    (folder / "README.md").write_text("a model card")
    save_router(randomise(Model(), 5), folder)
    model = Model()
    load_router(model, folder)
    expected = router_parameters(randomise(Model(), 5))
    assert all(map(torch.equal, router_parameters(model), expected))
    assert len(os.listdir(folder)) == 3
    assert (folder / "README.md").read_text() == "a model card"


@pytest.mark.parametrize("step", [0, 1])
def test_an_interrupted_save_leaves_the_old_router_whole(folder, monkeypatch, step):
    calls = []
    replace = os.replace

    def interrupted(source, target):
        calls.append(target)
        if len(calls) == step + 1:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_router(randomise(Model(), 7), folder)
    assert len(calls) == step + 1
    model = Model()
    load_router(model, folder)
    assert all(map(torch.equal, router_parameters(model), router_parameters(randomise(Model(), 1))))
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    save_router(randomise(Model(), 8), folder)  # and what it left behind is tidied up
    assert len(os.listdir(folder)) == 2


def test_an_interrupted_first_save_is_no_router(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_router(Model(), tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="a save that never finished"):
        load_router(Model(), tmp_path / "new")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(layers=3), "2 sites there, 3 rewritten here"),
        (dict(kv_heads=2), r"layers.0 \(3 kv heads of size 8\) there is layers.0 \(2 kv heads"),
        (dict(head_dim=4), r"\(3 kv heads of size 8\) there is layers.0 \(3 kv heads of size 4\)"),
    ],
)
def test_another_geometry_is_refused(folder, fields, words):
    model = randomise(Model(**fields), 3)
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"trained on someone/tiny and does not fit.*{words}"):
        load_router(model, folder)
    assert unchanged(model, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(local=128), "local 128 in the model, 64 there"),
        (dict(sink=4, pool_tokens=9), "sink 4 in the model, 16 there, pool_tokens 9 in the model"),
        (dict(route_bias=0.5), "route_bias 0.5 in the model, 0.0 there"),
        (dict(reroute="each_call"), "reroute 'each_call' in the model"),
    ],
)
def test_another_configuration_is_refused(folder, change, words):
    model = randomise(Model(dataclasses.replace(CONFIG, **change)), 3)
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"another configuration: {words}.*transform"):
        load_router(model, folder)
    assert unchanged(model, before)


def test_the_kernel_belongs_to_the_machine_not_to_the_router(tmp_path):
    model = Model(dataclasses.replace(CONFIG, kernel="triton"))
    save_router(model, tmp_path)
    assert read_router_config(tmp_path) == CONFIG
    load_router(model, tmp_path)
    load_router(Model(dataclasses.replace(CONFIG, kernel="cpu")), tmp_path)


def truncate(folder):
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(folder):
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def not_safetensors(folder):
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(b"text")
    edit(folder, sha256=hashlib.sha256(b"text").hexdigest())


def config_with(**changes):
    return {**CONFIG.to_dict(), **changes}


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


FIRST = "layers.0.elastic_router.router.4.bias"


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (truncate, ValueError, "damaged or truncated"),
        (flip_a_bit, ValueError, "damaged or truncated"),
        (not_safetensors, ValueError, "not a safetensors file"),
        (lambda f: next(f.glob("*.safetensors")).unlink(), FileNotFoundError, "lacks router-"),
        (lambda f: (f / CONFIG_FILE).unlink(), FileNotFoundError, "has no elastic_config.json"),
        (shutil.rmtree, FileNotFoundError, "no router folder"),
        (lambda f: (f / CONFIG_FILE).write_text("{"), ValueError, "not a valid JSON"),
        (lambda f: (f / CONFIG_FILE).write_text("[]"), ValueError, "not written by elastic_comp"),
        (lambda f: edit(f, library="other"), ValueError, "not written by elastic_compile"),
        (lambda f: edit(f, format_version=2, new=1), ValueError, "format version 2.*upgrade"),
        (lambda f: edit(f, format_version=0), ValueError, "format_version is 0; allowed: 1"),
        (lambda f: edit(f, format_version=True), ValueError, "format_version is True"),
        (lambda f: edit(f, new=1), ValueError, "unknown key 'new'"),
        (lambda f: edit(f, geometry=None), ValueError, "missing key 'geometry'"),
        (lambda f: edit(f, geometry=[1]), ValueError, "geometry must be a list of sites"),
        (
            lambda f: edit(f, geometry=[{"site": "a"}]),
            ValueError,
            "missing geometry key 'kv_heads'",
        ),
        (lambda f: edit(f, weights=3), ValueError, "weights must be a string"),
        (lambda f: edit(f, weights="../x"), ValueError, "weights must be a file name"),
        (lambda f: edit(f, config=[]), ValueError, "mapping of its fields"),
        (lambda f: edit(f, config=config_with(sink=0)), ValueError, "ElasticConfig.sink is 0"),
        (lambda f: edit(f, config=config_with(version=9)), ValueError, "newer elastic_compile"),
        (lambda f: edit(f, config=config_with(extra=1)), ValueError, "unknown .* field 'extra'"),
        (
            lambda f: edit(f, config=without(CONFIG.to_dict(), "sink")),
            ValueError,
            "missing .* 'sink'",
        ),
        (
            lambda f: rewrite_tensors(f, lambda t: without(t, FIRST)),
            ValueError,
            f"missing tensors: {FIRST}",
        ),
        (
            lambda f: rewrite_tensors(f, lambda t: {**t, "extra": torch.ones(1)}),
            ValueError,
            "unknown tensors: extra",
        ),
        (
            lambda f: rewrite_tensors(f, lambda t: {**t, FIRST: torch.ones(3)}),
            ValueError,
            r"router.4.bias has shape \(3,\), this model's has \(2,\)",
        ),
        (
            lambda f: rewrite_tensors(f, lambda t: {**t, FIRST: t[FIRST] / 0}),
            ValueError,
            "not finite",
        ),
        (
            lambda f: rewrite_tensors(f, lambda t: {**t, FIRST: t[FIRST].long()}),
            ValueError,
            "not finite",
        ),
    ],
)
def test_a_wrong_folder_says_so_and_leaves_the_model_unchanged(folder, damage, error, words):
    damage(folder)
    model = randomise(Model(), 3)
    before = snapshot(model)
    with pytest.raises(error, match=words):
        load_router(model, folder)
    assert unchanged(model, before)


def test_a_model_that_is_not_transformed_is_refused(folder, tmp_path):
    model = Model(transformed=False)
    for call in (
        lambda: load_router(model, folder),
        lambda: save_router(model, tmp_path / "x"),
        lambda: router_parameters(model),
    ):
        with pytest.raises(ValueError, match="not transformed; call elastic_compile.transform"):
            call()


def test_a_model_without_sites_has_no_router_to_save_or_load(folder, tmp_path):
    model = Model(layers=0)
    with pytest.raises(ValueError, match="no rewritten attention site"):
        save_router(model, tmp_path / "x")
    with pytest.raises(ValueError, match="no rewritten attention site"):
        load_router(model, folder)
    assert router_parameters(model) == []
    assert not (tmp_path / "x").exists()


def test_routers_without_values_are_neither_saved_nor_loaded(folder, tmp_path):
    model = Model().to("meta")
    with pytest.raises(ValueError, match="router of layers.0 is on the meta device"):
        save_router(model, tmp_path / "x")
    with pytest.raises(ValueError, match="router of layers.0 is on the meta device"):
        load_router(model, folder)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; a router is saved to a folder"):
        save_router(Model(), tmp_path / "taken")
