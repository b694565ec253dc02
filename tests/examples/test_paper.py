"""Conversion of the paper's sources: small hand-made files of each format."""

import gzip
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "paper"))

import _packing
import _reading
import benchmarks
import convert
from _sources import SOURCES, Document, Item, _repository

import elastic_compile.evaluate
import elastic_compile.fit
from elastic_compile import ElasticConfig
from elastic_compile.training import evaluate, fit
from elastic_compile.training.data import Encoder, read_rows, sources_from_rows
from elastic_compile.training.settings import PRESETS, ROBUST, SENSITIVE
from elastic_compile.training.tasks import load_sources
from tests.training import helpers
from tests.training.helpers import tokenizer

WORDS = random.Random(7).sample(
    [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("ra", "lo", "ti", "nu", "ske")], 200
)
LOW, HIGH = 300, 900


def words(text):
    """The counter of these tests."""
    return len(text.split())


def prose(seed, length):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(length))


def paragraph(name, fact=""):
    return f"{prose(name, 20)} {fact} {prose(name + 'x', 20)}"


def musique_record(n, **more):
    facts = [f"The head of firm{n} is person{n}.", f"The home of person{n} is town{n}."]
    documents = [
        {
            "idx": place,
            "title": f"Page {n} {place}",
            "paragraph_text": paragraph(f"{n}/{place}", facts[place] if place < 2 else ""),
            "is_supporting": place < 2,
        }
        for place in range(5)
    ]
    random.Random(n).shuffle(documents)
    return {
        "id": f"2hop__{n}",
        "paragraphs": documents,
        "question": f"Where is the home of the head of firm{n}?",
        "answer": f"town{n}",
        "answer_aliases": [],
        "answerable": True,
        **more,
    }


def hotpot_record(n, **more):
    context = [
        [f"Page {n} {place}", [f" {prose(f'{n}/{place}', 30)}.", f" Its town is town{n}."]]
        for place in range(4)
    ]
    return {
        "_id": str(n),
        "question": f"Which town is of page {n}?",
        "answer": f"town{n}",
        "supporting_facts": [[f"Page {n} 1", 1], [f"Page {n} 2", 0]],
        "context": context,
        **more,
    }


def qasper_paper(n):
    def answer(**given):
        empty = dict(unanswerable=False, extractive_spans=[], yes_no=None, free_form_answer="")
        return {"answer": {**empty, **given}}

    return {
        "title": f"A study of {n}",
        "abstract": prose(f"abstract{n}", 10),
        "full_text": [
            {"section_name": "Data", "paragraphs": [paragraph(f"p{n}", f"We use corpus{n}.")]},
            {"section_name": None, "paragraphs": [prose(f"q{n}", 60)]},
        ],
        "qas": [
            {"question": "Which corpus?", "answers": [answer(extractive_spans=[f"corpus{n}"])]},
            {"question": "Is it large?", "answers": [answer(yes_no=False)]},
            {"question": "Why?", "answers": [answer(unanswerable=True)]},
            {"question": "How much?", "answers": [answer(extractive_spans=["FLOAT SELECTED 1"])]},
        ],
    }


def chatqa2_record(n, length=400):
    if n % 2:
        text = f"User: Article: {prose(n, length)} Question: what is {n}?\n\nAssistant:"
        return {"question": text, "answer": f"It is {n}.", "sub-paragraphs": ""}
    body = f"<|begin_of_text|>\ufeff{prose(n, length)} The name is name{n}."
    return {"question": "What is the name?", "answers": [f"name{n}"], "sub-paragraphs": body}


def govreport_record(n, length=None):
    return {"report": prose(n, length or 80 + 13 * n), "summary": f"sum{n} {prose(n + 0.5, 12)}"}


def colt_record(n):
    return {
        "namespace": f"repo{n}.module.call",
        "code_file_path": f"repo{n}/module.py",
        "prefix": f"import helper{n}\n\ndef call():\n    return ",
        "suffix": "\n\ndef other():\n    pass\n",
        "middle": f"helper{n}.run()",
        "function_name": "call",
        "cross_file_dependency": [
            {"code_file_path": f"repo{n}/h{i}.py", "abstraction": f"def run{n}_{i}(): ..."}
            for i in range(3)
        ],
        "similar_functions": [
            {"code_file_path": f"repo{n}/s.py", "code_block": prose(f"code{n}", 40)}
        ],
    }


