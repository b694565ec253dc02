"""What the public sets look like, and the question, answer and documents of each record."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from _reading import FormatError

GENERIC = {"com", "org", "net", "io", "edu", "gov", "github", "gitlab", "golang"}


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with the key by which train and test are kept apart."""

    key: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Item:
    """What one sample is made of."""

    keys: tuple[str, ...]
    """Source documents; all have to be in the split that is written."""
    question: str
    answer: str
    gold: tuple[Document, ...] = ()
    """Documents that the answer needs."""
    others: tuple[Document, ...] = ()
    """Documents that came with them and do not hold the answer."""


@dataclasses.dataclass(frozen=True)
class Skip:
    """A record that gives no sample, and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A set that can be converted."""

    task: str
    """Label of the preset ``paper``."""
    packing: str
    """Function of ``_packing`` that makes a prompt."""
    parse: Callable[[Any, str], Iterator[Item | Skip]]
    """Record and its place to items."""
    looks: str
    """The expected format, for messages."""
    pool: int
    """Further documents kept in memory to fill samples with."""
    members: bool = False
    """The file is one object whose members are the records."""


class Fields:
    """Typed access to a record; what is missing is an error that shows the format."""

    def __init__(self, record: Any, where: str, looks: str) -> None:
        self.where, self.looks = where, looks
        if not isinstance(record, dict):
            raise FormatError(
                f"{where}: a record is an object, not {type(record).__name__}. Expected: {looks}"
            )
        self.record = record

    def fail(self, text: str) -> FormatError:
        return FormatError(f"{self.where}: {text}. Expected: {self.looks}")

    def get(self, kind: type, *names: str) -> Any:
        """The first of ``names`` that is there, of type ``kind``."""
        for name in names:
            value = self.record.get(name)
            if value is not None:
                if not isinstance(value, kind):
                    raise self.fail(
                        f"the field {name!r} is {type(value).__name__}, not {kind.__name__}"
                    )
                return value
        wanted = " or ".join(map(repr, names))
        found = ", ".join(map(repr, self.record)) or "none"
        raise self.fail(f"no field {wanted} (the record has: {found})")

    def text(self, *names: str) -> str:
        found: str = self.get(str, *names)
        return found

    def rows(self, *names: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(value, self.where, self.looks) for value in self.get(list, *names)]


def key_of(text: str) -> str:
    """Titles that differ in case or white space only are one document."""
    return " ".join(text.split()).casefold()


def holds(documents: tuple[Document, ...], answer: str) -> bool:
    """Whether an answer is literally in the documents."""
    wanted = key_of(answer)
    return any(wanted in key_of(document.text) for document in documents)


QASPER = (
    'one JSON object {paper id: {"title", "abstract", "full_text": [{"section_name", '
    '"paragraphs"}], "qas": [{"question", "answers": [{"answer": {"unanswerable", '
    '"extractive_spans", "yes_no", "free_form_answer"}}]}]}} (qasper-train-v0.3.json; not the '
    "Parquet files, which turn its lists around)"
)


def qasper(record: Any, where: str) -> Iterator[Item | Skip]:
    key, value = record
    paper = Fields(value, where, QASPER)
    title = paper.text("title").strip()
    parts = [paper.record.get("abstract") or ""]
    for section in paper.rows("full_text"):
        parts.append(section.record.get("section_name") or "")
        parts += section.get(list, "paragraphs")
    text = "\n\n".join(part.strip() for part in parts if part and part.strip())
    document = Document(key_of(str(key)), title, text)
    for question in paper.rows("qas"):
        answer = None
        for given in question.rows("answers"):
            fields = Fields(given.get(dict, "answer"), where, QASPER)
            spans = [span.strip() for span in fields.get(list, "extractive_spans") if span.strip()]
            free = fields.record.get("free_form_answer")
            if fields.record.get("unanswerable"):
                continue
            if spans:
                # Spans are quotes; one that is not in the text was taken from a table or figure.
                if all(holds((document,), span) for span in spans):
                    answer = ", ".join(spans)
            elif free and free.strip():
                answer = free.strip()
            elif fields.record.get("yes_no") is not None:
                answer = "Yes" if fields.record["yes_no"] else "No"
            if answer:
                break
        if answer is None:
            yield Skip("no answer that the text holds")
        else:
            asked = f'About the document "{title}": {question.text("question").strip()}'
            yield Item((document.key,), asked, answer, (document,))


CHATQA2 = (
    'a JSON array of {"question", "answer" or "answers": text or list, "sub-paragraphs"} '
    "(long_sft_QA_train.json: the whole prompt is in question; NarrativeQA_131072_QA_train.json: "
    "the document is in sub-paragraphs)"
)


