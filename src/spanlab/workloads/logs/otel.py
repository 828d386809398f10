"""OpenTelemetry spans with the attributes of generative AI, of OpenLLMetry, or of OpenInference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from spanlab.workloads.logs.log import Ids
from spanlab.workloads.logs.rows import BadFieldError, Row, actual, count_of
from spanlab.workloads.logs.source import LOG_FORMATS, LogFile, LogFormat, folder_has
from spanlab.workloads.logs.spans import (
    SUFFIXES,
    Refuse,
    Span,
    body_of,
    content_of,
    divided,
    message_of,
    read_spans,
    unpacked,
)

#: Operations that are calls of a model; spans of others may hold the sums of their calls.
_CALLS = ("chat", "text_completion", "generate_content", "completion", "responses", "message")
_MODELS = (
    "gen_ai.request.model",
    "gen_ai.response.model",
    "llm.model_name",
    "llm.request.model",
    "ai.model.id",
)
_PROMPTS: tuple[str, ...] = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.usage.prompt_tokens",
)
_PROMPTS += ("llm.token_count.prompt", "ai.usage.promptTokens", "ai.usage.inputTokens")
_OUTPUTS: tuple[str, ...] = (
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.completion_tokens",
    "llm.usage.completion_tokens",
)
_OUTPUTS += ("llm.token_count.completion", "ai.usage.completionTokens", "ai.usage.outputTokens")
_TOTALS = ("gen_ai.usage.total_tokens", "llm.usage.total_tokens", "llm.token_count.total")
_CACHED = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
    "gen_ai.usage.input_tokens.cached",
    "gen_ai.usage.details.cache_read_tokens",
    "gen_ai.usage.details.cached_tokens",
    "llm.usage.cache_read_input_tokens",
    "llm.token_count.prompt_details.cache_read",
    "ai.usage.cachedInputTokens",
)
_CREATED = (
    "gen_ai.usage.cache_write.input_tokens",
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_creation_input_tokens",
    "gen_ai.usage.cache_write_input_tokens",
    "gen_ai.usage.input_tokens.cache_write",
    "gen_ai.usage.details.cache_write_tokens",
    "llm.usage.cache_creation_input_tokens",
    "llm.token_count.prompt_details.cache_write",
)
_SESSIONS = (
    "gen_ai.conversation.id",
    "session.id",
    "langfuse.session.id",
    "exgentic.session.id",
    "thread.id",
)
_TENANTS = ("user.id", "enduser.id", "langfuse.user.id")
_FIRST_TOKEN = ("gen_ai.response.time_to_first_token", "gen_ai.response.time_to_first_chunk")
_INPUTS = (
    "gen_ai.input.messages",
    "gen_ai.prompt",
    "ai.prompt.messages",
    "input.value",
    "ai.prompt",
    "traceloop.entity.input",
)
_INDEXED = re.compile(r"(gen_ai\.prompt|llm\.input_messages|llm\.prompts)\.(\d+)\.(.+)")
_TOOL = re.compile(r"(llm\.request\.functions|llm\.tools)\.(\d+)\.(.+)")
_CALL = re.compile(r"(?:message\.)?tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(.+)")
_PART = re.compile(r"(?:message\.)?contents\.(\d+)\.message_content\.(text|image\.image\.url)")
# the event that has messages and counts of a call
_DETAILS = "gen_ai.client.inference.operation.details"
# of OTLP, and of Tempo
_GROUPS = ("resourceSpans", "resource_spans", "batches", "trace.resourceSpans")
_SPOKEN = ("system", "user", "assistant", "tool")


@LOG_FORMATS.register("otel")
def otel() -> LogFormat:
    """Spans as JSON: OTLP exports, lists of spans, or a span a line; one request per call of a
    model."""
    return LogFormat(
        looks_for="JSON of OpenTelemetry: resourceSpans, or spans with attributes such as gen_ai.request.model",
        recognises=_recognises,
        read=read_spans(_spans_of, "leave"),
        ids=Ids.CONTENT,
        fields=("resourceSpans",),
        marks=(
            frozenset({"resourceSpans"}),
            frozenset({"resource_spans"}),
            frozenset({"resourceLogs"}),
            frozenset({"spanId", "attributes"}),
            frozenset({"span_id", "attributes"}),
            frozenset({"spanID", "tags"}),
        ),
    )


def _recognises(file: LogFile) -> bool:
    def is_trace(row: dict[str, Any]) -> bool:
        if any(isinstance(Row(row).get(name), list) for name in (*_GROUPS, "resourceLogs")):
            return True
        try:
            return any(
                isinstance(span, dict) and _is_span(span)
                for _, span, _ in islice(_alone(Row(row)), 100)
            )
        except BadFieldError:
            return False

    return folder_has(file, is_trace, SUFFIXES)


def _is_span(span: dict[str, Any]) -> bool:
    if _is_tagged(span):
        return True
    named = {"spanId", "span_id", "context", "trace_id", "traceId"} & span.keys()
    return bool(named) and isinstance(span.get("attributes"), (dict, list))


def _spans_of(row: Row, refuse: Refuse) -> Iterator[Span]:
    for path, span, resource in _located(row):
        try:
            yield _span(path, span, resource)
        except BadFieldError as error:
            refuse(f"{path}{error}")


def _located(row: Row) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield path, object and attributes of the resource of each span of an item."""
    groups = row.get(*_GROUPS)
    if groups is None and (logs := row.get("resourceLogs", "resource_logs")) is not None:
        yield from _of_logs(logs)
        return
    if groups is None:
        yield from _alone(row)
        return
    for first, group in enumerate(_objects(groups, "resourceSpans")):
        resource = _attributes(Row(group).get("resource.attributes"))
        names = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans")
        key = next((name for name in names if name in group), "scopeSpans")
        for second, scope in enumerate(_objects(group.get(key) or [], key)):
            for third, span in enumerate(_listed(scope.get("spans") or [], "spans")):
                yield f"resourceSpans[{first}].{key}[{second}].spans[{third}].", span, resource


