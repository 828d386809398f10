"""Requests as an OpenAI-compatible server gets them: `messages` or `prompt`, one JSON object a line.

Each message is a span: equal messages are equal content wherever they stand. What a chat template adds is unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids, Ints, Keys
from spanlab.workloads.logs.pieces import cut, named, salted
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, head_rows, json_lines

HOLDERS = ("", "body.", "request.", "request.body.")  # where batch files and proxies put the request
TEMPLATE = "what a chat template adds to messages is unknown, and left out"
_REMEMBERED = 4096  # texts that were cut lately: a conversation repeats its own


@LOG_FORMATS.register("openai")
def openai() -> LogFormat:
    """One request a line, of its own or inside `body` or `request`."""
    return LogFormat(
        looks_for="JSONL with messages or prompt",
        recognises=lambda file: any(_asked(Row(row)) is not None for row in head_rows(file)),
        read=_read,
        ids=Ids.CONTENT,
    )


def _asked(row: Row) -> Any:
    return row.get(*(f"{holder}{name}" for name in ("messages", "prompt") for holder in HOLDERS))


def _read(file: LogFile) -> Iterator[Entry]:
    texts = _Texts(file)

    def parse(row: Row, line: int, file: LogFile) -> Entry:
        spans = [texts.cut(part) for part in _parts(_asked(row), file)]
        keys, lengths = (np.concatenate([span[at] for span in spans]) for at in (0, 1))
        ends = np.cumsum([len(span[0]) for span in spans])
        held = [row.get(*(f"{holder}{name}" for holder in HOLDERS)) for name in ("cache_salt", "user")]
        return Entry(
            salted(keys, held[0]),
            lengths,
            line,
            row.seconds("timestamp", "created", "created_at", "time", "ts", "start_time"),
            row.count("usage.completion_tokens", "response.usage.completion_tokens", "output_length", default=0),
            row.get("session_id", "conversation_id", "body.session_id"),
            row.get("tenant", "tenant_id") or held[1],
            tuple(ends[:-1].tolist()),
        )

    return json_lines(parse)(file)


def _parts(asked: Any, file: LogFile) -> list[Any]:
    """What a prompt consists of: messages, texts or token ids."""
    if isinstance(asked, str):
        return [asked]
    if not isinstance(asked, list) or not asked:
        raise BadFieldError("messages", "a list of messages, or prompt as text or token ids")
    if all(isinstance(token, int) for token in asked):
        return [np.array(asked, dtype=np.int64)]
    if all(isinstance(part, dict) for part in asked):
        file.notes.append(TEMPLATE)
        return [_message(part) for part in asked]
    raise BadFieldError("messages", "a list of objects with role and content")


def _message(message: dict[str, Any]) -> str:
    if "role" not in message:
        raise BadFieldError("messages", "a role in each message")
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    text = content if isinstance(content, str) else "" if content is None else orjson.dumps(content).decode()
    return f"{message['role']}\n{text}{orjson.dumps(rest).decode() if rest else ''}"


class _Texts:
    """Cuts texts into pieces and remembers the latest ones."""

    def __init__(self, file: LogFile) -> None:
        self._file, self._known = file, OrderedDict[int, tuple[Keys, Ints]]()

    def cut(self, part: Any) -> tuple[Keys, Ints]:
        """Keys and lengths of a text or of token ids."""
        if not isinstance(part, str):
            return cut(part, self._file.piece)
        name = named(part)
        if name not in self._known:
            self._known[name] = cut(self._file.encode(part), self._file.piece)
        self._known.move_to_end(name)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return self._known[name]
