"""Requests to the clouds' own interfaces: Gemini's contents, Bedrock's Converse, and Bedrock's logs
of invocations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from spanlab.workloads.logs.bodies import is_body, is_gemini
from spanlab.workloads.logs.log import Ids
from spanlab.workloads.logs.observed import Usage
from spanlab.workloads.logs.openai import SUFFIXES, body_in, read_bodies, with_json
from spanlab.workloads.logs.rows import (
    BadFieldError,
    Row,
    actual,
    count_of,
    counted,
    output_in,
    usage_in,
)
from spanlab.workloads.logs.source import LOG_FORMATS, LogFile, LogFormat, folder_has
from spanlab.workloads.logs.spans import Refuse, Span, read_spans, unpacked

# ------------------------------------------------------------------------------
# Gemini: bodies of generateContent, alone, with their answers, or in lines of a batch.
# ------------------------------------------------------------------------------


@LOG_FORMATS.register("gemini")
def gemini() -> LogFormat:
    """One request to Gemini per line, at the top level or inside `request`; or a folder of such
    files."""
    return LogFormat(
        looks_for="JSONL with contents that have parts, at the top level or inside request",
        recognises=lambda file: folder_has(file, _has_contents, SUFFIXES),
        read=read_bodies,
        ids=Ids.CONTENT,
        fields=("contents",),
    )


def _has_contents(row: dict[str, Any]) -> bool:
    body = body_in(with_json(Row(row)))[1]
    return body is not None and is_gemini(body) and body.get("messages") is None


# ------------------------------------------------------------------------------
# Bedrock: bodies of Converse and of batches, and records of invocations as CloudWatch and S3 get
# them.
# ------------------------------------------------------------------------------

IN_S3 = "prompts in S3, of which the log has the address alone (inputBodyS3Path)"
UNKNOWN_BODY = "prompts in a form that is not read"
_OF_CONVERSE = ("toolConfig", "inferenceConfig", "additionalModelRequestFields", "guardrailConfig")
_NO_PROMPT = ("embed", "image", "video", "rerank", "stable-", "canvas", "reel", "sonic")


@LOG_FORMATS.register("bedrock")
def bedrock() -> LogFormat:
    """Records of invocations, also as CloudWatch exports them; or bodies of Converse or of a batch,
    one per line."""
    return LogFormat(
        looks_for="JSONL with schemaType ModelInvocationLog, modelId and input; or bodies of Converse; or modelInput",
        recognises=lambda file: _is_log(file) or folder_has(file, _has_converse, SUFFIXES),
        read=lambda file: (
            read_spans(_spans_of, "leave")(file) if _is_log(file) else read_bodies(file)
        ),
        ids=Ids.CONTENT,
        fields=("schemaType", "modelId", "input"),
        marks=(frozenset({"schemaType", "modelId"}),),
    )


def _is_log(file: LogFile) -> bool:
    return folder_has(file, lambda row: any(map(_is_record, _records_in(row))), SUFFIXES)


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and record.get("schemaType") == "ModelInvocationLog"


def _records_in(row: Mapping[str, Any]) -> list[Any]:
    """Return the records of a row: itself, the message of an event of CloudWatch, or those of a
    list of events."""
    for name in ("events", "Records", "records"):
        if isinstance(row.get(name), list):
            return [
                record
                for inner in row[name]
                for record in (_records_in(inner) if isinstance(inner, dict) else [])
            ]
    # of a query in Logs Insights: lists of fields with values
    if isinstance(row.get("results"), list):
        rows = [fields for fields in row["results"] if isinstance(fields, list)]
        named = [
            {str(each.get("field")): each.get("value") for each in fields if isinstance(each, dict)}
            for fields in rows
        ]
        return [record for inner in named for record in _records_in(inner)]
    for name in ("message", "@message"):
        message = unpacked(row.get(name))
        if isinstance(message, dict) and "schemaType" in message:
            return [message]
    return [row]


def _has_converse(row: dict[str, Any]) -> bool:
    prefix, body = body_in(with_json(Row(row)))
    if body is None:
        return False
    if prefix == "modelInput." or any(key in body for key in _OF_CONVERSE):
        return not is_gemini(body)
    return "modelId" in row and isinstance(body.get("messages"), list)


def _spans_of(row: Row, refuse: Refuse) -> Iterator[Span]:
    for record in _records_in(row.fields):
        if not _is_record(record):
            yield Span("", "", None, None, None, kind="no record of an invocation")
            continue
        try:
            yield _invocation(Row(record))
        except BadFieldError as error:
            refuse(str(error))


def _invocation(row: Row) -> Span:
    model, name = row.label("modelId"), row.label("requestId")
    kind = str(model).lower()
    session = row.label(
        "requestMetadata.sessionId", "requestMetadata.session_id", "requestMetadata.conversationId"
    )
    span = Span(
        "",
        "",
        None if name is None else str(name),
        None,
        row.seconds("timestamp"),
        is_call=not any(word in kind for word in _NO_PROMPT),
        kind=kind,
        failed=row.get("errorCode") is not None,
        session=None if session is None else str(session),
        tenant=row.label("identity.arn"),
    )
    if not span.is_call:
        return span
    answer = row.get("output.outputBodyJson")
    span.usage, span.output = _counts_of(row, usage_in(unpacked(answer)))
    span.identity = () if model is None else (("model", model),)
    span.body = partial(_body_of, row)
    span.missing = IN_S3 if row.get("input.inputBodyS3Path") is not None else UNKNOWN_BODY
    if isinstance(answer, dict) and span.start is not None:
        wait = count_of(answer.get("metrics"), "latencyMs")
        span.end = span.start + wait / 1e3
    return span


def _counts_of(row: Row, usage: Any) -> tuple[Usage, float]:
    """Return the counts of a record, which its answer may repeat; cached and created tokens stand
    beside the input."""
    entered, answered = (unpacked(row.get(side)) for side in ("input", "output"))
    output = count_of(answered, "outputTokenCount")
    output, reported = output_in(usage) if np.isnan(output) else output, counted(usage)
    names = ("inputTokenCount", "cacheReadInputTokenCount", "cacheWriteInputTokenCount")
    counts = {name: count for name in names if not np.isnan(count := count_of(entered, name))}
    if "inputTokenCount" not in counts:
        return reported, output
    for name, count in zip(names[1:], reported[1:], strict=True):
        if not np.isnan(count):
            counts.setdefault(name, count)
    return counted(counts), output


def _body_of(row: Row) -> Mapping[str, Any] | None:
    """Return the body of an invocation; None if the record does not have it, or has it in an
    unknown form."""
    body = unpacked(row.get("input.inputBodyJson"))
    if body is None:
        return None
    if not isinstance(body, dict):
        raise BadFieldError("input.inputBodyJson", f"an object{actual(body)}")
    if is_body(body):
        return body
    if isinstance(body.get("inputText"), str):  # of Titan
        return {"prompt": body["inputText"]}
    if isinstance(body.get("message"), str):  # of Cohere
        before = body.get("chat_history") or []
        messages = []
        for turn in before:
            if isinstance(turn, dict):
                role = str(turn.get("role", "")).lower()
                role = "assistant" if role == "chatbot" else role or "user"
                messages.append({"role": role, "content": turn.get("message") or ""})
        front = {"system": body["preamble"]} if isinstance(body.get("preamble"), str) else {}
        beside = {
            key: body[key] for key in ("tools", "documents") if isinstance(body.get(key), list)
        }
        return (
            front | beside | {"messages": [*messages, {"role": "user", "content": body["message"]}]}
        )
    return None
