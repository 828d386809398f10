"""Traces of hashed blocks: Tair KVCache and vllm-vcr, with their lengths, times and hits of keys."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.offline.replay import build_paths
from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines

START_NS = 1_793_600_000 * 10**9


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "trace", *rows), LogSettings(**settings))


def reused_tokens(log: Log) -> list[int]:
    return build_paths(log.pieces, log.lengths, log.starts).seen_tokens.tolist()


def event(kind: str, second: int, keys: list[int], tokens: int | None = None, **more: Any) -> dict[str, Any]:
    length = {} if tokens is None else {"input_len": tokens}
    return {"type": kind, "instance_id": "a", "timestamp_ns": START_NS + second * 10**9, "keys": keys} | length | more


def test_queries_of_tair_are_requests_and_writes_are_counted(tmp_path: Path):
    log = read(
        tmp_path,
        event("get", 0, [1, 2], 70),
        event("write", 1, [1, 2]),
        event("get", 2, [1, 2, 3], 96, block_mask=[True, False, False]),
        event("request", 3, [1], 40, block_mask=1),
        event("evicted", 4, [1]),
    )
    assert (log.format, log.ids, log.block) == ("tair", Ids.CHAINED, 32)
    assert log.prompt_tokens.tolist() == [70, 96, 40]
    assert reused_tokens(log) == [0, 64, 32]
    assert log.arrived_ns.tolist() == [0, 2 * 10**9, 3 * 10**9]
    assert {note for note in log.notes if note.startswith("not counted")} == {
        "not counted: 1 events of writes",
        "not counted: 1 lines of the type evicted",
        "not counted: 2 blocks as queries, since the engine had found them itself (block_mask)",
    }


def test_keys_above_63_bits_are_those_below_zero(tmp_path: Path):
    log = read(tmp_path, event("get", 0, [2**63 + 5], 16), event("get", 1, [5 - 2**63], 16))
    assert reused_tokens(log) == [0, 16]


def test_instances_share_no_blocks(tmp_path: Path):
    rows = [event("get", number, [1, 2], 32, instance_id=name) for number, name in enumerate("abab")]
    log = read(tmp_path, *rows)
    assert reused_tokens(log) == [0, 0, 32, 32]
    assert log.tenant_names == ("a", "b")


@pytest.mark.parametrize("size", [16, 512, 4096])
def test_tokens_of_a_block_follow_from_lengths(tmp_path: Path, size: int):
    draw = random.Random(size)
    counts = [draw.randrange(1, 9) for _ in range(40)]
    rows = [event("get", n, [*range(count)], count * size + draw.randrange(size)) for n, count in enumerate(counts)]
    cut = [event("get", 50 + number, [0], 4 * size) for number in range(9)]  # a trace may cut keys
    log = read(tmp_path, *rows, *cut)
    assert log.block == size
    assert sum(reused_tokens(log)) == size * (sum(min(c, max(counts[:n])) for n, c in enumerate(counts) if n) + 9)


def manager_event(kind: str, second: int, keys: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    base = {"id": f"{second}", "source": "a", "component": "cache_manager", "type": kind}
    return base | {"trigger_time_us": START_NS // 1000 + second * 10**6, "keys": keys, "input_token_len": tokens} | more


@pytest.mark.parametrize("lengths", [(33, 50), (33, 0), (0, 0)])
def test_events_of_the_manager_are_read(tmp_path: Path, lengths: tuple[int, int]):
    log = read(
        tmp_path,
        manager_event("GetCacheLocation", 0, [7, 8], lengths[0]),
        manager_event("StartWriteCache", 1, [7, 8], 0, write_session_id="w"),
        {"type": "FinishWriteCache", "source": "a", "trigger_time_us": 1, "write_session_id": "w"},
        manager_event("GetCacheLocation", 2, [7, 8, 9], lengths[1], query_type="prefix_match"),
    )
    assert log.prompt_tokens.tolist() == [lengths[0] or 32, lengths[1] or 48]
    assert reused_tokens(log) == [0, 32]
    assert log.arrived_ns.tolist() == [0, 2 * 10**9]
    assert "not counted: 2 events of writes" in log.notes
    assert any("tells no tokens per block" in note for note in log.notes) is (lengths == (0, 0))
    assert any("some events tell no length" in note for note in log.notes) is (lengths == (33, 0))


@pytest.mark.parametrize("seed", range(5))
def test_hits_of_keys_are_those_of_a_set(tmp_path: Path, seed: int):
    draw, number = random.Random(seed), 0
    prompts: list[list[int]] = [[]]
    for _ in range(60):
        base = draw.choice(prompts)
        fresh = range(number, number + draw.randrange(1, 6))
        number = fresh.stop
        prompts.append([*base[: draw.randrange(len(base) + 1)], *fresh])
    stored, hits = set[int](), []
    for keys in prompts[1:]:
        hits.append(next((n for n, key in enumerate(keys) if key not in stored), len(keys)))
        stored.update(keys)
    rows = [event("request", n, keys, 64 * len(keys) + draw.randrange(64)) for n, keys in enumerate(prompts[1:])]
    assert reused_tokens(read(tmp_path, *rows)) == [64 * count for count in hits]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (event("get", 1, [1, 2], 16), "keys: expected at most 1 for 16 tokens in blocks of 16, not 2"),
        (event("get", 1, [1]), "input_len: expected a whole number from 1 up, and it is missing"),
        (event("get", 1, [1], 0), "input_len: expected a whole number from 1 up, not '0'"),
        (event("get", 1, ["a", 1], 40), "keys: expected a list of whole numbers of 64 bits"),
        (event("get", 1, [1], 16, block_mask=[1]), r"block_mask: expected a list of true and false, or a whole number"),
        (event("get", 1, [1], 16, block_mask=-1), "block_mask: expected a whole number from 0 up, not '-1'"),
        ({"keys": [1]}, "type: expected get, request, write or the name of an event, and it is missing"),
        ('{"type": "get", "instance', "line: expected JSON"),
    ],
)
def test_bad_event_of_tair_is_named_or_skipped(tmp_path: Path, row: Any, problem: str):
    good = event("get", 0, [1, 2], 40), event("get", 1, [1, 2, 3], 48)
    with pytest.raises(ValueError, match=f"trace:3: {problem}"):
        read(tmp_path, *good, row)
    log = read(tmp_path, *good, row, bad_lines="skip")
    assert log.requests == 2
    assert any(f"bad lines ({problem.partition(':')[0]}, first in line 3)" in note for note in log.notes)


def test_blocks_that_fit_no_length_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"trace: keys: expected one key per full block of 16, 32, .* of input_len"):
        read(tmp_path, event("get", 0, [1, 2, 3], 30), event("get", 0, [1, 2, 3], 30_000))


META = {"meta": {"model": "m", "block_size": 16, "vllm_version": "0.33.0"}}


def record(arrival: float | None, tokens: int, cached: int, hashes: list[int] | None, **more: Any) -> dict[str, Any]:
    fields = {"arrival_ms": arrival, "block_hashes": hashes}
    counts = {"prompt_tokens": tokens, "cached_tokens": cached, "output_tokens": 3, "ttft_ms": 50.0, "concurrency": 1}
    return counts | {key: value for key, value in fields.items() if value is not None} | {"itl_ms": [10.0, 5.0]} | more


def test_capture_has_times_hashes_and_cached_tokens(tmp_path: Path):
    late = record(100.0, 48, 32, [1, 2, 3], itl_ms=None, itl_summary={"mean_ms": 20.0, "count": 2})
    short = record(200.0, 9, 0, None, output_tokens=1, itl_ms=None)
    log = read(tmp_path, META, late, short, record(0.0, 40, 0, [1, 2]))
    assert (log.format, log.ids, log.block) == ("vllm_vcr", Ids.CHAINED, 16)
    assert log.prompt_tokens.tolist() == [40, 48, 9]
    assert log.arrived_ns.tolist() == [0, 100_000_000, 200_000_000]
    np.testing.assert_allclose(log.observed.first_token, [0.05, 0.15, 0.25])
    np.testing.assert_allclose(log.observed.last_token, [0.065, 0.19, 0.25])
    assert reused_tokens(log) == [0, 32, 0]
    assert log.usage[:, :2].tolist() == [[40, 0], [48, 32], [9, 0]]
    assert log.output_lens.tolist() == [3, 3, 1]
    assert (log.lines.tolist(), log.unread.requests, log.unread.endless) == ([4, 2, 3], 3, 0)


def test_capture_without_hashes_has_lengths_only(tmp_path: Path):
    log = read(tmp_path, record(None, 40, 0, None), record(None, 48, 16, None))
    assert (log.ids, log.prompt_tokens.tolist()) == (Ids.NONE, [40, 48])
    assert np.nansum(log.usage, axis=0).tolist() == [88, 16, 0]


def test_prompt_without_hashes_among_others_is_unknown(tmp_path: Path):
    log = read(tmp_path, META, record(0.0, 40, 0, [1, 2]), record(1.0, 40, 0, None))
    assert (log.ids, log.unread.endless, log.unread.requests) == (Ids.CHAINED, 1, 2)
    assert not log.unread.allows_verdict


def test_images_of_a_capture_keep_prompts_apart(tmp_path: Path):
    rows = [record(float(n), 32, 0, [1, 2], mm_hashes=[name]) for n, name in enumerate("xyx")]
    assert reused_tokens(read(tmp_path, META, *rows)) == [0, 0, 32]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (record(1.0, 40, 0, [1]), "block_hashes: expected 2 for 40 tokens in blocks of 16, not 1"),
        (record(1.0, 40, 41, [1, 2]), "cached_tokens: expected at most prompt_tokens, 40, not 41"),
        (record(1.0, 40, 0, [1, 2], itl_ms=[-1.0]), "itl_ms: expected numbers from 0 up, not '-1.0'"),
        (record(1.0, 40, 0, [1, 2], output_tokens="x"), "output_tokens: expected a whole number from 0 up, not 'x'"),
        (META, "meta: expected the first line: every capture has a clock of its own"),
        ('{"prompt_tokens": 4', "line: expected JSON"),
    ],
)
def test_bad_record_is_named_or_skipped(tmp_path: Path, row: Any, problem: str):
    good = record(0.0, 40, 0, [1, 2])
    with pytest.raises(ValueError, match=f"trace:3: {problem}"):
        read(tmp_path, META, good, row)
    log = read(tmp_path, META, good, row, bad_lines="skip")
    assert log.requests == 1
    assert any(f"bad lines ({problem.partition(':')[0]}, first in line 3)" in note for note in log.notes)
