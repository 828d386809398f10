"""Spans of calls of models, as OpenTelemetry, Langfuse and LiteLLM write them, with invented contents."""

import json
from typing import Any

ASKED = "what does the second paragraph of the report say about the winter?"
START = 1_793_600_000_000_000_000  # nanoseconds


def value_of(value: Any) -> dict[str, Any]:
    """Return a value as OTLP's JSON has it: integers of 64 bits are texts."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": pairs(value)}}
    return {"stringValue": value}


def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return attributes as OTLP's list."""
    return [{"key": key, "value": value_of(value)} for key, value in attributes.items()]


def span(name: str, start: float, end: float, parent: str = "", trace: str = "t1", **fields: Any) -> dict[str, Any]:
    """Return a span of OTLP; attributes in `fields` are a dictionary."""
    times = {"startTimeUnixNano": str(START + int(start * 1e9)), "endTimeUnixNano": str(START + int(end * 1e9))}
    attributes = pairs(fields.pop("attributes", {}))
    return (
        {"traceId": trace, "spanId": name, "parentSpanId": parent, "name": name}
        | times
        | {"attributes": attributes}
        | fields
    )


def call(prompt: int, cached: int, created: int, output: int, messages: Any = None, **more: Any) -> dict[str, Any]:
    """Return the attributes of a call of a model."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.usage.cache_creation.input_tokens": created,
    }
    if messages is not None:
        attributes["gen_ai.input.messages"] = json.dumps(messages)
    return attributes | more


def parts(role: str, text: str) -> dict[str, Any]:
    """Return a message of the conventions, with its parts."""
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def otlp(*spans: dict[str, Any], **resource: Any) -> dict[str, Any]:
    """Return an export of spans."""
    scopes = [{"scope": {"name": "x"}, "spans": list(spans)}]
    return {"resourceSpans": [{"resource": {"attributes": pairs(resource)}, "scopeSpans": scopes}]}


def otel_lines() -> list[dict[str, Any]]:
    """Return two exports with one call each, of which the second goes on from the first."""
    first = [parts("user", ASKED)]
    second = [*first, parts("assistant", "that it was mild"), parts("user", "and the third?")]
    return [
        otlp(span("a", 0, 2, attributes=call(40, 0, 32, 6, first))),
        otlp(span("b", 5, 6, attributes=call(60, 32, 20, 7, second))),
    ]


def generation(name: str, second: int, messages: Any, counted: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return an observation of Langfuse."""
    return {
        "id": name,
        "traceId": "t1",
        "parentObservationId": None,
        "type": "GENERATION",
        "startTime": f"2026-11-02T09:00:{second:02}.000Z",
        "completionStartTime": f"2026-11-02T09:00:{second + 1:02}.000Z",
        "endTime": f"2026-11-02T09:00:{second + 2:02}.000Z",
        "model": "m",
        "input": messages,
        "usageDetails": counted,
    } | more


def langfuse_lines() -> list[dict[str, Any]]:
    """Return observations, a line each, the newest first."""
    first = [{"role": "user", "content": ASKED}]
    second = [
        *first,
        {"role": "assistant", "content": "that it was mild"},
        {"role": "user", "content": "and the third?"},
    ]
    return [
        generation("b", 5, second, {"input": 8, "input_cache_read": 32, "input_cache_creation": 20, "output": 7}),
        generation("a", 0, first, {"input": 40, "output": 6, "total": 46}),
    ]


def payload(name: str, second: int, messages: Any, usage: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Return a StandardLoggingPayload of LiteLLM."""
    return {
        "id": name,
        "trace_id": "t1",
        "call_type": "acompletion",
        "status": "success",
        "startTime": 1_793_600_000.0 + second,
        "completionStartTime": 1_793_600_001.0 + second,
        "endTime": 1_793_600_002.0 + second,
        "model": "m",
        "prompt_tokens": 60,
        "completion_tokens": 7,
        "total_tokens": 67,
        "messages": messages,
        "response": {"choices": []},
        "model_parameters": {},
        "metadata": {"usage_object": usage},
        "end_user": "ann",
    } | more


def litellm_lines() -> list[dict[str, Any]]:
    """Return two calls of which the second read the first from a cache."""
    first = [{"role": "user", "content": ASKED}]
    second = [
        *first,
        {"role": "assistant", "content": "that it was mild"},
        {"role": "user", "content": "and the third?"},
    ]
    usage = {"prompt_tokens": 60, "prompt_tokens_details": {"cached_tokens": 32}, "cache_creation_input_tokens": 20}
    return [payload("a", 0, first, None), payload("b", 5, second, usage)]
