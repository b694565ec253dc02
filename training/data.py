"""Training and evaluation samples: rows, their tokens, and the order in which a run sees them.

A sample is a prompt and scored tokens. The router sees the prompt, the loss the scored tokens.
"""

from __future__ import annotations

import dataclasses
import json
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic_compile._files import parse_json
from elastic_compile.training.constraints import task_weights

IGNORED = -100
"""Label of tokens that are not scored."""


class DataError(ValueError):
    """Bad data; the message says where and what to do."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A sample as text: ``prompt`` and ``completion``, or ``text`` and ``scored_tokens``."""

    task: str
    prompt: str = ""
    completion: str = ""
    text: str = ""
    scored_tokens: int = 0
    answer_prefix: str = ""
    """Start of the answer, given to the model and not scored; after a chat template's turn."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample as tokens."""

    task: str
    input_ids: array[int]
    """int32: rows of long samples are many tokens, and every process holds all of them."""
    prompt_length: int
    """Tokens before the first scored one."""
    answer: bool
    """Whether the scored tokens are a completion, so that an exact match means something."""


class Source(Protocol):
    """Samples of one task."""

    task: str

    def __len__(self) -> int:
        """Number of different samples; 0: as many as asked for."""

    def sample(self, index: int) -> Sample:
        """Sample ``index``, the same at every call and in every process."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Rows to tokens.

    Args:
        tokenizer: A Hugging Face tokenizer.
        length: Most tokens of a sample.
        chat_template: Put prompts into the tokenizer's chat template. Text rows stay raw.
        truncate: ``"middle"``: cut the middle out of an over-long prompt; None: refuse it.

    Raises:
        ValueError: The tokenizer has no chat template, or an unknown ``truncate``.
    """

    tokenizer: Any
    length: int
    chat_template: bool = False
    truncate: str | None = None

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"length is {self.length}; allowed: 2 or more")
        if self.truncate not in (None, "middle"):
            raise ValueError(f'truncate is {self.truncate!r}; allowed: None or "middle"')
        if self.chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this tokenizer has no chat template; leave --chat-template out")

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Token ids of ``text``."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)[
            "input_ids"
        ]
        return ids

    def prompt(self, row: Row) -> list[int]:
        """Token ids of a row's prompt, template and answer prefix included."""
        if not self.chat_template:
            return self.tokens(row.prompt + row.answer_prefix, special=True)
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": row.prompt}], tokenize=False, add_generation_prompt=True
        )
        # The template writes the special tokens itself.
        return self.tokens(text + row.answer_prefix.lstrip())

    def encode(self, row: Row, where: str) -> Sample:
        """Tokens of a row.

        Args:
            row: The row.
            where: Its place, for messages: ``"mine.jsonl:3"``.

        Raises:
            DataError: Over-long without ``truncate``, or no prompt or no scored token is left.
        """
        if row.text:
            ids = self.tokens(row.text, special=True)
            scored = row.scored_tokens
            if scored >= len(ids):
                raise DataError(
                    f"{where}: scored_tokens is {scored}, but the text has {len(ids)} tokens and "
                    "at least one must come before the scored ones"
                )
            prompt, answer = ids[:-scored], ids[-scored:]
        else:
            prompt, answer = self.prompt(row), self.tokens(row.completion)
            if not prompt or not answer:
                part = "prompt" if not prompt else "completion"
                raise DataError(f"{where}: the {part} has no token")
        room = self.length - len(answer)
        if len(prompt) > room:
            if room < 1:
                raise DataError(
                    f"{where}: {len(answer)} scored tokens do not fit into {self.length} with a "
                    "prompt; raise --length"
                )
            if self.truncate is None:
                raise DataError(
                    f"{where}: prompt and scored part have {len(prompt) + len(answer)} tokens, "
                    f"more than {self.length}; raise --length, shorten the prompt, or cut its "
                    "middle out with --truncate middle"
                )
            tail = room // 2
            prompt = prompt[: room - tail] + prompt[len(prompt) - tail :]
        tokens = array("i", [*prompt, *answer])
        return Sample(row.task, tokens, len(prompt), not row.text)


_ROW_KEYS = ({"prompt", "completion", "task"}, {"text", "task", "scored_tokens"})


def parse_row(value: Any, where: str) -> Row:
    """A row from a JSON value.

    Args:
        value: ``{"prompt", "completion", "task"}`` or ``{"text", "task", "scored_tokens"}``.
        where: Its place, for messages.

    Raises:
        DataError: Other keys, wrong types or empty strings.
    """
    forms = '{"prompt", "completion", "task"} or {"text", "task", "scored_tokens"}'
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a row is an object {forms}, not {type(value).__name__}")
    if set(value) not in _ROW_KEYS:
        names = ", ".join(map(repr, value)) or "no key"
        wanted = _ROW_KEYS["text" in value]
        missing = ", ".join(sorted(map(repr, wanted - set(value))))
        unknown = ", ".join(sorted(map(repr, set(value) - wanted)))
        detail = "; ".join(
            f"{word} {keys}" for word, keys in (("missing", missing), ("unknown", unknown)) if keys
        )
        raise DataError(f"{where}: a row is {forms}; this one has {names} ({detail})")
    for key in ("prompt", "completion", "text", "task"):
        if key in value and (not isinstance(value[key], str) or not value[key]):
            raise DataError(f"{where}: {key} must be a string that is not empty")
    scored = value.get("scored_tokens", 0)
    if "text" in value and (isinstance(scored, bool) or not isinstance(scored, int) or scored < 1):
        raise DataError(f"{where}: scored_tokens must be a whole number above 0, not {scored!r}")
    return Row(**value)