def _alone(row: Row) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the spans of a trace, of the traces that Jaeger lists, or a span that is the row."""
    traces = row.get("data")
    if not isinstance(traces, list) or not all(
        isinstance(trace, dict) and "spans" in trace for trace in traces
    ):
        traces = [row.fields]
    for number, trace in enumerate(traces):
        above = "" if trace is row.fields else f"data[{number}]."
        processes, spans = trace.get("processes"), trace.get("spans")
        if spans is None:
            yield above, trace, {}
            continue
        for index, span in enumerate(_listed(spans, f"{above}spans")):
            name = span.get("processID") if isinstance(span, dict) else None
            process = (
                processes.get(name)
                if isinstance(processes, dict) and isinstance(name, str)
                else None
            )
            tags = process.get("tags") if isinstance(process, dict) else None
            yield f"{above}spans[{index}].", span, _attributes(tags)


def _is_tagged(span: Mapping[str, Any]) -> bool:
    """Return whether a span is one of Jaeger or of Zipkin, which have tags."""
    return isinstance(span.get("tags"), (dict, list)) and (
        "spanID" in span or {"traceId", "id"} <= span.keys()
    )


def _from_tags(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span of Jaeger or Zipkin with the fields of OpenTelemetry; its times are
    microseconds."""
    row, tags = Row(dict(span)), _attributes(span.get("tags"))
    start, length = row.seconds("startTime", "timestamp"), row.duration("duration", scale=1e-6)
    references = _objects(span.get("references") or [], "references")
    above = next((each.get("spanID") for each in references), span.get("parentSpanID"))
    logged = (_attributes(log.get("fields")) for log in _objects(span.get("logs") or [], "logs"))
    events = [{"name": fields.get("event"), "attributes": fields} for fields in logged]
    failed = str(tags.get("error")).lower() == "true" or tags.get("otel.status_code") == "ERROR"
    return {
        "traceId": span.get("traceID", span.get("traceId")),
        "spanId": span.get("spanID", span.get("id")),
        "parentSpanId": span.get("parentId") if above is None else above,
        "startTime": start,
        "endTime": None if start is None or length is None else start + length,
        "attributes": tags,
        "events": events,
        "status": {"code": 2 if failed else 0},
    }


