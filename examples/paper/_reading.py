"""Records of local files, one at a time: JSON lines, one JSON array or object, CSV/TSV, Parquet."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20
LARGEST = 1 << 28  # characters of one record; a file with an open string is not read to its end


class FormatError(ValueError):
    """A file that is not what it was said to be; the message says where and what was expected."""


def records(path: Path, members: bool = False) -> Iterator[tuple[str, Any]]:
    """The records of a file with their places.

    Only one record and one chunk are in memory at a time. Files that end in ``.gz`` are unpacked
    on the way.

    Args:
        path: ``.jsonl``, ``.json`` (an array, or JSON lines), ``.csv`` and ``.tsv`` with a header
            line, ``.parquet``, or lines of text with any other ending.
        members: The file is one JSON object whose members are the records; each comes as
            ``(key, value)``.

    Raises:
        FormatError: No such file, not UTF-8, or not JSON, with line or record.
        ImportError: A Parquet file without pyarrow.
    """
    if not path.is_file():
        raise FormatError(f"{path}: no such file")
    ending = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    try:
        if ending == ".parquet":
            yield from _parquet(path)
            return
        with _open(path) as file:
            if ending in (".csv", ".tsv"):
                yield from _table(file, path, "\t" if ending == ".tsv" else ",")
            elif ending in (".json", ".jsonl"):
                start = _first(file)
                if members or start == "[":
                    yield from _stream(file, path, members)
                else:
                    yield from _lines(file, path)
            else:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text: {error}") from None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _first(file: IO[str]) -> str:
    """First character that is no white space; the file is put back to its start."""
    while (character := file.read(1)).isspace():
        pass
    file.seek(0)
    return character


def _lines(file: IO[str], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise FormatError(
                f"{path}:{number}: not JSON: {error}; expected one record a line, or one JSON "
                "array of records"
            ) from None


def _table(file: IO[str], path: Path, delimiter: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(LARGEST)
    reader = csv.DictReader(file, delimiter=delimiter)
    try:
        for row in reader:
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise FormatError(f"{path}:{reader.line_num}: not a table: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ImportError(
            f"{path}: reading Parquet needs pyarrow (pip install pyarrow); or give the set as JSONL"
        ) from None
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: record {number}", row
    except ArrowInvalid as error:
        raise FormatError(f"{path}: not a Parquet file: {error}") from None


def _stream(file: IO[str], path: Path, members: bool) -> Iterator[tuple[str, Any]]:
    """Elements of an array, or members of an object, decoded as they are read."""
    decoder = json.JSONDecoder()
    opening, closing = ("{", "}") if members else ("[", "]")
    buffer, place, number = "", 0, 0

    def more() -> bool:
        nonlocal buffer, place
        chunk = file.read(CHUNK)
        buffer, place = buffer[place:] + chunk, 0
        return bool(chunk)

    def mark() -> str:
        """The next character that is no white space, not taken; empty at the end."""
        nonlocal place
        while True:
            while place < len(buffer) and buffer[place].isspace():
                place += 1
            if place < len(buffer):
                return buffer[place]
            if not more():
                return ""

    def value() -> Any:
        nonlocal place
        mark()
        while True:
            try:
                found, place = decoder.raw_decode(buffer, place)
                return found
            except json.JSONDecodeError as error:
                # What is not complete fails at the end of the buffer, or in a string without end.
                rest = len(buffer) - error.pos
                cut = rest < 16 or error.msg.startswith("Unterminated")
                if not cut or len(buffer) - place > LARGEST or not more():
                    raise FormatError(
                        f"{path}: record {number + 1} is not JSON: {error.msg}"
                    ) from None

    def expect(wanted: str) -> str:
        nonlocal place
        found = mark()
        if not found or found not in wanted:
            raise FormatError(
                f"{path}: after record {number}: expected {' or '.join(wanted)}, found "
                f"{found or 'the end of the file'}"
            )
        place += 1
        return found

    expect(opening)
    if mark() == closing:
        return
    while True:
        if members:
            key = value()
            expect(":")
            found = (key, value())
        else:
            found = value()
        number += 1
        yield f"{path}: record {number}" + (f" ({found[0]})" if members else ""), found
        if expect("," + closing) == closing:
            return
