"""Sessions of Gemini CLI: each message of the model is a call, with the history before it and its counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spanlab.workloads.logs.agents import REPEATED_CALLS, REPEATED_LINES, Call, read_sessions
from spanlab.workloads.logs.log import Ids
from spanlab.workloads.logs.rows import BadFieldError, Row, actual
from spanlab.workloads.logs.source import LOG_FORMATS, LogFile, LogFormat, folder_has, parse_object
from spanlab.workloads.logs.usage import counted, output_in

# ------------------------------------------------------------------------------
# A session is one JSON object with its messages, or lines: what is known of the session, then
# messages, changes of what is known, and steps back. A message that changes is written again, with
# the same id. Messages are in memory until the end of their file.
# ------------------------------------------------------------------------------

SUFFIXES = (".jsonl", ".json")
_TIMES = ("startTime", "timestamp")
_COUNTS = {
    "input": "promptTokenCount",
    "cached": "cachedContentTokenCount",
    "output": "candidatesTokenCount",
    "thoughts": "thoughtsTokenCount",
    "tool": "toolUsePromptTokenCount",
    "total": "totalTokenCount",
}
_SPEAKERS = ("user", "gemini")
TAKEN_BACK = "messages that a step back took out of the history; calls among them count"
REPLACED = "times that a shorter or other history took the place of a session's messages"


@LOG_FORMATS.register("gemini_cli")
def gemini_cli() -> LogFormat:
    """A session of Gemini CLI, or a folder of sessions; one request per message of the model."""
    return LogFormat(
        looks_for="JSON or JSONL with sessionId, projectHash and messages of the types user and gemini, or a folder",
        recognises=lambda file: folder_has(file, _is_session, SUFFIXES),
        read=read_sessions(_calls, SUFFIXES, _TIMES),
        ids=Ids.CONTENT,
        fields=("sessionId", "projectHash", "messages"),
        marks=(frozenset({"sessionId", "projectHash"}),),
    )


def _is_session(row: dict[str, Any]) -> bool:
    return isinstance(row.get("sessionId"), str) and "projectHash" in row


@dataclass(eq=False)
class _Message:
    """A message as it was written last; `before` are those in front of it when it came."""

    line: int
    row: Row
    before: list[_Message] = field(default_factory=list)


class _Session:
    """The messages of a file by id, as the history is now, and the calls so far."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._messages: dict[str, _Message] = {}
        self._known: dict[str, _Message] = {}
        self._is_subagent = False
        self.name = str(file.path)
        self.calls: list[_Message] = []

    def add(self, row: Row, line: int) -> None:
        """Take a line of a file, or a session that is one object."""
        row.seconds("timestamp")
        if row.get("$rewindTo") is not None:
            self._step_back(str(row.get("$rewindTo")))
        elif "$set" in row.fields:
            known = row.get("$set")
            if not isinstance(known, dict):
                raise BadFieldError("$set", f"an object{actual(known)}")
            self._describe(Row(known), line, is_first=False)
        elif row.get("sessionId") is not None and row.get("type") is None:
            self._describe(row, line, is_first=True)
        else:
            self._take(row, line, is_written=True)

    def _describe(self, row: Row, line: int, *, is_first: bool) -> None:
        name = row.label("sessionId")
        self.name = self.name if name is None else str(name)
        self._is_subagent |= row.get("kind") == "subagent"
        messages = row.get("messages")
        if messages is None:
            return
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadFieldError("messages", f"a list of objects{actual(messages)}")
        if not is_first:
            self._file.set_aside(REPLACED)
        self._messages = {}
        for message in messages:
            self._take(Row(message), line, is_written=is_first)

    def _step_back(self, name: str) -> None:
        names = list(self._messages)
        gone = names[names.index(name) :] if name in self._messages else names
        self._file.set_aside(TAKEN_BACK, len(gone))
        for each in gone:
            del self._messages[each]

    def _take(self, row: Row, line: int, *, is_written: bool) -> None:
        """Take a message; `is_written`: as one of its own, and not as part of another history."""
        kind = row.label("type")
        if kind not in _SPEAKERS:
            self._file.set_aside(f"messages of the type {kind}")
            return
        _check(row)
        name = str(row.label("id") or f"line {line}, message {len(self._messages)}")
        known, now = self._known.get(name), self._messages.get(name)
        if now is not None:
            self._file.set_aside(REPEATED_LINES, int(is_written and now.row == row))
            now.row = row
        else:
            now = self._messages[name] = _Message(line, row, list(self._messages.values()))
        if known is None:
            self._known[name] = now
            if kind == "gemini" and (is_written or isinstance(row.get("tokens"), dict)):
                self.calls.append(now)
        elif isinstance(row.get("tokens"), dict):
            known.row = Row({**known.row.fields, "tokens": row.get("tokens")})

    def call(self, message: _Message) -> Call:
        """Return the call that a message of the model answers."""
        tokens = message.row.get("tokens")
        counts = {_COUNTS[name]: count for name, count in tokens.items() if name in _COUNTS} if tokens else {}
        model, end = message.row.label("model"), message.row.seconds("timestamp")
        output = output_in(counts)
        sent = [time for before in message.before[-1:] for time in _times_of(before.row)]
        return Call(
            message.line,
            self.name,
            {"contents": _contents([before.row for before in message.before])},
            counted(counts),
            0 if np.isnan(output) else int(output),
            min([max(sent), *([] if end is None else [end])]) if sent else end,
            end,
            identity=() if model is None else (("model", model),),
            key=(self.name, message.row.label("id") or message.line),
            caller=self._file.path.parent.name if self._is_subagent else None,
        )


