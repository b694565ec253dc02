"""Text that is on every machine: code and prose of the standard library, or a user's folder.

Documents go to the training or the test split by a hash of their name, so the two never share one.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "test"]
SPLITS = ("train", "test")
_TEST_SHARE = 5  # one document in five
_SMALLEST = 400  # characters; shorter documents are scraps
_PROSE_FILES = (".txt", ".md", ".rst")
_NOT_PROSE = re.compile(r"[^\w ,.']|[\d_]")


def split_of(name: str) -> Split:
    """The split of a document, by a hash of its name: one in five is test material."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "little") % _TEST_SHARE == 0 else "train"


@functools.cache
def code(split: Split) -> tuple[str, ...]:
    """Python files of the standard library, its own tests left out.

    Raises:
        ValueError: This Python carries no source files.
    """
    documents = tuple(text for name, text in _library_files() if split_of(name) == split)
    if not documents:
        raise ValueError("this Python installation has no standard library source files")
    return documents


@functools.cache
def prose(split: Split, folder: str | None = None) -> tuple[str, ...]:
    """English prose: a user's folder, or what the standard library's documentation has of it.

    Args:
        split: Training or test documents.
        folder: Folder of .txt, .md or .rst files, searched whole. None: full sentences of the
            library's docstrings and of its language reference (``pydoc`` topics), about 1 MB.

    Raises:
        ValueError: The folder holds no text.
        FileNotFoundError: There is no such folder.
    """
    pairs = _folder(Path(folder)) if folder is not None else _documentation()
    documents = tuple(
        text for name, text in pairs if split_of(name) == split and len(text) >= _SMALLEST
    )
    if not documents:
        where = "this Python's documentation" if folder is None else folder
        raise ValueError(
            f"{where} has no prose for the {split} split: documents are split by name, so give "
            f"several .txt, .md or .rst files of at least {_SMALLEST} characters"
        )
    return documents


def sentences(text: str) -> list[str]:
    """Sentences of a document, whitespace made single spaces."""
    return [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text) if part.strip()]


@functools.cache
def _library_files() -> tuple[tuple[str, str], ...]:
    return tuple(_read_library())


def _read_library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if skipped.isdisjoint(name.split("/")):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if len(text) >= _SMALLEST:
                yield name, text


def _folder(folder: Path) -> Iterator[tuple[str, str]]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder} with prose files")
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _PROSE_FILES and path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text: {error}") from None
            yield path.relative_to(folder).as_posix(), text


def _documentation() -> Iterator[tuple[str, str]]:
    for name, text in _library_files():
        # A regular expression: parsing every file would take longer than the use of it.
        strings = re.findall(r'"""(.*?)"""', text, re.DOTALL)
        paragraphs = _paragraphs("\n\n".join(strings))
        if paragraphs:
            yield name, "\n\n".join(paragraphs)
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name, text in sorted(topics.items()):
        yield f"topics/{name}", "\n\n".join(_paragraphs(text))


def _paragraphs(text: str) -> list[str]:
    """Paragraphs of full sentences, without code, tables and markup."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if words.endswith(".") and words.count(" ") >= 11:
            if len(_NOT_PROSE.findall(words)) <= 0.07 * len(words):
                found.append(words)
    return found