def _of_logs(groups: Any) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the records of an export of logs: an event with the details of a call has its
    attributes, and one time."""
    for first, group in enumerate(_objects(groups, "resourceLogs")):
        resource = _attributes(Row(group).get("resource.attributes"))
        for second, scope in enumerate(_objects(group.get("scopeLogs") or [], "scopeLogs")):
            for third, record in enumerate(_objects(scope.get("logRecords") or [], "logRecords")):
                time = _time(Row(record), "timeUnixNano", "observedTimeUnixNano")
                attributes = _attributes(record.get("attributes"))
                is_call = _DETAILS in (record.get("eventName"), attributes.get("event.name"))
                span = {"traceId": record.get("traceId"), "startTime": time, "endTime": time}
                if is_call:
                    span |= {"spanId": record.get("spanId"), "attributes": attributes}
                yield (
                    f"resourceLogs[{first}].scopeLogs[{second}].logRecords[{third}].",
                    span,
                    resource,
                )


def _listed(values: Any, name: str) -> list[Any]:
    if not isinstance(values, list):
        raise BadFieldError(name, f"a list{actual(values)}")
    return values


def _objects(values: Any, name: str) -> list[dict[str, Any]]:
    if not all(isinstance(value, dict) for value in _listed(values, name)):
        raise BadFieldError(name, "a list of objects")
    return values  # type: ignore[no-any-return]


def _attributes(pairs: Any) -> dict[str, Any]:
    """Return attributes by name, from an object or from OTLP's list of keys and values."""
    if isinstance(pairs, dict):
        return pairs
    known = (
        [pair for pair in pairs or () if isinstance(pair, dict)] if isinstance(pairs, list) else []
    )
    return {str(pair.get("key")): _value(pair.get("value")) for pair in known}


def _value(value: Any) -> Any:
    """Return a value of OTLP, whose 64-bit integers are texts."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, content),) = value.items()
    if kind in ("intValue", "int_value"):
        return (
            int(content)
            if isinstance(content, (int, str)) and str(content).lstrip("-").isdecimal()
            else content
        )
    if kind in ("arrayValue", "array_value"):
        return (
            [_value(item) for item in (content or {}).get("values") or ()]
            if isinstance(content, dict)
            else content
        )
    if kind in ("kvlistValue", "kvlist_value"):
        return _attributes(content.get("values")) if isinstance(content, dict) else content
    return content


def _span(path: str, span: Any, resource: Mapping[str, Any]) -> Span:
    if not isinstance(span, dict):
        raise BadFieldError("span", f"an object{actual(span)}")
    span = _from_tags(span) if _is_tagged(span) else span
    row, attributes = Row(span), _attributes(span.get("attributes"))
    trace = row.label("traceId", "trace_id", "context.trace_id")
    name = row.label("spanId", "span_id", "context.span_id")
    parent = row.label("parentSpanId", "parent_span_id", "parent_id", "parentId")
    start = _time(row, "startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime")
    end = _time(row, "endTimeUnixNano", "end_time_unix_nano", "end_time", "endTime")
    result = Span(
        path,
        str(trace or ""),
        None if name is None else str(name),
        str(parent) if parent else None,
        start,
        np.nan if end is None else end,
        _is_call(attributes),
        kind=str(
            attributes.get("gen_ai.operation.name")
            or attributes.get("openinference.span.kind")
            or "other"
        ),
        failed=row.get("status.code", "status.status_code")
        in (2, "ERROR", "STATUS_CODE_ERROR", "StatusCode.ERROR"),
    )
    if not result.is_call:
        return result
    first = next(
        (
            value
            for key in _FIRST_TOKEN
            if isinstance(value := attributes.get(key), (int, float))
            and not isinstance(value, bool)
            and 0 <= value < 1e6
        ),
        None,
    )
    result.first_token = np.nan if first is None or start is None else start + float(first)
    session = _text(attributes, resource, _SESSIONS)
    result.session, result.tenant = session or result.trace, _text(attributes, resource, _TENANTS)
    prompt, output, total, cached, created = (
        next((count for name in names if not np.isnan(count := count_of(attributes, name))), np.nan)
        for names in (_PROMPTS, _OUTPUTS, _TOTALS, _CACHED, _CREATED)
    )
    result.usage, result.output = divided(prompt, cached, created, output, total, includes=True)
    model = next((value for key in _MODELS if (value := attributes.get(key)) is not None), None)
    if model is not None and not isinstance(model, str):
        raise BadFieldError("attributes.gen_ai.request.model", f"a text{actual(model)}")
    result.identity = () if model is None else (("model", model),)
    result.body = partial(_body, attributes, span.get("events"))
    return result


def _time(row: Row, *names: str) -> float | None:
    for name in names:
        if row.get(name) is not None:
            return row.seconds(name, scale=1e-9 if "nano" in name.lower() else 1.0)
    return None


def _text(
    attributes: Mapping[str, Any], resource: Mapping[str, Any], names: tuple[str, ...]
) -> str | None:
    values = (source.get(name) for source in (attributes, resource) for name in names)
    return next(
        (str(value) for value in values if isinstance(value, (str, int)) and value != ""), None
    )


def _is_call(attributes: Mapping[str, Any]) -> bool:
    kind = attributes.get("openinference.span.kind", attributes.get("traceloop.span.kind"))
    operation = attributes.get("gen_ai.operation.name")
    if isinstance(operation, str):
        return operation.lower() in _CALLS
    if isinstance(kind, str):
        return kind.upper() == "LLM"
    if attributes.get("llm.request.type") is not None:
        return attributes["llm.request.type"] in ("chat", "completion")
    has_model = any(attributes.get(name) is not None for name in _MODELS)
    has_counts = any(attributes.get(name) is not None for name in (*_PROMPTS, *_INPUTS))
    return has_model and (has_counts or any(map(_INDEXED.match, attributes)))


def _body(attributes: Mapping[str, Any], events: Any) -> Mapping[str, Any] | None:
    """Return the body of a call's request from its attributes, or from the events of its span."""
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and event.get("name") == _DETAILS:
            attributes = {**_attributes(event.get("attributes")), **attributes}
    body: dict[str, Any] | None = None
    if indexed := _indexed(attributes, _INDEXED):
        body = {"messages": [_indexed_message(fields) for fields in indexed]}
    else:
        inputs = (attributes.get(name) for name in _INPUTS)
        body = next((known for value in inputs if (known := body_of(value)) is not None), None)
    if body is None:
        body = _of_events(events)
    if body is None:
        return None
    system = unpacked(attributes.get("gen_ai.system_instructions"))
    if system and "messages" in body:
        blocks = content_of(system)
        body = {**body, "messages": [{"role": "system", "content": blocks}, *body["messages"]]}
    tools = tools_of(attributes)
    return {**body, "tools": tools} if tools else body


