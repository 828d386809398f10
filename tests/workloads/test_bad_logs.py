"""Errors in server logs name line and field, and lines that cannot be read may be skipped."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgpack
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from spanlab.workloads.logs import LogSettings, read_log
from spanlab.workloads.logs.log import arrival_times

from .log_samples import write_sample


def test_unknown_format_says_what_was_looked_for(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing of the kind")
    with pytest.raises(ValueError, match=r"notes.txt: expected a log of a known format: ragpulse \(.*vllm_events \("):
        read_log(path, LogSettings())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is empty; expected requests"),
        (b"\n \n", "the file is empty; expected requests"),
        (gzip.compress(b"", mtime=0), "the file is empty; expected requests"),
        (
            gzip.compress(b'{"input_ids": [1]}\n' * 9, mtime=0)[:-9],
            "expected a complete gzip file, but it is damaged",
        ),
        (gzip.compress(b"x", mtime=0)[:3] + b"\xff" * 9, "expected a complete gzip file, but it is damaged"),
        (
            b'{"input_ids": [1], "time": 0}\n{"input_ids": [1], "time": 1e17}',
            "timestamp: expected a range of at most 9e",
        ),
        (b'{"input_ids": []}\n' * 2, "expected prompts with tokens, but all 2 requests are empty"),
    ],
)
def test_log_without_content_is_named(tmp_path: Path, data: bytes, problem: str):
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"^log=.*log.jsonl: {problem}"):
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
        ("mooncake", b'{"timestamp": [], "input_length": 9, "hash_ids": [1]}', "timestamp: expected a time"),
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
        ("tracelab", b"s,1,32,8,8,1e30", "tool_wait_after_ms: expected at most 9e"),
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
    assert any(f"server.log:{number}: {problem}" in note for note in log.notes)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ([None, []], "time: expected seconds, not null"),
        ([9.0, [1]], "event: expected a list, not '1'"),
        ([9.0, [["BlockStored", [], None, [], 16]]], r"BlockStored: expected \[BlockStored, hashes, parent"),
        ([9.0, [["BlockStored", [1], None, [], 0]]], "block_size: expected a whole number from 1 up, not '0'"),
    ],
)
def test_bad_event_names_its_batch(tmp_path: Path, batch: list, problem: str):
    path = write_sample(tmp_path, "vllm_events")
    path.write_bytes(path.read_bytes() + msgpack.packb(batch))
    with pytest.raises(ValueError, match=rf"server.log:4: {problem}"):
        read_log(path, LogSettings())
    assert read_log(path, LogSettings(bad_lines="skip")).requests == 2


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"tokens": [1]}, ": expected one of each of the columns group_id, tokens"),
        ({"group_id": [[1]], "tokens": [[1]]}, ": group_id: expected texts or numbers, not list"),
        ({"group_id": ["a"], "tokens": [["x"]]}, ": tokens: expected lists of integers, not list"),
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
