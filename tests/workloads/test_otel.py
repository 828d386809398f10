"""Spans of OpenTelemetry: one request per call of a model, in the attributes of several conventions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from ..support.shared import TRACES, needs
from .span_samples import ASKED, call, otel_lines, otlp, parts, span
from .test_claude_code import sums, texts

SPANS = TRACES / "agents" / "otel-genai-spans"
FOLLOW_UP = f"user\n{ASKED}|assistant\nthat it was mild|user\nand the third?"


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "spans", *rows), LogSettings(**settings))


def flat(name: str, second: int, attributes: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a span as the exporter of the Python SDK writes it to a console."""
    times = {"start_time": f"2026-11-02T09:00:{second:02}Z", "end_time": f"2026-11-02T09:00:{second + 1:02}Z"}
    context = {"trace_id": "0xt1", "span_id": name}
    return {"name": name, "context": context, "parent_id": None, "attributes": attributes} | times | more


def test_exports_are_read_call_by_call(tmp_path: Path):
    log = read(tmp_path, *otel_lines())
    assert (log.format, log.requests, sums(log)) == ("otel", 2, (100 - 32 - 52, 32, 52, 13))
    assert texts(log) == [f"user\n{ASKED}", FOLLOW_UP]
    assert log.arrived_ns.tolist() == [0, 5_000_000_000]
    assert log.waits_ns.tolist() == [0, 3_000_000_000]
    assert log.observed.last_token.tolist() == [2.0, 6.0]
    assert log.sessions.tolist() == [0, 0]


def test_one_document_of_all_spans_reads_alike(tmp_path: Path):
    plain = read(tmp_path, *otel_lines())
    document = tmp_path / "document"
    document.write_text(json.dumps({"resourceSpans": [row["resourceSpans"][0] for row in otel_lines()]}, indent=1))
    log = read_log(document, LogSettings())
    assert (log.fingerprint, sums(log)) == (plain.fingerprint, sums(plain))
    assert texts(log) == texts(plain)


def test_spans_in_order_of_their_end_are_sorted(tmp_path: Path):
    spans = [span("b", 1, 2, attributes=call(9, 0, 0, 1, [parts("user", "inner")]))]
    spans.append(span("a", 0, 3, attributes=call(8, 0, 0, 1, [parts("user", "outer")])))
    log = read(tmp_path, *map(otlp, spans))
    assert log.usage[:, 0].tolist() == [8, 9]


def test_calls_around_others_count_once(tmp_path: Path):
    inner = span("c", 1, 2, "b", attributes=call(50, 0, 0, 5, [parts("user", "x")]))
    outer = span("a", 0, 3, attributes=call(50, 0, 0, 5, [parts("user", "x")]))
    between = span("b", 0.5, 2.5, "a", attributes={"gen_ai.operation.name": "execute_tool"})
    agent = span("r", 0, 9, attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.usage.input_tokens": 50})
    after = span("d", 4, 5, "a", attributes=call(70, 0, 0, 6, [parts("user", "y")]))
    log = read(tmp_path, otlp(inner, between, outer, agent, after))
    assert sums(log) == (120, 0, 0, 11)
    assert {note for note in log.notes if note.startswith("not counted")} == {
        "not counted: 1 spans around a call of a model that is a span itself",
        "not counted: 1 spans that are no call of a model (execute_tool)",
        "not counted: 1 spans that are no call of a model (invoke_agent)",
    }


def test_repeated_and_failed_spans_count_once(tmp_path: Path):
    failed = span("f", 7, 8, attributes={"gen_ai.operation.name": "chat"}, status={"code": 2})
    log = read(tmp_path, *otel_lines(), otel_lines()[1], otlp(failed))
    assert sums(log) == (16, 32, 52, 13)
    assert "not counted: 1 spans that repeat an earlier one" in log.notes
    assert "not counted: 1 calls that failed, without a count of tokens" in log.notes


def test_session_is_that_of_the_conversation(tmp_path: Path):
    attributes = call(9, 0, 0, 1, [parts("user", "x")]) | {"gen_ai.conversation.id": "c7"}
    spans = [span(str(n), n, n + 0.5, trace=f"t{n}", attributes=attributes) for n in range(2)]
    assert read(tmp_path, otlp(*spans)).sessions.tolist() == [0, 0]


INDEXED = {
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "be kind",
    "gen_ai.prompt.10.role": "tool",
    "gen_ai.prompt.10.content": "sunny",
    "gen_ai.prompt.10.tool_call_id": "k",
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "k",
    "gen_ai.prompt.2.tool_calls.0.name": "look",
    "gen_ai.prompt.2.tool_calls.0.arguments": "{}",
    "gen_ai.usage.prompt_tokens": 30,
    "gen_ai.usage.completion_tokens": 4,
    "gen_ai.usage.cache_read_input_tokens": 16,
    "llm.request.type": "chat",
    "llm.request.functions.0.name": "look",
    "llm.request.functions.0.parameters": '{"type": "object"}',
}
INFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "be kind",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "look",
    "llm.tools.0.tool.json_schema": '{"name": "look"}',
    "llm.token_count.prompt": 30,
    "llm.token_count.completion": 4,
    "llm.token_count.prompt_details.cache_read": 16,
}
VERCEL = {
    "ai.model.id": "m",
    "gen_ai.request.model": "m",
    "ai.prompt.messages": '[{"role":"user","content":[{"type":"text","text":"look"}]}]',
    "ai.prompt.tools": ['{"type":"function","name":"look"}'],
    "ai.usage.promptTokens": 30,
    "ai.usage.completionTokens": 4,
    "ai.usage.cachedInputTokens": 16,
}


