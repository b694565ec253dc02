"""Adapters, gradients, checkpointing and dropout of a transformed model."""

from __future__ import annotations

import pytest
import torch

import elastic_compile
from tests.families import build, tokens
from tests.integration.helpers import (
    Pair,
    counting,
    elastic_config,
    error,
    generate,
    layer_mask,
    logits,
    positions,
    prompts,
    routers,
    run,
)

ATOL = 1e-5


def transformed(name="llama", **kwargs):
    return elastic_compile.transform(build(name, **kwargs), elastic_config())


def loss_of(model, ids, mask=None, **kwargs):
    labels = ids
    if mask is not None:
        # Neither padding nor what padding would predict: the first real token.
        first = mask.argmax(1, keepdim=True)
        labels = ids.masked_fill(mask == 0, -100).scatter(1, first, -100)
    at = {} if mask is None else {"position_ids": positions(mask)}
    return model(
        input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **at, **kwargs
    ).loss


def gradients(model, ids, mask=None, **kwargs):
    """(loss, gradients of the backbone by name)."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, ids, mask, **kwargs)
    loss.backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and "elastic_router" not in name
    }
    return loss.detach(), found


def check_gradients(actual, expected, tolerance=1e-4):
    assert abs(actual[0] - expected[0]) <= ATOL
    assert list(actual[1]) == list(expected[1])
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().clamp(min=1e-8)
        assert (actual[1][name] - gradient).abs().max() <= tolerance * scale, name


# --- gradients of the backbone --------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "falcon", "gemma3", "olmo2"])
def test_gradients_equal_those_of_the_untouched_model(pairs, name, side):
    pair = pairs(name)
    ids, mask = prompts(side=side)
    with counting() as count:
        actual = gradients(pair.model, ids, mask)
    check_gradients(actual, gradients(pair.base, ids, mask))
    assert count["fallbacks"] == {}
    assert all(torch.isfinite(g).all() for g in actual[1].values())
    moved = [
        n for n, g in actual[1].items() if ("k_proj" in n or "c_attn" in n) and "bias" not in n
    ]
    assert all(actual[1][n].abs().max() > 0 for n in moved)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("kind", ["sparse", "mixed"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_of_streaming_heads(pairs, name, kind, side):
    """R-grad: those of the untouched model under the explicit mask."""
    pair = pairs(name)
    ids, mask = prompts(side=side)
    routes = pair.routes(kind)
    real = torch.ones_like(ids) if mask is None else mask
    handles = []
    for index, layer in enumerate(pair.rewritten):
        allowed = layer_mask(real, routes[index].expand(3, -1), 8)

        def replace(module, args, kwargs, allowed=allowed):
            return args, {**kwargs, "attention_mask": allowed}

        module = pair.family.attention_modules(pair.base)[layer]
        handles.append(module.register_forward_pre_hook(replace, with_kwargs=True))
    try:
        expected = gradients(pair.base, ids, mask)
    finally:
        for handle in handles:
            handle.remove()
    with elastic_compile.force_routes(pair.model, routes):
        actual = gradients(pair.model, ids, mask)
    check_gradients(actual, expected)
    full = gradients(pair.base, ids, mask)
    assert abs(full[0] - expected[0]) > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_gradient_checkpointing(name, reentrant):
    model, base = transformed(name).train(), build(name).train()
    ids, mask = prompts(side="left")
    plain = gradients(model, ids, mask)
    check_gradients(plain, gradients(base, ids, mask))
    for one in (model, base):
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
        one.enable_input_require_grads()
    with counting() as count:
        actual = gradients(model, ids, mask)
    check_gradients(actual, plain)
    check_gradients(actual, gradients(base, ids, mask))
    # Recomputed, so each site is called twice.
    assert count["calls"] == 2 * len(routers(model)) and count["fallbacks"] == {}


def test_checkpointing_with_sparse_routes_recomputes_the_same(pairs):
    model = transformed().train()
    ids, mask = prompts(side="left")
    routes = torch.tensor([[0, 1], [1, 0]])
    with elastic_compile.force_routes(model, routes):
        plain = gradients(model, ids, mask)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        check_gradients(gradients(model, ids, mask), plain)


class STE(torch.nn.Module):
    """The smallest relaxation: the soft route, straight through to the hard one."""

    def forward(self, site, logits):
        soft = logits.float().softmax(-1)[..., 1]
        return (soft > 0.5).float() + soft - soft.detach()


def router_gradients(model, ids, mask):
    for parameter in elastic_compile.router_parameters(model):
        parameter.grad = None
    loss_of(model, ids, mask).backward()
    return [
        {name: p.grad.clone() for name, p in site.named_parameters() if p.grad is not None}
        for site in routers(model)
    ]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "gemma3"])
def test_router_gradients_in_every_layer(name, checkpointing):
    """From cross-entropy alone, at lengths beyond the window; equal under checkpointing."""
    model = transformed(name)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for site in routers(model):
        site.relaxation = STE()
        for parameter in site.parameters():
            parameter.requires_grad_(True)
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(noise * 2 / parameter.shape[1] ** 0.5)
    model.train()
    ids, mask = prompts(side="left")
    plain = router_gradients(model, ids, mask)
    for layer in plain:
        assert layer and all(torch.isfinite(g).all() for g in layer.values())
        assert max(g.abs().max() for g in layer.values()) > 1e-9
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again = router_gradients(model, ids, mask)
        for layer, other in zip(plain, again, strict=True):
            assert list(layer) == list(other)
            for key, gradient in layer.items():
                scale = gradient.abs().max().clamp(min=1e-8)
                assert (other[key] - gradient).abs().max() <= 1e-4 * scale, key


# --- adapters -------------------------------------------------------------------------------------

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gemma3": ["q_proj", "k_proj"],
    "falcon": ["query_key_value", "dense"],
}


def with_lora(model, name):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=TARGETS[name],
        r=4,
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(11)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_lora_after_the_transform(name):
    """The generated code calls whatever child is installed now."""
    plain = with_lora(build(name), name)
    model = with_lora(transformed(name), name)
    ids, mask = prompts(side="left")
    assert elastic_compile.is_transformed(model)
    lora = [n for n, _ in model.named_parameters() if "lora" in n]
    assert lora == [n for n, _ in plain.named_parameters() if "lora" in n]
    assert not any("elastic_router" in n for n in lora)
    at = positions(mask)
    with counting() as count, torch.no_grad():
        actual = model(input_ids=ids, attention_mask=mask, position_ids=at, use_cache=False).logits
    with torch.no_grad():
        expected = plain(
            input_ids=ids, attention_mask=mask, position_ids=at, use_cache=False
        ).logits
    assert count["fallbacks"] == {} and count["calls"] == len(routers(model))
    assert error(actual, expected, mask) <= ATOL
    assert error(actual, logits(build(name), ids, mask, position_ids=at), mask) > 1e-3
    one, other = gradients(model, ids, mask), gradients(plain, ids, mask)
    check_gradients(one, other)
    found = {n for n, g in one[1].items() if "lora" in n and g.abs().max() > 0}
    assert found == set(lora)
    assert torch.equal(
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False),
        plain.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False),
    )


@pytest.mark.filterwarnings("ignore")
def test_merging_and_unloading_lora():
    model = with_lora(transformed(), "llama")
    ids, mask = prompts(side="left")
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
    merged = model.merge_and_unload()
    assert elastic_compile.is_transformed(merged)
    with counting() as count:
        assert error(logits(merged, ids, mask), expected, mask) <= 5e-5
    assert count["calls"] == 2
    with elastic_compile.force_routes(merged, "sparse"):
        assert error(logits(merged, ids, mask), expected, mask) > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_lora_before_the_transform():
    plain, inner = with_lora(build("llama"), "llama"), with_lora(build("llama"), "llama")
    elastic_compile.transform(inner.get_base_model(), elastic_config())
    ids, mask = prompts(side="left")
    with counting() as count, torch.no_grad():
        actual = inner(input_ids=ids, attention_mask=mask).logits
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask).logits
    assert count == {"calls": 2, "fallbacks": {}}
    assert error(actual, expected, mask) <= ATOL
    check_gradients(gradients(inner, ids, mask), gradients(plain, ids, mask))


@pytest.mark.filterwarnings("ignore")
def test_prefix_tuning(pairs):
    """Virtual tokens fill the cache before the first call and are longer than the input's mask."""
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ids, mask = prompts(side="right")
    out = []
    for model in (transformed(), build("llama")):
        torch.manual_seed(0)
        tuned = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            out.append(tuned(input_ids=ids, attention_mask=mask).logits)
    assert error(out[0], out[1], mask) <= 5 * ATOL
    assert error(out[1], logits(build("llama"), ids, mask), mask) > 1e-3


