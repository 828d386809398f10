"""KV events of a server are read as prompts; damaged captures and blocks that cannot be are refused."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from spanlab.offline.replay import build_paths
from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.shared import TRACES, needs
from .log_samples import SAMPLES, write_sample


def stored(blocks: list, parent: object, **fields: object) -> dict:
    """Return an event of today's servers; old ones send the values alone."""
    named = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent, "token_ids": []}
    return named | {"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


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
        tmp_path, [1.0, [stored(blocks, None)]], [2.0, [stored([7], None)]], [3.0, [stored([8], blocks[-1])]]
    )
    assert lines_read(read_log(path, LogSettings())) == (3, 96, 32)


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
def test_unfinished_container_is_refused(tmp_path: Path, unfinished: bytes):
    path = write_sample(tmp_path, "vllm_events")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + unfinished)
    with pytest.raises(
        ValueError, match=f"ends within message 4, which begins at byte {size}: {len(unfinished)} bytes"
    ):
        read_log(path, LogSettings(bad_lines="skip"))


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
    assert "the capture lost 7 messages, in 2 gaps of the sequence numbers: their blocks are missing" in log.notes
    assert "not counted: 1 messages that came twice" in log.notes


@needs(TRACES)
def test_recorded_events_of_a_server_are_read():
    log = read_log(TRACES / "vllm-cpu-0.32-live" / "kv_events_raw.bin", LogSettings())
    assert (log.requests, log.block) == (113, 32)