@pytest.mark.parametrize(
    ("attributes", "prompt"),
    [
        (
            INDEXED,
            '[{"name": "look", "parameters": {"type": "object"}}]|system\nbe kind|assistant\n{"tool_calls":[{"type":'
            '"function","function":{"name":"look","arguments":"{}"},"id":"k"}]}|tool\nsunny{"tool_call_id":"k"}',
        ),
        (INFERENCE, '[{"name": "look"}]|system\nbe kind|user\nlook'),
        (VERCEL, '[{"type": "function", "name": "look"}]|user\nlook'),
    ],
)
def test_other_conventions_are_read(tmp_path: Path, attributes: dict[str, Any], prompt: str):
    log = read(tmp_path, flat("a", 0, attributes))
    assert (log.format, sums(log)) == ("otel", (14, 16, 0, 4))
    assert texts(log) == [prompt]


def test_parts_of_messages_become_blocks(tmp_path: Path):
    messages = [
        parts("user", "look"),
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "k", "name": "see", "arguments": {"a": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "k", "response": {"sky": "blue"}}]},
        {"role": "user", "parts": [{"type": "hologram", "content": "x" * 30}]},
    ]
    more = {"gen_ai.system_instructions": '[{"type":"text","content":"be kind"}]'}
    more |= {"gen_ai.tool.definitions": '[{"type":"function","name":"see"}]'}
    log = read(tmp_path, flat("a", 0, call(30, 0, 0, 4, messages, **more)))
    call_text = '{"tool_calls":[{"id":"k","type":"function","function":{"name":"see","arguments":{"a":1}}}]}'
    assert texts(log) == [
        f'[{{"type": "function", "name": "see"}}]|system\nbe kind|user\nlook|assistant\n{call_text}|tool\n'
        '{"sky": "blue"}{"tool_call_id":"k"}|user\n|<hologram>'
    ]
    assert [*log.unread.left] == ["hologram"]


def test_messages_are_read_from_events(tmp_path: Path):
    events = [
        {"name": "gen_ai.system.message", "attributes": {"content": "be kind"}},
        {"name": "gen_ai.user.message", "attributes": {"content": "look"}},
        {"name": "gen_ai.choice", "attributes": {"message": "{}"}},
    ]
    assert texts(read(tmp_path, flat("a", 0, call(9, 0, 0, 1), events=events))) == ["system\nbe kind|user\nlook"]


DETAILS = "gen_ai.client.inference.operation.details"
SPOKEN = {
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "be kind"}]),
    "gen_ai.input.messages": json.dumps([parts("user", "look")]),
}


def test_event_with_details_has_prompt_and_instructions(tmp_path: Path):
    span = flat("a", 0, call(9, 0, 0, 1), events=[{"name": DETAILS, "attributes": SPOKEN}])
    assert texts(read(tmp_path, span)) == ["system\nbe kind|user\nlook"]


