"""JSON lines whose lists of messages begin like those of earlier lines: what a conversation repeats is parsed once.

The line of a call has the messages of the call before it, and new ones. A message with the bytes of one that stood at
the same place becomes the same object, so that only the rest of a line is parsed.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import OrderedDict
from typing import Any

import orjson

_LIST = re.compile(rb'"(?:messages|input)"\s*:\s*\[\s*(?=\{)')
_BETWEEN = re.compile(rb"\s*(?:(,)\s*|(\]))")
_HOLDERS = ((), ("body",), ("params",), ("request",), ("request", "body"))  # where a body stands in its line
_CONVERSATIONS = 64  # of which the last line is in memory, since the next one may go on from it
_BYTES_IN_MEMORY = 1 << 26
_FIRST_MESSAGES = 16  # in memory: rules that conversations have in common
_BEGIN = 256  # bytes behind the first message by which a conversation is known: the first one may be all's rules
_WINDOW = 1 << 16  # bytes in which the end of a message is looked for at first
_UNREPEATED = 1 << 26  # bytes whose messages are told apart, which takes longer than to parse them, in vain
_end_of = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # value and end of the JSON at an offset of a text


class RepeatedLines:
    """Parser of JSON lines that share objects; a line without such a list is parsed as a whole.

    `shares`  whether the messages of the last line are objects of earlier lines, where they have the same bytes
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._latest = OrderedDict[bytes, list[tuple[bytes, Any]]]()
        self._in_memory, self.shares = 0, False
        self._first = list[tuple[bytes, Any]]()
        self._alone, self._repeated = 0, 0  # bytes of messages that no line had before, and that one had

    def loads(self, line: bytes) -> Any:
        """Return what `orjson.loads` returns."""
        value = self._sharing(line)
        self.shares = value is not None
        return value if self.shares else orjson.loads(line)

    def _sharing(self, line: bytes) -> dict[str, Any] | None:
        """Return the object of a line that has one list of messages where bodies have it; None for any other."""
        begin = _LIST.search(line) if self._alone - self._repeated < _UNREPEATED else None
        if begin is None:
            return None
        try:
            messages, stop = self._messages(line, begin.end())
            value = orjson.loads(b'%b"%b"%b' % (line[: begin.end()], self._mark.encode(), line[stop:]))
        except (ValueError, RecursionError, StopIteration):
            return None
        for path in _HOLDERS:
            holder = value
            for key in path:
                holder = holder.get(key) if isinstance(holder, dict) else None
            for key in ("messages", "input") if isinstance(holder, dict) else ():
                if holder.get(key) == [self._mark]:
                    holder[key] = messages
                    return value  # type: ignore[no-any-return]
        return None

    def _messages(self, line: bytes, start: int) -> tuple[list[Any], int]:
        """Return the objects of the list that begins at an offset, and where it ends: at its bracket."""
        elements, known = list[tuple[bytes, Any]](), list[tuple[bytes, Any]]()
        offset, name, more = start, b"", True
        while more:
            index = len(elements)
            if index == 1:
                name = line[offset : offset + _BEGIN]
                known = self._latest.pop(name, known)
                self._in_memory -= sum(len(text) for text, _ in known)
            candidates = known[index : index + 1] if index else self._first
            element = next((each for each in candidates if line.startswith(each[0], offset)), None)
            if element is None:
                text = _message_at(line, offset)
                element = text, orjson.loads(text)
                self._alone += len(text)
            else:
                text = element[0]
                self._repeated += len(text)
            if index == 0 and not (self._first and element is self._first[0]):
                self._first = [element, *(each for each in self._first if each is not element)][:_FIRST_MESSAGES]
            elements.append(element)
            between = _BETWEEN.match(line, offset + len(text))
            if between is None:
                raise ValueError("expected a comma or the end of a list")
            more = between[1] is not None
            offset = between.end() if more else between.start(2)
        self._remember(name, elements)
        return [value for _, value in elements], offset

    def _remember(self, name: bytes, elements: list[tuple[bytes, Any]]) -> None:
        if not name:
            return
        self._latest[name] = elements
        self._in_memory += sum(len(text) for text, _ in elements)
        while len(self._latest) > _CONVERSATIONS or self._in_memory > _BYTES_IN_MEMORY:
            self._in_memory -= sum(len(text) for text, _ in self._latest.popitem(last=False)[1])


def _message_at(line: bytes, offset: int) -> bytes:
    """Return the bytes of the JSON object that begins at an offset; ValueError where none does."""
    window = _WINDOW
    while line[offset : offset + 1] == b"{":
        try:
            _, end = _end_of(line[offset : offset + window].decode("latin-1"), 0)  # one character a byte
        except (ValueError, StopIteration):
            if offset + window >= len(line):
                raise
            window *= 4
            continue
        return line[offset : offset + end]
    raise ValueError("expected a JSON object")
