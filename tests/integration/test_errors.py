"""Bad input: an error that says what is wrong and what to do, and no harm done."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from torch import nn

import elastic_compile
from tests.families import UNREWRITTEN, build, tokens
from tests.integration.helpers import elastic_config, error, logits, prompts, run, site_rows


@pytest.fixture
def pair(pairs):
    return pairs("llama")


# --- transform ------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_second_transform_is_an_error(pair):
    ids, _ = prompts()
    with pytest.raises(ValueError, match=r"(?i)already.*restore|restore.*already"):
        elastic_compile.transform(pair.model, elastic_config())
    assert elastic_compile.is_transformed(pair.model)
    assert error(logits(pair.model, ids), logits(pair.base, ids)) <= 1e-5


def test_a_part_of_a_transformed_model_cannot_be_transformed_again(pair):
    with pytest.raises(ValueError, match="(?i)already|transformed"):
        elastic_compile.transform(pair.model.model, elastic_config())


def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="(?i)compile"):
        elastic_compile.transform(torch.compile(build("llama"), backend="eager"))


@pytest.mark.smoke
@pytest.mark.parametrize("name", UNREWRITTEN)
def test_no_site_rewritten_says_why(name):
    model = build(name)
    with pytest.raises(ValueError) as problem:
        elastic_compile.transform(model, elastic_config())
    message = str(problem.value)
    assert "allow_unrewritten" in message
    assert re.search({"mistral": "(?i)sliding"}.get(name, "(?i)mask|bias|alibi"), message)
    assert not elastic_compile.is_transformed(model)


@pytest.mark.parametrize("name", UNREWRITTEN)
def test_no_site_rewritten_can_be_allowed(pairs, name):
    pair = pairs(name)
    assert elastic_compile.is_transformed(pair.model)
    assert [row.status for row in site_rows(pair.model)] == ["skipped"] * 2
    ids, mask = prompts(side="left")
    assert error(logits(pair.model, ids, mask), logits(pair.base, ids, mask), mask) <= 1e-5


def test_a_bidirectional_model_is_refused_with_the_reason():
    config = transformers.BertConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=400,
    )
    model = transformers.AutoModel.from_config(config).eval()
    ids = tokens(2, 20)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    with pytest.raises(ValueError, match="(?i)causal|bidirectional|mask"):
        elastic_compile.transform(model, elastic_config())
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, expected)


def test_a_model_without_attention_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(ValueError, match="(?i)attention|input"):
        elastic_compile.transform(model, elastic_config(), example_inputs=(torch.rand(3, 16, 8),))


def test_a_module_of_ones_own_needs_example_inputs():
    with pytest.raises((ValueError, TypeError), match="example_inputs"):
        elastic_compile.transform(nn.Sequential(nn.Linear(8, 8)), elastic_config())


@pytest.mark.parametrize("config", [{"sink": 4}, "ssa", 3])
def test_the_configuration_must_be_one(config):
    model = build("llama")
    with pytest.raises(TypeError, match="ElasticConfig"):
        elastic_compile.transform(model, config)
    assert not elastic_compile.is_transformed(model)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="(?i)module|model"):
        elastic_compile.transform("llama")


# --- functions on a model that is not transformed -------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        elastic_compile.restore,
        elastic_compile.report,
        elastic_compile.last_routes,
        elastic_compile.sparsity,
        lambda model: list(elastic_compile.router_parameters(model)),
        lambda model: elastic_compile.save_router(model, "/nonexistent/router"),
        lambda model: elastic_compile.load_router(model, "/nonexistent/router"),
        lambda model: elastic_compile.force_routes(model, "full").__enter__(),
        lambda model: elastic_compile.route_length(model, torch.tensor([1])).__enter__(),
    ],
)
def test_functions_need_a_transformed_model(call):
    model = build("llama")
    with pytest.raises((ValueError, FileNotFoundError)) as problem:
        call(model)
    if isinstance(problem.value, ValueError):
        assert re.search("(?i)not transformed|transform", str(problem.value))


def test_is_transformed_of_anything():
    assert not elastic_compile.is_transformed(build("llama"))
    assert not elastic_compile.is_transformed(nn.Linear(2, 2))


def test_routes_of_a_model_that_was_not_called():
    model = elastic_compile.transform(build("llama"), elastic_config())
    for function in (elastic_compile.last_routes, elastic_compile.sparsity):
        with pytest.raises(ValueError, match="(?i)call|cache"):
            function(model)
    with pytest.raises(ValueError, match="(?i)route"):
        elastic_compile.last_routes(transformers.DynamicCache(config=model.config))


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "routes",
    [
        "streaming",
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.full((2, 2), 2),
        torch.full((2, 2), -2),
        torch.zeros(2, 2),
        torch.zeros(1, 1, 2, 2, dtype=torch.int64),
        [torch.zeros(2, dtype=torch.int64)],
        3,
        None,
    ],
    ids=str,
)
def test_routes_that_do_not_fit(pair, routes):
    ids, _ = prompts()
    with pytest.raises((ValueError, TypeError), match="(?i)route"):
        with elastic_compile.force_routes(pair.model, routes):
            pass
    assert error(logits(pair.model, ids), logits(pair.base, ids)) <= 1e-5


def test_routes_for_another_batch_size(pair):
    """Three rows of routes for a batch of two: an error, not a broadcast or a crash below."""
    routes = torch.ones(3, 2, 2, dtype=torch.int64)
    with elastic_compile.force_routes(pair.model, routes):
        with pytest.raises((ValueError, RuntimeError), match=r"3"):
            run(pair.model, tokens(2, 40))
        run(pair.model, tokens(3, 40))
    with pytest.raises((ValueError, RuntimeError)):
        with elastic_compile.force_routes(pair.model, torch.ones(1, 2, 2, dtype=torch.int64)[:0]):
            run(pair.model, tokens(2, 40))


@pytest.mark.parametrize(
    "lengths",
    [torch.tensor([[1, 2]]), torch.tensor([1.5, 2.0]), torch.tensor(3), "ten", [1, 2]],
    ids=str,
)
def test_route_lengths_that_do_not_fit(pair, lengths):
    with pytest.raises((ValueError, TypeError), match="(?i)length"):
        with elastic_compile.route_length(pair.model, lengths):
            pass


def test_route_lengths_for_another_batch_size(pair):
    with elastic_compile.route_length(pair.model, torch.tensor([3, 4, 5])):
        with pytest.raises((ValueError, RuntimeError), match="3"):
            run(pair.model, tokens(2, 40))


def test_a_route_length_of_nothing_is_full(pair):
    """A row whose answer starts at once shows the router nothing, and must not be NaN or sparse."""
    ids, _ = prompts()
    with elastic_compile.route_length(pair.model, torch.tensor([0, 0, 5])):
        assert error(logits(pair.model, ids), logits(pair.base, ids)) <= 1e-5


def test_a_cache_of_another_batch_size(pair):
    """Rows taken from a cache by hand leave routes that do not fit: say so."""
    cache = transformers.DynamicCache(config=pair.model.config)
    run(pair.model, tokens(3, 20), None, cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:2], layer.values[:2]
    with pytest.raises(ValueError, match="(?i)route|batch|sequences"):
        run(pair.model, tokens(2, 1), None, cache)


# --- kernels --------------------------------------------------------------------------------------


def test_an_explicit_kernel_never_falls_back():
    if torch.cuda.is_available():
        pytest.skip("the kernel could run here")
    model = build("llama")
    with pytest.raises(Exception, match="(?i)triton|cuda|gpu"):
        elastic_compile.transform(model, elastic_config(kernel="triton"))
        run(model, tokens(2, 40))


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_explicit_kernels(pairs, kernel):
    pair = pairs("llama", config={"kernel": kernel})
    ids, _ = prompts()
    before = elastic_compile.counters()["calls"].get(kernel, 0)
    for routes in ("full", "sparse"):
        with elastic_compile.force_routes(pair.model, routes):
            actual = logits(pair.model, ids)
        with elastic_compile.force_routes(pairs("llama").model, routes):
            assert error(actual, logits(pairs("llama").model, ids)) <= 1e-5
    assert elastic_compile.counters()["calls"][kernel] >= before + 4


# --- router folders -------------------------------------------------------------------------------


def test_a_router_of_another_geometry(tmp_path, pair):
    other = elastic_compile.transform(build("qwen3"), elastic_config())
    elastic_compile.save_router(other, tmp_path)
    ids, _ = prompts()
    with pytest.raises(ValueError) as problem:
        elastic_compile.load_router(pair.model, tmp_path)
    assert "64" in str(problem.value) and "32" in str(problem.value)
    assert error(logits(pair.model, ids), logits(pair.base, ids)) <= 1e-5


def test_a_router_folder_that_is_not_there(pair, tmp_path):
    with pytest.raises(FileNotFoundError):
        elastic_compile.load_router(pair.model, tmp_path / "nowhere")
    model = build("llama")
    with pytest.raises(FileNotFoundError):
        elastic_compile.transform(model, router=tmp_path / "nowhere")
    assert not elastic_compile.is_transformed(model)


def test_a_truncated_router_file(pair, tmp_path):
    elastic_compile.save_router(pair.model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError):
        elastic_compile.load_router(pair.model, tmp_path)


def test_a_configuration_that_disagrees_with_the_router(tmp_path, pair):
    elastic_compile.save_router(pair.model, tmp_path)
    model = build("llama")
    with pytest.raises(ValueError, match="local"):
        elastic_compile.transform(model, elastic_config(local=9), router=tmp_path)
    assert not elastic_compile.is_transformed(model)


def test_continuous_batching_refuses_a_transformed_model_by_name():
    """Its paged cache is none that the rewritten sites know; nothing must run half."""
    model = elastic_compile.transform(build("llama"), elastic_config())
    config = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match=r"elastic_compile.* is not supported"):
        model.generate_batch(inputs=[[5, 6, 7]], generation_config=config)
    assert elastic_compile.is_transformed(model)
