"""Convert local copies of public sets to the JSONL that ``python -m elastic_compile.fit`` reads.

    python examples/paper/convert.py musique --input musique_ans_v1.0_train.jsonl \\
        --out musique.jsonl --tokenizer FOLDER --samples 2880

Nothing is downloaded. The result depends on the input, the tokenizer and the options alone.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import dataclasses
import hashlib
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from _packing import PACKING, Limits, Made, Pool
from _packing import Counter as TokenCounter
from _reading import FormatError, records
from _sources import SOURCES, Document, Item, Skip, Source
from tqdm.auto import tqdm

from elastic_compile.training.data import Row, dump_rows

SPLITS = ("train", "test")
OTHER_SPLIT = "in the other split"
BOTH_SPLITS = "its documents are in both splits"


@dataclasses.dataclass
class Summary:
    """What became of the records."""

    out: Path
    task: str
    asked: int
    records: int = 0
    items: int = 0
    lengths: list[int] = dataclasses.field(default_factory=list)
    cut: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)

    def __str__(self) -> str:
        found = sorted(self.lengths)
        lines = [
            f"{self.out}: {len(found):,} samples of {self.task}, {sum(found):,} tokens; shortest "
            f"{found[0]:,}, median {found[len(found) // 2]:,}, longest {found[-1]:,}",
            f"{self.items:,} possible samples in {self.records:,} records",
        ]
        if self.cut:
            lines.append(f"cut in the middle: {self.cut:,}")
        lines += [f"skipped: {count:,} {reason}" for reason, count in sorted(self.skipped.items())]
        if len(found) < self.asked:
            lines.append(f"{self.asked:,} samples were asked for; the input gives no more")
        return "\n".join(lines)


def split_of(key: str, share: float) -> str:
    """The split of a source document, the same in every run whatever the seed."""
    number = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")
    return "test" if number < share * 2**64 else "train"


def convert(
    name: str,
    inputs: Sequence[Path],
    out: Path,
    count: TokenCounter,
    *,
    samples: int,
    low: int = 8192,
    high: int = 65_536,
    reserve: int = 64,
    split: str = "train",
    test_share: float = 0.1,
    seed: int = 0,
    pool: int | None = None,
    cut: bool = False,
    progress: bool = True,
) -> Summary:
    """Write one set's samples.

    The input is read at least twice: once to see which samples it can give and to choose the
    documents that fill them, then to make a random choice of them.

    Args:
        name: Name in :data:`SOURCES`.
        inputs: Files of that set.
        out: JSONL file; it is written whole or not at all.
        count: Tokens of a text.
        samples: Most samples.
        low: Fewest tokens of a sample, prompt and completion together.
        high: Most tokens.
        reserve: Tokens below ``high`` that are left free for a chat template.
        split: ``"train"`` or ``"test"``; no source document is in both.
        test_share: Share of the source documents that are for testing.
        seed: Of the choice of samples, their documents and their order.
        pool: Further documents kept in memory; None: as fits the set.
        cut: Take the middle out of documents that are too long, where a sample stays meaningful.
        progress: Show a progress bar.

    Raises:
        FormatError: A file is not in the set's format, or gives no sample at all.
        ValueError: An option is out of range.
        OSError: ``out`` cannot be written.
    """
    source = SOURCES[name]
    if not 1 <= low <= high - reserve or reserve < 0:
        raise ValueError(
            f"--min-tokens {low}, --max-tokens {high}, --reserve {reserve}: allowed is "
            "1 <= min <= max - reserve"
        )
    # Known before hours of reading.
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if any(out.resolve() == path.resolve() for path in inputs):
        raise ValueError(f"--out {out}: that is an input file")
    if pool is not None and pool < 0:
        raise ValueError(f"--pool {pool}: allowed is 0 or more")
    if samples < 1 or not 0 < test_share < 1 or split not in SPLITS:
        raise ValueError(
            f"--samples {samples}, --test-share {test_share}, --split {split}: allowed are 1 or "
            "more, above 0 and below 1, train or test"
        )
    if cut and source.packing != "summary":
        raise ValueError(
            f"--too-long cut: a sample of {name} with its middle cut out may lose what the answer "
            "needs; only summaries (govreport) can be cut"
        )
    summary = Summary(out, source.task, samples)
    label = f"{seed}/{name}/{split}"

    def belongs(document: Document) -> bool:
        return split_of(document.key, test_share) == split

    size = source.pool if pool is None else pool
    eligible = array.array("Q")
    documents: list[Document] = []
    chooser = random.Random(f"{label}/pool")
    seen: set[int] = set()
    bar = tqdm(unit=" records", desc="reading", disable=not progress)
    for number, item in _items(source, inputs, summary, bar):
        if isinstance(item, Skip):
            summary.skipped[item.reason] += 1
            continue
        summary.items += 1
        for document in (*item.gold, *item.others):
            identity = hash((document.key, document.text))
            if size and belongs(document) and identity not in seen:
                seen.add(identity)
                # A uniform choice of all that passed.
                place = len(seen) - 1 if len(seen) <= size else chooser.randrange(len(seen))
                if place < len(documents):
                    documents[place] = document
                elif place < size:
                    documents.append(document)
        splits = {split_of(key, test_share) for key in item.keys}
        if splits == {split}:
            eligible.append(number)
        else:
            summary.skipped[OTHER_SPLIT if len(splits) == 1 else BOTH_SPLITS] += 1
    bar.close()
    if not summary.records:
        raise FormatError(f"{', '.join(map(str, inputs))}: no records. Expected: {source.looks}")

    order = list(eligible)
    random.Random(f"{label}/order").shuffle(order)
    fillers = Pool(documents, count)
    limits = Limits(low, high - reserve, count, cut)
    make = PACKING[source.packing]
    with _spool(out) as spool:
        made: dict[int, tuple[int, int, int]] = {}  # rank: (offset, bytes, tokens)
        cuts: set[int] = set()
        tried = 0
        bar = tqdm(total=samples, unit=" samples", desc="writing", disable=not progress)
        while len(made) < samples and tried < len(order):
            # As many as are missing, and more where some of the first ones gave nothing.
            rate = max(0.05, len(made) / tried) if tried else 1.0
            end = min(len(order), tried + math.ceil((samples - len(made)) / rate))
            wanted = {order[rank]: rank for rank in range(tried, end)}
            tried = end
            for number, item in _items(source, inputs):
                if not wanted:
                    break
                if (rank := wanted.pop(number, None)) is None or isinstance(item, Skip):
                    continue
                others = tuple(filter(belongs, item.others))
                found = make(
                    dataclasses.replace(item, others=others),
                    fillers,
                    limits,
                    random.Random(f"{label}/{number}"),
                )
                if isinstance(found, Skip):
                    summary.skipped[found.reason] += 1
                    continue
                if (line := _line(found, source.task)) is None:
                    summary.skipped["with characters that are no valid Unicode"] += 1
                    continue
                made[rank] = (spool.tell(), len(line), found.tokens)
                spool.write(line)
                if found.cut:
                    cuts.add(rank)
                bar.update(len(made) <= samples)
        bar.close()
        if not made:
            reasons = "; ".join(f"{n:,} {reason}" for reason, n in summary.skipped.items())
            raise FormatError(
                f"{', '.join(map(str, inputs))}: {summary.records:,} records give no sample of "
                f"split {split}: {reasons or 'nothing was found in them'}"
            )
        ranks = sorted(made)[:samples]
        summary.cut = len(cuts.intersection(ranks))
        with whole(out) as file:
            for rank in ranks:
                offset, length, tokens = made[rank]
                spool.seek(offset)
                file.write(spool.read(length))
                summary.lengths.append(tokens)
    return summary


def _items(
    source: Source, inputs: Sequence[Path], summary: Summary | None = None, bar: tqdm | None = None
) -> Iterator[tuple[int, Item | Skip]]:
    """Numbered items of all files."""
    number = 0
    for path in inputs:
        for where, record in records(path, source.members):
            if summary is not None and bar is not None:
                summary.records += 1
                bar.update()
            for item in source.parse(record, where):
                yield number, item
                number += 1


def _line(found: Made, task: str) -> bytes | None:
    """The row; None where it is no valid Unicode."""
    try:
        return dump_rows([Row(task, prompt=found.prompt, completion=found.completion)]).encode()
    except UnicodeEncodeError:
        return None


@contextlib.contextmanager
def _spool(out: Path) -> Iterator[IO[bytes]]:
    """A temporary file beside ``out``: samples are made in the input's order."""
    with tempfile.TemporaryFile(prefix=f".{out.name}.", dir=out.parent) as file:
        yield file


