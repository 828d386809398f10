"""Sessions of the command lines of Codex and Gemini: each call of a model is a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spanlab.workloads.logs.agents import (
    REPEATED_CALLS,
    REPEATED_LINES,
    Call,
    output_of,
    read_sessions,
)
from spanlab.workloads.logs.bodies import check_block
from spanlab.workloads.logs.log import Ids
from spanlab.workloads.logs.observed import NOT_REPORTED
from spanlab.workloads.logs.rows import (
    BadFieldError,
    Row,
    actual,
    count_of,
    counted,
    inclusive,
    output_in,
)
from spanlab.workloads.logs.source import LOG_FORMATS, LogFile, LogFormat, folder_has, parse_object

# ------------------------------------------------------------------------------
# Codex: rollout files, with the items of a conversation and the counts of tokens after each call.
# ------------------------------------------------------------------------------

_ENVELOPES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
#: Items that the model makes; `message` is one if its role is assistant.
_OF_MODEL = frozenset(
    (
        "reasoning",
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "web_search_call",
        "image_generation_call",
        "tool_search_call",
        "mcp_call",
        "compaction",
    )
)
_EVENTS_OF_PROMPTS = ("user_message", "task_started", "token_count")
_NOT_SENT = frozenset(("ghost_snapshot", "other"))
REPEATED_COUNTS = "counts of tokens that repeat the one before"
NO_CALL = "counts of tokens of no call"
REBUILT = "after a compaction without replacement_history, a history is the messages of the user and the summary"


@LOG_FORMATS.register("codex")
def codex() -> LogFormat:
    """A rollout file of Codex, or a folder of them; one request per call of the model."""
    return LogFormat(
        looks_for="JSONL with session_meta, response_item and event_msg, or a folder of such files",
        recognises=lambda file: folder_has(file, _is_codex),
        read=read_sessions(_codex_calls),
        ids=Ids.CONTENT,
        fields=("type", "payload"),
        marks=(frozenset({"timestamp", "type", "payload"}),),
    )


def _is_codex(row: dict[str, Any]) -> bool:
    if "payload" in row:
        return row.get("type") in _ENVELOPES and isinstance(row["payload"], dict)
    return {"id", "timestamp", "instructions"} <= row.keys() or row.get("record_type") == "state"


class _Rollout:
    """Reader of the lines of one session: the history, and the call whose items are being
    written."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._session, self._model, self._instructions = "", "", ""
        self._caller: str | None = None
        self.is_fork = False
        self._items_seen = 0
        self._counted = -1  # items that the history had at the last count
        self._items: list[Any] = []
        self._time: float | None = None
        self._open: Call | None = None
        # whether an item that is not the model's follows the items of the open call
        self._is_answered = False
        self._totals: Any = None

    def add(self, row: Row, line: int) -> list[Call]:
        """Take a line, and return the calls that it ends."""
        kind, payload = row.get("type"), row.get("payload")
        time = row.seconds("timestamp")
        is_enveloped = "payload" in row.fields
        if is_enveloped and not isinstance(payload, dict):
            raise BadFieldError("payload", f"an object, not {payload!r:.40}")
        if not is_enveloped:
            kind, payload = self._without_envelope(row)
        inner = Row(payload)
        calls: list[Call] = []
        if kind == "session_meta":
            self.is_fork |= bool(self._session) or inner.get("forked_from_id") is not None
            self._session = self._session or str(inner.label("id", "session_id") or "")
            caller = inner.label(
                "parent_thread_id", "source.subagent.thread_spawn.parent_thread_id"
            )
            self._caller = self._caller or (None if caller is None else str(caller))
            text = inner.get("base_instructions.text", "base_instructions", "instructions")
            self._instructions = text if isinstance(text, str) else self._instructions
        elif kind == "turn_context":
            self._model = str(inner.label("model") or self._model)
        elif kind == "response_item":
            calls = self._add_item(payload, line, time)
        elif kind == "event_msg" and payload.get("type") == "token_count":
            calls = self._count(inner, line, time)
        elif kind == "compacted":
            calls = self.close()
            self._compact(inner)
        else:
            inner_kind = payload.get("type")
            beside = f" ({inner_kind:.40})" if isinstance(inner_kind, str) else ""
            self._file.set_aside(f"lines of the type {kind}{beside}")
        if time is not None and self._ends_prompt(str(kind), inner):
            self._time = time
        return calls

    def _ends_prompt(self, kind: str, payload: Row) -> bool:
        """Return whether a prompt may be complete at the time of a line; events about an answer say
        nothing of it."""
        if kind == "event_msg":
            return payload.get("type") in _EVENTS_OF_PROMPTS
        return kind in _ENVELOPES and not (kind == "response_item" and _is_of_model(payload.fields))

    def _without_envelope(self, row: Row) -> tuple[str, dict[str, Any]]:
        """Return type and payload of a line of the first versions, which wrote items as they
        are."""
        if "instructions" in row.fields and "type" not in row.fields:
            return "session_meta", row.fields
        if row.get("record_type") is not None:
            return str(row.get("record_type")), {}
        if not isinstance(row.get("type"), str):
            return "none", {}
        return "response_item", row.fields

    def _add_item(self, item: dict[str, Any], line: int, time: float | None) -> list[Call]:
        kind = str(item.get("type"))
        if kind in _NOT_SENT:
            self._file.set_aside(f"items of the type {kind}, which are not sent")
            return []
        content = item.get("content")
        for block in (
            content if isinstance(content, list) else () if content is None else (content,)
        ):
            check_block(block, "payload.content")
        calls: list[Call] = []
        if _is_of_model(item):
            if self._is_answered:
                calls = self.close()
            if self._open is None:
                self._open = self._call(line)
            self._open.end = time if time is not None else self._open.end
        else:
            self._is_answered = self._open is not None
        self._items.append(item)
        self._items_seen += 1
        return calls

    def _call(self, line: int) -> Call:
        body = {"instructions": self._instructions or None, "input": list(self._items)}
        model = self._model
        identity = (("model", model),) if model else ()
        session = self._session or str(self._file.path)
        return Call(line, session, body, at=self._time, identity=identity, caller=self._caller)

    def _count(self, event: Row, line: int, time: float | None) -> list[Call]:
        """Take a count of tokens: that of the open call, or of one without items."""
        last, totals = event.get("info.last_token_usage"), event.get("info.total_token_usage")
        before, self._totals = self._totals, totals if isinstance(totals, dict) else self._totals
        if not isinstance(last, dict) and isinstance(totals, dict):
            # what the session's counts grew by; those that fell began again
            earlier = before if isinstance(before, dict) else {}
            last = {}
            for name in totals:
                now, then = count_of(totals, name), count_of(earlier, name)
                if not np.isnan(now):
                    last[name] = now - then if now >= then else now
        if not isinstance(last, dict) or not (
            count_of(last, "input_tokens") > 0 or output_of(last)
        ):
            self._file.set_aside(NO_CALL)
            return []
        is_repeated = (
            totals == before if isinstance(totals, dict) else self._counted == self._items_seen
        )
        self._counted = self._items_seen
        if is_repeated:
            self._file.set_aside(REPEATED_COUNTS)
            return []
        call = self._open or self._call(line)
        prompt = count_of(last, "input_tokens")
        cached, created = (
            count_of(last, f"{kind}_input_tokens") for kind in ("cached", "cache_write")
        )
        call.usage = NOT_REPORTED if np.isnan(prompt) else inclusive(prompt, cached, created)
        call.output = output_of(last)
        call.key = (
            ("codex", repr(sorted(totals.items(), key=str))) if isinstance(totals, dict) else None
        )
        call.end = time if time is not None else call.end
        self._open = call
        return self.close()

    def close(self) -> list[Call]:
        """End the open call, if there is one."""
        call, self._open, self._is_answered = self._open, None, False
        return [] if call is None else [call]

    def _compact(self, payload: Row) -> None:
        """Replace the history by what stands in its place after a compaction."""
        history = payload.get("replacement_history")
        if history is not None:
            if not isinstance(history, list) or not all(isinstance(item, dict) for item in history):
                raise BadFieldError(
                    "payload.replacement_history", f"a list of objects, not {history!r:.40}"
                )
            self._items = list(history)
            return
        if REBUILT not in self._file.notes:
            self._file.notes.append(REBUILT)
        of_user = [
            item
            for item in self._items
            if item.get("type") == "message" and item.get("role") != "assistant"
        ]
        summary = {
            "type": "message",
            "role": "user",
            "content": str(payload.label("message") or ""),
        }
        self._items = [*of_user, summary]


