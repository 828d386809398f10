"""Output that cannot fail a study: ASCII for characters that a terminal lacks, a warning if stdout is closed."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

_ASCII = dict(zip("×÷−–±·…†→", "x/--~|.*>", strict=True))  # one character each, so that columns stay columns
_WIDE = 240  # where stdout is no terminal and COLUMNS does not say: enough for every column of a table


def use_ascii_fallback() -> None:
    """Let stdout and stderr write an ASCII character for one that they cannot encode."""
    codecs.register_error("spanlab", _ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spanlab")


def _ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "the error handler is for encoding only"
    characters = error.object[error.start : error.end]
    return "".join(_ASCII.get(character, "?") for character in characters), error.end


class _Page(io.StringIO):
    """Buffer of text for stdout."""

    encoding = "utf-8"


@contextmanager
def printed() -> Iterator[Console]:
    """Yield a console whose text is written to stdout at the end; a failure is a warning on stderr."""
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


def warn(text: str) -> None:
    """Print one line on stderr, if it can be written."""
    with suppress(OSError, ValueError):
        print(f"spanlab: {text}", file=sys.stderr)


def _drop_stdout() -> None:
    """Redirect stdout to null, so that Python exits without an error about unwritten text."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
