"""The built-in tasks: offline, seeded, as long as asked for, training and test apart."""

import re

import pytest

from elastic_compile.training import _corpora
from elastic_compile.training.data import DataError, Encoder
from elastic_compile.training.tasks import BUILTIN, builtin, load_sources
from tests.training.helpers import tokenizer

LENGTH = 1500


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prose")
    for number in range(40):
        text = " ".join(f"Document {number} has a sentence number {i}." for i in range(60))
        (folder / f"{number}.txt").write_text(text)
    return str(folder)


def source(name, prose, split="train", length=LENGTH, seed=0):
    return builtin(name, Encoder(tokenizer(), length), split=split, prose=prose, seed=seed)


@pytest.mark.parametrize(("name", "keys"), [("niah_single", 1), ("niah_multikey", 4)])
def test_needles(name, keys, prose):
    task = source(name, prose)
    for index in range(5):
        row = task.row(index)
        needle = r"One of the special magic numbers for (\S+) is: (\d{6})\."
        found = dict(re.findall(needle, row.prompt))
        assert len(found) == keys
        asked = re.search(r"number for (\S+) mentioned in the provided text\?$", row.prompt)[1]
        assert row.completion == f" {found[asked]}"
        assert row.answer_prefix.endswith(f"{asked} mentioned in the provided text is")
        for match in re.finditer("One of the special", row.prompt):
            assert 0.05 <= match.start() / len(row.prompt) <= 0.57  # the needles push one another
        sample = task.sample(index)
        assert 0.95 * LENGTH < len(sample.input_ids) <= LENGTH
        assert tokenizer().decode(list(sample.input_ids[sample.prompt_length :])) == row.completion
    assert task.row(0) != task.row(1)


@pytest.mark.parametrize("name", BUILTIN)
def test_samples_belong_to_their_number(name, prose):
    one, other = source(name, prose), source(name, prose)
    assert one.sample(3) == other.sample(3)
    assert one.sample(3) != one.sample(4)
    assert source(name, prose, seed=1).sample(3) != one.sample(3)
    assert source(name, prose, split="test").sample(3) != one.sample(3)


@pytest.mark.parametrize("name", ["lm_code", "lm_prose"])
@pytest.mark.parametrize("length", [40, LENGTH])
def test_language_modelling(name, length, prose):
    sample = source(name, prose, length=length).sample(0)
    assert len(sample.input_ids) == length and not sample.answer
    assert length - sample.prompt_length == min(256, length // 4)


def test_training_and_test_material_is_disjoint(prose):
    for documents in (_corpora.code, lambda split: _corpora.prose(split, prose)):
        train, test = set(documents("train")), set(documents("test"))
        assert train and test and not train & test and len(train) > len(test)
    text = {split: source("niah_multikey", prose, split).row(0).prompt for split in _corpora.SPLITS}
    numbers = {split: set(re.findall(r"Document (\d+)", t)) for split, t in text.items()}
    assert numbers["train"] and numbers["test"] and not numbers["train"] & numbers["test"]
    nouns = {split: set(source("niah_single", prose, split).nouns) for split in _corpora.SPLITS}
    assert not nouns["train"] & nouns["test"] and all(len(words) > 15 for words in nouns.values())


def test_prose_without_a_folder_is_full_sentences_of_the_library():
    documents = _corpora.prose("test")
    assert sum(map(len, documents)) > 50_000
    paragraphs = [part for text in documents for part in text.split("\n\n")]
    assert all(part.endswith(".") and part.count(" ") > 10 for part in paragraphs)
    assert not any(">>>" in part or "=" * 4 in part for part in paragraphs)


def test_bad_names_folders_and_lengths(prose, tmp_path):
    encoder = Encoder(tokenizer(), LENGTH)
    with pytest.raises(DataError, match="builtin:niah: no such task; there are niah_single, "):
        load_sources(["builtin:lm_code,niah"], encoder)
    with pytest.raises(DataError, match="builtin:lm_prose: no folder"):
        builtin("lm_prose", encoder, prose=str(tmp_path / "absent"))
    (tmp_path / "one.txt").write_text("short")
    with pytest.raises(DataError, match="has no prose for the train split"):
        builtin("lm_prose", encoder, prose=str(tmp_path))
    with pytest.raises(DataError, match="question and needles alone have"):
        source("niah_multikey", prose, length=100).sample(0)
    with pytest.raises(DataError, match="the task lm_code is there twice"):
        load_sources(["builtin:lm_code", "builtin:lm_code"], encoder)
