"""Prompts of a wanted length: what a sample needs, and further documents of the same set around it.

Every function takes an item, the pool of further documents, limits and a random generator of the
item's own, and returns prompt and completion, or why there is none.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from _sources import Document, Item, Skip

Counter = Callable[[str], int]
"""Tokens of a text."""

MISSES = 50  # documents in a row that are too long for what is left, before a sample is full


@dataclasses.dataclass(frozen=True)
class Limits:
    """Length of a sample, prompt and completion together."""

    low: int
    high: int
    count: Counter
    cut: bool = False
    """Take the middle out of a document that is too long."""


@dataclasses.dataclass(frozen=True)
class Made:
    """A sample."""

    prompt: str
    completion: str
    tokens: int
    documents: tuple[Document, ...]
    """All that the prompt holds."""
    cut: bool = False


class Pool:
    """Documents to fill samples with, each counted once."""

    def __init__(self, documents: Sequence[Document], count: Counter) -> None:
        self.documents, self.count = documents, count
        self.costs: dict[int, int] = {}

    def draw(
        self, generator: random.Random, render: Callable[[Document], str]
    ) -> Iterator[tuple[Document, int]]:
        """All documents in a random order, with their tokens."""
        for index in generator.sample(range(len(self.documents)), len(self.documents)):
            document = self.documents[index]
            if index not in self.costs:
                self.costs[index] = self.count(render(document))
            yield document, self.costs[index]


def _fill(
    used: int,
    own: Iterable[Document],
    pool: Pool,
    limits: Limits,
    generator: random.Random,
    render: Callable[[Document], str],
    banned: set[str],
    repeat_keys: bool = False,
) -> list[Document]:
    """Further documents up to a random length, beyond it only while ``low`` is not reached.

    Args:
        used: Tokens that are there already.
        own: Documents that come first; the pool's follow.
        pool: The set's documents.
        limits: Of the sample.
        generator: Of the item.
        render: A document as it stands in the prompt.
        banned: Keys that the pool may not add.
        repeat_keys: Whether several documents of one key may be there (files of a repository).
    """
    target = generator.randint(limits.low, limits.high)
    taken: list[Document] = []
    banned = set(banned)

    def offers() -> Iterator[tuple[Document, int]]:
        for document in own:
            yield document, limits.count(render(document))
            if not repeat_keys:
                banned.add(document.key)
        for document, cost in pool.draw(generator, render):
            if document.key not in banned:
                yield document, cost
                if not repeat_keys:
                    banned.add(document.key)

    misses = 0
    for document, cost in offers():
        if used + cost > (limits.high if used < limits.low else target):
            misses += 1
            if misses == MISSES:
                break
            continue
        taken.append(document)
        used += cost
        misses = 0
    return taken


def _settle(
    build: Callable[[Sequence[Document]], tuple[str, str]],
    fillers: list[Document],
    needed: Sequence[Document],
    limits: Limits,
    cut: bool = False,
) -> Made | Skip:
    """The sample, counted as a whole: the sum of its parts is only near to that."""
    while True:
        prompt, completion = build(fillers)
        tokens = limits.count(prompt) + limits.count(completion)
        if tokens <= limits.high:
            break
        if not fillers:
            return Skip("longer than --max-tokens")
        fillers = fillers[:-1]
    if tokens < limits.low:
        return Skip("shorter than --min-tokens, with all further documents that fit")
    return Made(prompt, completion, tokens, (*needed, *fillers), cut)


def _shuffled(documents: Sequence[Document], seed: float) -> list[Document]:
    order = list(documents)
    random.Random(seed).shuffle(order)
    return order


def as_it_is(item: Item, pool: Pool, limits: Limits, generator: random.Random) -> Made | Skip:
    """The record's own prompt; nothing can be put around it."""
    tokens = limits.count(item.question) + limits.count(item.answer)
    if tokens > limits.high:
        return Skip("longer than --max-tokens")
    if tokens < limits.low:
        return Skip("shorter than --min-tokens")
    return Made(item.question, item.answer, tokens, ())