def _is_of_model(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind in _OF_MODEL or (kind == "message" and item.get("role") == "assistant")


def _codex_calls(file: LogFile, seen: set[object]) -> Iterator[Call]:
    rollout = _Rollout(file)
    for calls in file.parsed(
        lambda item, line: rollout.add(parse_object(item), line), counts=False
    ):
        for call in calls:
            # a fork begins with a copy of the session that it goes on from; a copy of a file has
            # the same session
            in_session = (call.session, call.key, call.at, call.end)
            if in_session in seen or (rollout.is_fork and call.key in seen):
                file.set_aside(REPEATED_CALLS)
                continue
            seen.update(
                {call.key, in_session}
                if call.key is not None
                else {in_session}
                if call.at is not None
                else ()
            )
            yield call
    yield from rollout.close()


# ------------------------------------------------------------------------------
# Gemini CLI: a session is one JSON object with its messages, or lines: what is known of the
# session, then messages, changes of what is known, and steps back. A message that changes is
# written again, with the same id. Messages are in memory until the end of their file.
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
        recognises=lambda file: folder_has(
            file,
            lambda row: isinstance(row.get("sessionId"), str) and "projectHash" in row,
            SUFFIXES,
        ),
        read=read_sessions(_calls, SUFFIXES, _TIMES),
        ids=Ids.CONTENT,
        fields=("sessionId", "projectHash", "messages"),
        marks=(frozenset({"sessionId", "projectHash"}),),
    )


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
            name, names = str(row.get("$rewindTo")), list(self._messages)
            gone = names[names.index(name) :] if name in self._messages else names
            self._file.set_aside(TAKEN_BACK, len(gone))
            for each in gone:
                del self._messages[each]
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
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) for message in messages
        ):
            raise BadFieldError("messages", f"a list of objects{actual(messages)}")
        if not is_first:
            self._file.set_aside(REPLACED)
        self._messages = {}
        for message in messages:
            self._take(Row(message), line, is_written=is_first)

    def _take(self, row: Row, line: int, *, is_written: bool) -> None:
        """Take a message; `is_written`: as one of its own, and not as part of another history."""
        kind = row.label("type")
        if kind not in _SPEAKERS:
            self._file.set_aside(f"messages of the type {kind}")
            return
        calls, tokens = row.get("toolCalls"), row.get("tokens")
        if calls is not None and not (
            isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
        ):
            raise BadFieldError("toolCalls", f"a list of objects{actual(calls)}")
        if tokens is not None and not isinstance(tokens, dict):
            raise BadFieldError("tokens", f"an object with counts{actual(tokens)}")
        # these raise for fields of another type, which are read when the call is made
        for content in (row.get("content"), *(call.get("result") for call in calls or ())):
            _parts(content)
        row.label("model")
        row.seconds("timestamp")
        name = str(row.label("id") or f"line {line}, message {len(self._messages)}")
        known, now = self._known.get(name), self._messages.get(name)
        if now is not None:
            self._file.set_aside(REPEATED_LINES, int(is_written and now.row == row))
            now.row = row
        else:
            now = self._messages[name] = _Message(line, row, list(self._messages.values()))
        if known is None:
            self._known[name] = now
            if kind == "gemini" and (is_written or tokens is not None):
                self.calls.append(now)
        elif tokens is not None:
            known.row = Row({**known.row.fields, "tokens": tokens})

    def call(self, message: _Message) -> Call:
        """Return the call that a message of the model answers."""
        tokens = message.row.get("tokens")
        counts = (
            {_COUNTS[name]: count for name, count in tokens.items() if name in _COUNTS}
            if tokens
            else {}
        )
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
    """Return messages as the contents of a request: calls of tools and their answers stand where
    they are not yet."""
    parts = [_parts(row.get("content")) for row in rows]
    named = {
        (key, piece[key].get("id") if isinstance(piece[key], Mapping) else None)
        for several in parts
        for piece in several
        for key in _FUNCTIONS
        if key in piece
    }
    contents: list[dict[str, Any]] = []
    for row, several in zip(rows, parts, strict=True):
        calls = [call for call in _tools_of(row) if ("functionCall", call.get("id")) not in named]
        called = [
            {"functionCall": {name: call.get(name) for name in ("id", "name", "args")}}
            for call in calls
        ]
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