def _check(row: Row) -> None:
    """Raise BadFieldError for a message with a field of another type."""
    calls, tokens = row.get("toolCalls"), row.get("tokens")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadFieldError("toolCalls", f"a list of objects{actual(calls)}")
    if tokens is not None and not isinstance(tokens, dict):
        raise BadFieldError("tokens", f"an object with counts{actual(tokens)}")
    for content in (row.get("content"), *(call.get("result") for call in calls or ())):
        _parts(content)
    row.label("model")
    row.seconds("timestamp")


def _times_of(row: Row) -> Iterator[float]:
    """Yield the times of a message, and of the answers of its tools."""
    for each in (row, *(Row(call) for call in _tools_of(row))):
        try:
            time = each.seconds("timestamp")
        except BadFieldError:
            continue
        if time is not None:
            yield time


def _tools_of(row: Row) -> list[dict[str, Any]]:
    return row.get("toolCalls") or []


def _contents(rows: list[Row]) -> list[dict[str, Any]]:
    """Return messages as the contents of a request: calls of tools and their answers stand where they are not yet."""
    parts = [_parts(row.get("content")) for row in rows]
    named = {(key, _id(piece[key])) for several in parts for piece in several for key in _FUNCTIONS if key in piece}
    contents: list[dict[str, Any]] = []
    for row, several in zip(rows, parts, strict=True):
        calls = [call for call in _tools_of(row) if ("functionCall", call.get("id")) not in named]
        called = [{"functionCall": {name: call.get(name) for name in ("id", "name", "args")}} for call in calls]
        answered = [
            piece
            for call in _tools_of(row)
            if ("functionResponse", call.get("id")) not in named
            for piece in _parts(call.get("result"))
        ]
        role = "model" if row.get("type") == "gemini" else "user"
        if several or called:
            contents.append({"role": role, "parts": [*several, *called]})
        if answered:
            contents.append({"role": "user", "parts": answered})
    return contents


_FUNCTIONS = ("functionCall", "functionResponse")


def _id(function: Any) -> Any:
    return function.get("id") if isinstance(function, Mapping) else None


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the parts of a content, which may be a text; an empty text is none."""
    listed = content if isinstance(content, list) else [content]
    parts = [{"text": piece} if isinstance(piece, str) else piece for piece in listed if piece]
    for piece in parts:
        if not isinstance(piece, dict):
            raise BadFieldError("content", f"a text or a list of parts{actual(piece)}")
    return parts


def _calls(file: LogFile, seen: set[object]) -> Iterator[Call]:
    session = _Session(file)
    for _ in file.parsed(lambda item, line: session.add(parse_object(item), line), counts=False):
        pass
    calls = [session.call(message) for message in session.calls]
    for call in sorted(calls, key=lambda call: -np.inf if call.at is None else call.at):
        if call.key in seen:
            file.set_aside(REPEATED_CALLS)
            continue
        seen.add(call.key)
        yield call
