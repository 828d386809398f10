"""JSON lines whose lists of messages begin like those of earlier lines: what a conversation repeats
is parsed once.

The line of a call has the messages of the call before it, and new ones. A message with the bytes of
one that stood at the same place becomes the same object, so that only the rest of a line is parsed.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

_LIST = re.compile(rb'"(?:messages|input|contents)"\s*:\s*\[\s*(?=\{)')
_BETWEEN = re.compile(rb"\s*(?:(,)\s*|(\]))")
# where a body stands in its line
_HOLDERS = ((), ("body",), ("params",), ("request",), ("request", "body"), ("modelInput",))
_CONVERSATIONS = 64  # of which the last line is in memory, since the next one may go on from it
_BYTES_IN_MEMORY = 1 << 24
_FIRST_MESSAGES = 16  # in memory: rules that conversations have in common
_BEGIN = 256  # bytes behind the first message by which a conversation is known: the first one may be all's rules
_WINDOW = 1 << 16  # bytes in which the end of a message is looked for at first
# bytes whose messages are told apart, which takes longer than to parse them, in vain
_UNREPEATED = 1 << 26
_end_of = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # value and end of the JSON at an offset of a text


class RepeatedLines:
    """Parser of JSON lines that share objects; a line without such a list is parsed as a whole.

    `shares`  whether the messages of the last line are objects of earlier lines, where they have
              the same bytes
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._latest = OrderedDict[bytes, _Behind]()
        self._in_memory, self.shares = 0, False
        self._first = list[tuple[bytes, Any]]()
        # bytes of messages that no line had before, and that one had
        self._alone, self._repeated = 0, 0

    def loads(self, line: bytes) -> Any:
        """Return what `orjson.loads` returns."""
        value = self._sharing(line)
        self.shares = value is not None
        return value if self.shares else orjson.loads(line)

    def _sharing(self, line: bytes) -> dict[str, Any] | None:
        """Return the object of a line that has one list of messages where bodies have it; None for
        any other."""
        begin = _LIST.search(line) if self._alone - self._repeated < _UNREPEATED else None
        if begin is None:
            return None
        try:
            messages, stop = self._messages(line, begin.end())
            value = orjson.loads(
                b'%b"%b"%b' % (line[: begin.end()], self._mark.encode(), line[stop:])
            )
        except (ValueError, RecursionError, StopIteration):
            return None
        for path in _HOLDERS:
            holder = value
            for key in path:
                holder = holder.get(key) if isinstance(holder, dict) else None
            for key in ("messages", "input", "contents") if isinstance(holder, dict) else ():
                if holder.get(key) == [self._mark]:
                    holder[key] = messages
                    return value  # type: ignore[no-any-return]
        return None

    def _messages(self, line: bytes, start: int) -> tuple[list[Any], int]:
        """Return the objects of the list that begins at an offset, and where it ends: at its
        bracket."""
        first = next((each for each in self._first if line.startswith(each[0], start)), None)
        self._repeated += 0 if first is None else len(first[0])
        if first is None:
            first = self._parsed(line, start)
        if not (self._first and first is self._first[0]):
            self._first = [first, *(each for each in self._first if each is not first)][
                :_FIRST_MESSAGES
            ]
        offset, more = _next(line, start + len(first[0]))
        if not more:
            return [first[1]], offset
        begin, name = offset, line[offset : offset + _BEGIN]
        known = self._latest.pop(name, _NOTHING)
        self._in_memory -= len(known.text)
        values, bounds = list[Any](), list[tuple[int, int]]()
        # the common case: all of the last line's messages
        if known.text and line.startswith(known.text, begin):
            values, bounds = list(known.values), list(known.bounds)
            self._repeated += len(known.text)
            offset, more = _next(line, begin + len(known.text))
        while more:
            text, value = known.element(len(values))
            if text and line.startswith(text, offset):
                self._repeated += len(text)
            else:
                text, value = self._parsed(line, offset)
            values.append(value)
            bounds.append((offset - begin, offset - begin + len(text)))
            offset, more = _next(line, offset + len(text))
        behind = _Behind(line[begin : begin + bounds[-1][1]], bounds, values)
        self._latest[name] = behind
        self._in_memory += len(behind.text)
        while len(self._latest) > _CONVERSATIONS or self._in_memory > _BYTES_IN_MEMORY:
            self._in_memory -= len(self._latest.popitem(last=False)[1].text)
        return [first[1], *values], offset

    def _parsed(self, line: bytes, offset: int) -> tuple[bytes, Any]:
        """Return the bytes and the value of a message that no line had."""
        text = _message_at(line, offset)
        self._alone += len(text)
        return text, orjson.loads(text)


class _Behind(NamedTuple):
    """What stands behind the first message of a line: the bytes, where each message stands in them,
    and its object."""

    text: bytes
    bounds: Sequence[tuple[int, int]]
    values: Sequence[Any]

    def element(self, index: int) -> tuple[bytes, Any]:
        """Return the bytes and the object of a message; no bytes if there is none."""
        if index >= len(self.values):
            return b"", None
        begin, stop = self.bounds[index]
        return self.text[begin:stop], self.values[index]


_NOTHING = _Behind(b"", (), ())


def _next(line: bytes, offset: int) -> tuple[int, bool]:
    """Return where the next message of a list begins, or where the list ends, and whether there is
    a next one."""
    between = _BETWEEN.match(line, offset)
    if between is None:
        raise ValueError("expected a comma or the end of a list")
    more = between[1] is not None
    return between.end() if more else between.start(2), more


def _message_at(line: bytes, offset: int) -> bytes:
    """Return the bytes of the JSON object that begins at an offset; ValueError where none does."""
    window = _WINDOW
    while line[offset : offset + 1] == b"{":
        try:
            # one character a byte
            _, end = _end_of(line[offset : offset + window].decode("latin-1"), 0)
        except (ValueError, StopIteration):
            if offset + window >= len(line):
                raise
            window *= 4
            continue
        return line[offset : offset + end]
    raise ValueError("expected a JSON object")