def repobench_record(n):
    return {
        "repo_name": f"owner/repo{n}",
        "file_path": "a.py",
        "context": [{"identifier": "f", "path": "b.py", "snippet": prose(f"s{n}", 40)}],
        "import_statement": "from b import f",
        "cropped_code": f"def g():\n    x = {n}",
        "next_line": f"    return f(x, {n})",
    }


def xsum_record(n):
    return {"document": prose(n, 40), "summary": f"sum{n} {prose(n + 0.5, 6)}", "id": str(n)}


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


# Name of the file and its text, of ``count`` records.
FILES = {
    "chatqa2": ("long.json", lambda count: json.dumps([chatqa2_record(n) for n in range(count)])),
    "musique": ("m.jsonl", lambda count: lines(musique_record(n) for n in range(count))),
    "colt": ("python_line.jsonl", lambda count: lines(colt_record(n) for n in range(count))),
    "govreport": ("g.jsonl", lambda count: lines(govreport_record(n) for n in range(count))),
    "xsum": ("x.jsonl", lambda count: lines(xsum_record(n) for n in range(count))),
    "qasper": (
        "q.json",
        lambda count: json.dumps({f"1{n:03}.1": qasper_paper(n) for n in range(count)}),
    ),
    "hotpotqa": ("h.json", lambda count: json.dumps([hotpot_record(n) for n in range(count)])),
    "repobench": ("r.jsonl", lambda count: lines(repobench_record(n) for n in range(count))),
    "trec": (
        "train.label",
        lambda count: "".join(f"KIND{n % 3}:fine What is {prose(n, 5)} ?\n" for n in range(count)),
    ),
}
COUNT = {"trec": 400, "xsum": 80, "chatqa2": 40}


@pytest.fixture
def file_of(tmp_path):
    def write(name, count=None, text=None):
        file, make = FILES[name]
        path = tmp_path / file
        path.write_text(make(count or COUNT.get(name, 60)) if text is None else text, "utf-8")
        return path

    return write


def run(name, path, out, **options):
    settings = dict(samples=8, low=LOW, high=HIGH, reserve=10, test_share=0.3, progress=False)
    return convert.convert(name, [path], out, words, **{**settings, **options})


def prompts(path):
    return [(row.prompt, row.completion) for _, row in read_rows(path)]


def test_labels_are_those_of_the_preset():
    targets = PRESETS["paper"].targets
    kinds = {name: targets[source.task] for name, source in SOURCES.items()}
    sensitive = {"chatqa2", "musique", "qasper", "hotpotqa"}
    assert kinds == {name: SENSITIVE if name in sensitive else ROBUST for name in SOURCES}
    five = {SOURCES[n].task for n in ("chatqa2", "musique", "colt", "govreport", "xsum")}
    assert five == {source.task for source in SOURCES.values()} and len(five) == 5


@pytest.mark.parametrize("name", SOURCES)
def test_rows_are_read_by_fit_and_have_the_asked_length(name, file_of, tmp_path):
    path, out = file_of(name), tmp_path / "out.jsonl"
    summary = run(name, path, out)
    rows = read_rows(out)
    assert len(rows) == 8 == len(summary.lengths)
    assert {row.task for _, row in rows} == {SOURCES[name].task}
    found = [words(row.prompt) + words(row.completion) for _, row in rows]
    assert found == summary.lengths
    assert all(LOW <= length <= HIGH - 10 for length in found)
    assert len({row.prompt for _, row in rows}) == 8


@pytest.mark.parametrize("name", SOURCES)
def test_runs_repeat_and_the_seed_decides(name, file_of, tmp_path):
    path = file_of(name)
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(name, path, tmp_path / out, seed=seed)
    first = (tmp_path / "a").read_bytes()
    assert first == (tmp_path / "b").read_bytes()
    assert first != (tmp_path / "c").read_bytes()
    run(name, path, tmp_path / "d", samples=3)
    assert prompts(tmp_path / "d") == prompts(tmp_path / "a")[:3]


