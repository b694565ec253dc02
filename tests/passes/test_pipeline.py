"""Capture, sharing, install and self-check on tiny models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elastic_compile
from elastic_compile import _forward
from elastic_compile._state import rewritten_sites
from elastic_compile.passes import selfcheck
from tests.families import FAMILIES, build

TOKENS = torch.arange(40).reshape(2, 20) % 37 + 3


def logits(model, **kwargs):
    with torch.no_grad():
        return model(TOKENS, **kwargs).logits


def test_layers_of_one_geometry_share_a_capture(captures):
    model = build("llama", layers=3)
    expected = logits(model)
    elastic_compile.transform(model)
    # The second one confirms that the layer's index is but a place in the cache.
    assert captures == ["LlamaAttention"] * 2
    assert [site.layer_idx for _, site in rewritten_sites(model)] == [0, 1, 2]
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)


def test_a_scale_per_layer_is_captured_per_layer(captures):
    model = build("gpt2_layer_scale", layers=3)
    expected = logits(model)
    elastic_compile.transform(model)
    assert len(captures) == 3
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)


def test_code_that_depends_on_the_layer_index_is_not_shared_wrongly():
    """A shared capture would bake the index in."""
    model = build("llama", layers=2)

    class Indexed(type(model.model.layers[0].self_attn)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states * (1.0 + self.layer_idx), **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Indexed
    expected = logits(model)
    elastic_compile.transform(model)
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)
    assert len(elastic_compile.report(model).rewritten) == 2


def test_lifted_constants_are_buffers_outside_the_checkpoint():
    model = build("falcon")
    keys = set(model.state_dict())
    elastic_compile.transform(model)
    (attention, _) = FAMILIES["falcon"].attention_modules(model)
    names = [name for name, _ in attention.named_buffers() if name.startswith("elastic_constant")]
    assert names
    assert {k for k in model.state_dict() if "elastic_router" not in k} == keys
    elastic_compile.restore(model)
    assert not [n for n, _ in attention.named_buffers() if n.startswith("elastic_constant")]


def test_a_site_that_fails_the_self_check_is_skipped_and_exact(monkeypatch):
    model = build("llama", layers=2)
    expected = logits(model)
    padded = torch.ones_like(TOKENS)
    padded[0, :6] = 0
    expected_padded = logits(model, attention_mask=padded)
    original = selfcheck._differences

    def fail_second(site, found):
        return [9.0] if site.path.endswith("1.self_attn") else original(site, found)

    monkeypatch.setattr(selfcheck, "_differences", fail_second)
    elastic_compile.transform(model)
    first, second = elastic_compile.report(model).sites
    assert (first.status, first.checked) == ("rewritten", True)
    assert (second.status, second.checked) == ("skipped", False)
    assert "self-check failed" in second.reason
    skipped = model.model.layers[1].self_attn
    assert isinstance(skipped.forward, _forward.ExactForward)
    assert not hasattr(skipped, "elastic_router")
    # It no longer gets a dense mask from the model, and must not lose the padding by that.
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)
    real = padded.bool()
    got = logits(model, attention_mask=padded)
    torch.testing.assert_close(got[real], expected_padded[real], atol=2e-5, rtol=0)
    kwargs = dict(max_new_tokens=5, do_sample=False, attention_mask=padded)
    for cache in ({}, {"cache_implementation": "static"}):
        tokens = model.generate(TOKENS, **kwargs, **cache)
        elastic_compile.restore(model)
        assert torch.equal(tokens, model.generate(TOKENS, **kwargs, **cache))
        elastic_compile.transform(model)


def test_a_consumer_of_the_mask_that_is_no_site_refuses_the_transform(monkeypatch):
    model = build("llama")
    layer = type(model.model.layers[0])
    original = layer.forward

    def peeks(self, hidden_states, attention_mask=None, **kwargs):
        hidden = original(self, hidden_states, attention_mask=attention_mask, **kwargs)
        return hidden if attention_mask is None else hidden + attention_mask.dim()

    monkeypatch.setattr(layer, "forward", peeks)
    keys, configuration = set(model.state_dict()), model.config._attn_implementation
    with pytest.raises(RuntimeError, match="other\\s+than its attention sites"):
        elastic_compile.transform(model)
    assert set(model.state_dict()) == keys
    assert model.config._attn_implementation == configuration
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_meta_models_are_rewritten_unchecked():
    with torch.device("meta"):
        model = build("llama", layers=4)
    elastic_compile.transform(model)
    report = elastic_compile.report(model)
    assert [site.status for site in report.sites] == ["rewritten"] * 4
    assert not any(site.checked for site in report.sites)
    assert all(p.is_meta for p in model.parameters())


def test_random_state_and_modes_are_left_alone():
    model = build("llama")
    model.train()
    model.model.layers[0].mlp.eval()
    before = torch.get_rng_state()
    elastic_compile.transform(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and not model.model.layers[0].mlp.training
    assert model.model.layers[0].self_attn.training


class NanoAttention(nn.Module):
    """A module of nobody's library: fused projection, SDPA called by itself."""

    def __init__(self, hidden=32, heads=4):
        super().__init__()
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.heads = heads

    def forward(self, x):
        batch, length, hidden = x.shape
        q, k, v = self.c_attn(x).split(hidden, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, hidden))


