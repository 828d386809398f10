"""Requests to servers with the interfaces of OpenAI or Anthropic: bodies of requests, one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spanlab.workloads.logs.bodies import is_body
from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.rendering import BodyReader
from spanlab.workloads.logs.source import (
    TIMES,
    BadFieldError,
    LogFile,
    LogFormat,
    Row,
    head_rows,
    identity_of,
    json_lines,
    moments_of,
)
from spanlab.workloads.logs.usage import OUTPUTS, usage_of

PREFIXES = ("", "body.", "request.", "request.body.")  # prefixes of the request's fields in batch files and proxy logs


@LOG_FORMATS.register("openai")
def openai() -> LogFormat:
    """One request per line, at the top level or inside `body` or `request`."""
    return LogFormat(
        looks_for="JSONL with messages, prompt, or model and input",
        recognises=lambda file: any(_body_of(Row(row))[1] is not None for row in head_rows(file)),
        read=_read_entries,
        ids=Ids.CONTENT,
        fields=("messages",),
    )


def _body_of(row: Row) -> tuple[str, Mapping[str, Any] | None]:
    """Return the prefix of the body's fields and the body; None if the line has none."""
    for prefix in PREFIXES:
        body = row.get(prefix[:-1]) if prefix else row.fields
        if is_body(body):
            return prefix, body
    return "", None


def _read_entries(file: LogFile) -> Iterator[Entry]:
    reader = BodyReader(file)

    def parse(row: Row, line: int, file: LogFile) -> Entry:
        if row.get("message_mode") == "delta":
            raise BadFieldError("message_mode", "history, not delta: the new messages of a turn are not read")
        prefix, body = _body_of(row)
        if body is None:
            raise BadFieldError("messages", "a list of messages, or prompt as text or token ids, and it is missing")
        keys, lengths, opens = reader.pieces(body, line, is_line=not prefix)
        return Entry(
            keys,
            lengths,
            line,
            row.seconds(*TIMES),
            row.count(*OUTPUTS, "output_length", default=0),
            row.label("session_id", "conversation_id", "body.session_id"),
            row.label("tenant", "tenant_id") or row.label(*(f"{prefix}user" for prefix in PREFIXES)),
            opens,
            moments=moments_of(row),
            usage=usage_of(row),
            identity=identity_of(row, *PREFIXES),
        )

    return json_lines(parse)(file)
