"""Requests of different models, adapters, salts, ranks and media share nothing; turns continue their session."""

from pathlib import Path

import pytest

from spanlab.offline.replay import build_paths
from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.read import LogSettings, read_log

from .log_samples import lines, table

TOKENS = list(range(32))
#: A row of each format that has a prompt of 32 tokens, at a time.
ROWS = {
    "mooncake": lambda time: {"timestamp": time, "input_length": 32, "hash_ids": [1, 2], "block_size": 16},
    "lmcache": lambda time: {"timestamp": time, "chunk_size": 16, "chunk_hashes": [1, 2]},
    "sglang": lambda time: {"timestamp": time, "input_ids": TOKENS},
    "openai": lambda time: {"timestamp": time, "prompt": TOKENS},
    "agent_sessions": lambda time: {"block_size": 16, "requests": [{"t": time, "in": 32, "hash_ids": [1, 2]}]},
}


def reused_tokens(log: Log) -> int:
    return int(build_paths(log.pieces, log.lengths, log.starts).seen_tokens.sum())


def read_rows(folder: Path, *rows: dict, settings: LogSettings | None = None) -> Log:
    path = folder / "log.jsonl"
    path.write_bytes(lines(*rows))
    return read_log(path, settings or LogSettings())


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        ({"model": "base"}, {"model": "adapter"}, "model"),
        ({}, {"lora_name": "one"}, "adapter"),
        ({"lora_path": "one"}, {"lora_path": "two"}, "adapter"),
        ({"lora_id": 1}, {"lora_id": 2}, "adapter"),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, "salt"),
        ({"data_parallel_rank": 0}, {"data_parallel_rank": 1}, "rank"),
        ({"mm_hashes": ["cat"]}, {"mm_hashes": ["dog"]}, "media"),
    ],
)
def test_identities_share_nothing(tmp_path: Path, name: str, first: dict, second: dict, part: str):
    rows = [ROWS[name](time) | fields for time, fields in enumerate((first, second, first, second))]
    log = read_rows(tmp_path, *rows)
    assert (log.format, reused_tokens(log)) == (name, 64)
    assert f"2 cache identities ({part}): requests of different ones share nothing" in log.notes


@pytest.mark.parametrize("name", ROWS)
def test_one_identity_is_read_as_none(tmp_path: Path, name: str):
    plain = read_rows(tmp_path, *map(ROWS[name], range(3)))
    named = read_rows(tmp_path, *(ROWS[name](time) | {"model": "m", "lora_name": None} for time in range(3)))
    assert named.fingerprint == plain.fingerprint
    assert not any("identities" in note for note in named.notes)


def test_rounds_of_other_models_share_nothing(tmp_path: Path):
    path = tmp_path / "rounds.csv"
    header = ["id", "round_idx", "prefix_len", "input_len", "output_len", "model"]
    path.write_bytes(table(header, *(["s", index, 32 * index, 32, 0, model] for index, model in enumerate("aba"))))
    assert reused_tokens(read_log(path, LogSettings())) == 32


def turn(session: str, tokens: int, ids: list[int], **fields: object) -> dict:
    return {
        "session_id": session,
        "input_length": tokens,
        "output_length": 10,
        "hash_ids": ids,
        "block_size": 16,
    } | fields


def test_increments_continue_their_session(tmp_path: Path):
    log = read_rows(
        tmp_path,
        turn("a", 32, [1, 2], timestamp=1000),
        turn("a", 20, [3, 4], delay=5000),
        turn("b", 32, [1, 2], timestamp=2000),
        turn("a", 16, [5], delay=500),
        turn("b", 20, [6, 7], delay=1000),
    )
    assert log.prompt_tokens.tolist() == [32, 32, 62, 62, 88]  # a, b, b, a, a: history, answers of 10, increment
    assert log.arrived_ns.tolist() == [0, 10**9, 2 * 10**9, 5 * 10**9, 5_500_000_000]
    assert log.waits_ns is not None
    assert log.waits_ns.tolist() == [0, 0, 10**9, 5 * 10**9, 500_000_000]
    assert reused_tokens(log) == 32 + 32 + 32 + 62
    assert (log.ids, log.block) == (Ids.CHAINED, None)
    assert any(note.startswith("later rows of a session are the new tokens") for note in log.notes)


def test_turns_without_ids_are_new_tokens(tmp_path: Path):
    fields = [{"timestamp": 0}, {"delay": 1000}, {"delay": 500}]
    rows = [{"session_id": "a", "input_length": 16, "output_length": 4} | delay for delay in fields]
    log = read_rows(tmp_path, *rows)
    assert (log.format, log.prompt_tokens.tolist(), reused_tokens(log)) == ("mooncake", [16, 36, 56], 16 + 36)


def test_sessions_without_times_start_together(tmp_path: Path):
    log = read_rows(tmp_path, turn("a", 16, [1]), turn("a", 16, [2], delay=1000), turn("b", 16, [1]))
    assert log.prompt_tokens.tolist() == [16, 16, 42]
    assert any(note.startswith("sessions without a timestamp start together") for note in log.notes)


def test_rows_with_repeated_ids_are_whole_prompts(tmp_path: Path):
    rows = [turn("a", 32, [1, 2], timestamp=0), turn("a", 58, [1, 2, 3, 4], delay=1000)]
    log = read_rows(tmp_path, *rows)
    assert log.prompt_tokens.tolist() == [32, 58]
    assert any(note.startswith("rows with a delay repeat the ids") for note in log.notes)
    log = read_rows(tmp_path, *rows, settings=LogSettings(rows="increments"))
    assert log.prompt_tokens.tolist() == [32, 100]


def test_rows_can_be_taken_as_whole_or_increments(tmp_path: Path):
    delayed = [turn("a", 16, [1], timestamp=0), turn("a", 16, [2], delay=1000)]
    assert read_rows(tmp_path, *delayed, settings=LogSettings(rows="whole")).prompt_tokens.tolist() == [16, 16]
    timed = [turn("a", 16, [1], timestamp=0), turn("a", 16, [2], timestamp=1000)]
    assert read_rows(tmp_path, *timed).prompt_tokens.tolist() == [16, 16]
    assert read_rows(tmp_path, *timed, settings=LogSettings(rows="increments")).prompt_tokens.tolist() == [16, 42]
