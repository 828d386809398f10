"""Exports of Langfuse and LiteLLM: one request per call, with the counts of the provider."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from ..support.shared import TRACES, needs
from .span_samples import ASKED, generation, langfuse_lines, litellm_lines, payload
from .test_claude_code import sums, texts
from .test_otel import FOLLOW_UP

LANGFUSE = TRACES / "agents" / "langfuse-traces"
MESSAGES = [{"role": "user", "content": "x"}]


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "export", *rows), LogSettings(**settings))


def test_generations_are_read_by_time(tmp_path: Path):
    log = read(tmp_path, *langfuse_lines())
    assert (log.format, log.requests, sums(log)) == ("langfuse", 2, (48, 32, 20, 13))
    assert texts(log) == [f"user\n{ASKED}", FOLLOW_UP]
    assert log.observed.first_token.tolist() == [1.0, 6.0]
    assert log.arrived_ns.tolist() == [0, 5_000_000_000]


@pytest.mark.parametrize("shape", ["trace", "inside", "page", "list", "snake"])
def test_every_shape_of_an_export_reads_alike(tmp_path: Path, shape: str):
    rows = langfuse_lines()
    snake = {"traceId": "trace_id", "startTime": "start_time", "endTime": "end_time", "usageDetails": "usage_details"}
    snake |= {"completionStartTime": "completion_start_time", "model": "provided_model_name"}
    shapes: dict[str, Any] = {
        "trace": {"trace": {"id": "t1", "sessionId": "s"}, "observations": rows},
        "inside": {"id": "t1", "name": "n", "observations": rows},
        "page": {"data": rows, "meta": {"page": 1}},
        "list": rows,
        "snake": [{snake.get(key, key): value for key, value in row.items()} for row in rows],
    }
    path = tmp_path / "document"
    path.write_text(json.dumps(shapes[shape], indent=1))
    log = read_log(path, LogSettings())
    assert (log.format, log.fingerprint) == ("langfuse", read(tmp_path, *rows).fingerprint)
    assert texts(log) == [f"user\n{ASKED}", FOLLOW_UP]


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("how are you?", "how are you?"),
        ('{"prompt": "how are you?"}', "how are you?"),
        ({"messages": [{"type": "human", "content": "hi"}], "tools": [{"name": "t"}]}, '[{"name": "t"}]|user\nhi'),
        ('[{"role": "system", "content": "be kind"}, "hi"]', "system\nbe kind|user\nhi"),
        ({"content": "hi", "role": "user"}, "user\nhi"),
        ([{"role": "tool", "content": {"name": "t"}}], 'tool\n{"name": "t"}'),
        ([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}], "user\nhi"),
        ({"city": "Bonn"}, '{"city": "Bonn"}'),
        (
            {
                "contents": [{"parts": [{"text": "hi"}]}],
                "system_instruction": "be kind",
                "tools": [{"google_search": {}}],
            },
            '[{"google_search": {}}]|be kind|user\nhi',
        ),
        (
            {
                "system": [{"text": "be kind"}],
                "messages": [{"role": "user", "content": [{"text": "hi"}, {"cachePoint": {"type": "default"}}]}],
                "toolConfig": {"tools": [{"toolSpec": {"name": "t"}}]},
            },
            '[{"name": "t"}]|be kind|user\nhi',
        ),
        (
            [{"role": "user", "content": "hi"}, {"type": "function_call_output", "call_id": "k", "output": "o"}],
            'user\nhi|tool\no{"tool_call_id":"k"}',
        ),
        (
            [{"role": "assistant", "content": "", "additional_kwargs": {"tool_calls": [{"id": "k"}]}}],
            'assistant\n{"tool_calls":[{"id":"k"}]}',
        ),
    ],
)
def test_every_shape_of_an_input_is_a_prompt(tmp_path: Path, given: Any, prompt: str):
    assert texts(read(tmp_path, generation("a", 0, given, {"input": 1}))) == [prompt]


@pytest.mark.parametrize(
    ("beside", "prompt"),
    [
        (
            {"toolDefinitions": {"look": '{"description": "see"}'}},
            '[{"name": "look", "definition": {"description": "see"}}]',
        ),
        ({"metadata": {"attributes": {"llm.tools.0.tool.json_schema": '{"name": "t"}'}}}, '[{"name": "t"}]'),
        (
            {"metadata": '{"attributes": {"model_request_parameters": {"function_tools": [{"name": "t"}]}}}'},
            '[{"name": "t"}]',
        ),
        ({"modelParameters": {"instructions": "be kind"}}, "be kind"),
    ],
)
def test_tools_and_instructions_beside_the_input_are_read(tmp_path: Path, beside: dict[str, Any], prompt: str):
    assert texts(read(tmp_path, generation("a", 0, MESSAGES, {"input": 1}, **beside))) == [f"{prompt}|user\nx"]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input": 40, "output": 6, "total": 46, "input_cache_read": 0}, (40, 0, 0, 6)),
        ({"input": 8, "output": 6, "total": 46, "input_cached_tokens": 32}, (8, 32, 0, 6)),
        ({"input": 40, "output": 6, "total": 46, "input_cached_tokens": 32}, (8, 32, 0, 6)),
        ({"input": 8, "output": 6, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 5}, (8, 32, 5, 6)),
        ({"input": 8, "output": 6, "input_cache_creation_5m": 3, "input_cache_creation_1h": 4}, (8, 0, 7, 6)),
        ({"input": 8, "output": 6, "input_cache_creation": 7, "input_cache_creation_1h": 7, "total": 21}, (8, 0, 7, 6)),
        ({"input": 8, "output": 6, "total": 50, "input_cached_tokens": 32, "output_reasoning": 4}, (8, 32, 0, 10)),
        ({"input": 8, "output": 6, "total": 14, "completion_details.reasoning": 4}, (8, 0, 0, 6)),
        ({"input": 40, "output": 6, "total": 46, "prompt_details.cache_read": 32}, (8, 32, 0, 6)),
        ({"input": "8", "output": "6", "total": "46", "input_cached_tokens": "32"}, (8, 32, 0, 6)),
        ({"prompt_token_count": 40, "cached_content_token_count": 32, "candidates_token_count": 6}, (8, 32, 0, 6)),
        ({"inputTokens": 8, "outputTokens": 6, "cacheReadInputTokens": 32}, (8, 32, 0, 6)),
    ],
)
def test_total_tells_what_the_input_includes(tmp_path: Path, usage: dict[str, int], expected: tuple[int, ...]):
    assert sums(read(tmp_path, generation("a", 0, MESSAGES, usage))) == expected


def test_older_usage_is_read(tmp_path: Path):
    usage = {"promptTokens": 40, "completionTokens": 6, "totalTokens": 46}
    log = read(tmp_path, generation("a", 0, MESSAGES, {}, usage=usage), generation("b", 5, MESSAGES, {}))
    np.testing.assert_array_equal(log.usage[:, 0], [40, np.nan])


def test_observations_of_other_types_are_counted(tmp_path: Path):
    rows = [*langfuse_lines(), generation("c", 0, {}, {}, type="SPAN"), langfuse_lines()[0]]
    rows.append(generation("d", 9, MESSAGES, {}, level="ERROR"))
    log = read(tmp_path, *rows)
    assert sums(log) == (48, 32, 20, 13)
    assert {note for note in log.notes if note.startswith("not counted")} == {
        "not counted: 1 spans that are no call of a model (SPAN)",
        "not counted: 1 spans that repeat an earlier one",
        "not counted: 1 calls that failed, without a count of tokens",
    }


def test_nested_generations_are_named(tmp_path: Path):
    inner = generation("b", 0, MESSAGES, {"input": 4, "output": 1}, parentObservationId="a")
    log = read(tmp_path, generation("a", 0, MESSAGES, {"input": 3, "output": 1}), inner)
    assert log.requests == 2
    assert any(note.startswith("some generations contain another one") for note in log.notes)


@needs(LANGFUSE)
@pytest.mark.parametrize(
    ("name", "calls", "prompt", "output"),
    [
        ("claude-agent-2025-12-22", 4, 34, 232),
        ("langgraph-python-2025-08-22", 2, 168, 66),
        ("openai-agents-2025-09-30", 2, 140, 44),
        ("pydantic-ai-tools-2025-12-04", 4, 1315, 209),
        ("vercel-aisdk-2025-11-17", 2, 76, 128),
    ],
)
def test_recorded_generations_are_read(name: str, calls: int, prompt: int, output: int):
    log = read_log(LANGFUSE / f"{name}.trace.json", LogSettings())
    assert (log.format, log.requests, sums(log)) == ("langfuse", calls, (prompt, 0, 0, output))


def test_payloads_are_read_with_the_counts_of_the_provider(tmp_path: Path):
    log = read(tmp_path, *litellm_lines())
    assert (log.format, log.requests, sums(log)) == ("litellm", 2, (120 - 52, 32, 20, 14))
    assert texts(log) == [f"user\n{ASKED}", FOLLOW_UP]
    assert log.tenant_names == ("ann",)
    assert log.observed.first_token.tolist() == [1.0, 6.0]
    assert log.waits_ns.tolist() == [0, 3_000_000_000]


def spend_row(name: str, **more: Any) -> dict[str, Any]:
    """Return a row of the table of a proxy, whose columns of JSON are texts."""
    usage = {"prompt_tokens": 60, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 20}
    return {
        "request_id": name,
        "call_type": "acompletion",
        "spend": 0.1,
        "total_tokens": 67,
        "prompt_tokens": 60,
        "completion_tokens": 7,
        "startTime": "2026-11-02 09:00:00.000",
        "endTime": "2026-11-02 09:00:02.000",
        "completionStartTime": "2026-11-02 09:00:01.000",
        "model": "m",
        "metadata": json.dumps({"usage_object": usage}),
        "cache_hit": "False",
        "messages": "{}",
        "response": "{}",
        "session_id": "s",
    } | more


def test_rows_of_spend_without_prompts_have_lengths_only(tmp_path: Path):
    log = read(tmp_path, spend_row("a"), spend_row("b", messages={}), spend_row("c", messages=None))
    assert (str(log.ids), log.prompt_tokens.tolist()) == ("none", [60, 60, 60])
    assert sums(log) == (24, 96, 60, 21)


@pytest.mark.parametrize(
    "messages",
    [
        "redacted-by-litellm",
        [{"role": "user", "content": "redacted-by-litellm"}],
        [{"role": "user", "content": "a long te... (litellm_truncated 900 chars)"}],
        '[{"role": "user", "content": "a long te',
        '{"messages": [{"role": "us',
    ],
)
def test_redacted_and_cut_prompts_are_withheld(tmp_path: Path, messages: Any):
    log = read(tmp_path, payload("a", 0, messages, None))
    assert (str(log.ids), log.prompt_tokens.tolist()) == ("none", [60])


@pytest.mark.parametrize("front", ["system", "instructions"])
def test_what_stands_beside_the_messages_of_a_payload_is_read(tmp_path: Path, front: str):
    log = read(
        tmp_path, spend_row("a", messages=MESSAGES, model_parameters={front: "be kind", "tools": [{"name": "t"}]})
    )
    assert texts(log) == ['[{"name": "t"}]|be kind|user\nx']


def test_body_that_the_proxy_stored_is_the_prompt(tmp_path: Path):
    body = {"model": "m", "system": "be kind", "messages": MESSAGES, "tools": [{"name": "t"}]}
    log = read(tmp_path, spend_row("a", proxy_server_request=json.dumps(body)))
    assert texts(log) == ['[{"name": "t"}]|be kind|user\nx']


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt_tokens": 8, "total_tokens": 15}, (8, 32, 20, 7)),  # a count without cached ones, as Anthropic has it
        ({"prompt_tokens": 60, "total_tokens": 67}, (8, 32, 20, 7)),
        ({"prompt_tokens": 60, "total_tokens": 119}, (60, 32, 20, 7)),
        ({"metadata": None}, (60, 0, 0, 7)),
        ({"metadata": {"usage_object": {"input_tokens": 55, "cache_read_input_tokens": 3}}}, (55, 3, 0, 7)),
    ],
)
def test_prompt_includes_cached_tokens_or_not(tmp_path: Path, row: dict[str, Any], expected: tuple[int, ...]):
    assert sums(read(tmp_path, spend_row("a", **row))) == expected


def test_page_of_rows_is_read(tmp_path: Path):
    path = tmp_path / "page.json"
    path.write_text(json.dumps({"data": [spend_row("a"), spend_row("b")], "total": 2}, indent=1))
    log = read_log(path, LogSettings())
    assert (log.format, sums(log)) == ("litellm", (16, 64, 40, 14))


def test_folder_of_exports_is_one_log(tmp_path: Path):
    folder = tmp_path / "exports"
    folder.mkdir()
    for number, row in enumerate(langfuse_lines()):
        with gzip.open(folder / f"{number}.json.gz", "wt") as file:
            json.dump({"trace": {"id": "t1"}, "observations": [row]}, file)
    log = read_log(folder, LogSettings())
    assert (log.format, log.requests, sums(log)) == ("langfuse", 2, (48, 32, 20, 13))
    assert texts(log)[1] == FOLLOW_UP


def test_folder_without_a_log_is_named(tmp_path: Path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match="the folder has no file of a format that is read from folders"):
        read_log(tmp_path, LogSettings())


def test_rows_that_called_no_model_are_counted(tmp_path: Path):
    rows = [
        *litellm_lines(),
        payload("c", 9, MESSAGES, None, cache_hit=True),
        payload("d", 9, MESSAGES, None, call_type="aembedding"),
        payload("e", 9, MESSAGES, None, status="failure", prompt_tokens=0),
        litellm_lines()[1],
    ]
    log = read(tmp_path, *rows)
    assert sums(log) == (68, 32, 20, 14)
    assert {note for note in log.notes if note.startswith("not counted")} == {
        "not counted: 1 spans that are no call of a model (answered by LiteLLM's own cache)",
        "not counted: 1 spans that are no call of a model (aembedding)",
        "not counted: 1 calls that failed, without a count of tokens",
        "not counted: 1 spans that repeat an earlier one",
    }


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        (langfuse_lines, '{"type": "GENERATION", ', "line: expected JSON"),
        (langfuse_lines, generation("z", 9, [7.5], {}), "messages: expected a text or an object with role"),
        (langfuse_lines, generation("z", 9, MESSAGES, {}, startTime="soon"), "startTime: expected a number or a date"),
        (langfuse_lines, {"observations": 7}, "observations: expected a list, not '7'"),
        (langfuse_lines, {"observations": [7]}, r"observations\[0\].observation: expected an object, not '7'"),
        (litellm_lines, payload("z", 9, MESSAGES, None, startTime="soon"), "startTime: expected a number or a date"),
        (litellm_lines, payload("z", 9, MESSAGES, None, model=[]), "model: expected a text or a number"),
        (litellm_lines, payload("z", 9, [7.5], None), "messages: expected a text or an object with role"),
    ],
)
def test_bad_call_is_named_or_skipped(tmp_path: Path, good: Any, bad: Any, problem: str):
    with pytest.raises(ValueError, match=f"export:3: {problem}"):
        read(tmp_path, *good(), bad)
    log = read(tmp_path, *good(), bad, bad_lines="skip")
    assert sums(log) == sums(read(tmp_path, *good()))
    assert any("bad lines" in note and "(1 times" in note for note in log.notes)
