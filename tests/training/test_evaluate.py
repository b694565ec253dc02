"""Evaluation: scores against the untouched model, routes against those of generate."""

import pytest
import torch

import elastic_compile
from elastic_compile.training import evaluate
from elastic_compile.training.data import Encoder
from elastic_compile.training.tasks import load_sources
from tests.training.helpers import LENGTH, plain, rows, sites, stir, tiny, tokenizer


def sources(data=None):
    return load_sources(rows() if data is None else data, Encoder(tokenizer(), LENGTH))


@pytest.fixture
def model():
    return stir(tiny(3))


def test_full_scores_are_those_of_the_untouched_model(model):
    result = evaluate(model, sources(), samples=4, batch_size=3, progress=False)
    base = plain(3)
    for source in sources():
        task = result.tasks[source.task]
        assert task.samples == 4
        for index in range(4):
            sample = source.sample(index)
            ids = torch.tensor([list(sample.input_ids)])
            with torch.no_grad():
                logits = base(ids).logits[0, sample.prompt_length - 1 : -1].log_softmax(-1)
            answer = ids[0, sample.prompt_length :]
            nll = -logits.gather(1, answer[:, None]).mean().item()
            assert task.nll["full"][index] == pytest.approx(nll, abs=1e-4)
            assert task.exact["full"][index] == bool((logits.argmax(-1) == answer).all())
        assert task.mean_nll("streaming") != pytest.approx(task.mean_nll("full"), abs=1e-3)


def test_exact_match_sees_a_right_answer(model):
    """Answers that the model itself gives are exact, and only under the mode that gave them."""
    data = []
    for row in rows("a"):
        ids = tokenizer()(row["prompt"], return_tensors="pt")["input_ids"]
        with elastic_compile.force_routes(model, "full"):
            new = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False
            )
        data.append({**row, "answer": new[0, ids.shape[1] :].tolist()})
    found = sources([{k: v for k, v in row.items() if k != "answer"} for row in data])[0]
    samples = []
    for index, row in enumerate(data):
        sample = found.sample(index)
        prompt = list(sample.input_ids[: sample.prompt_length])
        samples.append(
            type(sample)(sample.task, (*prompt, *row["answer"]), len(prompt), answer=True)
        )
    found.samples = tuple(samples)
    result = evaluate(model, [found], samples=4, progress=False).tasks["a"]
    assert result.exact_match("full") == 1.0
    assert result.exact_match("streaming") < 1.0


def test_routes_are_those_of_generate(model):
    result = evaluate(model, sources(), samples=4, batch_size=4, progress=False)
    shares = []
    for source in sources():
        tables = []
        for index in range(4):
            sample = source.sample(index)
            ids = torch.tensor([list(sample.input_ids[: sample.prompt_length])])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=2,
                do_sample=False,
                return_dict_in_generate=True,
            )
            cache = getattr(out, "cache", None)
            cache = out.past_key_values if cache is None else cache
            tables.append(elastic_compile.last_routes(cache)[0].double())
            assert result.tasks[source.task].msr[index] == pytest.approx(tables[-1].mean().item())
        expected = torch.stack(tables).mean(0)
        actual = torch.tensor(result.tasks[source.task].sparse_share, dtype=torch.float64)
        assert torch.equal(actual, expected)
        shares.append(expected)
    assert 0 < torch.stack(shares).mean() < 1


def test_swapping_the_completion_leaves_routes_alone(model):
    data = rows()
    swapped = [{**row, "completion": row["completion"][::-1].upper() + "!"} for row in data]
    one = evaluate(model, sources(data), samples=4, progress=False)
    other = evaluate(model, sources(swapped), samples=4, progress=False)
    for task in one.tasks:
        assert one.tasks[task].nll != other.tasks[task].nll
        assert one.tasks[task].msr == other.tasks[task].msr
        assert one.tasks[task].sparse_share == other.tasks[task].sparse_share


def test_language_modelling_has_no_exact_match_and_counts_scored_tokens_only(model):
    data = [
        {"text": row["prompt"] + row["completion"], "scored_tokens": 5, "task": "lm"}
        for row in rows("a")
    ]
    result = evaluate(model, sources(data), samples=99, progress=False).tasks["lm"]
    assert result.samples == 4 and result.exact is None and result.exact_match("full") is None


def test_the_model_is_left_as_it_was(model):
    model.train()
    before = [site.forced.clone() for site in sites(model)]
    result = evaluate(model, sources(), samples=2, progress=False, modes=("streaming", "routed"))
    assert model.training and all(map(torch.equal, before, [s.forced for s in sites(model)]))
    assert result.modes == ("streaming", "routed") and result.tasks["a"].recovered() is None
    assert "streaming EM" in str(result) and "full EM" not in str(result)


def test_results_as_table_and_json(model):
    result = evaluate(model, sources(), samples=3, progress=False)
    document = result.to_dict()
    task = document["tasks"]["a"]
    assert len(task["per_sample"]["nll"]["routed"]) == 3
    assert task["msr"] == pytest.approx(result.tasks["a"].mean_msr(), abs=1e-4)
    a = result.tasks["a"]
    share = (a.mean_nll("streaming") - a.mean_nll("routed")) / (
        a.mean_nll("streaming") - a.mean_nll("full")
    )
    assert a.recovered() is None or a.recovered() == pytest.approx(share)
    assert document["mean_msr"] == pytest.approx(
        sum(t["msr"] for t in document["tasks"].values()) / 2, abs=1e-4
    )
    assert len(task["sparse_share"]) == 3 and len(task["sparse_share"][0]) == 2
    assert str(result).count("\n") == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modes": ("routed", "dense")}, "allowed: full, streaming, routed"),
        ({"modes": ()}, "allowed: full, streaming, routed"),
        ({"samples": 0}, "samples is 0"),
    ],
)
def test_bad_arguments(model, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(model, sources(), progress=False, **settings)