def test_hooks_on_children_still_run():
    model = transformed()
    seen = []
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        child = getattr(model.model.layers[0].self_attn, name)
        child.register_forward_hook(lambda m, i, o, name=name: seen.append((name, o.shape)))
    ids, _ = prompts()
    run(model, ids)
    assert sorted(n for n, _ in seen) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    # And may change what comes out, as on the untouched model.
    base = build("llama")
    for one in (model, base):
        one.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, i, o: o * 1.5)
    assert error(logits(model, ids), logits(base, ids)) <= ATOL


def test_replaced_children_are_used():
    """A linear swapped for another after the transform, as quantisation does."""
    model, base = transformed(), build("llama")
    ids, _ = prompts()
    for one in (model, base):
        torch.manual_seed(4)
        attention = one.model.layers[0].self_attn
        attention.v_proj = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Tanh())
        one.eval()
    expected = logits(base, ids)
    assert error(logits(model, ids), expected) <= ATOL
    assert error(expected, logits(build("llama"), ids)) > 1e-3


# --- dropout --------------------------------------------------------------------------------------

DROPOUT = {
    "llama": {"attention_dropout": 0.1},
    "qwen3": {"attention_dropout": 0.1},
    "gpt2": {"attn_pdrop": 0.1},
    # Full attention throughout: a skipped layer's dropout would hide a missing one.
    "gemma3": {"attention_dropout": 0.1, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_never_silently_dropped(name):
    """B61: in eval none; in train mode it happens, in full and in streaming heads."""
    model, base = transformed(name, **DROPOUT[name]), build(name, **DROPOUT[name])
    ids, mask = prompts(side="left")
    at = positions(mask)
    expected = logits(base, ids, mask, position_ids=at)
    for _ in range(2):
        assert error(logits(model, ids, mask, position_ids=at), expected, mask) <= ATOL
    model.train()
    for routes in ("full", "sparse"):
        with elastic_compile.force_routes(model, routes):
            one, other = (logits(model, ids, mask, position_ids=at) for _ in range(2))
        assert error(one, other, mask) > 1e-3
    torch.manual_seed(2)
    one = logits(model, ids, mask)
    torch.manual_seed(2)
    assert torch.equal(one, logits(model, ids, mask)), "dropout does not follow the seed"
    model.eval()
    assert error(logits(model, ids, mask, position_ids=at), expected, mask) <= ATOL


def test_dropout_has_the_right_strength():
    """The mean over many draws of a layer's attention output is the output without dropout."""
    model = transformed(layers=1, attention_dropout=0.5)
    attention = model.model.layers[0].self_attn
    outputs = []
    attention.register_forward_hook(lambda m, i, o: outputs.append(o[0].detach()))
    ids = tokens(1, 24)
    run(model, ids)
    expected = outputs.pop()
    model.train()
    for _ in range(400):
        run(model, ids)
    draws = torch.stack(outputs)
    deviation = (draws.mean(0) - expected) / (draws.std(0) / 20 + 1e-6)
    assert draws.std(0).mean() > 1e-2
    assert deviation.pow(2).mean() < 1.3
    # Kept weights are scaled up: with p = 0.5 each is dropped about half of the time.
    reference = build("llama", layers=1, attention_dropout=0.5).train()
    others = []
    reference.model.layers[0].self_attn.register_forward_hook(
        lambda m, i, o: others.append(o[0].detach())
    )
    for _ in range(400):
        run(reference, ids)
    ratio = draws.std(0).mean() / torch.stack(others).std(0).mean()
    assert 0.9 < ratio < 1.1


def test_dropout_that_the_architecture_never_applies_is_not_invented():
    """Falcon with rotary embeddings has an attention_dropout and ignores it."""
    model = transformed("falcon", attention_dropout=0.5).train()
    base = build("falcon", attention_dropout=0.5).train()
    ids, _ = prompts()
    assert error(logits(model, ids), logits(base, ids)) <= ATOL


def test_dropout_and_checkpointing_draw_the_same_numbers_again():
    model = transformed(attention_dropout=0.1).train()
    ids, mask = prompts(side="left")
    torch.manual_seed(6)
    plain = gradients(model, ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(6)
    check_gradients(gradients(model, ids, mask), plain)


# --- mixed precision and modes --------------------------------------------------------------------


def test_autocast(pairs):
    pair: Pair = pairs("llama")
    ids, mask = prompts(side="left")
    out = []
    for model in (pair.model, pair.base):
        with torch.autocast("cpu", dtype=torch.bfloat16), counting() as count:
            out.append(logits(model, ids, mask))
        if model is pair.model:
            assert count == {"calls": 2, "fallbacks": {}}
    assert error(out[0], out[1], mask) <= 6e-2
    assert error(out[1], logits(pair.base, ids, mask), mask) > 1e-4


def test_inference_mode(pairs):
    pair: Pair = pairs("llama")
    ids, mask = prompts(side="left")
    with torch.inference_mode():
        actual = pair.model(ids, attention_mask=mask).logits
        answer = generate(pair.model, ids, mask)
    assert error(actual, logits(pair.base, ids, mask), mask) <= ATOL
    assert torch.equal(answer, generate(pair.base, ids, mask))
    # And afterwards gradients again: nothing made in inference mode is kept.
    check_gradients(gradients(pair.model, ids, mask), gradients(pair.base, ids, mask))


def test_a_few_steps_of_training_move_both_alike():
    model, base = transformed(), build("llama")
    ids, mask = prompts(side="left")
    losses = {}
    for key, one in (("model", model), ("base", base)):
        backbone = [p for n, p in one.named_parameters() if "elastic_router" not in n]
        optimizer = torch.optim.SGD(backbone, lr=0.05)
        losses[key] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = loss_of(one, ids, mask)
            loss.backward()
            optimizer.step()
            losses[key].append(loss.item())
    assert losses["model"] == pytest.approx(losses["base"], abs=1e-4)
    assert losses["base"][-1] < losses["base"][0] - 0.05
