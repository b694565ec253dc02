"""What a transform must not do to others: other models, other threads, other libraries' hooks."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

import elastic_compile
from tests.families import FAMILIES, build

IDS = torch.arange(60).reshape(3, 20) % 41 + 3
MASK = torch.ones_like(IDS)
MASK[0, :7] = 0


def logits(model, **kwargs):
    with torch.no_grad():
        return model(IDS, **kwargs).logits


def difference(a, b):
    real = MASK.bool()
    return (a - b)[real].abs().max()


@pytest.mark.smoke
def test_a_model_that_shares_the_configuration_is_left_alone():
    config = FAMILIES["llama"].config()
    first, second = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    expected = logits(second, attention_mask=MASK)
    loaded = config._attn_implementation
    elastic_compile.transform(first)
    assert second.config._attn_implementation == loaded
    assert torch.equal(logits(second, attention_mask=MASK), expected)
    elastic_compile.transform(second)
    elastic_compile.restore(first)
    elastic_compile.restore(second)
    for model in (first, second):
        assert model.config._attn_implementation == loaded
    assert torch.equal(logits(second, attention_mask=MASK), expected)


def test_a_failed_transform_gives_the_configuration_back(monkeypatch):
    from elastic_compile.passes import selfcheck

    model = build("llama")
    config = model.config
    monkeypatch.setattr(selfcheck, "_differences", lambda site, found: [9.0])
    with pytest.raises(ValueError, match="self-check failed"):
        elastic_compile.transform(model)
    assert model.config is config and model.model.config is config


def test_a_configuration_taken_from_a_transformed_model_is_refused():
    model = build("llama")
    elastic_compile.transform(model)
    stray = LlamaForCausalLM(model.config).eval()
    with pytest.raises(ValueError, match="not transformed"):
        logits(stray, attention_mask=MASK)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        elastic_compile.transform(stray)
    stray.set_attn_implementation("sdpa")
    elastic_compile.transform(stray)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_is_causal_false_is_honoured_as_the_untouched_model_does(implementation):
    model = build("llama", attn_implementation=implementation)
    expected = logits(model, is_causal=False)
    causal = logits(model)
    elastic_compile.transform(model)
    before = sum(elastic_compile.counters()["fallbacks"].values())
    got = logits(model, is_causal=False)
    assert (got - expected).abs().max() < 1e-5
    assert sum(elastic_compile.counters()["fallbacks"].values()) == before + 2
    assert (expected - causal).abs().max() > 1e-3
    # Such a call runs every head full, and says so.
    assert elastic_compile.sparsity(model).msr == 0


def test_overlapping_blocks_leave_nothing_forced():
    model = build("llama")
    elastic_compile.transform(model)
    first = elastic_compile.force_routes(model, "sparse")
    second = elastic_compile.force_routes(model, "full")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    logits(model)
    assert elastic_compile.last_routes(model).sum() == 0
    second.__exit__(None, None, None)
    for layer in model.model.layers:
        assert (layer.self_attn.elastic_router.forced == -1).all()


def test_forced_routes_of_another_batch_are_named():
    model = build("llama")
    elastic_compile.transform(model)
    table = torch.ones(2, 2, 2, dtype=torch.int32)
    with elastic_compile.force_routes(model, table):
        with pytest.raises(ValueError, match="forced for 2 samples"):
            logits(model)


def test_hooks_added_after_the_transform_survive_restore():
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("llama")
    expected = logits(model)
    elastic_compile.transform(model)
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer.self_attn, hooks.ModelHook())
    elastic_compile.restore(model)
    assert torch.equal(logits(model), expected)


def test_a_forward_replaced_since_refuses_restore():
    model = build("llama")
    elastic_compile.transform(model)
    attention = model.model.layers[0].self_attn
    ours = attention.forward
    attention.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(ValueError, match="layers.0.self_attn was replaced"):
        elastic_compile.restore(model)
    assert elastic_compile.is_transformed(model)
    attention.forward = ours
    elastic_compile.restore(model)
    assert not hasattr(attention, "elastic_router")


def test_an_offloaded_model_is_rewritten():
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    expected = logits(model, attention_mask=MASK)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elastic_compile.transform(model)
    assert len(elastic_compile.report(model).rewritten) == 2
    assert difference(logits(model, attention_mask=MASK), expected) < 1e-5


def test_routers_made_in_inference_mode_can_be_trained():
    model = build("llama")
    with torch.inference_mode():
        elastic_compile.transform(model)
    assert not any(p.is_inference() for p in elastic_compile.router_parameters(model))


def test_threads_may_transform_at_the_same_time():
    models = [build("llama", seed=i) for i in range(3)]
    failures = []

    def work(model):
        try:
            elastic_compile.transform(model)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(len(elastic_compile.report(model).rewritten) == 2 for model in models)


def test_a_wrapper_around_two_models_names_them():
    pair = torch.nn.ModuleDict({"student": build("llama"), "teacher": build("llama")})
    with pytest.raises(ValueError, match="student, teacher"):
        elastic_compile.transform(pair)


def test_a_cache_whose_first_layer_holds_no_tokens():
    """transformers then believes that nothing is cached and makes a mask of one column for decode:
    the model computes what it did, if not routed."""
    config = transformers.MiniMaxConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=2,
        block_size=16,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=98,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.MiniMaxForCausalLM(config).eval()
    ids = torch.randint(2, 97, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    run = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    run |= dict(return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        before = model.generate(ids, **run)
        elastic_compile.transform(model, elastic_compile.ElasticConfig(sink=4, local=8))
        after = model.generate(ids, **run)
    assert len(elastic_compile.report(model).rewritten) == 1
    for a, b in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
