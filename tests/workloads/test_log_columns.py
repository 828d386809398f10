"""A log is the same however its prompts repeat each other: columns store only where they differ."""

import numpy as np
import pytest

from spanlab.core.token_string import sums_before
from spanlab.offline.replay import Contents
from spanlab.workloads.logs.log import Columns, Entry, Ids


def entries(seed: int, sessions: int) -> list[Entry]:
    """Return prompts that go on from, repeat, part from or change in the middle the last one of their session."""
    draw = np.random.default_rng(seed)
    last: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    made = []
    for line in range(1, 120):
        session = int(draw.integers(sessions))
        keys, lengths = last.get(session, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        cut = int(draw.integers(len(keys) + 1)) if draw.random() < 0.4 else len(keys)
        more = int(draw.integers(0, 12))
        keys = np.concatenate([keys[:cut], draw.integers(-50, 50, more)])
        lengths = np.concatenate([lengths[:cut], draw.integers(1, 20, more)])
        if draw.random() < 0.3 and len(keys):
            keys[draw.integers(len(keys))], lengths[draw.integers(len(keys))] = draw.integers(-50, 50), 30
        last[session] = keys, lengths
        opens = tuple(sorted({int(at) for at in draw.integers(0, max(len(keys), 1), 3)} - {0})) if len(keys) else ()
        made.append(Entry(keys, lengths, line, float(line), session=session if sessions > 1 else None, opens=opens))
    return made


@pytest.mark.parametrize("limit", ["_SESSIONS_HELD", "_PIECES_HELD"])
@pytest.mark.parametrize("sessions", [1, 4, 600])
@pytest.mark.parametrize("seed", range(4))
def test_columns_hold_every_piece(monkeypatch, seed: int, sessions: int, limit: str):
    monkeypatch.setattr(f"spanlab.workloads.logs.log.{limit}", 3)
    made, columns = entries(seed, sessions), Columns()
    for entry in made:
        columns.add(entry)
    log = columns.log("test", Ids.CONTENT, None, ())
    keys = np.concatenate([entry.keys for entry in made])
    assert log.pieces.tolist() == np.unique(keys, return_inverse=True)[1].tolist()
    assert log.lengths.tolist() == [length for entry in made for length in entry.lengths.tolist()]
    assert log.starts.tolist() == np.cumsum([0, *(len(entry.keys) for entry in made)]).tolist()
    assert log.prompt_tokens.tolist() == [int(entry.lengths.sum()) for entry in made]
    opened = np.flatnonzero(log.opens).tolist()
    starts = log.starts.tolist()
    expected = [
        start + at for start, entry in zip(starts, made, strict=False) if len(entry.keys) for at in (0, *entry.opens)
    ]
    assert opened == expected


def test_a_long_piece_follows_short_ones():
    columns, lengths = Columns(), [[16, 5], [16, 70_000], [16, 5]]
    for line, each in enumerate(lengths):
        columns.add(Entry(np.array([1, sum(each)]), np.array(each), line, float(line)))
    log = columns.log("test", Ids.CONTENT, None, ())
    assert (log.lengths.dtype, log.lengths.tolist()) == (np.int32, [length for each in lengths for length in each])


@pytest.mark.parametrize("count", [0, 1, 7, 70])
def test_sums_before_indexes_equal_all_sums(monkeypatch, count: int):
    monkeypatch.setattr("spanlab.core.token_string._CHUNK", 7)
    draw = np.random.default_rng(0)
    values = draw.integers(0, 1 << 30, count).astype(np.int32)
    indexes = draw.integers(0, count + 1, 200)
    assert (
        sums_before(values, indexes).tolist()
        == np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[indexes].tolist()
    )


def test_tokens_seen_anywhere_are_counted_in_chunks(monkeypatch):
    pieces = np.random.default_rng(1).integers(0, 30, 100).astype(np.int32)
    lengths, flags = np.arange(1, 101, dtype=np.int32), np.zeros(100, dtype=np.bool_)
    contents = Contents(pieces, lengths, flags, flags, np.array([0, 40, 40, 100]))
    whole = contents.seen_anywhere().tolist()
    monkeypatch.setattr("spanlab.offline.replay._CHUNK", 9)
    assert contents.seen_anywhere().tolist() == whole
    first = {piece: place for place, piece in reversed(list(enumerate(pieces.tolist())))}
    again = [0 if first[piece] == place else place + 1 for place, piece in enumerate(pieces.tolist())]
    assert whole == [sum(again[:40]), 0, sum(again[40:])]
