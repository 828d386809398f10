"""Requests to an OpenAI-compatible server: `messages` or `prompt`, one JSON object per line.

Each message is a span: equal messages are equal content at any position. The text of the chat template is unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids, Ints, Keys
from spanlab.workloads.logs.pieces import hash_name, hash_pieces, salt_keys
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, head_rows, json_lines

PREFIXES = ("", "body.", "request.", "request.body.")  # prefixes of the request's fields in batch files and proxy logs
TEMPLATE = "what a chat template adds to messages is unknown, and left out"
_MEMO_SIZE = 4096  # recently hashed texts: a conversation repeats its messages


@LOG_FORMATS.register("openai")
def openai() -> LogFormat:
    """One request per line, at the top level or inside `body` or `request`."""
    return LogFormat(
        looks_for="JSONL with messages or prompt",
        recognises=lambda file: any(_prompt_of(Row(row)) is not None for row in head_rows(file)),
        read=_read_entries,
        ids=Ids.CONTENT,
    )


def _prompt_of(row: Row) -> Any:
    return row.get(*(f"{prefix}{name}" for name in ("messages", "prompt") for prefix in PREFIXES))


def _read_entries(file: LogFile) -> Iterator[Entry]:
    texts = _TextPieces(file)

    def parse(row: Row, line: int, file: LogFile) -> Entry:
        spans = [texts.hash(message) for message in _split_prompt(_prompt_of(row), file)]
        keys, lengths = (np.concatenate([span[index] for span in spans]) for index in (0, 1))
        ends = np.cumsum([len(span[0]) for span in spans])
        salt = row.get(*(f"{prefix}cache_salt" for prefix in PREFIXES))
        return Entry(
            salt_keys(keys, salt),
            lengths,
            line,
            row.seconds("timestamp", "created", "created_at", "time", "ts", "start_time"),
            row.count("usage.completion_tokens", "response.usage.completion_tokens", "output_length", default=0),
            row.label("session_id", "conversation_id", "body.session_id"),
            row.label("tenant", "tenant_id") or row.label(*(f"{prefix}user" for prefix in PREFIXES)),
            tuple(ends[:-1].tolist()),
        )

    return json_lines(parse)(file)


def _split_prompt(prompt: Any, file: LogFile) -> list[Any]:
    """Return the spans of a prompt: messages as text, a text, or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise BadFieldError("messages", "a list of messages, or prompt as text or token ids")
    if all(isinstance(token, int) for token in prompt):
        return [Row({"prompt": prompt}).whole_numbers("prompt")]
    if all(isinstance(message, dict) for message in prompt):
        file.notes.append(TEMPLATE)
        return [_message(message) for message in prompt]
    raise BadFieldError("messages", "a list of objects with role and content")


def _message(message: dict[str, Any]) -> str:
    if "role" not in message:
        raise BadFieldError("messages", "a role in each message")
    content = message.get("content")
    other_fields = {key: value for key, value in message.items() if key not in ("role", "content")}
    text = content if isinstance(content, str) else "" if content is None else orjson.dumps(content).decode()
    return f"{message['role']}\n{text}{orjson.dumps(other_fields).decode() if other_fields else ''}"


class _TextPieces:
    """Pieces of texts, with a memo of recent texts."""

    def __init__(self, file: LogFile) -> None:
        self._file, self._known = file, OrderedDict[int, tuple[Keys, Ints]]()

    def hash(self, content: Any) -> tuple[Keys, Ints]:
        """Return keys and lengths of the pieces of a text or of token ids."""
        if not isinstance(content, str):
            return hash_pieces(content, self._file.piece)
        name = hash_name(content)
        if name not in self._known:
            self._known[name] = hash_pieces(self._file.encode(content), self._file.piece)
        self._known.move_to_end(name)
        if len(self._known) > _MEMO_SIZE:
            self._known.popitem(last=False)
        return self._known[name]
