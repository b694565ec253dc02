"""Built-in tasks: retrieval of hidden numbers, and language modelling of code and prose.

All are offline, seeded and as long as asked for. Training and test samples come from disjoint
documents, and from disjoint key words where they have some.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_compile.training import _corpora
from elastic_compile.training._corpora import Split
from elastic_compile.training.data import (
    DataError,
    Encoder,
    Row,
    Sample,
    Source,
    parse_row,
    read_rows,
    sources_from_rows,
)

PREFIX = "builtin:"
NEEDLE_DEPTHS = (0.05, 0.5)
"""Where needles are hidden, as a share of the text: out of reach of sink and window alike."""

SCORED_TOKENS = 256
"""Last tokens of a language modelling sample that are scored (at most a quarter of it)."""

_ADJECTIVES = (
    "amber ancient bitter blue brave bright broken calm careful clever copper cosmic crimson "
    "curious dusty eager early electric empty endless fancy fierce foggy frozen gentle giant "
    "golden graceful hasty heavy hidden hollow humble icy jolly kind lazy little lonely loud "
    "lucky mellow mighty misty modern narrow nimble noble odd patient plain polite proud quick "
    "quiet rapid rare rough royal rusty scarlet secret shiny silent silver simple sleepy slow "
    "smooth solid spare steady strange sturdy sudden sweet swift tall tender thin tiny vivid "
    "warm wild wise wooden young"
).split()
_NOUNS = (
    "anchor apple arrow badger balcony banner basket beacon blanket bottle bridge bucket butter "
    "button candle canyon carpet castle cellar chapel cherry cliff clock cloud coat comet "
    "compass copper cottage cradle curtain desert dragon drum eagle engine falcon feather fence "
    "ferry fiddle forest fountain garden glacier glove hammer harbor harvest helmet hill island "
    "jacket kettle kitchen ladder lantern lemon letter lion lizard mango market meadow mirror "
    "mountain needle ocean orchard otter owl paddle palace parrot pencil pepper piano pillow "
    "pocket pony puzzle rabbit ribbon river rocket saddle sailor shadow shelf shovel spider "
    "spoon statue stone summer table temple thunder ticket tiger tower train trumpet tunnel "
    "turtle valley velvet violin wagon walnut whistle window winter wizard"
).split()
_INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n"
)
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
_ANSWER = " The special magic number for {key} mentioned in the provided text is"


class NeedleSource:
    """Numbers hidden in prose, one of them asked for at the end.

    Args:
        task: Its name.
        keys: Numbers hidden, each under a key of its own.
        encoder: Turns rows into tokens; its ``length`` is the size of a sample.
        split: Training or test documents and words.
        seed: Seed.
        prose: Folder of prose, or None.
    """

    def __init__(
        self, task: str, keys: int, encoder: Encoder, split: Split, seed: int, prose: str | None
    ) -> None:
        self.task, self.keys, self.encoder = task, keys, encoder
        self.split, self.seed = split, seed
        self.documents = _corpora.prose(split, prose)
        self.nouns = [word for word in _NOUNS if _corpora.split_of(word) == split]

    def __len__(self) -> int:
        return 0

    def row(self, index: int) -> Row:
        """Sample ``index`` as text, as long as fits."""
        rng = random.Random(f"{self.task}/{self.split}/{self.seed}/{index}")
        names: dict[str, str] = {}
        while len(names) < self.keys:
            name = f"{rng.choice(_ADJECTIVES)}-{rng.choice(self.nouns)}"
            names[name] = str(rng.randrange(100_000, 1_000_000))
        asked = rng.choice(list(names))
        needles = [_NEEDLE.format(key=key, value=value) for key, value in names.items()]
        depths = [rng.uniform(*NEEDLE_DEPTHS) for _ in needles]
        stream = _sentences(self.documents, rng)
        hay: list[str] = []

        def build(count: int) -> Row:
            while len(hay) < count:
                hay.append(next(stream))
            return Row(
                task=self.task,
                prompt=_INTRODUCTION
                + _hide(hay[:count], needles, depths)
                + _QUESTION.format(key=asked),
                answer_prefix=_ANSWER.format(key=asked),
                completion=f" {names[asked]}",
            )

        return _fill(build, self.encoder, f"{PREFIX}{self.task}")

    def sample(self, index: int) -> Sample:
        return self.encoder.encode(self.row(index), f"{PREFIX}{self.task} {index}")


class TextSource:
    """Language modelling: the last tokens of a stretch of text are scored.

    Args:
        task: Its name.
        documents: The texts.
        encoder: Turns text into tokens; a sample has exactly its ``length``.
        split: Part of the seed.
        seed: Seed.
    """

    def __init__(
        self, task: str, documents: Sequence[str], encoder: Encoder, split: Split, seed: int
    ) -> None:
        self.task, self.documents, self.encoder = task, documents, encoder
        self.split, self.seed = split, seed

    def __len__(self) -> int:
        return 0

    def sample(self, index: int) -> Sample:
        length = self.encoder.length
        rng = random.Random(f"{self.task}/{self.split}/{self.seed}/{index}")
        # More characters than needed: tokens are cut, text is not.
        wanted = 5 * length
        text = ""
        while True:
            while len(text) < wanted:
                text += ("\n\n" if text else "") + _stretch(rng, self.documents, wanted - len(text))
            ids = self.encoder.tokens(text, special=True)
            if len(ids) >= length:
                break
            wanted += 6 * (length - len(ids)) + 64
        scored = min(SCORED_TOKENS, max(1, length // 4))
        return Sample(self.task, array("i", ids[:length]), length - scored, answer=False)


def _stretch(rng: random.Random, documents: Sequence[str], size: int) -> str:
    """Whole lines of a random document, from a random one on, about ``size`` characters."""
    document = rng.choice(documents)
    spare = len(document) - size
    start = rng.randrange(spare) if spare > 0 else 0
    start = document.find("\n", start) + 1 if start else 0
    return document[start : start + size]


def _sentences(documents: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Endless sentences of documents in a random order."""
    while True:
        parts = _corpora.sentences(rng.choice(documents))
        # Not always from the start: a long document would show its beginning only.
        yield from parts[rng.randrange(max(1, len(parts) // 2)) :]


def _hide(hay: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Sentences with each needle between two of them, at its depth in characters."""
    total = sum(len(part) + 1 for part in hay)
    placed = sorted(zip(depths, needles, strict=True))
    parts: list[str] = []
    position = 0
    for part in hay:
        while placed and position >= placed[0][0] * total:
            parts.append(placed.pop(0)[1])
        parts.append(part)
        position += len(part) + 1
    return " ".join([*parts, *(needle for _, needle in placed)])


def _fill(build: Callable[[int], Row], encoder: Encoder, name: str) -> Row:
    """The row with about as many sentences as fit into the encoder's length."""

    def size(count: int) -> int:
        row = build(count)
        return len(encoder.prompt(row)) + len(encoder.tokens(row.completion))

    limit = encoder.length
    base = size(0)
    if base > limit:
        raise DataError(
            f"{name}: question and needles alone have {base} tokens, more than the {limit} of "
            "--length"
        )
    tolerance = max(8, limit // 100)
    low, high = 0, 2 * limit  # low fits; a sentence has a token at least
    guess = max(1, (limit - base) // 30)
    while high - low > 1:
        tokens = size(guess)
        if tokens > limit:
            high = guess
        else:
            low = guess
            if limit - tokens <= tolerance:
                break
        # Tokens grow nearly linearly with sentences: two or three trials do.
        per_sentence = max(1.0, (tokens - base) / guess)
        guess += round((limit - tolerance / 2 - tokens) / per_sentence)
        guess = min(max(guess, low + 1), high - 1)
    return build(low)


BUILTIN = ("niah_single", "niah_multikey", "lm_code", "lm_prose")
"""Names of the built-in tasks."""


def builtin(
    name: str, encoder: Encoder, *, split: Split = "train", seed: int = 0, prose: str | None = None
) -> Source:
    """The source of a built-in task.

    Args:
        name: One of :data:`BUILTIN`.
        encoder: Turns text into tokens; its ``length`` is the size of a sample.
        split: ``"train"`` or ``"test"``: disjoint documents and words.
        seed: Seed.
        prose: Folder of .txt, .md or .rst files; None: prose of the standard library.

    Raises:
        DataError: An unknown name, or no text for it.
    """
    try:
        if name == "niah_single":
            return NeedleSource(name, 1, encoder, split, seed, prose)
        if name == "niah_multikey":
            return NeedleSource(name, 4, encoder, split, seed, prose)
        if name == "lm_code":
            return TextSource(name, _corpora.code(split), encoder, split, seed)
        if name == "lm_prose":
            return TextSource(name, _corpora.prose(split, prose), encoder, split, seed)
    except (ValueError, OSError) as error:
        raise DataError(f"{PREFIX}{name}: {error}") from None
    raise DataError(f"{PREFIX}{name}: no such task; there are {', '.join(BUILTIN)}")


def load_sources(
    data: Sequence[str | Any],
    encoder: Encoder,
    *,
    split: Split = "train",
    seed: int = 0,
    prose: str | None = None,
) -> list[Source]:
    """The sources of everything named as data.

    Args:
        data: ``"builtin:a,b"``, paths of JSONL files, or rows as dicts.
        encoder: Turns rows into tokens.
        split: Split of the built-in tasks. Files are used whole.
        seed: Seed of the built-in tasks.
        prose: Folder of prose for them.

    Returns:
        One source a task, in order of appearance; rows of one task from several files are one.

    Raises:
        DataError: Bad rows, with file and line; unknown built-in tasks; a task named twice.
    """
    sources: list[Source] = []
    rows = []
    for number, item in enumerate(data, 1):
        if isinstance(item, str) and item.startswith(PREFIX):
            names = [name.strip() for name in item.removeprefix(PREFIX).split(",")]
            sources += [builtin(n, encoder, split=split, seed=seed, prose=prose) for n in names]
        elif isinstance(item, (str, Path)):
            rows += read_rows(Path(item))
        else:
            rows.append((f"row {number}", parse_row(item, f"row {number}")))
    sources += sources_from_rows(rows, encoder)
    names = [source.task for source in sources]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(
            f"the task {', '.join(repeated)} is there twice; a file's task cannot have the name of "
            "a built-in one that is used too"
        )
    if not sources:
        raise DataError("no data: name built-in tasks (builtin:niah_single,lm_code) or JSONL files")
    return sources
