"""Logs come as files, compressed files, pipes and JSON documents; all read alike."""

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pytest

from spanlab.workloads.logs import repeated_lines
from spanlab.workloads.logs.read import LogSettings, local, read_log, served
from spanlab.workloads.logs.repeated_lines import RepeatedLines
from spanlab.workloads.selection import Selection

from .log_samples import SAMPLES, lines, write_sample


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_compressed_log_reads_as_plain(tmp_path: Path, pack: Callable[[bytes], bytes]):
    plain, packed = write_sample(tmp_path, "sglang"), tmp_path / "packed"
    packed.write_bytes(pack(plain.read_bytes()))
    assert read_log(packed, LogSettings()).fingerprint == read_log(plain, LogSettings()).fingerprint
    packed.write_bytes(pack(plain.read_bytes())[:-9])
    with pytest.raises(ValueError, match="packed: expected a complete compressed file, but it is damaged"):
        read_log(packed, LogSettings())


@pytest.fixture
def pipe(tmp_path: Path) -> Callable[[bytes], Path]:
    """Return a function that writes bytes into a new named pipe, while somebody reads it."""

    def make(data: bytes) -> Path:
        path = tmp_path / "pipe"
        os.mkfifo(path)
        threading.Thread(target=lambda: path.write_bytes(data), daemon=True).start()
        return path

    return make


def test_pipe_reads_as_a_file(tmp_path: Path, pipe: Callable[[bytes], Path]):
    plain, path = write_sample(tmp_path, "parquet"), pipe(SAMPLES["parquet"]())
    workload = local(path, LogSettings(), Selection())
    assert workload.log is not None
    assert workload.log.fingerprint == read_log(plain, LogSettings()).fingerprint
    assert f"{path} (a pipe, SHA-256 " in workload.provenance.detail
    again = read_log(path, LogSettings(piece=1))  # a second reading of the copy
    assert again.prompt_tokens.tolist() == [40, 48]


READ_TWICE = """
import sys
from multiprocessing import get_context
from pathlib import Path
from spanlab.workloads.logs.read import LogSettings, read_log

arguments = Path(sys.argv[1]), LogSettings()
here = read_log(*arguments).fingerprint
with get_context("spawn").Pool(1) as pool:
    assert pool.apply(read_log, arguments).fingerprint == here
"""


def test_served_log_is_known_by_its_requests_and_their_groups(tmp_path: Path):
    def origin(*sessions: str) -> str:
        row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]}
        path = tmp_path / "log.jsonl"
        path.write_bytes(lines(*(row | {"session_id": session} for session in sessions)))
        return served(local(path, LogSettings(), Selection()), Selection()).origin

    assert origin("a", "b") == origin("c", "d") != origin("a", "a")
    assert origin("a", "b", "b") not in (origin("a", "b", "a"), origin("a", "b"))


def test_workers_read_the_copy_of_a_pipe(tmp_path: Path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    data = SAMPLES["mooncake"]()
    subprocess.run([sys.executable, "-c", READ_TWICE, "-"], input=data, env=environment, check=True)
    assert not list(tmp_path.glob("spanlab-log-*"))


def test_pipe_without_a_writer_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"pipe: no data for 0.01 s; expected a program that writes into this pipe"):
        read_log(path, LogSettings(wait_s=0.01))
    assert "pipe: waits for data, up to 0.01 s" in capsys.readouterr().err


