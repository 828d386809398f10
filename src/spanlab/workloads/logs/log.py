"""A log as columns: no object per request, and no token ids where a block's number says as much."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from spanlab.workloads.logs.observed import UNKNOWN, Moments, Observed, observed

Ints = NDArray[np.int64]
Keys = NDArray[np.int64]


_PART = 1 << 20  # pieces that are numbered at once
LONGEST_S = 9e9  # between the first and the last request: what nanoseconds in 64 bits can say, 285 years


class Ids(StrEnum):
    """What equal ids of two pieces of a log mean."""

    CHAINED = "chained"  # equal content after an equal past: reuse at other positions cannot be known
    CONTENT = "content"  # equal content, wherever it stands
    NONE = "none"  # lengths only: no reuse can be computed


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Requests in order of arrival; request r consists of the pieces `starts[r]:starts[r + 1]`.

    `pieces`       int32 numbers of contents, end to end
    `lengths`      int32, tokens of each piece
    `opens`        whether a piece begins a span: a message, a passage
    `free`         whether a piece belongs to a span whose order among its neighbours does not matter: a passage
    `starts`       int64, shape (requests + 1,)
    `arrived_ns`   int64, shape (requests,); zeros where the log has no times
    `output_lens`  int32, shape (requests,); 0 where the log does not say
    `sessions`     numbers by first appearance, shape (requests,); None where the log names none
    `tenants`      likewise; `tenant_names` are their names
    `waits_ns`     int64, shape (requests,): think or tool time before a request, since the one before it in its session
                   ended; None where the log does not say
    `block`        tokens per block, where the log cuts prompts into blocks itself
    `notes`        what a reader of the numbers must know, one sentence each
    `observed`     when tokens came, where the log says so
    """

    format: str
    ids: Ids
    pieces: NDArray[np.int32]
    lengths: NDArray[np.int32]
    opens: NDArray[np.bool_]
    free: NDArray[np.bool_]
    starts: Ints
    arrived_ns: Ints
    output_lens: NDArray[np.int32]
    sessions: NDArray[np.int32] | None = None
    tenants: NDArray[np.int32] | None = None
    tenant_names: tuple[str, ...] = ()
    waits_ns: Ints | None = None
    block: int | None = None
    notes: tuple[str, ...] = ()
    observed: Observed | None = None

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    @property
    def prompt_tokens(self) -> Ints:
        """Prompt lengths, shape (requests,)."""
        ends = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        return np.diff(ends[self.starts])

    @property
    def fingerprint(self) -> str:
        """A hash of every request."""
        digest = sha256()
        for column in (self.pieces, self.lengths, self.opens, self.starts, self.arrived_ns, self.output_lens):
            digest.update(column.tobytes())
        return digest.hexdigest()


@dataclass(slots=True)
class Entry:
    """One request as an importer reads it.

    `keys`     int64, contents of its pieces; `lengths` are their tokens
    `opens`    indexes of the pieces that begin a span; empty: the prompt is one span
    `free`     indexes of the pieces of spans whose order does not matter
    `at`       seconds on the log's clock; None where it has none
    `wait`     seconds between the end of the one before it in its session and this one; 0 where it has none
    `line`     where it stands, for messages
    `moments`  when it was queued and scheduled, and its tokens came
    """

    keys: Keys
    lengths: Ints
    line: int
    at: float | None = None
    output_len: int = 0
    session: Hashable | None = None
    tenant: Hashable | None = None
    opens: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    moments: Moments = UNKNOWN
    wait: float = 0.0


