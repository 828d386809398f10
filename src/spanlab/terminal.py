"""Printing that costs no result: ASCII where a terminal lacks a character, a warning where stdout cannot be written."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

_TWINS = dict(zip("×÷−–±·…†→", "x/--~|.*>", strict=True))  # one character each, so that columns stay columns
_WIDE = 240  # where stdout is no terminal and COLUMNS does not say: enough for every column of a table


def use_twins() -> None:
    """Let stdout and stderr write an ASCII character for one that they cannot encode."""
    codecs.register_error("spanlab", _twins)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spanlab")


def _twins(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "only writing meets characters that cannot be encoded"
    lacking = error.object[error.start : error.end]
    return "".join(_TWINS.get(character, "?") for character in lacking), error.end


class _Page(io.StringIO):
    """Text for stdout."""

    encoding = "utf-8"


@contextmanager
def printed() -> Iterator[Console]:
    """Print what the block prints; where stdout cannot be written, say so on stderr and go on."""
    stdout, page, columns = Console(), _Page(), os.environ.get("COLUMNS", "")
    page.encoding = stdout.encoding
    wide = int(columns) if columns.isdecimal() and int(columns) else _WIDE
    yield Console(file=page, force_terminal=stdout.is_terminal, width=stdout.width if stdout.is_terminal else wide)
    if sys.stdout is None:  # closed before the program began
        return
    try:
        sys.stdout.write(page.getvalue())
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        warn(f"stdout cannot be written, the results are in the run's folder: {error}")
        _drop_stdout()


def warn(words: str) -> None:
    """One line on stderr; nothing where that cannot be written either."""
    with suppress(OSError, ValueError):
        print(f"spanlab: {words}", file=sys.stderr)


def _drop_stdout() -> None:
    """Let Python end without an error about what stdout still holds."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