def test_exported_logs_have_the_calls_of_events(tmp_path: Path):
    values = {**call(40, 32, 0, 4), **SPOKEN}
    attributes = [
        {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}
        for key, value in values.items()
    ]
    records = [
        {"timeUnixNano": "1793600001000000000", "traceId": "t", "spanId": "s", "eventName": DETAILS},
        {"timeUnixNano": "1793600001000000000", "traceId": "t", "spanId": "s", "body": {"stringValue": "a line"}},
    ]
    records[0]["attributes"] = attributes
    log = read(tmp_path, {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": records}]}]})
    assert (log.format, texts(log), sums(log)) == ("otel", ["system\nbe kind|user\nlook"], (8, 32, 0, 4))
    assert "not counted: 1 spans that are no call of a model (other)" in log.notes


def test_calls_without_prompts_have_lengths_only(tmp_path: Path):
    log = read(tmp_path, flat("a", 0, call(90, 32, 0, 4)), flat("b", 3, call(120, 64, 0, 4)))
    assert (str(log.ids), log.prompt_tokens.tolist(), sums(log)) == ("none", [90, 120], (114, 96, 0, 8))


def test_some_calls_without_prompts_allow_no_verdict(tmp_path: Path):
    log = read(tmp_path, flat("a", 0, call(90, 32, 0, 4)), flat("b", 3, call(9, 0, 0, 4, [parts("user", "x")])))
    assert str(log.ids) != "none"
    assert log.unread.reason.endswith("the tokens of 1 of 2 requests are unknown")
    assert not log.unread.allows_verdict


@pytest.mark.parametrize(
    ("prompt", "cached", "created", "more", "expected"),
    [
        (100, 60, 20, {}, (20, 60, 20)),  # as the conventions define it
        (20, 60, 20, {}, (20, 60, 20)),  # Anthropic's own count: less than its parts
        (90, 60, 20, {"gen_ai.usage.total_tokens": 94}, (10, 60, 20)),
        (90, 60, 20, {"gen_ai.usage.total_tokens": 174}, (90, 60, 20)),
        (90, 60, 20, {"gen_ai.usage.total_tokens": 7}, (10, 60, 20)),
    ],
)
def test_sum_tells_whether_the_prompt_includes_cached_tokens(
    tmp_path: Path, prompt: int, cached: int, created: int, more: dict[str, Any], expected: tuple[int, ...]
):
    log = read(tmp_path, flat("a", 0, call(prompt, cached, created, 4, [parts("user", "x")], **more)))
    assert sums(log) == (*expected, 4)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('{"resourceSpans": [', "line: expected JSON"),
        ({"resourceSpans": 7}, "resourceSpans: expected a list, not '7'"),
        ({"resourceSpans": [{"scopeSpans": [7]}]}, "scopeSpans: expected a list of objects"),
        (otlp(7), r"resourceSpans\[0\].scopeSpans\[0\].spans\[0\].span: expected an object, not '7'"),
        (
            otlp(span("z", 0, 1, attributes=call(1, 0, 0, 1), startTimeUnixNano="soon")),
            r"resourceSpans\[0\].scopeSpans\[0\].spans\[0\].startTimeUnixNano: expected a number or a date",
        ),
        (
            otlp(span("z", 0, 1, attributes=call(1, 0, 0, 1, 7 * [[]]))),
            r"resourceSpans\[0\].scopeSpans\[0\].spans\[0\].messages: expected a text or an object",
        ),
    ],
)
def test_bad_span_is_named_or_skipped(tmp_path: Path, bad: Any, problem: str):
    rows = [*otel_lines(), bad]
    with pytest.raises(ValueError, match=f"spans:3: {problem}"):
        read(tmp_path, *rows)
    log = read(tmp_path, *rows, bad_lines="skip")
    assert sums(log) == (16, 32, 52, 13)
    assert any("bad lines" in note and "(1 times" in note for note in log.notes)