def chatqa2(record: Any, where: str) -> Iterator[Item | Skip]:
    fields = Fields(record, where, CHATQA2)
    question = fields.text("question").strip()
    # The turn's role names are part of the text; a chat template writes its own.
    question = re.sub(r"\s*Assistant:$", "", question.removeprefix("User:")).strip()
    document = record.get("sub-paragraphs") or ""
    if not isinstance(document, str):
        raise fields.fail("the field 'sub-paragraphs' is no text")
    prompt = f"{document}\n\n{question}" if document.strip() else question
    # Left over from a tokenizer and an encoding; the first would become a special token.
    for mark in ("<|begin_of_text|>", "\ufeff", "ï»¿"):
        prompt = prompt.replace(mark, "")
    name = "answers" if "answers" in record else "answer"
    answer = fields.get(object, name)
    if isinstance(answer, list):
        answer = answer[0] if answer else ""
    if not isinstance(answer, str):
        raise fields.fail(f"the field {name!r} is neither text nor a list of texts")
    if not answer.strip() or not question:
        yield Skip("no question or no answer")
        return
    # No field names the document. Questions about one share the prompt's beginning.
    prompt = prompt.strip()
    yield Item((key_of(prompt[:1000]),), prompt, answer.strip())


MUSIQUE = (
    'JSON lines of {"question", "answer", "answer_aliases", "answerable", "paragraphs": [{"title", '
    '"paragraph_text", "is_supporting"}]} (musique_ans_v1.0_train.jsonl)'
)


def musique(record: Any, where: str) -> Iterator[Item | Skip]:
    fields = Fields(record, where, MUSIQUE)
    question, answer = fields.text("question").strip(), fields.text("answer").strip()
    gold: list[Document] = []
    others: list[Document] = []
    for row in fields.rows("paragraphs"):
        title = row.text("title").strip()
        document = Document(key_of(title), title, row.text("paragraph_text").strip())
        (gold if row.get(bool, "is_supporting") else others).append(document)
    names = [answer, *(record.get("answer_aliases") or [])]
    if record.get("answerable") is False:
        yield Skip("marked as not answerable")
    else:
        yield _multi_hop(question, answer, names, gold, others)


HOTPOTQA = (
    'a JSON array of {"question", "answer", "supporting_facts": [[title, sentence number]], '
    '"context": [[title, [sentence, ...]]]} (hotpot_train_v1.1.json, the distractor setting), or '
    "the Parquet files of the same set"
)


def hotpotqa(record: Any, where: str) -> Iterator[Item | Skip]:
    fields = Fields(record, where, HOTPOTQA)
    question, answer = fields.text("question").strip(), fields.text("answer").strip()
    context, facts = fields.get(object, "context"), fields.get(object, "supporting_facts")
    try:
        if isinstance(context, dict):
            context = list(zip(context["title"], context["sentences"], strict=True))
            facts = [(title,) for title in facts["title"]]
        supporting = {key_of(fact[0]) for fact in facts}
        documents = [
            Document(key_of(title), title.strip(), "".join(sentences).strip())
            for title, sentences in context
        ]
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        raise fields.fail("'context' or 'supporting_facts' has another shape") from None
    gold = [document for document in documents if document.key in supporting]
    others = [document for document in documents if document.key not in supporting]
    # A comparison's yes or no stands in no document.
    names = [] if answer.lower() in ("yes", "no") else [answer]
    if missing := supporting - {document.key for document in gold}:
        yield Skip(f"{len(missing)} supporting documents are not in the context")
    else:
        yield _multi_hop(question, answer, names, gold, others)


def _multi_hop(
    question: str,
    answer: str,
    names: list[str],
    gold: list[Document],
    others: list[Document],
) -> Item | Skip:
    """One question over several documents; ``names`` are spellings of which one must be there."""
    if not question or not answer or not gold:
        return Skip("no question, no answer or no supporting document")
    needed = tuple(gold)
    if names and not any(holds(needed, name) for name in names if name.strip()):
        return Skip("the answer is not in the supporting documents")
    keys = {document.key for document in gold}
    further = tuple(document for document in others if document.key not in keys)
    return Item(tuple(sorted(keys)), question, answer, needed, further)


GOVREPORT = (
    'JSON lines, JSON array or Parquet of {"report" or "document", "summary"} (GovReport as plain '
    "text; not the form with sections)"
)
XSUM = 'JSON lines, JSON array or Parquet of {"document", "summary", "id"}'


def _summaries(looks: str, *names: str) -> Callable[[Any, str], Iterator[Item | Skip]]:
    def parse(record: Any, where: str) -> Iterator[Item | Skip]:
        fields = Fields(record, where, looks)
        text, summary = fields.text(*names).strip(), fields.text("summary").strip()
        if not text or not summary:
            yield Skip("no document or no summary")
            return
        # The text itself: the same report is there under several numbers.
        key = key_of(text[:1000])
        yield Item((key,), text, summary, (Document(key, summary, text),))

    return parse


