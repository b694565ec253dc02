"""Rows, their tokens, batches and the order of a run; bad data is named with its line."""

import json

import pytest
import torch

from elastic_compile.training.data import (
    IGNORED,
    DataError,
    Encoder,
    Row,
    Sample,
    TrainingStream,
    collate,
    dump_rows,
    read_rows,
)
from elastic_compile.training.tasks import load_sources
from tests.training.helpers import tokenizer

PAIR = {"prompt": "question", "completion": "yes", "task": "qa"}
TEXT = {"text": "some words", "scored_tokens": 4, "task": "lm"}


def write(path, *lines):
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


def test_rows_become_tokens(tmp_path):
    path = write(tmp_path / "a.jsonl", PAIR, "\n", TEXT)
    encoder = Encoder(tokenizer(), 20)
    qa, lm = load_sources([str(path)], encoder)
    assert (qa.task, lm.task) == ("qa", "lm")
    sample = qa.sample(0)
    assert tokenizer().decode(list(sample.input_ids)) == "questionyes"
    assert sample.prompt_length == 8 and sample.answer
    sample = lm.sample(0)
    assert tokenizer().decode(list(sample.input_ids)) == "some words"
    assert sample.prompt_length == 6 and not sample.answer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{]\n", "a.jsonl:2: not a valid JSON document"),
        ("[1]\n", "a.jsonl:2: a row is an object .* not list"),
        ({"prompt": "a", "task": "t"}, r"a.jsonl:2: .*\(missing 'completion'\)"),
        ({**PAIR, "extra": 1}, r"a.jsonl:2: .*unknown 'extra'"),
        ({"text": "abc", "task": "t"}, "a.jsonl:2: .*missing 'scored_tokens'"),
        ({**PAIR, "prompt": ""}, "a.jsonl:2: prompt must be a string that is not empty"),
        ({**PAIR, "task": 3}, "a.jsonl:2: task must be a string"),
        ({**TEXT, "scored_tokens": 0}, "a.jsonl:2: scored_tokens must be a whole number above 0"),
        ({**TEXT, "scored_tokens": True}, "a.jsonl:2: scored_tokens must be a whole number"),
        ({**TEXT, "scored_tokens": 10}, "a.jsonl:2: scored_tokens is 10, but the text has 10"),
        ({**PAIR, "prompt": "x" * 30}, "a.jsonl:2: .* 33 tokens, more than 20; raise --length"),
        ('{"task": "a", "task": "b"}\n', "a.jsonl:2: .*'task' appears more than once"),
    ],
)
def test_bad_rows_are_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", PAIR, line)
    with pytest.raises(DataError, match=message):
        load_sources([str(path)], Encoder(tokenizer(), 20))


def test_bad_files(tmp_path):
    encoder = Encoder(tokenizer(), 20)
    with pytest.raises(DataError, match="no.jsonl: no such file"):
        load_sources([str(tmp_path / "no.jsonl")], encoder)
    with pytest.raises(DataError, match="e.jsonl: no rows"):
        load_sources([str(write(tmp_path / "e.jsonl", "\n"))], encoder)
    (tmp_path / "l.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    with pytest.raises(DataError, match="l.jsonl:1: not UTF-8"):
        load_sources([str(tmp_path / "l.jsonl")], encoder)
    with pytest.raises(DataError, match="row 2: a row is"):
        load_sources([PAIR, {"prompt": "x"}], encoder)
    with pytest.raises(DataError, match="no data"):
        load_sources([], encoder)


def test_truncation_cuts_the_middle_and_keeps_the_answer():
    encoder = Encoder(tokenizer(), 10, truncate="middle")
    sample = encoder.encode(Row("t", prompt="abcdefghijklmnop", completion="XYZ"), "here")
    assert tokenizer().decode(list(sample.input_ids)) == "abcdnopXYZ" and sample.prompt_length == 7
    sample = encoder.encode(Row("t", text="abcdefghijklmnop", scored_tokens=5), "here")
    assert (
        tokenizer().decode(list(sample.input_ids)) == "abcjklmnop" + ""
        and sample.prompt_length == 5
    )
    with pytest.raises(DataError, match="12 scored tokens do not fit into 10"):
        encoder.encode(Row("t", prompt="a", completion="x" * 12), "here")
    with pytest.raises(ValueError, match="truncate is 'left'"):
        Encoder(tokenizer(), 10, truncate="left")


def test_chat_template():
    encoder = Encoder(tokenizer(chat=True), 60, chat_template=True)
    row = Row("t", prompt="hi", completion=" 7", answer_prefix=" It is")
    sample = encoder.encode(row, "here")
    assert tokenizer().decode(list(sample.input_ids)) == "<user>hi<assistant>It is 7"
    assert sample.prompt_length == len(sample.input_ids) - 2
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(tokenizer(), 60, chat_template=True)


def test_rows_survive_a_file(tmp_path):
    text = Row("u", text="é", scored_tokens=1)
    given = [Row("t", prompt="a", completion="b", answer_prefix=" c"), text]
    path = tmp_path / "r.jsonl"
    path.write_text(dump_rows(given), encoding="utf-8")
    back = [row for _, row in read_rows(path)]
    assert back == [Row("t", prompt="a c", completion="b"), text]


class Numbers:
    """A source whose samples say which they are."""

    def __init__(self, task, size):
        self.task, self.size = task, size

    def __len__(self):
        return self.size

    def sample(self, index):
        assert self.size == 0 or 0 <= index < self.size
        return Sample(self.task, (index, 1, 2), 2, True)


def test_tasks_take_turns_and_rows_are_used_up_before_they_repeat():
    stream = TrainingStream([Numbers("a", 4), Numbers("b", 0)], steps=4, batch_size=4, seed=1)
    items = [stream[i] for i in range(len(stream))]
    assert len(items) == 16 and [x["key"] for x in items] == list(range(16))
    assert [x["task"] for x in items] == [0, 1] * 8
    first = [x["sample"].input_ids[0] for x in items if x["task"] == 0]
    assert sorted(first[:4]) == sorted(first[4:]) == [0, 1, 2, 3]
    assert first[:4] != [0, 1, 2, 3] or first[4:] != [0, 1, 2, 3]
    assert [x["sample"].input_ids[0] for x in items if x["task"] == 1] == list(range(8))
    again = TrainingStream([Numbers("a", 4), Numbers("b", 0)], steps=4, batch_size=4, seed=1)
    assert again[13] == items[13]
    with pytest.raises(IndexError):
        stream[16]


def test_weights_are_those_of_the_whole_step():
    stream = TrainingStream([Numbers(t, 0) for t in "abc"], steps=2, batch_size=4)
    # Tasks 0 1 2 0 | 1 2 0 1: two samples of one task, one of the others.
    weights = [stream[i]["weight"] for i in range(8)]
    assert weights == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6, 1 / 6, 1 / 3, 1 / 3, 1 / 6])


def test_batches_are_padded_on_the_right():
    items = [
        {"sample": Sample("a", (5, 6, 7, 8), 3, True), "task": 0, "weight": 0.5, "key": 3},
        {"sample": Sample("b", (9, 4), 1, True), "task": 1, "weight": 0.5, "key": 4},
    ]
    batch = collate(items)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED] * 3 + [8], [IGNORED, 4, IGNORED, IGNORED]]
    assert batch["route_length"].tolist() == [3, 1] and batch["task"].tolist() == [0, 1]
    assert batch["weight"].dtype == torch.float32 and batch["key"].tolist() == [3, 4]
