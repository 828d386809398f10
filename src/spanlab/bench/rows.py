"""Rows of a run, written as they are produced; a cell is the rows that are made together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

import orjson


class Kept(Protocol):
    """A row that knows what is run together with it."""

    @property
    def cell(self) -> tuple[Any, ...]: ...


R = TypeVar("R", bound=Kept)


class RowFile(Generic[R]):
    """The rows of a run as JSON lines; opening it drops those of a cell that an interruption left incomplete.

    `kind`      the dataclass of its rows
    `expected`  rows of a complete cell
    """

    def __init__(self, path: Path, kind: Callable[..., R], expected: Mapping[Any, int]) -> None:
        self.rows = _complete(path, kind, expected)
        path.write_bytes(b"".join(map(_line, self.rows)))
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def __enter__(self) -> RowFile[R]:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def done(self) -> set[tuple[Any, ...]]:
        """Cells that need not be run again."""
        return {row.cell for row in self.rows}

    def add(self, row: R) -> None:
        """Keep a row."""
        self.rows.append(row)
        self._file.write(_line(row))


def _complete(path: Path, kind: Callable[..., R], expected: Mapping[Any, int]) -> list[R]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    cells: dict[tuple[Any, ...], list[R]] = defaultdict(list)
    for line in lines:
        if line.endswith(b"\n"):  # the last line of a killed run may be cut off
            row = kind(**orjson.loads(line))
            cells[row.cell].append(row)
    return [row for cell, rows in cells.items() if len(rows) == expected.get(cell) for row in rows]


def _line(row: Any) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