@dataclass
class _Names:
    """Names of one kind in order of first appearance; empty where the log has none."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    column: array[int] = field(default_factory=lambda: array("i"))

    def add(self, name: Hashable | None) -> None:
        self.column.append(self.numbers.setdefault(name, len(self.numbers)))

    def known(self) -> NDArray[np.int32] | None:
        return None if set(self.numbers) <= {None} else np.array(self.column, dtype=np.int32)


class Columns:
    """Takes entries in and hands out a log; 14 bytes a piece while it reads."""

    def __init__(self) -> None:
        self._keys, self._lengths = array("q"), array("i")
        self._opens, self._free = bytearray(), bytearray()
        self._starts, self._outputs = array("q", [0]), array("i")
        self._times: array[float] = array("d")
        self._waits: array[float] = array("d")
        self._moments, self._lines = array("d"), array("q")
        self._sessions, self._tenants = _Names(), _Names()

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, entry: Entry) -> None:
        """Append a request."""
        count = len(entry.keys)
        self._keys.frombytes(entry.keys.astype(np.int64, copy=False).tobytes())
        self._lengths.frombytes(entry.lengths.astype(np.int32, copy=False).tobytes())
        self._opens += _marked((0, *entry.opens) if count else (), count)
        self._free += _marked(entry.free, count)
        self._starts.append(len(self._keys))
        self._outputs.append(entry.output_len)
        self._times.append(np.nan if entry.at is None else entry.at)
        self._waits.append(entry.wait)
        self._moments.extend(entry.moments)
        self._lines.append(entry.line)
        self._sessions.add(entry.session)
        self._tenants.add(entry.tenant)

    def log(self, name: str, ids: Ids | None, block: int | None, notes: tuple[str, ...]) -> Log:
        """The log; `ids` None lets the ids themselves tell whether they are chained."""
        pieces = _numbered(np.frombuffer(self._keys, dtype=np.int64))
        starts = np.array(self._starts, dtype=np.int64)
        waits = np.rint(np.array(self._waits) * 1e9).astype(np.int64)
        times = np.array(self._times, dtype=np.float64)
        arrived, spread = arrival_times(times)
        moments = np.array(self._moments, dtype=np.float64).reshape(-1, len(UNKNOWN))
        return Log(
            format=name,
            ids=ids or (Ids.CHAINED if is_chained(pieces, starts) else Ids.CONTENT),
            pieces=pieces,
            lengths=np.array(self._lengths, dtype=np.int32),
            opens=np.frombuffer(bytes(self._opens), dtype=np.bool_),
            free=np.frombuffer(bytes(self._free), dtype=np.bool_),
            starts=starts,
            arrived_ns=arrived,
            output_lens=np.array(self._outputs, dtype=np.int32),
            sessions=self._sessions.known(),
            tenants=self._tenants.known(),
            tenant_names=tuple(str(name) for name in self._tenants.numbers),
            waits_ns=waits if waits.any() else None,
            block=block,
            notes=(*notes, *spread),
            observed=observed(times, moments, np.array(self._lines, dtype=np.int64)),
        )


def _marked(indexes: Iterable[int], count: int) -> bytearray:
    marks = bytearray(count)
    for index in indexes:
        marks[index] = 1
    return marks


def _numbered(keys: Keys) -> NDArray[np.int32]:
    """Each key's number in increasing order; found part by part, for an inverse of all takes more memory."""
    known, numbers = np.unique(keys), np.empty(len(keys), dtype=np.int32)
    for start in range(0, len(keys), _PART):
        numbers[start : start + _PART] = np.searchsorted(known, keys[start : start + _PART])
    return numbers


def is_chained(pieces: NDArray[np.int32], starts: Ints) -> bool:
    """Whether each content always stands behind the same one: then its id may name its whole past."""
    before = np.empty_like(pieces)
    before[1:] = pieces[:-1]
    before[starts[:-1][np.diff(starts) > 0]] = -1
    last = np.empty(int(pieces.max(initial=-1)) + 1, dtype=pieces.dtype)  # before each content, where it stood last
    last[pieces] = before
    return np.array_equal(last[pieces], before)


def arrival_times(seconds: NDArray[np.float64]) -> tuple[Ints, tuple[str, ...]]:
    """Nanoseconds since the first request, and what was done to the times, in words.

    Requests of one coarse time stamp are spread evenly up to the next one.
    """
    if not len(seconds) or np.isnan(seconds).all():
        return np.zeros(len(seconds), dtype=np.int64), ("the log has no times: requests are taken in its order",)
    if np.isnan(seconds).any():
        return np.zeros(len(seconds), dtype=np.int64), ("some requests have no time: all are taken in the log's order",)
    if np.ptp(seconds) >= LONGEST_S:
        raise ValueError(f"log: timestamp: expected {LONGEST_S:.0e} s at most in all, not {np.ptp(seconds):.3g}")
    stamps, first, counts = np.unique(seconds, return_index=True, return_counts=True)
    gaps = np.diff(stamps)
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    step = np.append(gaps, usual) / counts
    within = np.arange(len(seconds)) - np.repeat(first, counts)
    spread = np.repeat(stamps - stamps[0], counts) + within * np.repeat(step, counts)
    shared = int((counts > 1).sum())
    said = f"{shared:,} time stamps are shared by up to {counts.max()} requests, which are spread up to the next stamp"
    return np.rint(spread * 1e9).astype(np.int64), (said,) if shared else ()