def texts_of(name, path):
    """The texts of every source document in a file, from which a sample can be recognised."""
    found = set()
    for where, record in _reading.records(path, SOURCES[name].members):
        for item in SOURCES[name].parse(record, where):
            if isinstance(item, Item):
                found |= {document.text for document in (*item.gold, *item.others)}
                found |= {item.question} if not item.gold else set()
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_train_and_test_share_no_document(name, file_of, tmp_path):
    path = file_of(name)
    texts = texts_of(name, path)
    found = {}
    for split in ("train", "test"):
        # The test part is small here: one long sample may need more than it has.
        run(name, path, tmp_path / split, split=split, samples=100, low=40, high=400, seed=3) if (
            name != "chatqa2"
        ) else run(name, path, tmp_path / split, split=split, samples=100)
        joined = "\n".join(prompt for prompt, _ in prompts(tmp_path / split))
        found[split] = {text for text in texts if text in joined}
    assert found["train"] and found["test"]
    assert not found["train"] & found["test"]


@pytest.mark.parametrize("name", ["musique", "hotpotqa", "qasper"])
def test_answers_are_in_the_context_among_further_documents(name, file_of, tmp_path):
    run(name, file_of(name), tmp_path / "out", samples=20)
    places = []
    for prompt, answer in prompts(tmp_path / "out"):
        context, question = prompt.split("Question:")
        parts = context.split("Document ")[1:]
        assert [int(part.split(":")[0]) for part in parts] == list(range(1, len(parts) + 1))
        assert len(parts) > 2
        if answer not in ("Yes", "No"):
            held = [
                place
                for place, part in enumerate(parts)
                if answer in part.split() or f"{answer}." in part.split()
            ]
            assert held and answer not in question
            places.append(held[0] / len(parts))
    assert max(places) - min(places) > 0.4  # not always at the same place


def test_every_supporting_document_is_there_once_and_fillers_are_of_other_records(
    file_of, tmp_path
):
    run("musique", file_of("musique"), tmp_path / "out", samples=10)
    for prompt, answer in prompts(tmp_path / "out"):
        n = answer.removeprefix("town")
        assert (
            prompt.count(f"The head of firm{n} is") == prompt.count(f"The home of person{n}") == 1
        )
        titles = [line.split(": ")[1] for line in prompt.splitlines() if line.startswith("Documen")]
        assert len(titles) == len(set(titles))
        assert {title.split()[1] for title in titles} > {n}


def test_lengths_are_spread_over_the_range(file_of, tmp_path):
    found = run("xsum", file_of("xsum", 200), tmp_path / "out", samples=40).lengths
    assert min(found) < 400 and max(found) > 750


def test_a_question_is_about_its_paper_and_unanswerable_ones_are_counted(file_of, tmp_path):
    summary = run("qasper", file_of("qasper"), tmp_path / "out", samples=200)
    for prompt, answer in prompts(tmp_path / "out"):
        assert answer in ("No",) or f'"A study of {answer.removeprefix("corpus")}"' in prompt
    assert summary.skipped["no answer that the text holds"] == 2 * 60
    assert "skipped: 120 no answer that the text holds" in str(summary)
    assert "200 samples were asked for; the input gives no more" in str(summary)


def test_role_names_and_left_over_marks_are_taken_out(file_of, tmp_path):
    run("chatqa2", file_of("chatqa2"), tmp_path / "out", samples=100)
    rows = prompts(tmp_path / "out")
    for prompt, answer in rows:
        assert not any(
            mark in prompt for mark in ("Assistant:", "User:", "<|begin_of_text|>", "\ufeff")
        )
        assert prompt.endswith("?")
        assert answer.startswith("It is") or f"The name is {answer}." in prompt
    assert {answer.startswith("It is") for _, answer in rows} == {True, False}


def test_short_reports_are_summarised_together(file_of, tmp_path):
    run("govreport", file_of("govreport"), tmp_path / "out", samples=30)
    together = 0
    for prompt, completion in prompts(tmp_path / "out"):
        answers = completion.split("\n\n")
        reports = prompt.split("\n\nReport ")[1:]
        assert len(answers) == len(reports)
        together += len(reports) > 1
        records = {r["summary"]: r["report"] for r in map(govreport_record, range(60))}
        for number, (answer, report) in enumerate(zip(answers, reports, strict=True), 1):
            summary = answer.removeprefix(f"Report {number}: ")
            assert summary != answer and records[summary] in report
    assert together


