"""One capture for layers of one geometry; layers that differ in a constant get what is theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import elastic_compile
from elastic_compile.passes import capture
from tests.families import build as build_family
from tests.own_models import WIDTH, FusedAttention, NanoLike, TuneLike, build, tokens

CONFIG = elastic_compile.ElasticConfig(sink=2, local=3, pool_tokens=4)


def programs(model):
    forwards = [m.__dict__.get("forward") for m in model.modules()]
    return [f.program for f in forwards if f is not None]


def compared(model):
    """Transform; logits before and after."""
    with torch.no_grad():
        expected = model(tokens(2, 25))
        elastic_compile.transform(model, CONFIG, example_inputs=(tokens(),))
        return model(tokens(2, 25)), expected


@pytest.mark.parametrize("kind", [NanoLike, TuneLike], ids=lambda kind: kind.__name__)
def test_layers_of_one_geometry_share_one_program(kind, captures):
    model = build(kind, layers=3)
    got, expected = compared(model)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    assert len(captures) == 1
    first, *others = programs(model)
    assert len(others) == 2 and all(other is first for other in others)


def test_the_layers_of_a_decoder_share_one_program(captures):
    with torch.device("meta"):
        model = build_family("qwen3", layers=4)
    elastic_compile.transform(model)
    # The second one confirms that the layer's index is but a place in the cache.
    assert captures == ["Qwen3Attention"] * 2
    assert len({id(program) for program in programs(model)}) == 1


class Numbered(FusedAttention):
    """Each layer is built with its own number."""

    made = 0

    def __init__(self):
        self.place = Numbered.made % 3
        Numbered.made += 1
        super().__init__()


class LayerScale(Numbered):
    def __init__(self):
        super().__init__()
        self.scale = 0.1 + 0.2 * self.place


class LayerTemperature(Numbered):
    """A temperature that the code works out from the layer's index."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q / (1.0 + self.layer_idx), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    @property
    def layer_idx(self):
        return self.place


class PlainIndex(Numbered):
    """The index is an attribute of the name that is left out of the comparison of layers."""

    def __init__(self):
        super().__init__()
        self.layer_idx = self.place
        del self.place

    forward = LayerTemperature.forward


class LayerHeads(Numbered):
    """Layers differ in their head count; so does nothing else, the weights' shapes included."""

    def forward(self, x):
        heads = (2, 4, 8)[self.place]
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attention", [LayerScale, LayerTemperature, PlainIndex, LayerHeads])
def test_layers_with_constants_of_their_own_stay_right(attention):
    Numbered.made = 0
    model = build(NanoLike, layers=3, attention=attention)
    got, expected = compared(model)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    report = elastic_compile.report(model)
    assert all(site.checked for site in report.rewritten)
    assert len(report.rewritten) == 3
    if attention is LayerHeads:
        assert [site.kv_heads for site in report.sites] == [2, 4, 8]


class LateIndex(PlainIndex):
    """Layers that differ from the first two only further up, where no second capture looks."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q = q * (0.3 if self.layer_idx == 2 else 1.0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_shared_capture_that_fails_is_made_for_each_layer(captures, monkeypatch):
    """As if layers without a cache took their place in it from their index."""
    original = capture.capture

    def indexed(module, *args):
        graph = original(module, *args)
        graph.layer_idx = module.layer_idx
        return graph

    monkeypatch.setattr(capture, "capture", indexed)
    Numbered.made = 0
    got, expected = compared(build(NanoLike, layers=3, attention=LateIndex))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    Numbered.made = 0
    model = build(NanoLike, layers=3, attention=LateIndex)
    elastic_compile.transform(model, CONFIG, example_inputs=(tokens(),))
    assert [site.checked for site in elastic_compile.report(model).rewritten] == [True] * 3
    assert len(set(map(id, programs(model)))) == 3
    # Two and a failure, then three: each time.
    assert len(captures) == 2 * 5


@pytest.mark.parametrize("meta", [False, True])
def test_code_that_computes_with_the_layers_index_is_right_unchecked_too(meta):
    """Weights that come after the transform are no excuse for the first layer's constants."""

    def build():
        model = build_family("llama", layers=3)
        for layer in model.model.layers:
            layer.self_attn.__class__ = Indexed
        return model

    class Indexed(type(build_family("llama").model.layers[0].self_attn)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states * (1.0 + self.layer_idx), **kwargs)

    loaded = build()
    with torch.device("meta" if meta else "cpu"):
        model = build()
    elastic_compile.transform(model, CONFIG)
    assert len(elastic_compile.report(model).rewritten) == 3
    if meta:
        model.to_empty(device="cpu")
        model.load_state_dict(loaded.state_dict(), strict=False)
        model.model.rotary_emb = loaded.model.rotary_emb  # its buffers are in no checkpoint
    ids = torch.arange(1, 26)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, loaded(ids).logits, atol=1e-4, rtol=0)


def test_a_closure_is_a_constant_too():
    """Layers whose difference is a function, not a number, do not share a capture."""

    class Applied(FusedAttention):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return super().forward(self.function(x))

    class Model(NanoLike):
        def __init__(self):
            super().__init__()
            for block, factor in zip(self.blocks, (1.0, 3.0), strict=True):
                block.attention = Applied(lambda x, factor=factor: x * factor)

    got, expected = compared(build(Model))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_a_buffer_of_its_own_is_read_from_the_layer():
    class Gained(FusedAttention):
        def __init__(self):
            super().__init__()
            self.register_buffer("gain", torch.rand(WIDTH))

        def forward(self, x):
            return super().forward(x * self.gain)

    model = build(NanoLike, attention=Gained)
    assert not torch.equal(model.blocks[0].attention.gain, model.blocks[1].attention.gain)
    got, expected = compared(model)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