def test_pipe_above_the_limit_is_refused(pipe: Callable[[bytes], Path]):
    with pytest.raises(
        ValueError, match=r"expected at most 1.52588e-05 GiB from a pipe; workload.log.pipe_gib=N allows more"
    ):
        read_log(pipe(b"x" * 20_000), LogSettings(pipe_gib=2**-16))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/dev/zero", "log=/dev/zero: expected a file, a folder, a pipe, or - for standard input"),
        ("/proc/self/mem", "log=/proc/self/mem: expected a readable file, not one with 'Input/output error'"),
    ],
)
def test_what_is_no_log_is_named(path: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_log(Path(path), LogSettings())


def test_array_of_bodies_reads_as_lines(tmp_path: Path):
    path, document = write_sample(tmp_path, "openai"), tmp_path / "bodies.json"
    bodies = [json.loads(line) for line in path.read_text().splitlines()]
    for text in (json.dumps(bodies), json.dumps(bodies, indent=1), "\ufeff" + json.dumps(bodies)):
        document.write_text(text)
        assert read_log(document, LogSettings()).fingerprint == read_log(path, LogSettings()).fingerprint


def test_formatted_result_reads_as_one_line(tmp_path: Path):
    path, document = write_sample(tmp_path, "vllm_bench"), tmp_path / "result.json"
    document.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    assert read_log(document, LogSettings()).fingerprint == read_log(path, LogSettings()).fingerprint


def test_failed_requests_count_nowhere(tmp_path: Path):
    path = tmp_path / "result.json"
    result = {"input_lens": [5, 6, 7, 8], "output_lens": [3, 0, 3, 0], "start_times": [1.0, 2.0, 3.0, 4.0]}
    path.write_bytes(lines(result | {"ttfts": [0.5, 0.0, 0.5, 0.5], "itls": [[], [], [], []]}))
    log = read_log(path, LogSettings())
    assert log.prompt_tokens.tolist() == [5, 7, 8]
    assert "not counted: 1 failed requests" in log.notes
    path.write_bytes(lines(result | {"errors": ["", "Connection lost", "", "Connection lost"]}))
    assert read_log(path, LogSettings()).prompt_tokens.tolist() == [5, 7]
    rows = [{"input_toks": 5, "arrival_time": 1.0}, {"input_toks": 6, "arrival_time": 2.0, "error": "lost"}]
    path.write_bytes(lines(*rows))
    assert read_log(path, LogSettings()).prompt_tokens.tolist() == [5]


def test_times_that_the_server_reports_beside_those_of_the_client(tmp_path: Path):
    path = tmp_path / "result.json"
    result = {"input_lens": [5, 6], "output_lens": [3, 3], "start_times": [1.0, 2.0]}
    result |= {"ttfts": [0.5, 0.75], "itls": [[0.25, 0.25], [0.25, 0.25]]}
    path.write_bytes(lines(result | {"server_ttfts": [0.375, None], "server_queue_times": [0.125, None]}))
    observed = read_log(path, LogSettings()).observed
    assert observed is not None
    assert not observed.own_clock
    assert (observed.queued[0], observed.scheduled[0]) == (0.125, 0.25)
    assert np.isnan([observed.queued[1], observed.scheduled[1]]).all()
    assert observed.last_token.tolist() == [1.0, 2.25]
    for name, values, message in (
        ("server_ttfts", [0.625, None], "server_ttfts: expected no more than ttfts, 0.5"),
        ("server_ttfts", [0.5], "server_ttfts: expected a list, as long as ttfts"),
        ("server_queue_times", ["x", None], "server_queue_times: expected a list of numbers"),
    ):
        path.write_bytes(lines(result | {name: values}))
        with pytest.raises(ValueError, match=message):
            read_log(path, LogSettings())


@pytest.mark.parametrize("field", ["hash_ids", "chunk_hashes"])
@pytest.mark.parametrize(("ids", "others"), [([1, 2**63 + 1], [1, 2**63 + 2]), ([-5, -6], [-5, -7])])
def test_hashes_of_64_bits_are_read(tmp_path: Path, field: str, ids: list[int], others: list[int]):
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines(*({"input_length": 1024, field: row} for row in (ids, others, ids))))
    first, second, third = read_log(path, LogSettings()).pieces.reshape(3, 2).tolist()
    assert first == third
    assert (first[0] == second[0], first[1] == second[1]) == (True, False)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("2026-05-01T10:00:00Z", "2026-05-01T12:00:02+02:00"),
        (1_777_000_000.0, 1_777_000_002.0),
        (1_777_000_000_000, 1_777_000_002_000),
        (1_777_000_000_000_000_000, 1_777_000_002_000_000_000),
    ],
)
def test_times_of_proxies_are_read(tmp_path: Path, start: object, end: object):
    path = tmp_path / "proxy.jsonl"
    path.write_bytes(lines({"prompt": "one", "startTime": start, "endTime": end}, {"prompt": "two", "startTime": end}))
    log = read_log(path, LogSettings())
    assert log.arrived_ns.tolist() == [0, 2 * 10**9]
    assert log.observed is not None
    assert log.observed.last_token[0] == 2.0


# -- Lines that repeat messages: the same values as of a whole line, of objects that lines share. ---


def message(draw: random.Random) -> dict[str, Any]:
    content = "".join(draw.choices('ab"\\\n}]{[,é\u2028😀', k=draw.randrange(400)))
    return {"role": draw.choice(["user", "tool"]), "content": content, "messages": [draw.random(), {"input": [{}]}]}


@pytest.mark.parametrize("seed", range(4))
def test_lines_have_the_values_of_whole_lines(monkeypatch: pytest.MonkeyPatch, seed: int):
    draw, lines = random.Random(seed), RepeatedLines()
    monkeypatch.setattr(repeated_lines, "_WINDOW", 8)
    monkeypatch.setattr(repeated_lines, "_CONVERSATIONS", 2)
    conversations: list[list[dict[str, Any]]] = [[] for _ in range(3)]
    shared = 0
    for number in range(120):
        messages = draw.choice(conversations)
        if draw.random() < 0.1:
            messages[draw.randrange(len(messages) + 1) :] = []
        messages += [message(draw) for _ in range(draw.randrange(3))]
        misleading = {"tools": [{"messages": [{}]}]} if draw.random() < 0.2 else {}
        body = misleading | {draw.choice(["messages", "input"]): messages}
        row = {"at": number} | draw.choice([body, {"body": body}, {"request": {"body": body}}, {"x": body}])
        separators = draw.choice([None, (",", ":"), (" , ", " : ")])
        line = json.dumps(row, ensure_ascii=draw.random() < 0.5, separators=separators).encode()
        assert lines.loads(line) == orjson.loads(line)
        shared += lines.shares
    assert shared > 20


def test_messages_of_a_conversation_are_the_same_objects():
    lines, messages = RepeatedLines(), [{"role": "user", "content": "x" * 300} for _ in range(4)]
    bodies = [{"at": count, "messages": messages[:count]} for count in (3, 4)]
    first, second = (lines.loads(orjson.dumps(body))["messages"] for body in bodies)
    assert [one is other for one, other in zip(first, second, strict=False)] == [True] * 3


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [{"a": 1}, {"b": NaN}]}',
        '{"messages": [{"a": 1} {"b": 2}]}',
        '{"messages": [{"a": 1},]}',
        '{"messages": [{"a": 1}], "b": }',
        '{"messages": [{"a": "\\ud800"}]}',
        '{"messages": [{"a": 1}',
    ],
)
def test_damaged_line_is_refused(text: str):
    with pytest.raises(orjson.JSONDecodeError):
        RepeatedLines().loads(text.encode())