def _indexed(attributes: Mapping[str, Any], pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return the fields of attributes such as gen_ai.prompt.0.content, by their number."""
    entries: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if match := pattern.fullmatch(key):
            entries.setdefault(int(match[2]), {})[match[3]] = value
    return [entries[number] for number in sorted(entries)]


def _indexed_message(fields: Mapping[str, Any]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    parts: dict[int, dict[str, Any]] = {}
    message: dict[str, Any] = {"role": "user", "content": ""}
    for key, value in fields.items():
        name = key.removeprefix("message.")
        if match := _CALL.fullmatch(key):
            function = calls.setdefault(int(match[1]), {"type": "function", "function": {}})
            if match[2] == "id":
                function["id"] = value
            else:
                function["function"][match[2]] = value
        elif match := _PART.fullmatch(key):
            is_text = match[2] == "text"
            parts[int(match[1])] = (
                {"type": "text", "text": value}
                if is_text
                else {"type": "image_url", "image_url": value}
            )
        elif name == "content":
            message["content"] = content_of(
                unpacked(value) if str(value)[:2] in ("[{", '{"') else value
            )
        elif name in ("role", "name", "tool_call_id"):
            message[name] = value
    if parts:
        message["content"] = [parts[number] for number in sorted(parts)]
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    return message


def tools_of(attributes: Mapping[str, Any]) -> list[Any]:
    """Return the definitions of tools in the attributes of a call."""
    for name in ("gen_ai.tool.definitions", "gen_ai.request.tools", "ai.prompt.tools"):
        tools = unpacked(attributes.get(name))
        if isinstance(tools, list) and tools:
            return [unpacked(tool) for tool in tools]
    parameters = unpacked(attributes.get("model_request_parameters"))
    if isinstance(parameters, dict) and isinstance(parameters.get("function_tools"), list):
        return [*parameters["function_tools"]]
    indexed = _indexed(attributes, _TOOL)
    return [
        unpacked(fields["tool.json_schema"])
        if "tool.json_schema" in fields
        else {key: unpacked(value) for key, value in fields.items()}
        for fields in indexed
    ]


def _of_events(events: Any) -> dict[str, Any] | None:
    """Return the messages in the events of a span, as the earlier conventions have them."""
    messages: list[Any] = []
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict):
            continue
        name, attributes = str(event.get("name")), _attributes(event.get("attributes"))
        for key in ("gen_ai.input.messages", "gen_ai.prompt"):
            if (body := body_of(attributes.get(key))) is not None:
                return body
        role = name.removeprefix("gen_ai.").removesuffix(".message")
        if name == f"gen_ai.{role}.message" and role in _SPOKEN:
            messages.append(
                message_of(
                    {"role": role, **{key: unpacked(value) for key, value in attributes.items()}}
                )
            )
    return {"messages": messages} if messages else None
