"""Results of benchmarks, captures and answers: lengths, times and the counts of servers; texts with rates alone."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from .log_samples import FIRST, SECOND
from .test_claude_code import sums, texts


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "file", *rows), LogSettings(**settings))


def guided(prompt: int, start: float, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "output_tokens": 5, "request_start_time": start} | more


def test_report_of_guidellm_has_times_and_cached_tokens(tmp_path: Path):
    requests = [
        guided(40, 5.0, time_to_first_token_ms=250.0, inter_token_latency_ms=10.0, cached_tokens=16),
        guided(48, 1.0, first_token_time=1.5, last_token_time=2.0, cached_tokens=32),
        {"prompt_tokens": None, "output_tokens": None, "request_start_time": 2.0},
    ]
    totals = {"request_totals": {"successful": 5, "errored": 1}}
    first = {"requests": {"successful": requests, "errored": [{}], "incomplete": [{}, {}]}, "metrics": totals}
    measured = {"request_start_time": 9.0, "input_metrics": {"text_tokens": 30}, "output_metrics": {"text_tokens": 5}}
    second = {"requests": {"successful": [measured]}}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"benchmarks": [first, second]}, indent=1))
    log = read_log(path, LogSettings())
    assert (log.format, log.prompt_tokens.tolist()) == ("guidellm", [48, 40, 30])
    assert log.observed.first_token.tolist()[:2] == [0.5, 4.25]
    assert log.observed.last_token.tolist()[:2] == [1.0, 4.25 + 0.04]
    assert np.nansum(log.usage, axis=0).tolist() == [88, 48, 0]
    assert {note for note in log.notes if note.startswith("not counted")} == {
        "not counted: 1 errored requests",
        "not counted: 2 incomplete requests",
        "not counted: 1 requests without a length of their prompt",
        "not counted: 2 successful requests that the report counts without a record",
    }


def aiperf_record(start: int, **more: Any) -> dict[str, Any]:
    metrics = {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 9, "unit": "tokens"},
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "request_latency": {"value": 2.0, "unit": "s"},
    }
    metadata = {"request_start_ns": (1_793_600_000 + start) * 10**9, "x_correlation_id": "c"}
    return {"metadata": metadata, "metrics": metrics, "error": None} | more


def test_records_of_aiperf_are_read_by_time(tmp_path: Path):
    failed = aiperf_record(9, metrics={"error_isl": {"value": 5}}, error={"code": 499})
    log = read(tmp_path, aiperf_record(4), failed, aiperf_record(0))
    assert (log.format, log.arrived_ns.tolist()) == ("aiperf", [0, 4 * 10**9])
    np.testing.assert_allclose(log.observed.first_token, [0.25, 4.25])
    np.testing.assert_allclose(log.observed.last_token, [2.0, 6.0])
    assert log.sessions.tolist() == [0, 0]
    assert "not counted: 1 failed requests" in log.notes


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"benchmarks": [{"requests": {"successful": [guided(-1, 1.0)]}}]},
            r"benchmarks\[0\].requests.successful\[0\].prompt_tokens: a whole number from 0 up, not '-1'",
        ),
        ({"benchmarks": [{"requests": {}}]}, r"benchmarks\[0\].requests.successful: expected a list of requests"),
        (
            aiperf_record(0, metrics={"input_sequence_length": {"value": -1}}),
            "metrics.input_sequence_length.value: expected a whole number from 0 up",
        ),
        (
            aiperf_record(
                0, metrics={"input_sequence_length": {"value": 1}, "time_to_first_token": {"value": 1, "unit": "days"}}
            ),
            "metrics.time_to_first_token.unit: expected ns, us, ms or s, not 'days'",
        ),
    ],
)
def test_bad_result_is_named(tmp_path: Path, row: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=f"file:1: {problem.replace(': a whole', ': expected a whole')}"):
        read(tmp_path, row)


def test_counts_that_a_proxy_keeps_are_answers(tmp_path: Path):
    usage = {"input_tokens": 8, "cache_read_input_tokens": 32, "output_tokens": 5}
    rows = [{"timestamp": 9 - n, "model": "m", "session_id": f"s{n}", "user": "ann", "usage": usage} for n in range(2)]
    rows.append({"time": 12, "model": "m", "usage": {"promptTokenCount": 60, "candidatesTokenCount": 4}})
    log = read(tmp_path, *rows)
    assert (log.format, str(log.ids), sums(log)) == ("openai_answers", "none", (76, 64, 0, 14))
    assert log.arrived_ns.tolist() == [0, 10**9, 4 * 10**9]
    assert (log.sessions.tolist(), log.tenant_names[0]) == ([0, 1, 2], "ann")


@pytest.mark.parametrize("shape", ["keyed", "snake"])
def test_answers_of_gemini_have_the_counts_of_the_provider(tmp_path: Path, shape: str):
    counts = {"promptTokenCount": 50, "cachedContentTokenCount": 10, "candidatesTokenCount": 3}
    answer: dict[str, Any] = {"candidates": [], "usageMetadata": counts, "modelVersion": "m"}
    if shape == "snake":
        counts = {"prompt_token_count": 50, "cached_content_token_count": 10, "candidates_token_count": 3}
        answer = {"candidates": [], "usage_metadata": counts, "model_version": "m"}
    rows = [{"key": "a", "response": answer}, {"key": "b", "error": {"code": 400}}, {"key": "a", "response": answer}]
    log = read(tmp_path, *rows)
    assert (log.format, sums(log)) == ("openai_answers", (40, 10, 0, 3))
    assert {"not counted: 1 failed requests", "not counted: 1 requests that repeat an earlier one"} <= set(log.notes)


def test_output_of_a_batch_has_the_counts_of_the_provider(tmp_path: Path):
    def answer(name: str, prompt: int, cached: int) -> dict[str, Any]:
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": prompt, "completion_tokens": 7, "prompt_tokens_details": details}
        body = {"object": "chat.completion", "created": 1_793_600_000, "model": "m", "usage": usage}
        return {"id": name, "custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}

    failed = {"id": "c", "custom_id": "c", "response": None, "error": {"code": "x"}}
    log = read(tmp_path, answer("a", 100, 64), failed, answer("b", 50, 0))
    assert (log.format, sums(log)) == ("openai_answers", (86, 64, 0, 14))
    assert "not counted: 1 failed requests" in log.notes


def test_batch_of_anthropic_has_created_tokens(tmp_path: Path):
    usage = {"input_tokens": 5, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 7, "output_tokens": 9}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    rows = [{"custom_id": name, "result": {"type": "succeeded", "message": message}} for name in "ab"]
    failed = [{"custom_id": "c", "result": {"type": kind}} for kind in ("errored", "expired", "canceled")]
    log = read(tmp_path, *rows, *failed)
    assert (log.format, log.prompt_tokens.tolist(), sums(log)) == ("openai_answers", [112, 112], (10, 200, 14, 18))
    assert "not counted: 3 failed requests" in log.notes
    asked = {"custom_id": "a", "params": {"model": "m", "max_tokens": 9, "system": "be", **MESSAGES}}
    assert texts(read(tmp_path, asked)) == ["be|user\nhi"]


def test_stored_responses_are_read_without_prompts(tmp_path: Path):
    usage = {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 7}
    response = {"id": "r", "object": "response", "created_at": 5, "model": "m", "output": [], "usage": usage}
    log = read(tmp_path, response | {"previous_response_id": "q", "instructions": None})
    assert (log.format, str(log.ids), sums(log)) == ("openai_answers", "none", (26, 64, 0, 7))


def test_input_of_a_batch_is_read(tmp_path: Path):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    responses = {"custom_id": "b", "url": "/v1/responses", "body": {"model": "m", "input": "ho", "instructions": "be"}}
    log = read(tmp_path, row, responses)
    assert (log.format, texts(log), log.unread.left) == ("openai", ["user\nhi", "be|user\nho"], {})


def capture(second: int, given: Any, answer: str = "{}", encoding: str = "JSON") -> dict[str, Any]:
    data = json.dumps(given)
    if encoding == "BASE64":
        data = base64.b64encode(data.encode()).decode()
    return {
        "captureData": {
            "endpointInput": {"observedContentType": "application/json", "data": data, "encoding": encoding},
            "endpointOutput": {"data": answer, "encoding": "JSON"},
        },
        "eventMetadata": {"eventId": str(second), "inferenceTime": f"2026-11-02T09:00:{second:02}Z"},
        "eventVersion": "0",
    }


MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
USAGE = {"usage": {"prompt_tokens": 40, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}}


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
def test_captured_bodies_are_read_by_time(tmp_path: Path, encoding: str):
    stream = f'data: {{"choices": []}}\n\ndata: {json.dumps(USAGE)}\n\ndata: [DONE]\n'
    rows = [capture(5, MESSAGES, stream, encoding), capture(1, MESSAGES, json.dumps(USAGE), encoding)]
    log = read(tmp_path, *rows, capture(9, {"inputs": "a prompt"}, "text", encoding))
    assert (log.format, sums(log)) == ("sagemaker", (48, 32, 0, 14))
    assert texts(log) == ["user\nhi", "user\nhi", "a prompt"]
    assert log.arrived_ns.tolist() == [0, 4 * 10**9, 8 * 10**9]


def test_folder_of_captures_is_one_log(tmp_path: Path):
    for hour in range(2):
        (tmp_path / "captures" / f"{hour:02}").mkdir(parents=True)
        write_lines(tmp_path / "captures" / f"{hour:02}" / "x.jsonl", capture(hour, MESSAGES, json.dumps(USAGE)))
    log = read_log(tmp_path / "captures", LogSettings())
    assert (log.format, sums(log)) == ("sagemaker", (48, 32, 0, 14))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (capture(3, {"rows": [1, 2]}), "captureData.endpointInput.data: expected the body of a request"),
        (
            {"captureData": {"endpointInput": {"data": "!", "encoding": "BASE64"}}},
            "captureData.endpointInput.data: expected text in base64, not '!'",
        ),
        (
            capture(3, MESSAGES) | {"eventMetadata": {"inferenceTime": "soon"}},
            "eventMetadata.inferenceTime: expected a",
        ),
    ],
)
def test_bad_capture_is_named_or_skipped(tmp_path: Path, bad: Any, problem: str):
    with pytest.raises(ValueError, match=f"file:2: {problem}"):
        read(tmp_path, capture(1, MESSAGES), bad)
    assert read(tmp_path, capture(1, MESSAGES), bad, bad_lines="skip").requests == 1


def tracelab_round(session: str, index: int, second: int, prefix: int, new: int, **more: Any) -> dict[str, Any]:
    times = [("tool_result", second), ("user_message", second - 1), ("reasoning", second + 1), ("text", second + 2)]
    events = [{"event_type": kind, "timestamp": f"2026-11-02T09:00:{at:02}Z"} for kind, at in times]
    return {
        "provider": "claude",
        "session_id": session,
        "round_index": index,
        "model": "m",
        "input_tokens_total": prefix + new,
        "prefix_tokens": prefix,
        "newly_append_tokens": new,
        "claude_cache_creation_input_tokens": new - 1,
        "output_tokens": 6,
        "timing_events": events,
        "tools": [],
    } | more


def test_rounds_of_tracelab_have_the_counts_of_the_provider(tmp_path: Path):
    rows = [
        tracelab_round("a", 0, 1, 0, 64),
        tracelab_round("a", 1, 11, 64, 32),
        tracelab_round("b", 0, 5, 48, 16, claude_cache_creation_input_tokens=None),
        tracelab_round("a", 2, 21, 640, 8),
    ]
    log = read(tmp_path, *rows)
    assert (log.format, log.prompt_tokens.tolist()) == ("tracelab", [64, 64, 96, 648])
    assert sums(log) == (1 + 16 + 1 + 1, 64 + 48 + 640, 63 + 31 + 7, 24)
    assert log.sessions.tolist() == [0, 1, 0, 0]
    assert log.arrived_ns.tolist() == [0, 4 * 10**9, 10 * 10**9, 20 * 10**9]
    assert log.waits_ns.tolist() == [0, 0, 8 * 10**9, 8 * 10**9]
    assert set(log.pieces[:4]) == set(log.pieces[8:12])
    assert any(note.startswith("not counted: 1 rounds whose cached prefix is longer") for note in log.notes)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"prefix_tokens": 99}, "prefix_tokens: expected at most input_tokens_total, 40, not 99"),
        ({"input_tokens_total": "x"}, "input_tokens_total: expected a whole number from 0 up, not 'x'"),
        ({"timing_events": 7}, "timing_events: expected a list of objects, not '7'"),
    ],
)
def test_bad_round_is_named_or_skipped(tmp_path: Path, more: dict[str, Any], problem: str):
    rows = [tracelab_round("a", 0, 1, 0, 64), tracelab_round("a", 1, 11, 8, 32, **more)]
    with pytest.raises(ValueError, match=f"file:2: {problem}"):
        read(tmp_path, *rows)
    assert read(tmp_path, *rows, bad_lines="skip").requests == 1


VLLM = "INFO [loggers.py] Engine 000: Avg prompt throughput: {} tokens/s, Running: 1 reqs, Prefix cache hit rate: {}%"
SGLANG = "[2026-11-02 09:00:00] Prefill batch. #new-seq: 1, #new-token: {}, #cached-token: {}, token usage: 0.0"


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        (
            f"{VLLM.format(30, 10)}\n{VLLM.format(50, 42.5)}\n",
            "a console log of vLLM: 2 lines with 40.0 prompt tokens/s on average, and a hit rate of 42.5 % in the "
            "last of 2; these are rates alone",
        ),
        (
            "INFO [metrics.py:486] Avg prompt throughput: 40.0 tokens/s, Running: 1 reqs\n"
            "INFO [metrics.py:502] Prefix cache hit rate: GPU: 12.50%, CPU: 90.00%\n",
            "a console log of vLLM: 1 lines with 40.0 prompt tokens/s on average, and a hit rate of 12.5 % in the",
        ),
        (f"Received request x\n{VLLM.format(30, 10)}\n", ".* its lines about single requests are not read"),
        (
            f"{SGLANG.format(100, 20)}\n{SGLANG.format(100, 180)}\n",
            r"a console log of SGLang without token ids: 2 prefill batches with 200 cached of 400 tokens \(50.0 %\)",
        ),
        (
            "LMCache INFO: Reqid: 1, Total tokens 800, LMCache hit tokens: 600, need to load: 0\n",
            r"a console log of LMCache: 1 lookups with 600 cached of 800 tokens \(75.0 %\)",
        ),
        (
            '# TYPE vllm:prefix_cache_queries counter\nvllm:prefix_cache_queries_total{engine="0"} 300\n'
            'vllm:prefix_cache_queries_total{engine="1"} 100\nvllm:prefix_cache_hits_total{engine="0"} 1e2\n',
            r"a scrape of /metrics: counters with 100 cached of 400 tokens \(25.0 %\)",
        ),
        (
            "vllm:prefix_cache_queries_total 300\nvllm:prefix_cache_hits_total 100\n"
            "vllm:prefix_cache_queries_total 500\nvllm:prefix_cache_hits_total 250\n",
            r"a scrape of /metrics: counters with 150 cached of 200 tokens \(75.0 %\)",
        ),
    ],
)
def test_rates_are_named_where_there_are_no_requests(tmp_path: Path, text: str, rates: str):
    path = tmp_path / "console.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"this looks like {rates}"):
        read_log(path, LogSettings())


def test_captures_share_token_ids(tmp_path: Path):
    log = read(tmp_path, capture(1, {"prompt": FIRST}), capture(2, {"prompt": SECOND}))
    assert log.prompt_tokens.tolist() == [40, 48]