def questions(item: Item, pool: Pool, limits: Limits, generator: random.Random) -> Made | Skip:
    """Numbered documents in a random order, then the question."""
    head = "Answer the question with what the documents say. Give the answer only.\n\n"
    tail = f"Question: {item.question}\nAnswer:\n"

    def render(document: Document, number: int = 1000) -> str:
        title = f" {document.title}" if document.title else ""
        return f"Document {number}:{title}\n{document.text}\n\n"

    used = limits.count(head + "".join(map(render, item.gold)) + tail) + limits.count(item.answer)
    if used > limits.high:
        return Skip("longer than --max-tokens")
    keys = {document.key for document in item.gold}
    fillers = _fill(used, item.others, pool, limits, generator, render, keys)
    seed = generator.random()

    def build(further: Sequence[Document]) -> tuple[str, str]:
        order = _shuffled([*item.gold, *further], seed)
        body = "".join(render(document, number) for number, document in enumerate(order, 1))
        return head + body + tail, item.answer

    return _settle(build, fillers, item.gold, limits)


def summary(item: Item, pool: Pool, limits: Limits, generator: random.Random) -> Made | Skip:
    """A report and its summary; short ones are put together and summarised one after the other."""
    head = "Summarise each of the following reports, in their order.\n\n"
    tail = "Summaries:\n"

    def render(document: Document, number: int = 100) -> str:
        return f"Report {number}:\n{document.text}\n\n"

    def cost(document: Document) -> str:
        return render(document) + f"Report 100: {document.title}\n\n"

    (gold,) = item.gold
    used = limits.count(head + cost(gold) + tail)
    cut = used > limits.high
    if cut:
        if not limits.cut:
            return Skip("longer than --max-tokens")
        room = limits.high - limits.count(head + cost(dataclasses.replace(gold, text="")) + tail)
        text = cut_middle(gold.text, room, limits.count)
        if not text:
            return Skip("longer than --max-tokens")
        gold = dataclasses.replace(gold, text=text)
        used = limits.high
    fillers = _fill(used, (), pool, limits, generator, cost, {gold.key})
    seed = generator.random()

    def build(further: Sequence[Document]) -> tuple[str, str]:
        order = _shuffled([gold, *further], seed)
        body = "".join(render(document, number) for number, document in enumerate(order, 1))
        answers = "\n\n".join(
            f"Report {number}: {document.title}" for number, document in enumerate(order, 1)
        )
        return head + body + tail, answers

    return _settle(build, fillers, (gold,), limits, cut)


def cut_middle(text: str, room: int, count: Counter) -> str:
    """Both ends of a text with at most ``room`` tokens; empty where nothing fits."""
    mark = "\n[...]\n"
    keep = len(text)
    while keep > 1:
        found = text if keep >= len(text) else text[: keep - keep // 2] + mark + text[-keep // 2 :]
        tokens = count(found)
        if tokens <= room:
            return found
        keep = min(keep - 1, int(keep * room / tokens * 0.98))
    return ""


def shots(item: Item, pool: Pool, limits: Limits, generator: random.Random) -> Made | Skip:
    """Many solved examples, then one to solve."""
    head = "Each input is followed by its output. Give the output of the last input.\n\n"
    tail = f"Input: {item.question}\nOutput:\n"

    def render(document: Document) -> str:
        return f"Input: {document.text}\nOutput:\n{document.title}\n\n"

    used = limits.count(head + tail) + limits.count(item.answer)
    if used > limits.high:
        return Skip("longer than --max-tokens")
    keys = {document.key for document in item.gold}
    fillers = _fill(used, (), pool, limits, generator, render, keys)

    def build(further: Sequence[Document]) -> tuple[str, str]:
        return head + "".join(map(render, further)) + tail, item.answer

    return _settle(build, fillers, (), limits)


def completion(item: Item, pool: Pool, limits: Limits, generator: random.Random) -> Made | Skip:
    """Code of other files in a random order, then the file with the gap."""
    head = "Complete the code at the end. Code of other files comes first.\n\n"

    def render(document: Document) -> str:
        return f"File {document.title}:\n{document.text}\n\n"

    used = limits.count(head + item.question) + limits.count(item.answer)
    if used > limits.high:
        return Skip("longer than --max-tokens")
    own = generator.sample(item.others, len(item.others))
    # Other records of the same repository may show what is to be completed.
    fillers = _fill(used, own, pool, limits, generator, render, set(item.keys), repeat_keys=True)
    seed = generator.random()

    def build(further: Sequence[Document]) -> tuple[str, str]:
        return head + "".join(map(render, _shuffled(further, seed))) + item.question, item.answer

    return _settle(build, fillers, (), limits)


PACKING = {made.__name__: made for made in (as_it_is, questions, summary, shots, completion)}
