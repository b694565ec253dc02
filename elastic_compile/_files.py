"""Files written whole or not at all, and JSON read strictly."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all: a temporary file in the same folder, then a rename.

    Args:
        path: Target file. Its folder must exist; an existing file is replaced.
        data: The complete content.

    Raises:
        OSError: The folder does not exist or cannot be written; the target is unchanged.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            # Without this a power cut can leave the new name on empty content.
            os.fsync(file.fileno())
        # mkstemp makes files private; a checkpoint is as readable as any file its owner creates.
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def dump_json(value: Any) -> bytes:
    """The bytes of a JSON file: indented, keys in their order, a final newline."""
    return (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file as ``parse_json`` does.

    Args:
        path: The file.

    Returns:
        The parsed value.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not JSON text, or an object names a key twice; the message names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a valid JSON document: {error}") from None
    return parse_json(text, str(path))


def parse_json(text: str, source: str) -> Any:
    """Parse JSON, refusing what the standard parser quietly resolves.

    Args:
        text: The JSON text.
        source: What it is, for the error message.

    Returns:
        The parsed value.

    Raises:
        ValueError: The text is not JSON or an object names a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise ValueError(f"{source}: not a valid JSON document: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"key {', '.join(map(repr, repeated))} appears more than once")
    return result