COLT = (
    'JSON lines of {"namespace", "code_file_path", "prefix", "suffix", "middle", '
    '"cross_file_dependency": [{"code_file_path", "abstraction"}], "similar_functions": '
    '[{"code_file_path", "code_block"}]} (CoLT-132K, python_line.jsonl and the like)'
)


def colt(record: Any, where: str) -> Iterator[Item | Skip]:
    fields = Fields(record, where, COLT)
    prefix, middle = fields.text("prefix"), fields.text("middle")
    suffix = record.get("suffix") or ""
    path = fields.text("code_file_path")
    repository = _repository(fields.text("namespace"))
    context = [
        Document(repository, row.record.get("code_file_path") or "", row.text(code))
        for name, code in (
            ("cross_file_dependency", "abstraction"),
            ("similar_functions", "code_block"),
        )
        for row in fields.rows(name)
    ]
    yield _code(repository, path, prefix, suffix, middle, context)


def _repository(namespace: str) -> str:
    """The repository that a dotted name belongs to, as far as the name tells."""
    parts = [part for part in re.split(r"[./:\\]+", namespace.casefold()) if part]
    generic = 0
    while generic < len(parts) - 1 and parts[generic] in GENERIC:
        generic += 1
    return "/".join(parts[: generic + (2 if generic else 1)]) or namespace


REPOBENCH = (
    'JSON lines or Parquet of {"repo_name", "file_path", "context": [{"path", "snippet"}], '
    '"import_statement", "cropped_code" or "code", "next_line"} (RepoBench)'
)


def repobench(record: Any, where: str) -> Iterator[Item | Skip]:
    fields = Fields(record, where, REPOBENCH)
    repository = key_of(fields.text("repo_name"))
    context = [
        Document(repository, row.record.get("path") or "", row.text("snippet"))
        for row in fields.rows("context")
    ]
    prefix = fields.text("import_statement") + "\n" + fields.text("cropped_code", "code")
    if not prefix.endswith("\n"):
        prefix += "\n"
    path, line = fields.text("file_path"), fields.text("next_line")
    yield _code(repository, path, prefix, "", line, context)


def _code(
    repository: str, path: str, prefix: str, suffix: str, middle: str, context: list[Document]
) -> Item | Skip:
    if not middle.strip() or not prefix.strip():
        return Skip("no code before the gap, or nothing to complete")
    ending = f"Code after the gap in {path}:\n{suffix}\n\n" if suffix.strip() else ""
    further = tuple(unit for unit in context if unit.text.strip())
    return Item(
        (repository,), f"{ending}Code before the gap in {path}:\n{prefix}", middle, (), further
    )


TREC = (
    "lines LABEL:fine question (train_5500.label, saved as UTF-8), or JSON lines, CSV or TSV (with "
    'a header line) of {"text", "label"}; labels are text, not class numbers'
)


def trec(record: Any, where: str) -> Iterator[Item | Skip]:
    if isinstance(record, str):
        label, _, text = record.partition(" ")
        if ":" not in label or not text.strip():
            raise FormatError(f"{where}: no line LABEL:fine question. Expected: {TREC}")
    else:
        fields = Fields(record, where, TREC)
        text, label = fields.text("text"), fields.text("label")
    text, label = text.strip(), label.strip()
    if not text or not label:
        yield Skip("no text or no label")
        return
    key = key_of(text)
    yield Item((key,), text, label, (Document(key, label, text),))


SOURCES = {
    # The five sets that the paper names.
    "chatqa2": Source("single_doc_qa", "as_it_is", chatqa2, CHATQA2, 0),
    "musique": Source("multi_hop_qa", "questions", musique, MUSIQUE, 20_000),
    "colt": Source("code", "completion", colt, COLT, 20_000),
    "govreport": Source(
        "summarization", "summary", _summaries(GOVREPORT, "report", "document"), GOVREPORT, 1000
    ),
    "xsum": Source("in_context_learning", "shots", _summaries(XSUM, "document"), XSUM, 10_000),
    # Sets of the same kinds, where one of the five cannot be had or its licence does not fit.
    "qasper": Source("single_doc_qa", "questions", qasper, QASPER, 1000, members=True),
    "hotpotqa": Source("multi_hop_qa", "questions", hotpotqa, HOTPOTQA, 20_000),
    "repobench": Source("code", "completion", repobench, REPOBENCH, 20_000),
    "trec": Source("in_context_learning", "shots", trec, TREC, 20_000),
}