@needs(SPANS)
@pytest.mark.parametrize(
    ("name", "calls", "prompt", "output"),
    [
        ("code_review_workflow", 15, None, 0),
        ("customer_support_escalation", 9, None, 0),
        ("fan_in_dependencies", 4, None, 0),
        ("multi_agent_research", 12, None, 0),
        ("parallel_requests", 5, None, 0),
        ("prefix_sharing_example", 7, 1065, 280),
        ("simple_chain", 3, None, 0),
        ("simple_chain_alt", 3, None, 0),
        ("software_architecture_review", 15, None, 0),
    ],
)
def test_recorded_spans_are_read(name: str, calls: int, prompt: int | None, output: int):
    log = read_log(SPANS / f"{name}.json", LogSettings())
    assert (log.format, log.requests, log.output_lens.sum()) == ("otel", calls, output)
    assert (None if log.usage is None else np.nansum(log.usage[:, 0])) == prompt
    assert log.unread.left == {}


# ------------------------------------------------------------------------------
# Spans of Jaeger, Zipkin and Tempo.
# ------------------------------------------------------------------------------

BEGIN = 1_793_600_000_000_000  # microseconds


def tags(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return attributes as Jaeger writes them."""
    return [{"key": key, "type": "string", "value": value} for key, value in attributes.items()]


def jaeger(name: str, start: int, length: int, attributes: dict[str, Any], *above: str) -> dict[str, Any]:
    """Return a span of Jaeger."""
    row = {"traceID": "t1", "spanID": name, "operationName": name, "startTime": BEGIN + start * 10**6}
    row |= {"references": [{"refType": "CHILD_OF", "traceID": "t1", "spanID": each} for each in above]}
    return row | {"duration": length * 10**6, "tags": tags(attributes), "processID": "p1", "logs": []}


def of_jaeger() -> list[dict[str, Any]]:
    """Return the calls of `otel_lines`, and the span of an agent around both."""
    first = [parts("user", ASKED)]
    second = [*first, parts("assistant", "that it was mild"), parts("user", "and the third?")]
    return [
        jaeger("r", 0, 9, {"gen_ai.operation.name": "invoke_agent"}),
        jaeger("a", 0, 2, call(40, 0, 32, 6, first), "r"),
        jaeger("b", 5, 1, call(60, 32, 20, 7, second), "r"),
    ]


def zipkin(row: dict[str, Any]) -> dict[str, Any]:
    """Return a span of Jaeger as Zipkin writes it, whose values are texts."""
    attributes = {tag["key"]: str(tag["value"]) for tag in row["tags"]}
    above = row["references"][0]["spanID"] if row["references"] else None
    times = {"timestamp": row["startTime"], "duration": row["duration"]}
    return {"traceId": "t1", "id": row["spanID"], "parentId": above, "name": "x", **times, "tags": attributes}


@pytest.mark.parametrize("shape", ["page", "trace", "lines", "zipkin", "tempo", "tempo trace"])
def test_spans_of_other_stores_read_alike(tmp_path: Path, shape: str):
    process = {"p1": {"serviceName": "x", "tags": tags({"session.id": "s"})}}
    trace = {"traceID": "t1", "spans": of_jaeger(), "processes": process}
    groups = [row["resourceSpans"][0] for row in otel_lines()]
    rows: dict[str, list[Any]] = {
        "page": [{"data": [trace], "total": 0}],
        "trace": [trace],
        "lines": of_jaeger(),
        "zipkin": list(map(zipkin, of_jaeger())),
        "tempo": [{"batches": groups}],
        "tempo trace": [{"trace": {"resourceSpans": groups}}],
    }
    log = read(tmp_path, *rows[shape])
    assert (log.format, log.requests, sums(log)) == ("otel", 2, (16, 32, 52, 13))
    assert texts(log) == [f"user\n{ASKED}", FOLLOW_UP]
    assert log.arrived_ns.tolist() == [0, 5_000_000_000]
    assert log.observed.last_token.tolist() == [2.0, 6.0]
    is_named = any("spans that are no call of a model (invoke_agent)" in note for note in log.notes)
    assert is_named == (not shape.startswith("tempo"))


def test_bad_span_of_jaeger_is_named_or_skipped(tmp_path: Path):
    row = of_jaeger()[1] | {"spanID": "z", "references": 7}
    with pytest.raises(ValueError, match=r"spans:4: references: expected a list, not '7'"):
        read(tmp_path, *of_jaeger(), row)
    assert read(tmp_path, *of_jaeger(), row, bad_lines="skip").requests == 2