def read_rows(path: Path) -> list[tuple[str, Row]]:
    """The rows of a JSONL file with their places; lines of white space are passed over.

    Raises:
        DataError: The file is absent, not UTF-8 or empty, or a line is no row.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file (built-in tasks are written builtin:name)")
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                value = parse_json(line.decode("utf-8"), where)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 text: {error}") from None
            except ValueError as error:
                raise DataError(str(error)) from None
            rows.append((where, parse_row(value, where)))
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


class RowSource:
    """Samples of one task from rows, all encoded (and so checked) at once.

    Args:
        task: The task.
        samples: Its samples, at least one.
    """

    def __init__(self, task: str, samples: Sequence[Sample]) -> None:
        self.task = task
        self.samples = tuple(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int) -> Sample:
        return self.samples[index]


def sources_from_rows(rows: Iterable[tuple[str, Row]], encoder: Encoder) -> list[RowSource]:
    """One source a task, in order of appearance.

    Raises:
        DataError: As :meth:`Encoder.encode`.
    """
    found: dict[str, list[Sample]] = {}
    for where, row in rows:
        found.setdefault(row.task, []).append(encoder.encode(row, where))
    return [RowSource(task, samples) for task, samples in found.items()]


class TrainingStream(Dataset[dict[str, Any]]):
    """The samples of a whole run, in order: step s holds numbers s·B to (s+1)·B − 1.

    Tasks take turns, so all have equal shares; a task's rows come in a seeded order, drawn anew
    when they are used up. Every item is a function of its number alone: a resumed run, other
    accumulation and other processes see the same.

    Args:
        sources: One a task.
        steps: Optimiser steps.
        batch_size: B, samples a step over all ranks and accumulation steps.
        seed: Seed of the order.
    """

    def __init__(
        self, sources: Sequence[Source], steps: int, batch_size: int, seed: int = 0
    ) -> None:
        self.sources = list(sources)
        self.steps, self.batch_size, self.seed = steps, batch_size, seed

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        tasks = len(self.sources)
        task = number % tasks
        start = number - number % self.batch_size
        batch = [n % tasks for n in range(start, start + self.batch_size)]
        return {
            "sample": self._sample(task, number // tasks),
            "task": task,
            "weight": task_weights(batch)[number - start],
            "key": number,
        }

    def _sample(self, task: int, index: int) -> Sample:
        source = self.sources[task]
        if not len(source):
            return source.sample(index)
        round_, place = divmod(index, len(source))
        order = list(range(len(source)))
        random.Random(f"{self.seed}/{source.task}/{round_}").shuffle(order)
        return source.sample(order[place])


def collate(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch, padded on the right: what follows a token is invisible to it in a causal model, so
    no mask is needed.

    Args:
        items: From :class:`TrainingStream`.

    Returns:
        ``input_ids`` int64 [B, S]; ``labels`` int64 [B, S], :data:`IGNORED` where not scored;
        ``route_length`` int64 [B], the prompts' lengths; ``task`` and ``key`` int64 [B];
        ``weight`` float32 [B].
    """
    samples = [item["sample"] for item in items]
    return {
        **pad_samples(samples),
        "task": torch.tensor([item["task"] for item in items]),
        "key": torch.tensor([item["key"] for item in items]),
        "weight": torch.tensor([item["weight"] for item in items], dtype=torch.float32),
    }


def pad_samples(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """``input_ids``, ``labels`` and ``route_length`` of :func:`collate`."""
    width = max(len(sample.input_ids) for sample in samples)
    input_ids = torch.zeros(len(samples), width, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    for row, sample in enumerate(samples):
        ids = torch.tensor(sample.input_ids, dtype=torch.int64)
        input_ids[row, : len(ids)] = ids
        labels[row, sample.prompt_length : len(ids)] = ids[sample.prompt_length :]
    lengths = torch.tensor([sample.prompt_length for sample in samples])
    return {"input_ids": input_ids, "labels": labels, "route_length": lengths}


def dump_rows(rows: Iterable[Row]) -> str:
    """Rows as JSONL text that :func:`read_rows` reads; answer prefixes become prompt."""
    lines = []
    for row in rows:
        value: dict[str, Any]
        if row.text:
            value = {"text": row.text, "task": row.task, "scored_tokens": row.scored_tokens}
        else:
            value = {
                "prompt": row.prompt + row.answer_prefix,
                "completion": row.completion,
                "task": row.task,
            }
        lines.append(json.dumps(value, ensure_ascii=False) + "\n")
    return "".join(lines)
