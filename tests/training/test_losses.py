"""Losses in chunks of tokens: equal to those of whole logits, and never many logits at once."""

import logging

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from elastic_compile.training import _losses
from elastic_compile.training._losses import ChunkedLoss
from elastic_compile.training.data import IGNORED

VOCABULARY, LENGTH, FIRST = 120, 40, 9
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=2.0))


def cohere():
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3))


def granite():
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2))


def batch():
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    labels = tokens.clone()
    labels[0, :FIRST] = IGNORED
    labels[1, : FIRST + 6] = IGNORED
    labels[1, -3:] = IGNORED
    return {
        "input_ids": tokens,
        "labels": labels,
        "route_length": torch.tensor([FIRST, FIRST + 6]),
    }


def prepared(make):
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # What the routers' gradient flows through.
    model.get_input_embeddings().weight.requires_grad_()
    model.get_output_embeddings().weight.data.mul_(20)
    return model


def widest(model):
    """Records how many logits the head makes at once."""
    sizes = []
    model.get_output_embeddings().register_forward_hook(lambda *call: sizes.append(call[2].numel()))
    return sizes


@pytest.mark.parametrize("make", [llama, gemma2, cohere, granite, gpt2])
def test_equal_to_whole_logits(make, caplog):
    model, inputs = prepared(make), batch()
    weight = model.get_input_embeddings().weight
    weights = torch.tensor([0.3, 0.7])
    whole = ChunkedLoss(model)(model, inputs)
    (wanted,) = torch.autograd.grad((whole * weights).sum(), weight)
    sizes = widest(model)
    limit = 7 * 2 * VOCABULARY
    parts = ChunkedLoss(model, limit)(model, inputs)
    (found,) = torch.autograd.grad((parts * weights).sum(), weight)
    assert "in chunks" not in caplog.text
    torch.testing.assert_close(parts, whole)
    assert (found - wanted).norm() < 1e-5 * wanted.norm() and wanted.norm() > 1e-4
    assert max(sizes) <= limit
    # Forward and backward make every chunk; the pass and the check make one token.
    assert len(sizes) == 2 + 2 * -(-(LENGTH - FIRST) // 7)
    assert "forward" not in model.base_model.__dict__


def test_few_logits_are_made_as_ever():
    model, inputs = prepared(llama), batch()
    sizes = widest(model)
    loss = ChunkedLoss(model, 2 * (LENGTH - FIRST) * VOCABULARY)(model, inputs)
    assert len(sizes) == 1
    logits, labels = _losses.forward_scored(model, inputs, True)
    assert torch.equal(loss, _losses.scored_loss(logits, labels))


@pytest.mark.parametrize("how", ["differs", "fails"])
def test_a_model_whose_logits_depend_on_more_keeps_them_whole(how, caplog):
    class Odd(LlamaForCausalLM):
        def forward(self, input_ids=None, logits_to_keep=0, **kwargs):
            result = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
            if how == "fails" and input_ids.shape[1] < 5:
                raise RuntimeError("too short")
            result.logits = result.logits + 0.01 * input_ids.float().mean()
            return result

    model, inputs = prepared(lambda: Odd(LlamaConfig(**SIZES))), batch()
    loss = ChunkedLoss(model, 1000)
    with caplog.at_level(logging.WARNING):
        found = [loss(model, inputs) for _ in range(2)]
    assert caplog.text.count("cannot be made in chunks") == 1
    wanted = _losses.scored_loss(*_losses.forward_scored(model, inputs, True))
    assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)


def test_half_precision():
    model, inputs = prepared(llama).bfloat16(), batch()
    whole = ChunkedLoss(model)(model, inputs)
    parts = ChunkedLoss(model, 500)(model, inputs)
    torch.testing.assert_close(parts, whole, rtol=1e-2, atol=1e-3)
