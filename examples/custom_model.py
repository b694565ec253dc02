"""A model of your own: transform it, look at it, compile it, steer its routes.

    python examples/custom_model.py                    # compiles with Inductor
    python examples/custom_model.py --backend eager    # no C++ compiler needed

The model is a small GPT written with ``scaled_dot_product_attention``; nothing in it knows of
elastic_compile. Its weights are random, so only differences between runs mean something.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic_compile


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] to the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SmallGPT(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, words: int = 256, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
            for _ in range(layers)
        )
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, S] to logits [B, S, words]."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for norm, attend, mlp, down in zip(
            self.norms, self.attention, self.mlps, self.downs, strict=True
        ):
            x = x + attend(norm(x))
            x = x + down(mlp(x))
        return self.head(x)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--backend", default="inductor", help="what torch.compile uses")
options = parser.parse_args()

torch.manual_seed(0)
model = SmallGPT().eval()
ids = torch.randint(0, 256, (2, 300))
with torch.no_grad():
    untouched = model(ids)

# A model that is not transformers' needs inputs to run on: at least 3 rows and 13 tokens. They are
# cut to other sizes, so that the graphs hold for every batch and length.
example = (torch.randint(0, 256, (3, 32)),)
config = elastic_compile.ElasticConfig(sink=4, local=64)
elastic_compile.transform(model, config, example_inputs=example)
print(elastic_compile.report(model))

compiled = torch.compile(model, backend=options.backend, dynamic=True, fullgraph=True)
with torch.no_grad():
    # Untrained routers leave every head full: nothing changed but rounding.
    print(f"largest difference, all heads full: {(compiled(ids) - untouched).abs().max():.1e}")
    with elastic_compile.force_routes(model, "sparse"):
        difference = (compiled(ids) - untouched).abs().max()
    print(f"largest difference, all heads streaming: {difference:.1e}")
    # One row a layer, one number a head: 1 streams, 0 is full, -1 asks the router.
    with elastic_compile.force_routes(model, torch.tensor([[0, 0, 1, 1]] * 4)):
        difference = (compiled(ids) - untouched).abs().max()
    print(f"largest difference, half of them: {difference:.1e}")

elastic_compile.restore(model)
with torch.no_grad():
    print("restored, equal to the untouched model:", torch.equal(model(ids), untouched))
