"""Quantised linears, meta loading, pipelines and assisted generation around a transformed model.

Every test compares with the untouched model treated alike, and shows that the op runs and that
streaming, where it is forced, still moves the logits.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch import nn

import elastic_compile
from tests.families import build, tokens
from tests.integration.helpers import (
    counting,
    elastic_config,
    error,
    generate,
    logits,
    prompts,
    random_routers,
    routers,
    routes_of,
    run,
)

ATOL = 2e-5


def transformed(name="llama", config=None, **kwargs):
    return elastic_compile.transform(build(name, **kwargs), elastic_config(**(config or {})))


def check_alike(model, base):
    """All heads full equals ``base``, through the op; streaming is something else."""
    ids, mask = prompts(side="left")
    expected = logits(base, ids, mask)
    with counting() as count:
        actual = logits(model, ids, mask)
    assert count == {"calls": len(routers(model)), "fallbacks": {}}
    assert error(actual, expected, mask) <= ATOL
    assert not routes_of(model).any(), "an untrained router went to streaming"
    with elastic_compile.force_routes(model, "sparse"):
        assert error(logits(model, ids, mask), expected, mask) > 1e-3


# --- quantised linears ----------------------------------------------------------------------------


def quantized(model, kind):
    if kind == "dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, getattr(quantization, kind)())
    return model


@pytest.mark.parametrize("kind", ["dynamic", "Int8WeightOnlyConfig"])
def test_quantised_after_the_transform(kind):
    """The routers' linears are converted with the rest; untrained ones still choose full."""
    model = quantized(transformed(), kind)
    assert type(model.model.layers[0].self_attn.elastic_router.task[0]) is not nn.Linear or (
        type(model.model.layers[0].self_attn.elastic_router.task[0].weight) is not nn.Parameter
    )
    check_alike(model, quantized(build("llama"), kind))


def test_quantised_before_the_transform():
    kind = "Int8WeightOnlyConfig"
    model = elastic_compile.transform(quantized(build("llama"), kind), elastic_config())
    check_alike(model, quantized(build("llama"), kind))


def test_linears_that_cannot_be_traced_are_refused():
    """Dynamically quantised linears hold objects that export does not know."""
    model = quantized(build("llama"), "dynamic")
    ids, mask = prompts(side="left")
    expected = logits(model, ids, mask)
    with pytest.raises(ValueError, match="cannot be traced"):
        elastic_compile.transform(model, elastic_config())
    assert torch.equal(logits(model, ids, mask), expected)


# --- configuration --------------------------------------------------------------------------------


def test_attention_weights_in_every_call_are_refused_by_name():
    model = build("llama", attn_implementation="eager")
    model.config.output_attentions = True
    ids, mask = prompts(side="left")
    expected = run(model, ids, mask)
    with pytest.raises(ValueError, match="config.output_attentions = False"):
        elastic_compile.transform(model, elastic_config())
    assert len(expected.attentions) == 2
    assert torch.equal(logits(model, ids, mask), expected.logits)
    model.config.output_attentions = False
    elastic_compile.transform(model, elastic_config())
    found = run(model, ids, mask, output_attentions=True)
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        assert error(one, other, None) <= ATOL


# --- meta, then memory ----------------------------------------------------------------------------


def test_transform_on_meta_then_load():
    base = build("llama")
    with torch.device("meta"):
        model = type(base)(type(base.config).from_dict(base.config.to_dict())).eval()
    elastic_compile.transform(model, elastic_config())
    assert not any(site.checked for site in elastic_compile.report(model).sites)
    # Memory that is new holds anything: here what would force every head to stream.
    empty_like = torch.empty_like
    try:
        torch.empty_like = lambda *a, **k: empty_like(*a, **k).fill_(1)
        model.to_empty(device="cpu")
    finally:
        torch.empty_like = empty_like
    assert {int(router.forced.max()) for router in routers(model)} == {-1}
    missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
    assert all("elastic_router" in name for name in missing)
    model.model.rotary_emb = base.model.rotary_emb
    check_alike(model, base)


# --- pipelines and assisted generation ------------------------------------------------------------


def test_a_text_generation_pipeline(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(300)} | {"[UNK]": 300, "[PAD]": 301}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", padding_side="left"
    )
    texts = [" ".join(f"w{(7 * i * i + k) % 290}" for i in range(30 - 9 * k)) for k in range(2)]
    made = []
    model = transformed()
    for one in (build("llama"), model):
        pipe = transformers.pipeline(
            "text-generation", model=one, tokenizer=tokenizer, device="cpu", batch_size=2
        )
        with counting() as count:
            made.append(pipe(texts, max_new_tokens=6, do_sample=False, return_full_text=False))
    assert made[0] == made[1] and count["fallbacks"] == {}
    assert count["calls"] == 2 * 6
    with elastic_compile.force_routes(model, "sparse"):
        assert pipe(texts, max_new_tokens=6, do_sample=False, return_full_text=False) != made[0]


@pytest.mark.parametrize("assistant", ["untouched", "transformed"])
def test_assisted_generation(assistant):
    ids = tokens(1, 33)
    helper = build("llama", layers=1) if assistant == "untouched" else transformed(layers=1)
    base, model = build("llama"), transformed()
    expected = generate(base, ids, new=10)
    with counting() as count:
        assert torch.equal(generate(model, ids, new=10, assistant_model=helper), expected)
    assert count["calls"] and not count["fallbacks"]
    with elastic_compile.force_routes(model, "sparse"):
        alone = generate(model, ids, new=10)
        assert not torch.equal(alone, expected)
        assert torch.equal(generate(model, ids, new=10, assistant_model=helper), alone)
    with random_routers(model, seed=3):
        # The first call of the target holds drafts behind the prompt: the router must not see them.
        with elastic_compile.route_length(model, torch.tensor([33])):
            alone = generate(model, ids, new=10)
            assert 0 < routes_of(model).float().mean() < 1
            assert torch.equal(generate(model, ids, new=10, assistant_model=helper), alone)


# --- several models -------------------------------------------------------------------------------


def test_several_transformed_models_at_once():
    names = ("llama", "qwen3", "gpt2")
    bases, models = [build(n) for n in names], [transformed(n) for n in names]
    ids, mask = prompts(side="left")
    expected = [logits(base, ids, mask) for base in bases]
    with elastic_compile.force_routes(models[1], "sparse"):
        got = [logits(model, ids, mask) for model in models]
    assert error(got[0], expected[0], mask) <= ATOL and error(got[2], expected[2], mask) <= ATOL
    assert error(got[1], expected[1], mask) > 1e-3
    elastic_compile.restore(models[0])
    for model, base in zip(models[1:], bases[1:], strict=True):
        check_alike(model, base)