def test_what_is_too_long_is_skipped_or_cut_and_counted(file_of, tmp_path):
    long = [govreport_record(n, 5000) for n in range(20)]
    path = file_of("govreport", text=lines([*long, *map(govreport_record, range(40))]))
    summary = run("govreport", path, tmp_path / "out", samples=60)
    skipped = summary.skipped["longer than --max-tokens"]
    assert skipped and not summary.cut
    cut = run("govreport", path, tmp_path / "cut", samples=60, cut=True)
    assert cut.cut == skipped and "longer than --max-tokens" not in cut.skipped
    assert f"cut in the middle: {skipped}" in str(cut)
    parts = [prompt for prompt, _ in prompts(tmp_path / "cut") if "[...]" in prompt]
    assert len(parts) == skipped
    for part in parts:
        (report,) = [r["report"] for r in long if " ".join(r["report"].split()[:20]) in part]
        before, after = part.split("\n[...]\n")
        body = before.split("Report 1:\n")[1]
        end = after.split("\n\nSummaries:")[0]
        assert report.startswith(body) and report.endswith(end)
        assert HIGH - 60 < words(part) + 40 < HIGH + 40
    with pytest.raises(ValueError, match="may lose what the answer needs"):
        run("musique", path, tmp_path / "x", cut=True)


def test_a_query_is_not_among_its_shots(file_of, tmp_path):
    run("trec", file_of("trec"), tmp_path / "out", samples=60)
    for prompt, label in prompts(tmp_path / "out"):
        query = prompt.split("Input: ")[-1].split("\nOutput:")[0]
        assert prompt.count(query) == 1
        assert f"\nOutput:\n{label}\n" in prompt and prompt.endswith("\nOutput:\n")


def test_the_gap_comes_last_and_the_code_around_it_is_kept(file_of, tmp_path):
    run("colt", file_of("colt"), tmp_path / "out")
    for prompt, middle in prompts(tmp_path / "out"):
        n = middle.removeprefix("helper").removesuffix(".run()")
        assert prompt.endswith(f"import helper{n}\n\ndef call():\n    return ")
        assert "def other():" in prompt and middle not in prompt
        assert all(f"def run{n}_{i}(): ..." in prompt for i in range(3))
        assert prompt.count("File repo") > 4  # and files of other repositories


@pytest.mark.parametrize(
    ("namespace", "repository"),
    [
        ("mrjob.util.file_ext", "mrjob"),
        ("com.google.guava.Lists.of", "com/google/guava"),
        ("github.com/owner/repo/pkg.Call", "github/com/owner/repo"),
        ("single", "single"),
        ("...", "..."),
    ],
)
def test_repository_of_a_namespace(namespace, repository):
    assert _repository(namespace) == repository


