"""Errors in server logs name line and field, and lines that cannot be read may be skipped."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pytest
from pyarrow import parquet

from spanlab.workloads.logs.log import arrival_times
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.logs.source import LOG_FORMATS

from ..support.files import write_lines
from .log_samples import SAMPLES, lines, write_sample


@pytest.mark.parametrize(
    ("data", "nearest"),
    [
        (b"nothing of the kind", "the file begins with text that is neither JSON nor a known table"),
        (b"\0\1\2" * 99, "the file begins with binary data"),
        (b'{"hash_ids": [1], "timestamp": 0}', "the nearest is mooncake, whose input_length is missing"),
        (b"TIMESTAMP,ContextTokens\n1,2\n", "the nearest is azure, whose GeneratedTokens is missing"),
        (b'{"one": 1, "two": 2}', "no format has rows with the fields one, two"),
        (b'{"trace": {"id": "t"}}', "the nearest is langfuse, whose observations is missing"),
        (b'{"sessionId": "s", "message": {}}', "the nearest is claude_code, whose type is missing"),
        (b'{"payload": {}, "type": "custom"}', "the nearest is codex, whose fields have other content"),
        (b"INFO Received request c: prompt: 'x'", "this looks like a console log of vLLM"),
        (b"# HELP vllm:x y\n", "this looks like a scrape of /metrics"),
        ("{}".encode("utf-16"), "this looks like a text in UTF-16"),
        (b"PK\3\4", "this looks like a zip archive"),
    ],
)
def test_unknown_format_names_the_nearest(tmp_path: Path, data: bytes, nearest: str):
    path = tmp_path / "some.log"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"some.log: expected a log of a known format; {nearest}") as error:
        read_log(path, LogSettings())
    assert len(str(error.value)) < 250 + len(str(path))


#: What several tools write, and no call of a model is in it: each row alone could be taken for another format.
OF_OTHERS: dict[str, dict[str, Any]] = {
    "langfuse": {"model": "m", "input": "a text", "type": "SPAN", "sessionId": "s", "parentObservationId": None},
    "langfuse ": {"model": "m", "input": [{"role": "user", "content": "a"}], "usage_details": {"input": 3}},
    "langfuse  ": {"observations": [], "messages": [{"role": "user", "content": "a"}]},
    "otel": {"resourceSpans": {}, "messages": [{"role": "user", "content": "a"}]},
    "sagemaker": {"captureData": {}, "model": "m", "input": "a text"},
    "trajectory": {"trajectory": {}, "info": {}, "messages": [{"role": "user", "content": "a"}]},
    "sharegpt": {"conversations": [], "model": "m", "input": "a text"},
    "codex": {"timestamp": 1, "type": "later", "payload": {}, "prompt": "a text"},
    "guidellm": {"benchmarks": [], "prompt_tokens": 7, "timestamp": 1},
    "aiperf": {"metadata": {}, "metrics": {}, "messages": [{"role": "user", "content": "a"}]},
    "bedrock": {"schemaType": "Check", "modelId": "m", "model": "m", "input": "a text"},
    "helicone": {"request_created_at": 1, "response_status": 200, "messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_rows_with_marks_of_a_format_are_of_no_other(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=rf"expected a log of a known format; rows with .+ are of {name.strip()}, and"):
        read_log(write_lines(tmp_path / "log", OF_OTHERS[name]), LogSettings())


def test_samples_with_messages_beside_stay_what_they_are(tmp_path: Path):
    marked = [name for name in LOG_FORMATS if LOG_FORMATS.make(name, {}, {}).marks]
    assert len(marked) == 12
    for name in set(marked) & set(SAMPLES):
        rows = [orjson.loads(line) for line in SAMPLES[name]().splitlines()]
        rows = [row | {"model": "m", "prompt": "a text"} for row in rows]
        assert read_log(write_lines(tmp_path / name, *rows), LogSettings()).format == name


def test_traces_with_lengths_are_no_results_of_a_benchmark(tmp_path: Path):
    row = {"run_type": "llm", "start_time": 1, "prompt_tokens": 12, "inputs": {"messages": []}}
    with pytest.raises(ValueError, match="expected a log of a known format"):
        read_log(write_lines(tmp_path / "log", row), LogSettings())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is empty; expected requests"),
        (b"\n \n", "the file is empty; expected requests"),
        (gzip.compress(b"", mtime=0), "the file is empty; expected requests"),
        (gzip.compress(b"x", mtime=0)[:3] + b"\xff" * 9, "expected a complete compressed file, but it is damaged"),
        (
            b'{"input_ids": [1], "time": -8e9}\n{"input_ids": [1], "time": 8e9}',
            "timestamp: expected a range of at most 9e",
        ),
        (b'{"input_ids": []}\n' * 2, "expected prompts with tokens, but all 2 requests are empty"),
        (b'[{"prompt": "x"},\n{"prompt"', "expected one complete JSON value, but unexpected end of data"),
    ],
)
def test_log_without_content_is_named(tmp_path: Path, data: bytes, problem: str):
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"^log=.*log.jsonl: {problem}"):
        read_log(path, LogSettings())


def test_bad_item_of_a_document_is_named(tmp_path: Path):
    path = tmp_path / "log.json"
    path.write_bytes(b'[\n{"prompt": "x"},\n{"prompt": [-1]}\n]')
    with pytest.raises(ValueError, match=r"log.json: item 2: prompt: expected a list of whole numbers"):
        read_log(path, LogSettings())


def test_missing_log_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^log=.*gone: no such file; expected a log"):
        read_log(tmp_path / "gone", LogSettings())


@pytest.mark.parametrize(
    ("name", "bad", "problem"),
    [
        ("mooncake", b"{broken", "line: expected JSON"),
        ("mooncake", b'{"input_length": "x", "hash_ids": [1]}', "input_length: expected a whole number from 0 up"),
        ("mooncake", b'{"input_length": 9, "hash_ids": [1, 2]}', "hash_ids: expected 1 ids for 9 tokens, not 2"),
        ("mooncake", b'{"input_length": 9, "hash_ids": 1}', "hash_ids: expected a list of whole numbers"),
        ("mooncake", b'{"block_size": 0, "hash_ids": [1]}', "block_size: expected a whole number from 1 up, not '0'"),
        ("mooncake", b'{"input_length": 1e30}', "input_length: expected a whole number below"),
        (
            "mooncake",
            b'{"input_length": 9, "hash_ids": [1], "session_id": []}',
            "session_id: expected a text or a number",
        ),
        (
            "mooncake",
            b'{"timestamp": [], "input_length": 9, "hash_ids": [1]}',
            "timestamp: expected a number or a date",
        ),
        ("sglang", b'{"obj": {"input_ids": ["x"]}}', "input_ids: expected a list of whole numbers"),
        ("openai", b'{"messages": [{"content": "x"}]}', "messages: expected a role in each message"),
        ("openai", b'{"messages": 7}', "messages: expected a list of messages"),
        ("openai", b'{"prompt": [9223372036854775808, -1]}', "prompt: expected a list of whole numbers of 64 bits"),
        ("agent_sessions", b"null", "line: expected a JSON object, not 'null'"),
        ("agent_sessions", b'{"requests": true}', "requests: expected a list of objects, not 'True'"),
        ("agent_sessions", b'{"block_size": 0}', "block_size: expected a whole number from 1 up, not '0'"),
        ("sglang text", b"[2026-99-01 10:00:00] Finish: input_ids=[1]", "timestamp: expected a number or a date"),
        ("sglang text", b"Finish: input_ids=[1,,2]", "input_ids: expected a list of token ids, not '1,,2'"),
        ("lmcache", b'{"chunk_hashes": ["a"], "chunk_size": 16, "seq_len": 99}', "seq_len: expected 16 to 31"),
        ("azure", b"2023-11-16 18:15:46,many,5", "ContextTokens: expected a whole number from 0 up, not 'many'"),
        ("azure", b"2023-11-16 18:15:46,5", "line: expected 3 columns, not 2"),
        ("azure", b"2023-11-16 18:15:46,5,\xff", "line: expected one row of CSV as UTF-8 text, not b'2023"),
        ("azure", b"nan,5,5", "TIMESTAMP: expected a number or a date, not 'nan'"),
        ("azure", b"yesterday,5,5", "TIMESTAMP: expected a number or a date, not 'yesterday'"),
        ("openai", b'{"prompt": "x", "message_mode": "delta"}', "message_mode: expected history, not delta"),
        ("openai", b'{"prompt": [5, -1]}', "prompt: expected a list of whole numbers from 0 to below 2"),
        ("openai", b'{"prompt": [5, true]}', "prompt: expected a list of whole numbers of 64 bits"),
        ("openai", b'{"prompt": "x", "model": {}}', "model: expected a text or a number"),
        ("sglang", b'{"input_ids": [5, -1]}', "input_ids: expected a list of whole numbers from 0 to below 2"),
        ("sglang", b'{"input_ids": [5, true]}', "input_ids: expected a list of whole numbers of 64 bits"),
        ("sglang", b"\0\0\0\0", "line: expected JSON"),
        ("sglang", b"one,two,three", "line: expected JSON"),
        ("sglang", b"\xff\xfe\x93", "line: expected JSON"),
        ("mooncake", b'{"input_length": 9, "hash_ids": [false]}', "hash_ids: expected a list of whole numbers of 64"),
        ("mooncake", b'{"input_length": 9, "hash_ids": [18446744073709551616]}', "hash_ids: expected a list of whole"),
        ("agent_sessions", b'{"id": "t", "block_size": 16}', "requests: expected a list of objects, and it is missing"),
        ("agent_sessions", b'{"requests": [7]}', "requests: expected a list of objects"),
        ("agent_sessions", b'{"requests": [{"t": -1, "hash_ids": [1]}]}', r"requests\[0\].t: expected a number from 0"),
        (
            "agent_sessions",
            b'{"requests": [{"think_time": -9, "hash_ids": [1]}]}',
            r"requests\[0\].think_time: expected a number from 0 to 9e.09, not '-9'",
        ),
        (
            "agent_sessions",
            b'{"requests": [{"think_time": "2026-01-01", "hash_ids": [1]}]}',
            r"requests\[0\].think_time: expected a number from 0 to 9e",
        ),
        ("spanlab_records", b'{"seed": "x"}', "seed: expected a whole number from 0 up, not 'x'"),
        ("spanlab_records", b'{"seed": 0, "rate_rps": [1]}', "rate_rps: expected a number from 0 to 1e"),
        ("openai", b'{"messages": %b}' % (b"[" * 999 + b"]" * 999), "messages: expected a list of objects"),
        (
            "openai",
            b'{"messages": [{"role": "user", "content": %b}]}' % (b"[" * 999 + b"]" * 999),
            "line: expected JSON of at most 250 levels",
        ),
        (
            "mooncake",
            b'{"input_length": 9, "hash_ids": %b}' % (b"[" * 999 + b"]" * 999),
            "line: expected JSON of at most",
        ),
        (
            "vllm_bench requests",
            b'{"input_toks": 1, "arrival_time": 1.5, "queued_ts": 5, "scheduled_ts": 4}',
            "scheduled_ts: expected a time no earlier than the one before it, 5, not '4.0'",
        ),
        ("tracelab", b"s,1,32,8,8,1e30", "tool_wait_after_ms: expected a number from 0 to 9e"),
        ("tracelab", b"s,1,99,8,8,0", "prefix_len: expected at most 48, the tokens so far, not 99"),
        ("vllm_bench", b'{"input_lens": [1], "output_lens": []}', "input_lens: expected as many as output_lens"),
        ("vllm_bench", b'{"input_lens": [-1], "output_lens": [1]}', "input_lens: expected a list of whole numbers"),
        (
            "vllm_bench",
            b'{"input_lens": [1], "output_lens": [1], "start_times": ["x"]}',
            "start_times: expected a list of numbers",
        ),
    ],
)
def test_bad_line_is_named_or_skipped(tmp_path: Path, name: str, bad: bytes, problem: str):
    path = write_sample(tmp_path, name)
    rows = path.read_bytes().splitlines()
    number = 3 if name == "tracelab" else 2  # behind a header and the round that others build on
    path.write_bytes(b"\n".join([*rows[: number - 1], bad, *rows[number - 1 :]]))
    with pytest.raises(ValueError, match=rf"server.log:{number}: {problem}"):
        read_log(path, LogSettings())
    log = read_log(path, LogSettings(bad_lines="skip"))
    assert log.requests == 2
    field = re.sub(r"\\\[0\\\]", "[]", problem).partition(":")[0]
    assert any(f"bad lines ({field}, first in line {number}) (1 times" in note for note in log.notes)


def test_skipped_lines_are_counted_by_field(tmp_path: Path):
    path = write_sample(tmp_path, "mooncake")
    path.write_bytes(path.read_bytes() + b'{\n{\n{"input_length": -1}\n')
    with pytest.raises(ValueError, match=r"server.log:3: line: expected JSON; workload.log.bad_lines=skip skips"):
        read_log(path, LogSettings())
    log = read_log(path, LogSettings(bad_lines="skip"))
    (note,) = (note for note in log.notes if "bad lines" in note)
    assert "bad lines (line, first in line 3) (2 times, 2 bytes" in note
    assert "bad lines (input_length, first in line 5) (1 times, 20 bytes" in note


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ({"arrival_time": 1.0, "queued_ts": 1e300}, "queued_ts"),
        ({"arrival_time": 1.0, "queued_ts": 1.0, "last_token_ts": 1e9}, "last_token_ts"),
        ({"arrival_time": 1.0, "first_token_ts": 1e9}, "first_token_ts"),
    ],
)
def test_times_far_from_arrival_are_refused(tmp_path: Path, times: dict, name: str):
    path = tmp_path / "log.jsonl"
    rows = [{"input_toks": 5, "output_toks": 5, "arrival_time": 0.0, "queued_ts": 0.0}, {"input_toks": 5} | times]
    path.write_bytes(lines(*rows))
    with pytest.raises(ValueError, match=f"log.jsonl(:|, line )2: {name}: expected a time within 30 days"):
        read_log(path, LogSettings())


@pytest.mark.parametrize(
    ("settings", "data", "problem"),
    [
        (
            LogSettings(line_mib=1),
            b'{"prompt": "%b"}' % (b"x" * (1 << 20)),
            "log:1: line: expected at most 1 MiB; workload",
        ),
        (
            LogSettings(line_mib=1),
            b'[{"prompt": "%b"}]' % (b"x" * (1 << 20)),
            "log: one JSON value: expected at most 1 MiB",
        ),
        (
            LogSettings(prompt_tokens=9),
            b'{"prompt": [1,2,3,4,5,6,7,8,9,0]}',
            "log:1: tokens: expected a prompt of at most 9",
        ),
        (
            LogSettings(),
            b"id,round_idx,prefix_len,input_len,output_len\ns,0,0,1000000000,1\n",
            r"log:2: input_len: expected a prompt of at most 16,777,216 tokens, not 1,000,000,001 \(workload.log",
        ),
    ],
)
def test_limits_name_how_to_raise_them(tmp_path: Path, settings: LogSettings, data: bytes, problem: str):
    path = tmp_path / "log"
    path.write_bytes(gzip.compress(data))
    with pytest.raises(ValueError, match=problem):
        read_log(path, settings)


@pytest.mark.parametrize(
    ("name", "value"), [("line_mib", 1e300), ("wait_s", 0.0), ("pipe_gib", -1), ("prompt_tokens", 0)]
)
def test_limits_are_positive_and_finite(name: str, value: float):
    with pytest.raises(ValueError, match=rf"^workload.log.{name}={re.escape(str(value))}: expected "):
        LogSettings(**{name: value})


def test_quoted_header_is_recognised(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_text('"TIMESTAMP","ContextTokens","GeneratedTokens"\n"1","2","3"\n')
    assert read_log(path, LogSettings()).prompt_tokens.tolist() == [2]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"tokens": [1]}, ": expected one of each of the columns group_id, tokens"),
        ({"group_id": [[1]], "tokens": [[1]]}, ": group_id: expected texts or numbers, not list"),
        ({"group_id": ["a"], "tokens": [["x"]]}, ": tokens: expected lists of integers, not list"),
        ({"group_id": ["a", "b"], "tokens": [[1], [-1]]}, ":2: tokens: expected token ids from 0 to below 2"),
        ({"group_id": ["a", "b"], "tokens": [[1], [None]]}, ":2: tokens: expected a list of token ids, not null"),
    ],
)
def test_bad_table_is_named(tmp_path: Path, columns: dict, problem: str):
    parquet.write_table(pyarrow.table(columns), tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=rf"log.parquet{problem}"):
        read_log(tmp_path / "log.parquet", LogSettings())


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("ContextTokens", "expected one column ContextTokens, not 2"),
        ("\udcff", "expected one row of CSV as UTF-8 text"),
    ],
)
def test_bad_header_is_named(tmp_path: Path, header: str, problem: str):
    path = tmp_path / "log.csv"
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens,{header}\n1,2,3,4\n"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"log.csv:1: line: {problem}"):
        read_log(path, LogSettings(bad_lines="skip"))


def test_times_too_far_apart_are_refused():
    with pytest.raises(ValueError, match=r"^log: timestamp: expected a range of at most 9e\+09 s, not 1e\+17"):
        arrival_times(np.array([1.7e18, 1.8e18]))
