"""Calls of models as tracers and gateways export them: Langfuse, LiteLLM, Helicone, Portkey,
OpenRouter, SageMaker."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.bodies import is_body
from spanlab.workloads.logs.log import Ids
from spanlab.workloads.logs.observed import Usage
from spanlab.workloads.logs.otel import tools_of
from spanlab.workloads.logs.rows import (
    BadFieldError,
    Row,
    actual,
    count_of,
    counted,
    inclusive,
    is_of_cloud,
    output_in,
    usage_in,
    usage_of,
)
from spanlab.workloads.logs.source import LOG_FORMATS, LogFormat, folder_has
from spanlab.workloads.logs.spans import (
    SUFFIXES,
    Refuse,
    Span,
    body_of,
    divided,
    read_spans,
    unpacked,
)

# ------------------------------------------------------------------------------
# Langfuse: observations of traces; those of type GENERATION are calls of a model.
# ------------------------------------------------------------------------------

NESTED = (
    "some generations contain another one in their time: each is a request, and their tokens may "
    "be counted by both"
)
_CACHED = (
    "input_cached_tokens",
    "input_cache_read",
    "cache_read_input_tokens",
    "input_cached",
    "cached_tokens",
    "prompt_details.cache_read",
    "input_token_details.cache_read",
    "prompt_tokens_details.cached_tokens",
)
_CREATED = (
    "input_cache_creation",
    "cache_creation_input_tokens",
    "cache_write_input_tokens",
    "input_cache_write",
    "prompt_details.cache_write",
    "input_token_details.cache_creation",
)
#: The same tokens by the time that they stay, beside their sum or in place of it.
_CREATED_BY_TIME = ("input_cache_creation_5m", "input_cache_creation_1h")
_THOUGHTS = ("output_reasoning", "output_reasoning_tokens", "completion_details.reasoning")
_INPUT = ("input", "promptTokens", "prompt_tokens", "input_tokens")
_OUTPUT = ("output", "completionTokens")
_TOTAL = ("total", "totalTokens", "total_tokens")


@LOG_FORMATS.register("langfuse")
def langfuse() -> LogFormat:
    """Traces with observations, or observations alone, as JSON or JSONL; one request per
    GENERATION."""
    return LogFormat(
        looks_for="JSON of Langfuse: observations of the type GENERATION with input and usageDetails",
        recognises=lambda file: folder_has(file, _has_generation, SUFFIXES),
        read=read_spans(_observations_of, NESTED),
        ids=Ids.CONTENT,
        fields=("observations", "trace"),
        marks=(
            frozenset({"observations"}),
            frozenset({"usage_details"}),
            frozenset({"usageDetails"}),
            frozenset({"parentObservationId"}),
            frozenset({"parent_observation_id"}),
        ),
    )


def _has_generation(row: dict[str, Any]) -> bool:
    listed = row.get("observations", row.get("data"))
    observations = listed if isinstance(listed, list) else [row]
    return any(
        isinstance(observation, dict)
        and observation.get("type") == "GENERATION"
        and bool({"startTime", "start_time", "traceId", "trace_id", "input"} & observation.keys())
        for observation in observations
    )


def _observations_of(row: Row, refuse: Refuse) -> Iterator[Span]:
    trace = row.get("trace") if isinstance(row.get("trace"), dict) else row.fields
    name = "observations" if row.get("observations") is not None else "data"
    listed = row.get(name)
    if listed is None:
        yield _observation("", row.fields, {})
        return
    if not isinstance(listed, list):
        raise BadFieldError(name, f"a list{actual(listed)}")
    for index, observation in enumerate(listed):
        path = f"{name}[{index}]."
        try:
            yield _observation(path, observation, trace)
        except BadFieldError as error:
            refuse(f"{path}{error}")


def _observation(path: str, observation: Any, trace: Mapping[str, Any]) -> Span:
    if not isinstance(observation, dict):
        raise BadFieldError("observation", f"an object{actual(observation)}")
    row, above = Row(observation), Row(dict(trace))
    kind = str(row.get("type"))
    name, parent = row.label("id"), row.label("parentObservationId", "parent_observation_id")
    end = row.seconds("endTime", "end_time")
    span = Span(
        path,
        str(row.label("traceId", "trace_id") or above.label("id") or ""),
        None if name is None else str(name),
        None if parent is None else str(parent),
        row.seconds("startTime", "start_time", "timestamp"),
        np.nan if end is None else end,
        kind == "GENERATION",
        kind=kind,
        failed=row.get("level") == "ERROR",
    )
    if not span.is_call:
        return span
    first = row.seconds("completionStartTime", "completion_start_time")
    span.first_token = np.nan if first is None else first
    session = row.label("sessionId", "session_id") or above.label("sessionId", "session_id")
    span.session = span.trace if session is None else str(session)
    span.tenant = row.label("userId", "user_id") or above.label("userId", "user_id")
    span.usage, span.output = _usage_of(row)
    model = row.label("model", "providedModelName", "provided_model_name")
    span.identity = () if model is None else (("model", model),)
    span.body = partial(_body_of, row)
    return span


def _usage_of(row: Row) -> tuple[Usage, float]:
    """Return counts from usageDetails, whose parts stand beside `input` or inside it, or from the
    older `usage`."""
    details = unpacked(row.get("usageDetails", "usage_details"))
    usage = unpacked(row.get("usage"))
    counts = (
        details
        if isinstance(details, dict) and details
        else usage
        if isinstance(usage, dict)
        else {}
    )
    if is_of_cloud(counts):
        return counted(counts), output_in(counts)
    prompt, output, total, cached, created, thoughts = (
        next((count for name in names if not np.isnan(count := count_of(counts, name))), np.nan)
        for names in (_INPUT, _OUTPUT, _TOTAL, _CACHED, _CREATED, _THOUGHTS)
    )
    by_time = [count for name in _CREATED_BY_TIME if not np.isnan(count := count_of(counts, name))]
    created = float(np.nanmax([created, sum(by_time)])) if by_time else created
    return divided(
        prompt,
        cached,
        created,
        output,
        total,
        includes=False,
        thoughts=float(np.nan_to_num(thoughts)),
    )


def _body_of(row: Row) -> dict[str, Any] | None:
    """Return the body of a generation's request: its input, with instructions and tools that stand
    beside it."""
    body = body_of(row.get("input"))
    if body is None:
        return None
    metadata = unpacked(row.get("metadata"))
    attributes = unpacked(metadata.get("attributes")) if isinstance(metadata, dict) else None
    tools = unpacked(row.get("toolDefinitions", "tool_definitions"))
    if isinstance(tools, dict):
        tools = [{"name": name, "definition": unpacked(tool)} for name, tool in tools.items()]
    if not tools and isinstance(attributes, dict):
        tools = tools_of(attributes)
    parameters = unpacked(row.get("modelParameters", "model_parameters"))
    instructions = parameters.get("instructions") if isinstance(parameters, dict) else None
    beside: dict[str, Any] = {"tools": tools} if isinstance(tools, list) and tools else {}
    if isinstance(instructions, str) and instructions and "prompt" not in body:
        beside["instructions" if "input" in body else "system"] = instructions
    return beside | body


# ------------------------------------------------------------------------------
# LiteLLM: a StandardLoggingPayload per line, or rows of the table LiteLLM_SpendLogs.
# ------------------------------------------------------------------------------

_MARKS = (
    "call_type",
    "spend",
    "response_cost",
    "model_group",
    "litellm_call_id",
    "custom_llm_provider",
)
_REDACTED = b"redacted-by-litellm"
_CUT = b"litellm_truncated"
_NO_PROMPT = (
    "embedding",
    "image",
    "speech",
    "transcription",
    "rerank",
    "moderation",
    "file",
    "batch",
)


@LOG_FORMATS.register("litellm")
def litellm() -> LogFormat:
    """One call per line or item, with its prompt if the proxy stores prompts."""
    return LogFormat(
        looks_for="JSON of LiteLLM: startTime, prompt_tokens and call_type, as StandardLoggingPayload or SpendLogs",
        recognises=lambda file: folder_has(file, _is_litellm, SUFFIXES),
        read=read_spans(_payloads_of, NESTED),
        ids=Ids.CONTENT,
        fields=("startTime", "prompt_tokens", "call_type"),
    )


def _payload_of(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("standard_logging_object", "standard_logging_payload"):
        if isinstance(row.get(name), dict):
            return row[name]  # type: ignore[no-any-return]
    return row


def _is_litellm(row: dict[str, Any]) -> bool:
    page = row.get("data")
    if isinstance(page, list):
        return any(isinstance(item, dict) and _is_litellm(item) for item in page)
    payload = _payload_of(row)
    return {"startTime", "prompt_tokens"} <= payload.keys() and any(
        mark in payload for mark in _MARKS
    )


def _payloads_of(row: Row, refuse: Refuse) -> Iterator[Span]:
    """Yield the call of a line, or those of a page of the API."""
    page = row.get("data")
    if not isinstance(page, list) or "startTime" in row.fields:
        yield _payload(row, "")
        return
    for index, item in enumerate(page):
        path = f"data[{index}]."
        try:
            if not isinstance(item, dict):
                raise BadFieldError("payload", f"an object{actual(item)}")
            yield _payload(Row(item), path)
        except BadFieldError as error:
            refuse(f"{path}{error}")


def _payload(row: Row, path: str) -> Span:
    row = Row(_payload_of(row.fields))
    name = row.label("id", "request_id", "litellm_call_id")
    end, first = row.seconds("endTime"), row.seconds("completionStartTime")
    trace = row.label("session_id", "trace_id")
    kind = str(row.label("call_type") or "completion")
    span = Span(
        path,
        "",
        None if name is None else str(name),
        None,
        row.seconds("startTime"),
        np.nan if end is None else end,
        not any(word in kind for word in _NO_PROMPT),
        kind=kind,
        failed=row.get("status") == "failure",
    )
    if str(row.get("cache_hit")).lower() == "true":
        span.is_call, span.kind = False, "answered by LiteLLM's own cache"
    if not span.is_call:
        return span
    # without streaming, LiteLLM writes the end in place of the first token
    span.first_token = np.nan if first is None or first == end else first
    span.session = None if trace is None else str(trace)
    span.tenant = next((value for key in _TENANTS if (value := row.label(key))), None)
    span.usage, span.output = _counts_of(row)
    model = row.label("model")
    span.identity = () if not model else (("model", model),)
    span.body = partial(_prompt_of, row)
    return span


_TENANTS = (
    "end_user",
    "team_id",
    "metadata.user_api_key_team_id",
    "metadata.user_api_key_end_user_id",
    "user",
)


def _counts_of(row: Row) -> tuple[Usage, float]:
    """Return the counts of a row, with those of a cache from the usage that the provider sent."""
    metadata = unpacked(row.get("metadata"))
    inner = Row(metadata if isinstance(metadata, dict) else {})
    usage = unpacked(inner.get("usage_object", "additional_usage_values"))
    response = unpacked(row.get("response"))
    if not isinstance(usage, dict):
        usage = response.get("usage") if isinstance(response, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    output = count_of(row.fields, "completion_tokens")
    if "input_tokens" in usage:
        return usage_of(Row({"usage": usage})), output
    prompt, total = count_of(row.fields, "prompt_tokens"), count_of(row.fields, "total_tokens")
    details = usage.get("prompt_tokens_details")
    cached = _first(count_of(details, "cached_tokens"), count_of(usage, "cache_read_input_tokens"))
    created = _first(
        count_of(usage, "cache_creation_input_tokens"), count_of(details, "cache_creation_tokens")
    )
    return divided(prompt, cached, created, output, total, includes=True)


def _first(*counts: float) -> float:
    """Return the first count that is known and above zero, or else the first that is known."""
    known = [count for count in counts if not np.isnan(count)]
    return next((count for count in known if count), known[0] if known else np.nan)


def _prompt_of(row: Row) -> Mapping[str, Any] | None:
    """Return the body of a call's request; None if it is redacted, cut or not stored."""
    request = unpacked(row.get("proxy_server_request"))
    if isinstance(request, dict) and isinstance(request.get("body"), dict):
        request = request["body"]
    if is_body(request) and not _is_withheld(request):
        return request  # type: ignore[no-any-return]
    messages = row.get("messages")
    body = None if _is_withheld(messages) else body_of(messages)
    parameters = unpacked(row.get("model_parameters"))
    if body is None or not isinstance(parameters, dict):
        return body
    front = parameters.get("system") or parameters.get("instructions")
    beside = (
        {"instructions" if "input" in body else "system": front}
        if front and "prompt" not in body
        else {}
    )
    if isinstance(tools := unpacked(parameters.get("tools")), list) and tools:
        beside["tools"] = tools
    return beside | body


