"""Reading of input files with one-sentence errors, and atomic writing of output files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import orjson

ALTERNATIVES = "workload.source=shape, workload.source=local workload.path=..., or workload.source=hub with network"


class SourceUnavailable(ValueError):  # noqa: N818 - the name describes the state of the source
    """The text, its folder or its tokenizer is not available."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; alternatives: {ALTERNATIVES}")


def existing_file(path: Path | None, key: str, expected: str) -> Path:
    """Return `path` if it is a file; raise SourceUnavailable, naming `key`, if it is absent or a folder."""
    if path is None:
        raise SourceUnavailable(f"{key} is not set; expected {expected}")
    if not path.is_file():
        raise SourceUnavailable(f"{key}={path} is not a file; expected {expected}")
    return path


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_jsonl(path: Path | None, key: str, expected: str) -> list[dict[str, Any]]:
    """Read one JSON object per line; raise ValueError, naming `key`, for a missing, broken or empty file."""
    path = existing_file(path, key, expected)
    rows = list(_parsed_lines(path, key, expected))
    if not rows:
        raise ValueError(f"{key}={path} holds no rows; expected {expected}")
    return rows


#: JSON type names of the Python types that orjson returns.
_JSON_TYPES = {
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    list: "a list",
    dict: "an object",
}


def field(row: dict[str, Any], name: str, path: Path | str, key: str, expected: str, kind: type = object) -> Any:
    """Return `row[name]`; raise ValueError, naming file and field, if it is missing or not of type `kind`."""
    if name not in row:
        raise ValueError(f"{key}={path} has a row without the field {name!r}; expected {expected}")
    value = row[name]
    if not isinstance(value, kind):
        actual = _JSON_TYPES.get(type(value), "null")
        raise ValueError(
            f"{key}={path} has a field {name!r} that is {actual}, not {_JSON_TYPES[kind]}; expected {expected}"
        )
    return value


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> Path:
    """Write through a temporary file in the same folder and rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        # mkstemp makes private files, but other users read a committed shape and a shared cache.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _parsed_lines(path: Path, key: str, expected: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{key}={path} line {number} is not JSON ({error}); expected {expected}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{key}={path} line {number} is not a JSON object; expected {expected}")
        yield row