class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(NanoAttention() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_module_of_no_library_needs_example_inputs():
    model = Nano().eval()
    with pytest.raises(ValueError, match="example_inputs"):
        elastic_compile.transform(model)
    with pytest.raises(ValueError, match="at least 13 tokens"):
        elastic_compile.transform(model, example_inputs=(torch.zeros(3, 5, dtype=torch.long),))
    ids = torch.randint(0, 50, (3, 40))
    with torch.no_grad():
        expected = model(ids)
        config = elastic_compile.ElasticConfig(sink=2, local=4)
        elastic_compile.transform(model, config, example_inputs=(ids,))
        assert len(elastic_compile.report(model).rewritten) == 2
        torch.testing.assert_close(model(ids), expected)
        with elastic_compile.force_routes(model, "sparse"):
            assert (model(ids) - expected).abs().max() > 1e-3
        elastic_compile.restore(model)
        assert torch.equal(model(ids), expected)


def test_save_pretrained_puts_the_router_beside_the_backbone(tmp_path):
    model, plain = build("llama"), build("llama")
    elastic_compile.transform(model)
    with torch.no_grad():
        for parameter in elastic_compile.router_parameters(model):
            parameter.normal_()
    model.save_pretrained(tmp_path / "elastic")
    plain.save_pretrained(tmp_path / "plain")
    written = {p.relative_to(tmp_path / "elastic") for p in (tmp_path / "elastic").iterdir()}
    assert {p.name for p in written} - {p.name for p in (tmp_path / "plain").iterdir()} == {
        "elastic_router"
    }
    loaded = type(plain).from_pretrained(tmp_path / "elastic").eval()
    elastic_compile.transform(loaded, router=tmp_path / "elastic" / "elastic_router")
    torch.testing.assert_close(logits(loaded), logits(model))
    assert torch.equal(elastic_compile.last_routes(loaded), elastic_compile.last_routes(model))
    elastic_compile.restore(model)
    model.save_pretrained(tmp_path / "restored")
    assert not (tmp_path / "restored" / "elastic_router").exists()


def test_a_model_that_needs_other_inputs_says_so():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=50)
    with pytest.raises(ValueError, match="example_inputs"):
        elastic_compile.transform(T5ForConditionalGeneration(config))


def test_the_reference_is_the_untouched_model_not_what_the_probe_computes(monkeypatch):
    """A term that the probe misjudges must refuse the transform, not become the reference."""
    from elastic_compile.passes import discovery

    original = discovery.exact_interface_attention

    def misjudging(implementation, module, query, *args, **kwargs):
        return original(implementation, module, query * 1.5, *args, **kwargs)

    monkeypatch.setattr(discovery, "exact_interface_attention", misjudging)
    # Sites are compared with what the probe saw, so only the whole model can tell.
    monkeypatch.setattr(selfcheck, "_differences", lambda site, found: [0.0])
    marker = discovery.site_marker

    def misread(implementation, module, query, *args, **kwargs):
        return marker(implementation, module, query * 1.5, *args, **kwargs)

    monkeypatch.setattr(discovery, "site_marker", misread)
    model = build("llama")
    expected = logits(model)
    with pytest.raises(RuntimeError, match="differs from the untouched one"):
        elastic_compile.transform(model)
    assert torch.equal(logits(model), expected)


def test_a_model_that_cuts_the_mask_itself_is_refused_clearly():
    """Rewritten sites are handed a 2-D mask; a layer that slices four dimensions cannot run."""
    model = build("llama")

    class Cutting(type(model.model.layers[1])):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            if attention_mask is not None:
                attention_mask = attention_mask[:, :, :, :]
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)

    model.model.layers[1].__class__ = Cutting
    expected = logits(model)
    with pytest.raises(RuntimeError, match="does not run.*works on the causal mask.*Nothing was"):
        elastic_compile.transform(model)
    assert not elastic_compile.is_transformed(model) and torch.equal(logits(model), expected)
