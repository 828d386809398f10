"""Requests to Gemini and Bedrock: their prompts as those of other interfaces, with the counts of the provider."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.prompts import write_log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from .cloud_samples import (
    ASKED,
    PNG,
    RULES,
    converse_body,
    converse_lines,
    converse_messages,
    converse_usage,
    gemini_body,
    gemini_contents,
    gemini_lines,
    gemini_usage,
    invocation,
    invocations,
)
from .test_claude_code import sums, texts


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "log", *rows), LogSettings(**settings))


def prompts(name: str, tools: str) -> list[str]:
    """Return the texts of the two requests of a sample, whose call has a name."""
    arguments = '"function":{"name":"length","arguments":{"river":"first"}}'
    call = f'{{"tool_calls":[{{"id":"{name}","type":"function",{arguments}}}]}}'
    first = f"{tools}|{RULES}|user\n{ASKED}"
    return [first, f'{first}|assistant\n{call}|tool\n{{"km":1230}}{{"tool_call_id":"{name}"}}|user\nand now?']


GEMINI = prompts("length", '[{"name": "length", "parameters": {"type": "OBJECT"}}]')
CONVERSE = prompts("t1", '[{"name": "length", "input_schema": {"type": "object"}}]')


# ------------------------------------------------------------------------------
# Gemini.
# ------------------------------------------------------------------------------


def test_requests_to_gemini_have_the_counts_of_the_provider(tmp_path: Path):
    log = read(tmp_path, *gemini_lines())
    assert (log.format, log.requests) == ("gemini", 2)
    assert texts(log) == GEMINI
    assert sums(log) == (90 + 120 - 64, 64, 0, 6 + 4 + 7)
    np.testing.assert_array_equal(log.usage, [[90, 0, np.nan], [120, 64, np.nan]])  # an absent count is zero
    assert log.arrived_ns.tolist() == [0, 5_000_000_000]
    assert log.identity_names == ((("model", "m"),),)
    assert log.unread.allows_verdict


def underscored(value: Any) -> Any:
    """Return a value with underscores in the names of its fields."""
    if isinstance(value, dict):
        return {
            "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key): underscored(item)
            for key, item in value.items()
        }
    return list(map(underscored, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("shape", ["bare", "underscores", "batch", "keyed", "stream", "list", "text", "table", "flat"])
def test_every_shape_of_a_line_reads_alike(tmp_path: Path, shape: str):
    def shaped(line: dict[str, Any]) -> dict[str, Any]:
        request, response = line["request"], line["response"]
        chunks = [{"candidates": []}, response]
        stream = "".join(f"data: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks)
        return {
            "bare": request | {"usageMetadata": response["usageMetadata"]},
            "underscores": underscored(line),
            "batch": {"status": "", "processed_time": "2026-11-02T10:00:00Z", **line},
            "keyed": {"key": "a", **line},
            "stream": line | {"response": stream},
            "list": line | {"response": chunks},
            "text": line | {"request": json.dumps(request), "response": json.dumps(response)},
            "table": {"logging_time": "2026-11-02 09:00:00 UTC", "full_request": request, "full_response": response},
            "flat": request | response["usageMetadata"],
        }[shape]

    log = read(tmp_path, *map(shaped, gemini_lines()))
    assert (log.format, texts(log)) == ("gemini", GEMINI)
    assert sums(log) == (146, 64, 0, 17)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (gemini_usage(100, 64, 7), (36, 64, 0, 7)),
        (gemini_usage(100, 0, 7, 5), (100, 0, 0, 12)),
        (
            {"promptTokenCount": 100, "candidatesTokenCount": 12, "thoughtsTokenCount": 5, "totalTokenCount": 112},
            (100, 0, 0, 12),
        ),
        (gemini_usage(100, 64, 7) | {"toolUsePromptTokenCount": 9, "totalTokenCount": 116}, (45, 64, 0, 7)),
        ({"promptTokenCount": 100, "cachedContentTokenCount": None, "thoughtsTokenCount": 5}, (100, 0, 0, 5)),
        ({"promptTokenCount": "100", "cachedContentTokenCount": "64"}, (36, 64, 0, 0)),
        ({"promptTokenCount": 10, "cachedContentTokenCount": 64}, (0, 0, 0, 0)),  # which contradict each other
    ],
)
def test_counts_of_gemini_are_exact(tmp_path: Path, usage: dict[str, Any], expected: tuple[int, ...]):
    for spelled in (usage, underscored(usage)):
        log = read(tmp_path, {"request": gemini_body(), "response": {"usageMetadata": spelled}}, gemini_lines()[1])
        fresh, cached, created, output = sums(log)
        assert (fresh - 56, cached - 64, created, output - 7) == expected
    has_tools = "toolUsePromptTokenCount" in usage
    assert any("results of tools that the server ran" in note for note in log.notes) == has_tools


@pytest.mark.parametrize(
    ("part", "prompt", "tokens"),
    [
        ({"text": "because", "thought": True}, 'user\n{"reasoning_content":"because"}', None),
        ({"text": "so", "thoughtSignature": "c2ln"}, "user\n|<encrypted reasoning>|so", None),
        ({"inlineData": {"mimeType": "image/png", "data": PNG}}, "user\n|<image>", 2),
        ({"inline_data": {"mime_type": "audio/mp3", "data": "xx"}}, "user\n|<audio>", None),
        ({"fileData": {"mimeType": "video/mp4", "fileUri": "gs://b/v"}}, "user\n|<video>", None),
        ({"fileData": {"mimeType": "application/pdf", "fileUri": "gs://b/f"}}, "user\n|<file>", None),
        ({"executableCode": {"language": "PYTHON", "code": "1"}}, "user\n|<executableCode>", None),
        ({"hologram": {"data": "x" * 40}}, "user\n|<hologram>", None),
        ({"text": None, "functionCall": None, "thought": None}, "user\n", None),
    ],
)
def test_parts_that_are_no_text_are_named(tmp_path: Path, part: dict[str, Any], prompt: str, tokens: int | None):
    log = read(tmp_path, {"contents": [{"role": "user", "parts": [part]}]}, gemini_body())
    assert texts(log)[0] == prompt
    if tokens is not None:
        assert log.prompt_tokens[0] == -(-len("user\n") // 4) + tokens


def test_cached_content_is_a_part_that_the_body_names(tmp_path: Path):
    one, other = (gemini_body() | {"cachedContent": f"cachedContents/{name}"} for name in "ab")
    log = read(tmp_path, one, one, other, gemini_body() | {"cached_content": "cachedContents/a"})
    assert [text.partition("|")[0] for text in texts(log)] == ["<cachedContent>"] * 3 + ["<cached_content>"]
    assert log.pieces[log.starts[0]] == log.pieces[log.starts[1]] != log.pieces[log.starts[2]]
    assert log.unread.places["cachedContent"] == 3
    assert not log.unread.allows_verdict


def test_keys_that_change_the_prompt_are_counted(tmp_path: Path):
    schema = {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}}
    body = gemini_body() | {"generationConfig": schema, "later": "a text", "safetySettings": [{"category": "x"}]}
    log = read(tmp_path, body, body)
    assert dict(log.unread.places) == {"generationConfig.responseSchema": 2, "later": 2}


def test_shapes_of_libraries_are_read(tmp_path: Path):
    config = {"system_instruction": RULES, "temperature": 0.1, "tools": [{"google_search": {}}]}
    rows = [
        {"model": "m", "contents": ASKED, "config": config},
        {"model": "m", "contents": [ASKED], "config": config},
        {"model": "m", "contents": {"parts": [{"text": ASKED}]}, "config": config},
        {"model": "m", "contents": [{"text": ASKED}], "config": config},
    ]
    log = read(tmp_path, rows[2], *rows)
    assert texts(log) == [f'[{{"google_search": {{}}}}]|{RULES}|user\n{ASKED}'] * 5
    assert not log.unread.left


def test_failed_lines_of_a_batch_are_no_requests(tmp_path: Path):
    failed = {"status": "Bad Request", "processed_time": "x", "request": gemini_body(), "response": {}}
    log = read(tmp_path, *gemini_lines(), failed)
    assert log.requests == 2
    assert "not counted: 1 requests of a batch that failed" in log.notes


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"contents": [{"parts": [7]}]}, "contents.parts: expected a list of objects, not '7'"),
        ({"contents": [{"parts": []}, 7]}, "contents: expected a list of objects with role and parts"),
        ({"contents": [{"role": 7, "parts": []}]}, "contents.role: expected user or model, not '7'"),
        ({"contents": []}, "messages: expected a list of messages"),
    ],
)
def test_bad_contents_are_named_or_skipped(tmp_path: Path, body: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=f"log:3: {problem}"):
        read(tmp_path, *gemini_lines(), body)
    assert read(tmp_path, *gemini_lines(), body, bad_lines="skip").requests == 2


# ------------------------------------------------------------------------------
# Bedrock.
# ------------------------------------------------------------------------------


def test_requests_of_converse_have_the_counts_of_the_provider(tmp_path: Path):
    log = read(tmp_path, *converse_lines())
    assert (log.format, texts(log)) == ("bedrock", CONVERSE)
    assert sums(log) == (28, 80, 90, 13)
    assert log.usage.tolist() == [[88, 0, 80], [110, 80, 10]]
    assert log.identity_names == ((("model", "m"),),)
    assert log.unread.allows_verdict


def test_records_of_invocations_have_the_counts_of_the_provider(tmp_path: Path):
    log = read(tmp_path, *invocations())
    assert (log.format, texts(log)) == ("bedrock", CONVERSE)
    assert sums(log) == (28, 80, 90, 13)
    assert log.arrived_ns.tolist() == [0, 5_000_000_000]
    assert log.observed.last_token.tolist() == [1.5, 6.5]
    assert log.tenant_names == ("role/ann",)


@pytest.mark.parametrize("shape", ["events", "message", "text", "folder", "query"])
def test_every_export_of_invocations_reads_alike(tmp_path: Path, shape: str):
    records = invocations()
    events = [{"eventId": str(number), "message": json.dumps(record)} for number, record in enumerate(records)]
    path = tmp_path / "export"
    if shape == "events":
        path.write_text(json.dumps({"events": events, "searchedLogStreams": []}, indent=1))
    elif shape == "query":
        found = [
            [{"field": "@message", "value": event["message"]}, {"field": "@ptr", "value": "x"}] for event in events
        ]
        path.write_text(json.dumps({"results": found, "status": "Complete"}))
    elif shape == "folder":
        (path / "2026" / "11").mkdir(parents=True)
        for number, record in enumerate(records):
            with gzip.open(path / "2026" / "11" / f"{number}.json.gz", "wt") as file:
                json.dump(record, file)
    else:
        for record in records:
            record["input"]["inputBodyJson"] = json.dumps(record["input"]["inputBodyJson"])
        write_lines(path, *(events if shape == "message" else records))
    log = read_log(path, LogSettings())
    assert (log.format, texts(log), sums(log)) == ("bedrock", CONVERSE, (28, 80, 90, 13))


def anthropic_stream(output: int) -> list[dict[str, Any]]:
    """Return the events of an answer of InvokeModelWithResponseStream, as a record keeps them."""
    usage = {"input_tokens": 8, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 2, "output_tokens": 1}
    metrics = {"inputTokenCount": 8, "outputTokenCount": output}
    return [
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "message_delta", "usage": {"output_tokens": output}},
        {"type": "message_stop", "amazon-bedrock-invocationMetrics": metrics},
    ]


@pytest.mark.parametrize(
    ("entered", "answer", "expected"),
    [
        ({"inputTokenCount": 8}, anthropic_stream(9), (8, 30, 2, 9)),
        ({}, anthropic_stream(9), (8, 30, 2, 9)),
        ({}, [{"metadata": {"usage": converse_usage(8, 30, 2, 9)}}], (8, 30, 2, 9)),
        ({}, {"usage": converse_usage(8, 30, 2, 9)}, (8, 30, 2, 9)),
        ({"inputTokenCount": 8, "cacheReadInputTokenCount": 30}, None, (8, 30, 0, 0)),
        ({"inputTokenCount": 8, "cacheReadInputTokenCount": None}, None, (8, 0, 0, 0)),
        ({"inputTokenCount": "8"}, {"usage": {"inputTokens": 8, "outputTokens": 9}}, (8, 0, 0, 9)),
    ],
)
def test_counts_stand_in_the_record_or_in_its_answer(
    tmp_path: Path, entered: dict[str, Any], answer: Any, expected: tuple[int, ...]
):
    record = invocations()[0]
    record["input"] = {"inputBodyJson": {"messages": [{"role": "user", "content": ASKED}]}} | entered
    record["output"] = {"outputBodyJson": answer}
    assert sums(read(tmp_path, record)) == expected


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"anthropic_version": "v", "messages": [{"role": "user", "content": "hi"}]}, "user\nhi"),
        ({"prompt": "hi", "max_gen_len": 5}, "hi"),
        ({"inputText": "hi", "textGenerationConfig": {}}, "hi"),
        (
            {"message": "hi", "preamble": "be kind", "chat_history": [{"role": "CHATBOT", "message": "ho"}]},
            "be kind|assistant\nho|user\nhi",
        ),
        ({"later": True}, ""),
    ],
)
def test_bodies_of_every_model_are_prompts(tmp_path: Path, body: dict[str, Any], prompt: str):
    log = read(tmp_path, invocation("a", 0, body, converse_usage(5, 0, 0, 1)))
    assert texts(log) == [prompt]
    assert bool(prompt) == log.unread.allows_verdict


def test_prompts_in_s3_and_other_records_are_counted(tmp_path: Path):
    usage = converse_usage(8, 0, 80, 6)
    away, embedded, failed = (invocation(name, 9, converse_body(), usage) for name in "cde")
    away["input"] |= {"inputBodyJson": None, "inputBodyS3Path": "s3://bucket/data/c_input.json.gz"}
    embedded["modelId"] = "amazon.titan-embed-text-v2:0"
    failed = {**failed, "errorCode": "ThrottlingException", "input": {"inputBodyJson": converse_body()}, "output": {}}
    log = read(tmp_path, *invocations(), away, embedded, failed, {"schemaType": "Check", "modelId": "m"})
    assert (log.requests, sums(log)) == (3, (36, 80, 170, 19))
    assert log.prompt_tokens[2] == 88
    assert log.unread.places["prompts in S3, of which the log has the address alone (inputBodyS3Path)"] == 1
    assert {note for note in log.notes if note.startswith("not counted")} == {
        "not counted: 1 spans that are no call of a model (amazon.titan-embed-text-v2:0)",
        "not counted: 1 calls that failed, without a count of tokens",
        "not counted: 1 spans that are no call of a model (no record of an invocation)",
    }


def test_lines_of_a_batch_are_read(tmp_path: Path):
    body = {"anthropic_version": "v", "messages": [{"role": "user", "content": "hi"}]}
    answer = {"usage": {"input_tokens": 5, "output_tokens": 2}}
    rows = [{"recordId": f"r{number}", "modelInput": body, "modelOutput": answer} for number in range(2)]
    failed = {"recordId": "r2", "modelInput": body, "error": {"errorCode": 400}}
    log = read(tmp_path, *rows, rows[0], failed)
    assert (log.format, texts(log), sums(log)) == ("bedrock", ["user\nhi"] * 2, (10, 0, 0, 4))
    assert "not counted: 1 requests of a batch that failed" in log.notes
    assert "not counted: 1 requests that repeat an earlier one" in log.notes


@pytest.mark.parametrize(
    ("block", "prompt"),
    [
        ({"reasoningContent": {"reasoningText": {"text": "hm", "signature": "s"}}}, '{"reasoning_content":"hm"}'),
        ({"reasoningContent": {"redactedContent": "eA=="}}, "|<encrypted reasoning>"),
        ({"image": {"format": "png", "source": {"bytes": PNG}}}, "|<image>"),
        ({"image": {"format": "png", "source": {"s3Location": {"uri": "s3://b/i"}}}}, "|<image>"),
        ({"document": {"format": "txt", "name": "note", "source": {"text": "all of it"}}}, "note|all of it"),
        ({"document": {"format": "pdf", "name": "note", "source": {"bytes": "eA=="}}}, "|<file>"),
        ({"video": {"format": "mp4", "source": {"s3Location": {"uri": "s3://b/v"}}}}, "|<video>"),
        ({"guardContent": {"text": {"text": "guarded", "qualifiers": ["query"]}}}, "guarded"),
        ({"citationsContent": {"content": [{"text": "cited"}], "citations": []}}, "cited"),
        ({"hologram": {"data": "x" * 40}}, "|<hologram>"),
        ({"cachePoint": {"type": "default", "ttl": "1h"}}, ""),
    ],
)
def test_blocks_of_converse_are_read_or_named(tmp_path: Path, block: dict[str, Any], prompt: str):
    body = {"messages": [{"role": "user", "content": [block]}], "inferenceConfig": {}}
    log = read(tmp_path, body, converse_body())
    assert (log.format, texts(log)[0]) == ("bedrock", f"user\n{prompt}")


# ------------------------------------------------------------------------------
# Both.
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [gemini_lines, converse_lines], ids=["gemini", "bedrock"])
def test_written_prompts_read_alike(tmp_path: Path, lines: Any):
    log = read(tmp_path, *lines())
    path = tmp_path / "written.jsonl"
    assert write_log(log, lambda prompt: prompt, path) == 2
    again = read_log(path, LogSettings())
    assert (again.format, texts(again)) == ("openai", texts(log))
    assert again.pieces.tolist() == log.pieces.tolist()


def test_interfaces_share_what_their_messages_share(tmp_path: Path):
    content = [{"type": "text", "text": ASKED}]
    rows = [
        {"messages": [{"role": "user", "content": content}]},
        {"messages": converse_messages(), "modelId": None},
        {"contents": gemini_contents()},
    ]
    log = read(tmp_path, *rows)
    assert len(set(log.pieces[log.starts[:-1]].tolist())) == 1