def _is_withheld(value: Any) -> bool:
    text = orjson.dumps(value)
    return _REDACTED in text or _CUT in text


# ------------------------------------------------------------------------------
# Helicone: rows of its query interface, which its export tool writes, the newest first.
# ------------------------------------------------------------------------------

_OWN_CACHE = "00000000-0000-0000-0000-000000000000"  # reference of a request that Helicone's cache did not answer
_SESSIONS = ("Helicone-Session-Id", "helicone-session-id")


@LOG_FORMATS.register("helicone")
def helicone() -> LogFormat:
    """One request per line or item, with its prompt if the export has bodies."""
    return LogFormat(
        looks_for="JSON of Helicone: request_id, request_created_at and request_body or prompt_tokens",
        recognises=lambda file: folder_has(
            file,
            lambda row: any(
                "request_created_at" in each
                and {"request_body", "prompt_tokens", "signed_body_url"} & each.keys()
                for each in _page(row)
            ),
            SUFFIXES,
        ),
        read=read_spans(partial(_listed, parse=_helicone), NESTED),
        ids=Ids.CONTENT,
        fields=("request_id", "request_created_at", "request_body"),
        marks=(frozenset({"request_created_at", "response_status"}),),
    )


def _page(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a page of an interface, or a row that is none."""
    page = row.get("data")
    if isinstance(page, list):
        return [item for item in page if isinstance(item, dict)]
    return [page if isinstance(page, dict) else dict(row)]


def _listed(row: Row, refuse: Refuse, *, parse: Callable[[Row], Span]) -> Iterator[Span]:
    """Yield the calls of a row or of a page."""
    for index, item in enumerate(_page(row.fields)):
        try:
            yield parse(Row(item))
        except BadFieldError as error:
            refuse(f"data[{index}].{error}" if "data" in row.fields else str(error))


def _span_of(
    name: Any, path: str, start: float | None, wait: float | None, *, failed: bool
) -> Span:
    """Return the span of a request to a path of an interface, whose answer took `wait` seconds."""
    return Span(
        "",
        "",
        None if name is None else str(name),
        None,
        start,
        np.nan if start is None or wait is None else start + wait,
        not any(f"/{word}" in path for word in _NO_PROMPT),
        kind=path.rpartition("/")[2] or "other",
        failed=failed,
    )


def _helicone(row: Row) -> Span:
    name = row.label("request_id", "response_id")
    path = str(row.get("request_path", "target_url") or "")
    start, end = row.seconds("request_created_at"), row.seconds("response_created_at")
    wait = row.duration("delay_ms", "latency", scale=1e-3)
    first = row.duration("time_to_first_token", scale=1e-3)
    properties = unpacked(row.get("request_properties", "properties"))
    properties = Row(properties if isinstance(properties, dict) else {})
    session, status = properties.label(*_SESSIONS), count_of(row.fields, "response_status")
    span = _span_of(name, path, start, wait, failed=status < 200 or status >= 400)
    span.end = span.end if end is None else end
    if row.get("cache_reference_id") not in (None, "", _OWN_CACHE):
        span.is_call, span.kind = False, "answered by Helicone's own cache"
    if not span.is_call:
        return span
    span.first_token = np.nan if not first or start is None else start + first
    span.session = None if session is None else str(session)
    span.tenant = row.label("request_user_id", "helicone_user", "user_id")
    model = row.label("response_model", "model", "request_model", "model_override")
    span.identity = () if not model else (("model", model),)
    # the counts in the provider's answer, or else those of the row, whose prompt excludes cached
    # tokens
    usage = usage_in(unpacked(row.get("response_body")))
    output = count_of(row.fields, "completion_tokens")
    if not np.isnan((reported := counted(usage)).prompt):
        of_answer = output_in(usage)
        span.usage, span.output = reported, output if np.isnan(of_answer) else of_answer
    else:
        names = ("prompt_tokens", "prompt_cache_read_tokens", "prompt_cache_write_tokens")
        prompt, cached, created = (count_of(row.fields, name) for name in names)
        span.usage, span.output = divided(prompt, cached, created, output, np.nan, includes=False)
    span.body = partial(_stored_body, row, "request_body")
    return span


def _stored_body(row: Row, name: str) -> dict[str, Any] | None:
    """Return the body of a request that a gateway stored; None if it stored a message about it."""
    body = unpacked(row.get(name))
    if not isinstance(body, dict) or body.keys() <= {"helicone_message"}:
        return None
    return body if is_body(body) else body_of(body)


# ------------------------------------------------------------------------------
# Portkey: an export of logs, one line per request. OpenRouter: records of generations, which have
# counts and no prompts.
# ------------------------------------------------------------------------------


@LOG_FORMATS.register("portkey")
def portkey() -> LogFormat:
    """One request per line, with its prompt if the export has the column `request`."""
    return LogFormat(
        looks_for="JSONL of Portkey: created_at, ai_model and req_units or request",
        recognises=lambda file: folder_has(
            file,
            lambda row: any(
                "created_at" in each and {"req_units", "ai_model"} & each.keys()
                for each in _page(row)
            ),
            SUFFIXES,
        ),
        read=read_spans(partial(_listed, parse=_portkey), NESTED),
        ids=Ids.CONTENT,
        fields=("created_at", "req_units", "ai_model"),
    )


def _portkey(row: Row) -> Span:
    name, session = row.label("id"), row.label("trace_id")
    start, wait = row.seconds("created_at"), row.duration("response_time", scale=1e-3)
    status, path = count_of(row.fields, "response_status_code"), str(row.get("request_url") or "")
    failed = str(row.get("is_success")).lower() in ("0", "false") or status >= 400
    span = _span_of(name, path, start, wait, failed=failed)
    if str(row.get("cache_status")).upper() in ("HIT", "SEMANTIC HIT"):
        span.is_call, span.kind = False, "answered by Portkey's own cache"
    if not span.is_call:
        return span
    span.session = None if session is None else str(session)
    metadata = unpacked(row.get("metadata"))
    span.tenant = Row(metadata if isinstance(metadata, dict) else {}).label("_user", "user")
    model = row.label("ai_model")
    span.identity = () if not model else (("model", model),)
    answer = _portkey_side(row, "response")
    usage = usage_in(answer)
    span.usage, span.output = counted(usage), output_in(usage)
    if np.isnan(span.usage.prompt):
        span.usage = Usage(count_of(row.fields, "req_units"))
        span.output = count_of(row.fields, "res_units")
    span.body = lambda: _stored_body(Row({"body": _portkey_side(row, "request")}), "body")
    return span


def _portkey_side(row: Row, side: str) -> Any:
    """Return the body of a request or response, which stands in a column of its own, or beside its
    headers."""
    value = unpacked(row.fields.get(f"{side}.body", row.get(side)))
    inner = unpacked(value.get("body")) if isinstance(value, dict) else None
    return value if inner is None else inner


@LOG_FORMATS.register("openrouter")
def openrouter() -> LogFormat:
    """One record of a generation per line, as the interface of OpenRouter returns them."""
    return LogFormat(
        looks_for="JSON of OpenRouter: native_tokens_prompt and native_tokens_cached",
        recognises=lambda file: folder_has(
            file, lambda row: any("native_tokens_prompt" in each for each in _page(row)), SUFFIXES
        ),
        read=read_spans(partial(_listed, parse=_openrouter), NESTED),
        ids=Ids.CONTENT,
        fields=("native_tokens_prompt", "created_at"),
    )


def _openrouter(row: Row) -> Span:
    name, session = row.label("id"), row.label("session_id")
    span = Span(
        "", "", None if name is None else str(name), None, row.seconds("created_at"), is_call=True
    )
    span.failed = row.get("cancelled") is True
    span.session = None if session is None else str(session)
    span.tenant = row.label("external_user")
    model = row.label("model")
    span.identity = () if not model else (("model", model),)
    span.usage = inclusive(
        *(count_of(row.fields, f"native_tokens_{name}") for name in ("prompt", "cached"))
    )
    span.output = count_of(row.fields, "native_tokens_completion")
    return span


# ------------------------------------------------------------------------------
# SageMaker's data capture: input and output of an endpoint as texts, in JSON or base64.
# ------------------------------------------------------------------------------


@LOG_FORMATS.register("sagemaker")
def sagemaker() -> LogFormat:
    """One captured inference per line, or a folder of captures; the input is the body of a
    request."""
    return LogFormat(
        looks_for="JSONL with captureData.endpointInput.data and eventMetadata",
        recognises=lambda file: folder_has(
            file,
            lambda row: (
                isinstance(row.get("captureData"), dict) and "endpointInput" in row["captureData"]
            ),
            SUFFIXES,
        ),
        read=read_spans(_captures_of, NESTED),
        ids=Ids.CONTENT,
        fields=("captureData", "eventMetadata"),
        marks=(frozenset({"captureData"}),),
    )


def _captures_of(row: Row, refuse: Refuse) -> Iterator[Span]:
    usage = usage_in(_captured(row, "endpointOutput"))
    name = row.label("eventMetadata.eventId")
    yield Span(
        "",
        "",
        None if name is None else str(name),
        None,
        row.seconds("eventMetadata.inferenceTime"),
        is_call=True,
        usage=counted(usage),
        output=output_in(usage),
        body=partial(_request_in, row),
    )


def _captured(row: Row, side: str) -> Any:
    """Return what a side of an endpoint got or gave: JSON, or a text."""
    capture = row.get(f"captureData.{side}")
    if not isinstance(capture, dict):
        return None
    text, encoding = capture.get("data"), capture.get("encoding", "BASE64")
    if not isinstance(text, str):
        return text
    if encoding == "BASE64":
        try:
            text = base64.b64decode(text, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise BadFieldError(
                f"captureData.{side}.data", f"text in base64, not {text[:40]!r}"
            ) from error
    return unpacked(text)


def _request_in(row: Row) -> dict[str, Any] | None:
    body: Any = _captured(row, "endpointInput")
    # of Hugging Face's containers
    if isinstance(body, dict) and isinstance(body.get("inputs"), (str, list)):
        return body_of(body["inputs"])
    if body is None:
        return None
    if isinstance(body, dict) and is_body(body):
        return body
    raise BadFieldError("captureData.endpointInput.data", f"the body of a request{actual(body)}")