@contextlib.contextmanager
def whole(out: Path) -> Iterator[IO[bytes]]:
    """``out``, replaced when everything is written."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def token_counter(tokenizer: str) -> TokenCounter:
    """Counts the tokens of a text, special ones not included.

    Args:
        tokenizer: Folder or hub id.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)

    def count(text: str) -> int:
        return len(loaded(text, add_special_tokens=False, verbose=False)["input_ids"])

    return count


def parser() -> argparse.ArgumentParser:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--input", nargs="+", type=Path, required=True, help="files of the set")
    common.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    common.add_argument("--tokenizer", required=True, help="folder of the model's tokenizer")
    common.add_argument("--samples", type=int, required=True, help="most samples to write")
    common.add_argument("--min-tokens", type=int, default=8192, help="default: 8192")
    common.add_argument("--max-tokens", type=int, default=65_536, help="default: 65536")
    common.add_argument(
        "--reserve", type=int, default=64, help="tokens left free for a chat template (default: 64)"
    )
    common.add_argument("--split", choices=SPLITS, default="train")
    common.add_argument(
        "--test-share", type=float, default=0.1, help="share of the documents (default: 0.1)"
    )
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--pool", type=int, help="further documents kept in memory")
    common.add_argument(
        "--too-long",
        choices=["skip", "cut"],
        default="skip",
        help="records above --max-tokens: skip them, or cut their middle out (govreport only)",
    )
    common.add_argument("--quiet", action="store_true", help="no progress bar")
    result = argparse.ArgumentParser(
        prog="python examples/paper/convert.py",
        description="Convert a local copy of a public set to the JSONL that fit reads.",
    )
    commands = result.add_subparsers(dest="source", required=True, metavar="SET")
    for name, source in SOURCES.items():
        commands.add_parser(
            name, parents=[common], help=source.task, description=f"Reads {source.looks}."
        )
    return result


def main(arguments: Sequence[str] | None = None, count: TokenCounter | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(arguments)
    try:
        summary = convert(
            args.source,
            args.input,
            args.out,
            count or token_counter(args.tokenizer),
            samples=args.samples,
            low=args.min_tokens,
            high=args.max_tokens,
            reserve=args.reserve,
            split=args.split,
            test_share=args.test_share,
            seed=args.seed,
            pool=args.pool,
            cut=args.too_long == "cut",
            progress=not args.quiet,
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