BROKEN = {
    "musique": [
        (lines([{"question": "q", "answer": "a"}]), r"m.jsonl:1: no field 'paragraphs' .*musique_"),
        (lines([musique_record(1), [1]]), r"m.jsonl:2: a record is an object, not list"),
        (lines([musique_record(1)]) + "{", r"m.jsonl:2: not JSON"),
        (
            lines([musique_record(1, paragraphs=[{"title": "t", "paragraph_text": 3}])]),
            r"m.jsonl:1: the field 'paragraph_text' is int, not str.*Expected",
        ),
        ("", r"m.jsonl: no records. Expected: JSON lines"),
    ],
    "hotpotqa": [
        ('[{"question": "q", "answer": "a"}]', r"h.json: record 1: no field 'context'"),
        (
            json.dumps([hotpot_record(1, context=[["only a title"]])]),
            r"h.json: record 1: 'context' or 'supporting_facts' has another shape",
        ),
        ('[{"a": 1} {"b": 2}]', r"h.json: record 1: no field"),
        (json.dumps([hotpot_record(1)])[:-1], r"h.json: after record 1: .*the end of the file"),
        (json.dumps([hotpot_record(1)])[:-9], r"h.json: record 1 is not JSON"),
    ],
    "qasper": [
        ('{"1": {"title": "t"}}', r"q.json: record 1 \(1\): no field 'full_text'.*not the Parquet"),
        ("[]", r"q.json: after record 0: expected \{, found \["),
    ],
    "chatqa2": [
        ('[{"question": "q"}]', r"long.json: record 1: no field 'answer'"),
        ('[{"question": "q", "answer": {"a": 1}}]', r"'answer' is neither text nor a list"),
    ],
    "govreport": [
        (lines([{"id": "x", "document_sections": {}}]), r"no field 'report' or 'document'.*has: "),
    ],
    "colt": [(lines([{"prefix": "p"}]), r"python_line.jsonl:1: no field 'middle'")],
    "trec": [("What is it ?\n", r"train.label:1: no line LABEL:fine question")],
}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [(name, text, message) for name, cases in BROKEN.items() for text, message in cases],
)
def test_other_formats_are_errors_that_show_the_format(
    name, text, message, file_of, tmp_path, capsys
):
    path = file_of(name, text=text)
    with pytest.raises(_reading.FormatError, match=message):
        run(name, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    arguments = [name, "--input", str(path), "--out", str(tmp_path / "out"), "--tokenizer", "none"]
    assert convert.main([*arguments, "--samples", "1", "--quiet"], words) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert sorted(tmp_path.iterdir()) == [path]


def test_nothing_written_says_why(file_of, tmp_path):
    path = file_of("musique", text=lines([musique_record(n, answer="moon") for n in range(5)]))
    with pytest.raises(_reading.FormatError, match="5 the answer is not in the supporting docu"):
        run("musique", path, tmp_path / "out")
    path = file_of("musique", text=lines([musique_record(n, answerable=False) for n in range(5)]))
    with pytest.raises(_reading.FormatError, match="5 marked as not answerable"):
        run("musique", path, tmp_path / "out")
    path = file_of("musique", 10)
    with pytest.raises(_reading.FormatError, match="shorter than --min-tokens, with all further"):
        run("musique", path, tmp_path / "out", low=8192, high=65_536)
    with pytest.raises(_reading.FormatError, match="no such file"):
        run("musique", tmp_path / "absent.jsonl", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "options",
    [
        dict(low=0),
        dict(low=895),
        dict(samples=0),
        dict(test_share=1.0),
        dict(split="dev"),
        dict(pool=-1),
    ],
)
def test_options_out_of_range(options, file_of, tmp_path):
    with pytest.raises(ValueError, match="allowed"):
        run("musique", file_of("musique", 3), tmp_path / "out", **options)


def test_places_that_cannot_be_written_are_found_before_reading(tmp_path):
    path = tmp_path / "absent.jsonl"
    with pytest.raises(ValueError, match="there is no folder"):
        run("musique", path, tmp_path / "deep" / "out")
    with pytest.raises(ValueError, match="that is an input file"):
        run("musique", path, tmp_path / ".." / tmp_path.name / "absent.jsonl")


def test_aliases_count_as_the_answer_and_yes_needs_no_place(file_of, tmp_path):
    aliased = musique_record(1, answer="The City", answer_aliases=["Town1"])
    plain = hotpot_record(2, answer="yes")
    run(
        "musique", file_of("musique", text=lines([aliased])), tmp_path / "a", low=1, test_share=0.01
    )
    assert prompts(tmp_path / "a")[0][1] == "The City"
    run(
        "hotpotqa",
        file_of("hotpotqa", text=json.dumps([plain])),
        tmp_path / "b",
        low=1,
        test_share=0.01,
    )
    assert prompts(tmp_path / "b")[0][1] == "yes"


def test_a_sample_is_counted_as_a_whole():
    """A tokenizer may find more in a text than in its parts."""

    def count(text):
        return int(words(text) * (1.3 if words(text) > 300 else 1))

    pool = _packing.Pool([Document(f"k{n}", "", prose(n, 30)) for n in range(90)], count)
    item = Item(("g",), "q", "a", (Document("g", "", prose("g", 30)),))
    limits = _packing.Limits(400, 800, count)
    made = [_packing.questions(item, pool, limits, random.Random(n)) for n in range(40)]
    assert all(
        found.tokens == count(found.prompt) + count(found.completion) <= 800 for found in made
    )
    assert sum(found.tokens > 700 for found in made) > 10


def test_every_possible_sample_is_accounted_for(file_of, tmp_path):
    path = file_of("hotpotqa")
    summary = run("hotpotqa", path, tmp_path / "out", samples=1000)
    assert (summary.records, summary.items) == (60, 60)
    assert len(summary.lengths) + sum(summary.skipped.values()) == 60
    assert set(summary.skipped) >= {"in the other split", "its documents are in both splits"}


def test_failures_are_replaced_by_further_records(file_of, tmp_path):
    long = [chatqa2_record(n) for n in range(400)]
    for record in long[:350]:
        record["question"] = "short?"
        record["sub-paragraphs"] = f"{record['answers'][0] if 'answers' in record else 0}"
    path = file_of("chatqa2", text=json.dumps(long))
    summary = run("chatqa2", path, tmp_path / "out", samples=20)
    assert len(summary.lengths) == 20 and summary.skipped["shorter than --min-tokens"]


def test_lone_surrogates_are_skipped(file_of, tmp_path):
    records = [chatqa2_record(n) for n in range(1, 20, 2)]
    for record in records[:5]:
        record["answer"] = "\ud83d"
    path = file_of("chatqa2", text=json.dumps(records))
    summary = run("chatqa2", path, tmp_path / "out", samples=20, test_share=0.001)
    assert summary.skipped["with characters that are no valid Unicode"] == 5
    assert len(prompts(tmp_path / "out")) == 5


@pytest.mark.parametrize("text", ["[]", " [ ] ", '[{"a": [1, {"b": "]"}]}, {"c": "é\\""}]'])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_arrays_are_read_piece_by_piece(text, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(_reading, "CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text(text, "utf-8")
    assert [value for _, value in _reading.records(path)] == json.loads(text)


def test_one_array_record_is_in_memory_at_a_time(tmp_path):
    path = tmp_path / "a.json"
    record = json.dumps({"text": "x" * (_reading.CHUNK // 2)})
    path.write_text("[" + ",".join([record] * 40) + "]")
    import tracemalloc

    tracemalloc.start()
    assert sum(1 for _ in _reading.records(path)) == 40
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * _reading.CHUNK < path.stat().st_size


def test_a_broken_record_is_found_before_the_rest_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    end = b"\xff"  # whoever reads this far finds no UTF-8
    path.write_bytes(b'[{"a": 1}, {"a" 2}' + b" " * (3 * _reading.CHUNK) + end)
    found = _reading.records(path)
    next(found)
    with pytest.raises(_reading.FormatError, match="record 2 is not JSON"):
        next(found)
    monkeypatch.setattr(_reading, "CHUNK", 100)
    monkeypatch.setattr(_reading, "LARGEST", 1000)
    path.write_bytes(b'[{"a": "' + b"x" * 40_000 + end)
    with pytest.raises(_reading.FormatError, match="record 1 is not JSON: Unterminated"):
        next(_reading.records(path))


def test_packed_tables_and_other_endings(tmp_path):
    rows = [{"text": "a b", "label": "X"}, {"text": "c, d", "label": "Y"}]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines(rows))
    (tmp_path / "a.csv").write_text('text,label\na b,X\n"c, d",Y\n')
    (tmp_path / "a.tsv").write_text("text\tlabel\na b\tX\nc, d\tY\n")
    for name in ("a.jsonl.gz", "a.csv", "a.tsv"):
        assert [value for _, value in _reading.records(tmp_path / name)] == rows
    (tmp_path / "latin.label").write_bytes("X:y caf\xe9\n".encode("latin-1"))
    with pytest.raises(_reading.FormatError, match="not UTF-8"):
        list(_reading.records(tmp_path / "latin.label"))


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    records = [hotpot_record(n) for n in range(5)]
    for record in records:
        facts, context = record["supporting_facts"], record["context"]
        record["supporting_facts"] = {
            "title": [fact[0] for fact in facts],
            "sent_id": [fact[1] for fact in facts],
        }
        record["context"] = {
            "title": [part[0] for part in context],
            "sentences": [part[1] for part in context],
        }
    path = tmp_path / "h.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    plain = tmp_path / "h.json"
    plain.write_text(json.dumps([hotpot_record(n) for n in range(5)]))
    assert texts_of("hotpotqa", path) == texts_of("hotpotqa", plain)
    path.write_bytes(b"no parquet")
    with pytest.raises(_reading.FormatError, match="not a Parquet file"):
        list(_reading.records(path))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "h.parquet"
    path.write_bytes(b"")
    with pytest.raises(ImportError, match="pip install pyarrow"):
        list(_reading.records(path))


def test_fillers_beyond_the_target_only_up_to_the_shortest_length():
    """Long fillers: the target cannot be met, the shortest length can."""
    pool = _packing.Pool([Document(f"k{n}", "", prose(n, 350)) for n in range(9)], words)
    item = Item(("g",), "q", "a", (Document("g", "", prose("g", 100)),))
    limits = _packing.Limits(400, 1000, words)
    made = [_packing.questions(item, pool, limits, random.Random(n)) for n in range(40)]
    assert {len(found.documents) for found in made} == {2, 3}
    assert all(400 <= found.tokens <= 1000 for found in made)


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizer(chat=True).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def command(name, path, out, folder, low=2000, high=5000, split="train"):
    arguments = [name, "--input", str(path), "--out", str(out), "--tokenizer", str(folder)]
    arguments += ["--min-tokens", str(low), "--max-tokens", str(high), "--split", split]
    return convert.main([*arguments, "--test-share", "0.2", "--samples", "6", "--quiet"])


@pytest.mark.parametrize("name", SOURCES)
def test_the_encoder_finds_the_lengths_that_were_asked_for(
    name, file_of, tokenizer_folder, tmp_path, capsys
):
    out = tmp_path / "out.jsonl"
    assert command(name, file_of(name), out, tokenizer_folder) == 0
    assert f"{out}: 6 samples of {SOURCES[name].task}, " in capsys.readouterr().out
    for chat in (False, True):
        encoder = Encoder(tokenizer(chat=True), 5000, chat_template=chat)
        (source,) = sources_from_rows(read_rows(out), encoder)
        assert len(source) == 6
        assert all(2000 <= len(sample.input_ids) <= 5000 for sample in source.samples)


def test_fit_and_evaluate_run_on_the_five_sets(file_of, tokenizer_folder, tmp_path):
    """With the preset's own targets for the five labels."""
    data = {"train": [], "test": []}
    names = ["chatqa2", "musique", "colt", "govreport", "xsum"]
    for name in names:
        for split, files in data.items():
            files.append(str(tmp_path / f"{name}-{split}.jsonl"))
            text = json.dumps([chatqa2_record(n, 60) for n in range(40)])
            path = file_of(name, text=text if name == "chatqa2" else None)
            assert command(name, path, files[-1], tokenizer_folder, 200, 1800, split) == 0
    model = helpers.plain(1)
    fit(
        model,
        tokenizer(chat=True),
        data=data["train"],
        out=tmp_path / "router",
        preset="paper",
        chat_template=True,
        progress=False,
        curves=False,
        config=ElasticConfig(sink=4, local=64),
        length=1800,
        steps=1,
        batch_size=5,
        micro_batch=1,
    )
    encoder = Encoder(tokenizer(chat=True), 1800, chat_template=True)
    result = evaluate(model, load_sources(data["test"], encoder), samples=1, progress=False)
    assert list(result.tasks) == [SOURCES[name].task for name in names]


def benchmark(tmp_path, name, *files, prompts=None):
    arguments = [name, "--input", *map(str, files), "--out", str(tmp_path / "out.jsonl")]
    if prompts is not None:
        arguments += ["--prompts", str(prompts)]
    return benchmarks.main(arguments)


def test_longbench_rows(tmp_path, capsys):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"qasper": "{context}|{input}", "trec": "{length}"}))
    record = dict(input="Q {x}", context="C {y}", answers=["a", "b"], length=3)
    path = tmp_path / "qasper_e.jsonl"
    path.write_text(lines([record, {**record, "answers": []}]))
    assert benchmark(tmp_path, "longbench", path, prompts=prompts) == 0
    ((_, row),) = read_rows(tmp_path / "out.jsonl")
    assert (row.task, row.prompt, row.completion) == ("qasper", "C {y}|Q {x}", "a")
    assert capsys.readouterr().out.endswith("out.jsonl: 1 qasper\nskipped: 1 no reference\n")
    for other, text, message in (
        ("gov_report", lines([record]), "--prompts has no prompt for 'gov_report'"),
        ("trec", lines([record]), "the prompt of 'trec' in --prompts: KeyError('length')"),
        ("qasper", lines([{"input": "q"}]), "qasper.jsonl:1: no field 'answers'"),
        ("qasper", "", "the input has no row. Expected: JSON lines of"),
    ):
        bad = tmp_path / f"{other}.jsonl"
        bad.write_text(text)
        assert benchmark(tmp_path, "longbench", bad, prompts=prompts) == 1
        assert message in capsys.readouterr().err
    assert len(read_rows(tmp_path / "out.jsonl")) == 1  # what was there before stays


def test_ruler_rows(tmp_path, capsys):
    for task, more in (("niah_multivalue", {"answer_prefix": " They are"}), ("fwe", {})):
        (tmp_path / task).mkdir()
        record = dict(index=0, input="Which?", outputs=["1", "2"], length=9, **more)
        (tmp_path / task / "validation.jsonl").write_text(lines([record]))
    files = sorted(tmp_path.glob("*/validation.jsonl"))
    assert benchmark(tmp_path, "ruler", *files) == 0
    assert [
        (row.task, row.prompt, row.completion) for _, row in read_rows(tmp_path / "out.jsonl")
    ] == [
        ("fwe", "Which?", "1, 2"),
        ("niah_multivalue", "Which? They are", "1, 2"),
    ]
    files[0].write_text(lines([{"input": "Which?"}]))
    assert benchmark(tmp_path, "ruler", *files) == 1
    assert "validation.jsonl:1: no field 'outputs'" in capsys.readouterr().err


def test_longbench_v2_rows(tmp_path, capsys):
    prompts = tmp_path / "0shot.txt"
    prompts.write_text("$DOC$ $Q$ (A) $C_A$ (B) $C_B$ (C) $C_C$ (D) $C_D$")
    choices = {f"choice_{letter}": f"is {letter}" for letter in "ABCD"}
    record = dict(question="Q", answer="C", context="About $Q$.", difficulty="hard", **choices)
    path = tmp_path / "data.json"
    path.write_text(json.dumps([record]))
    assert benchmark(tmp_path, "longbench-v2", path, prompts=prompts) == 0
    ((_, row),) = read_rows(tmp_path / "out.jsonl")
    assert row.prompt == "About $Q$. Q (A) is A (B) is B (C) is C (D) is D"
    assert (row.task, row.completion) == ("longbench_v2_hard", "The correct answer is (C)")
    path.write_text(json.dumps([{**record, "answer": "E"}]))
    assert benchmark(tmp_path, "longbench-v2", path, prompts=prompts) == 1
    assert "record 1: the answer is 'E', not A, B, C or D" in capsys.readouterr().err
    prompts.write_text("$DOC$")
    path.write_text(json.dumps([record]))
    assert benchmark(tmp_path, "longbench-v2", path, prompts=prompts) == 1
    assert "the prompt in --prompts has no $C_A$" in capsys.readouterr().err


SHELL = r"""
python() { printf '%s\x1f' "$@"; echo; }
pip() { :; }
torchrun() {
    while [ "$1" != python ]; do shift; done
    "$@"
}
export -f python
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_commands_of_the_page_are_understood(tmp_path):
    page = (Path(convert.__file__).parent / "README.md").read_text("utf-8")
    script = SHELL + "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    done = subprocess.run(
        ["bash", "-eu"], input=script, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    parsers = {
        "examples/paper/convert.py": convert.parser,
        "examples/paper/benchmarks.py": benchmarks.parser,
        "-m elastic_compile.fit": elastic_compile.fit.parser,
        "-m elastic_compile.evaluate": elastic_compile.evaluate.parser,
    }
    found = {name: [] for name in parsers}
    for line in done.stdout.splitlines():
        given = line.removesuffix("\x1f").split("\x1f")
        start = 2 if given[0] == "-m" else 1
        name = " ".join(given[:start])
        found[name].append(parsers[name]().parse_args(given[start:]))
    assert {name: len(commands) for name, commands in found.items()} == {
        "examples/paper/convert.py": 5,
        "examples/paper/benchmarks.py": 1 + 6 + 1,
        "-m elastic_compile.fit": 3 + 1,
        "-m elastic_compile.evaluate": 1 + 6 + 1,
    }
    written = {str(command.out) for command in found["examples/paper/convert.py"]}
    for command in found["-m elastic_compile.fit"]:
        assert set(command.data) == written and command.preset == "paper"
    rows = {str(command.out) for command in found["examples/paper/benchmarks.py"]}
    assert rows == {file for c in found["-m elastic_compile.evaluate"] for file in c.data}
    assert all(f"| `{command.source}` |" in page for command in found["examples/paper/convert.py"])
