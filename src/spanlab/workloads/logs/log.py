"""Log in columns: no object per request, and content numbers of pieces in place of token ids."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b, sha256
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.token_string import sums_before
from spanlab.workloads.logs.call_graph import After, CallGraph, graph_of_names, graph_of_times
from spanlab.workloads.logs.observed import (
    NOT_REPORTED,
    UNKNOWN,
    Counters,
    Moments,
    Observed,
    Seconds,
    Unread,
    Usage,
    align_times,
)

# ------------------------------------------------------------------------------
# Pieces of token ids: runs of equal length, identified by a 64-bit hash of their content and
# prefix.
# ------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Keys = NDArray[np.int64]
#: Multipliers of positions in a piece, and of pieces in a span: odd, hence invertible modulo 2^64.
_ODD = np.random.default_rng(0).integers(0, 1 << 63, 4096, dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)
_NEXT = np.uint64(0x9E3779B97F4A7C15)


def hash_pieces(tokens: NDArray[np.integer], size: int) -> tuple[Keys, Ints]:
    """Divide tokens into pieces of `size` and hash each piece with its prefix; return (keys,
    lengths).

    The last piece may be shorter. Two prompts share a piece if they are equal up to its end, so ids
    are chained.
    """
    count = -(-len(tokens) // size)
    padded = np.zeros(count * size, dtype=np.uint64)
    # padding differs from every token
    padded[: len(tokens)] = tokens.astype(np.uint64) + np.uint64(1)
    piece_hashes = _mix_bits(
        (_mix_bits(padded.reshape(count, size) * _NEXT) * _multipliers(size)).sum(
            axis=1, dtype=np.uint64
        )
    )
    # their number is rounded up to a power of two, so that few arrays are cached
    powers = _powers_of(1 << max(6, (count - 1).bit_length()))[:count]
    chained = np.cumsum(piece_hashes * powers, dtype=np.uint64)
    return _mix_bits(chained).view(np.int64), block_lengths(len(tokens), size)


def block_lengths(tokens: int, size: int) -> Ints:
    """Return the tokens of each block of a prompt; the last block may be shorter."""
    lengths = np.full(-(-tokens // size), size, dtype=np.int64)
    if tokens % size:
        lengths[-1] = tokens % size
    return lengths


def hash_name(name: object) -> int:
    """Return a 64-bit number for a name, such as a hash given as text or a tenant's salt."""
    return int.from_bytes(
        blake2b(repr(name).encode(), digest_size=8).digest(), "little", signed=True
    )


def salt_keys(keys: Keys, identity: object) -> Keys:
    """Return keys that only requests with the same identity share."""
    return keys ^ np.int64(hash_name(identity))


def _mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all 64 bits; each step is invertible."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


@lru_cache(maxsize=8)
def _multipliers(size: int) -> NDArray[np.uint64]:
    return (
        np.resize(_ODD, size)
        if size <= len(_ODD)
        else np.random.default_rng(1).integers(0, 1 << 63, size, dtype=np.uint64) * np.uint64(2)
        + np.uint64(1)
    )


@lru_cache(maxsize=32)
def _powers_of(count: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(count, _NEXT, dtype=np.uint64), dtype=np.uint64)


#: Parts of a cache identity with their values; requests with different identities share no cached
#: tokens.
Identity = tuple[tuple[str, Any], ...]

_BATCH = 1 << 20  # pieces that are numbered at once
LONGEST_S = 9e9  # between first and last request: the range of 64-bit nanoseconds, 285 years
UNDIVIDED = (
    "no prompt is divided into messages or passages: only equal beginnings of prompts are compared, and a text that "
    "comes again at another position is not found"
)


class Ids(StrEnum):
    """Meaning of equal ids of two pieces of a log."""

    CHAINED = "chained"  # equal content after an equal prefix: reuse at other positions is unknown
    CONTENT = "content"  # equal content at any position
    NONE = "none"  # lengths only: reuse is unknown


#: Returns the first and the last character of each token of a text, half-open.
TokensOf = Callable[[str], Sequence[tuple[int, int]]]


class ChangedLog(NamedTuple):
    """A log with changed prompts: the number of these, and what builds its columns."""

    prompts: int
    build: Callable[[], Log]


class LogReader(Protocol):
    """Reads the file of a log again, for its prompts."""

    @property
    def settings(self) -> Any:
        """The settings with which the log was read."""
        ...

    @property
    def prompts(self) -> Sequence[Any]:
        """The prompt of each request; None where the log has none."""
        ...

    @property
    def has_prompts(self) -> bool:
        """Whether a request has a prompt."""
        ...

    def rewritten(
        self, log: Log, rewrites: Mapping[str, Callable[[Any], Any]]
    ) -> dict[str, ChangedLog]:
        """Return the log, as it was read, by each change of prompts that changes some."""
        ...

    @property
    def tokens_of(self) -> TokensOf | None:
        """The tokens of a text by its tokenizer; None without one."""
        ...

    @property
    def options(self) -> Any:
        """How the bodies of the log are rendered."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Requests in order of arrival; request r consists of the pieces `starts[r]:starts[r + 1]`.

    `pieces`       int32 content numbers of all requests, end to end
    `lengths`      uint16, or int32 if one is longer: tokens of each piece
    `opens`        whether a piece begins a span: a message, a passage
    `free`         whether a piece belongs to a span that can be reordered among its neighbours: a
                   passage
    `starts`       int64, shape (requests + 1,)
    `arrived_ns`   int64, shape (requests,); zeros if the log has no times
    `output_lens`  int32, shape (requests,); 0 if unknown
    `sessions`     numbers by first appearance, shape (requests,); None if the log has no sessions
    `tenants`      as `sessions`; `tenant_names` are their names
    `waits_ns`     int64, shape (requests,): think or tool time between the end of the previous
                   request of the session and this request; None if the log has none
    `block`        tokens per block, if the log divides prompts into blocks
    `notes`        caveats about the numbers, one sentence each
    `observed`     observed times of requests and tokens, if the log has them
    `unread`       what the reader left out of the prompts
    `lines`        int64, shape (requests,): the line of each request
    `usage`        float64, shape (requests, 3): reported tokens of the prompt, cached and created
                   ones; None if none is reported
    `source`       reads the log again, with changed prompts; None if it is no file
    `counters`     the server's own counters over the time of the log; None if the log has none
    `identities`   numbers of the requests' cache identities, shape (requests,); None if the log
                   names none
    `identity_names`  the identities by number
    `fronts`       int32, shape (requests,): first pieces of each request that are of no body
    `families`     numbers of the trees of sessions, shape (requests,): agents with those that they
                   started; None if each session is one
    `after`        the requests that each request waited for; None if each session is a line of
                   calls
    """

    format: str
    ids: Ids
    pieces: NDArray[np.int32]
    lengths: NDArray[np.uint16] | NDArray[np.int32]
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
    unread: Unread = field(default_factory=Unread)
    lines: Ints | None = None
    usage: NDArray[np.float64] | None = None
    source: LogReader | None = None
    counters: Counters | None = None
    identities: NDArray[np.int32] | None = None
    identity_names: tuple[Identity, ...] = ()
    fronts: NDArray[np.int32] | None = None
    families: NDArray[np.int32] | None = None
    after: After | None = None
    _prompt_tokens: Ints | None = field(default=None, init=False, repr=False)

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.starts) - 1

    @property
    def prompt_tokens(self) -> Ints:
        """Prompt lengths, shape (requests,); they are summed once."""
        if self._prompt_tokens is not None:
            return self._prompt_tokens
        tokens = np.diff(sums_before(self.lengths, self.starts))
        tokens.flags.writeable = False
        object.__setattr__(self, "_prompt_tokens", tokens)  # the log is frozen, and so is their sum
        return tokens

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts, arrival times and output lengths of all requests."""
        digest = sha256()
        for column in (
            self.pieces,
            self.lengths,
            self.opens,
            self.starts,
            self.arrived_ns,
            self.output_lens,
        ):
            for start in range(0, len(column), _BATCH):
                batch = column[start : start + _BATCH]
                digest.update((batch.astype(np.int32) if column is self.lengths else batch).data)
        return digest.hexdigest()


@dataclass(slots=True)
class Entry:
    """One request of a log, as its format reads it.

    `keys`     int64, content keys of its pieces; `lengths` are their tokens
    `opens`    indexes of the pieces that begin a span; empty: the prompt is one span
    `free`     indexes of the pieces of spans that can be reordered
    `at`       arrival in seconds on the log's clock; None if unknown
    `identity`  what a server caches apart: model, adapter, salt, …
    `wait`     seconds between the end of the previous request of its session and this one; 0 if
               unknown
    `line`     line in the log, for error messages
    `moments`  times of queueing, scheduling, first and last token
    `usage`    reported tokens of the prompt, cached and created ones; NaN if unknown
    `caller`   session of the agent that started the agent of this one; None if there is none
    `name`     name of the request, by which others name it in `after`: those that it waited for
    `record`   id that the log gives the request: another one with the same id, time and lengths is
               a copy
    `prompt`   number of its prompt, as the reader of bodies gives it; None if the log has none
    `front`    pieces before the prompt that no body holds
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
    usage: Usage = NOT_REPORTED
    identity: Identity = ()
    caller: Hashable | None = None
    name: Hashable | None = None
    after: tuple[Hashable, ...] = ()
    record: Hashable | None = None
    prompt: int | None = None
    front: int = 0


@dataclass
class _NameColumn:
    """Column of names as numbers by first appearance; the log may have no names."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    column: array[int] = field(default_factory=lambda: array("i"))

    def add(self, name: Hashable | None) -> int:
        number = self.numbers.setdefault(name, len(self.numbers))
        self.column.append(number)
        return number

    def to_array(self) -> NDArray[np.int32] | None:
        return None if set(self.numbers) <= {None, ()} else np.array(self.column, dtype=np.int32)


_MOST_SHORT = (1 << 16) - 1  # tokens of a piece that 16 bits hold
#: Sessions, and pieces of them, of which the last prompt is in memory, since the next one may go on
#: from it.
_SESSIONS_HELD, _PIECES_HELD = 4096, 1 << 19


class Columns:
    """Builder of a log from entries.

    Of keys and lengths, those are stored that the last prompt of the session does not have at the
    same place, so that long conversations take little memory, and few keys are numbered.
    """

    def __init__(self) -> None:
        self._keys, self._lengths = array("q"), array("H")
        self._runs = array("i")  # places of stored pieces: first and end of each run
        self._run_counts = array("i")  # runs of each prompt
        # pieces of an earlier prompt, and where that begins
        self._copied, self._sources = array("q"), array("q")
        self._latest, self._held = OrderedDict[Hashable, tuple[Keys, Ints, int]](), 0
        self._opens, self._free = array("q"), array("q")  # the pieces that are marked
        self._starts, self._outputs = array("q", [0]), array("i")
        self._times: array[float] = array("d")
        self._waits: array[float] = array("d")
        self._moments, self._lines = array("d"), array("q")
        self._usage = array("d")
        self._fronts, self._prompts = array("i"), list[int | None]()
        self._sessions, self._tenants = _NameColumn(), _NameColumn()
        self._identities = _NameColumn()
        self._callers: dict[Hashable, Hashable] = {}
        self._names: list[Hashable | None] = []
        self._after: list[tuple[Hashable, ...]] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, entry: Entry) -> None:
        """Append a request."""
        count, keys = len(entry.keys), entry.keys
        if self._identities.add(entry.identity):
            keys = salt_keys(keys, entry.identity)
        runs, copied, source = self._different(entry.session, keys, entry.lengths)
        self._copied.append(copied)
        self._sources.append(source)
        self._run_counts.append(len(runs) // 2)
        self._runs.extend(runs)
        for first, stop in zip(runs[::2], runs[1::2], strict=True):
            self._keys.frombytes(keys[first:stop].astype(np.int64, copy=False).tobytes())
            lengths = entry.lengths[first:stop]
            if self._lengths.typecode == "H" and lengths.max() > _MOST_SHORT:
                self._lengths = array("i", self._lengths)
            self._lengths.frombytes(lengths.astype(self._lengths.typecode).tobytes())
        begin = self._starts[-1]
        self._opens.extend([begin + index for index in ((0, *entry.opens) if count else ())])
        self._free.extend([begin + index for index in entry.free])
        self._starts.append(self._starts[-1] + count)
        self._outputs.append(entry.output_len)
        self._times.append(np.nan if entry.at is None else entry.at)
        self._waits.append(entry.wait)
        self._moments.extend(entry.moments)
        self._lines.append(entry.line)
        self._usage.extend(entry.usage)
        self._fronts.append(entry.front)
        self._prompts.append(entry.prompt)
        self._sessions.add(entry.session)
        self._tenants.add(entry.tenant)
        if entry.caller is not None and entry.session is not None:
            self._callers[entry.session] = entry.caller
        if entry.name is not None or self._names:
            missing = len(self) - 1 - len(self._names)
            self._names += [*[None] * missing, entry.name]
            self._after += [*[()] * missing, entry.after]

    @property
    def prompts(self) -> list[int | None]:
        """Number of the prompt of each request; None if it has none."""
        return self._prompts

    def _different(
        self, session: Hashable, keys: Keys, lengths: Ints
    ) -> tuple[list[int], int, int]:
        """Compare a prompt with the last one of its session.

        Returns the first place and the end of each run of pieces that differ, the pieces of both,
        and where the last prompt begins.
        """
        last = self._latest.pop(session, None)
        self._latest[session] = keys, lengths, self._starts[-1]
        self._held += len(keys) - (0 if last is None else len(last[0]))
        while len(self._latest) > 1 and (
            self._held > _PIECES_HELD or len(self._latest) > _SESSIONS_HELD
        ):
            self._held -= len(self._latest.popitem(last=False)[1][0])
        if last is None:
            return ([0, len(keys)] if len(keys) else []), 0, 0
        count = min(len(keys), len(last[0]))
        differs = (keys[:count] != last[0][:count]) | (lengths[:count] != last[1][:count])
        first = count - int(np.count_nonzero(differs))
        if not differs[first:].all():
            edges = np.flatnonzero(differs[1:] != differs[:-1]) + 1
            runs = [0, *edges.tolist()] if differs[0] else edges.tolist()
            if len(runs) % 2 == 0:  # the last pieces of both are equal
                return [*runs, *([count, len(keys)] if len(keys) > count else [])], count, last[2]
            return [*runs, len(keys)], count, last[2]
        return ([first, len(keys)] if first < len(keys) else []), count, last[2]

    def _expanded(self, starts: Ints, stored: NDArray[Any]) -> NDArray[Any]:
        """Return values of all pieces from those that are stored."""
        values = np.empty(int(starts[-1]), dtype=stored.dtype)
        done = 0
        runs = zip(*[iter(self._runs)] * 2, strict=True)
        rows = zip(starts.tolist(), self._run_counts, self._copied, self._sources, strict=False)
        for first, count, copied, source in rows:
            values[first : first + copied] = values[source : source + copied]
            for begin, end in islice(runs, count):
                values[first + begin : first + end] = stored[done : done + end - begin]
                done += end - begin
        return values

    def log(
        self,
        name: str,
        ids: Ids | None,
        block: int | None,
        notes: tuple[str, ...],
        subject: str = "log",
    ) -> Log:
        """Return the log; `ids` None infers from the ids whether they are chained; errors begin
        with `subject`.

        Content ids are chained within a span. Where each prompt is one span, all ids are therefore
        chained.
        """
        starts = np.array(self._starts, dtype=np.int64)
        pieces = self._expanded(starts, _ranks(np.frombuffer(self._keys, dtype=np.int64)))
        lengths = np.frombuffer(self._lengths, dtype=self._lengths.typecode)
        opens = _marked(self._opens, len(pieces))
        undivided = ids == Ids.CONTENT and int(opens.sum()) == np.count_nonzero(np.diff(starts))
        if undivided:
            ids = Ids.CHAINED
        waits = np.rint(np.minimum(self._waits, LONGEST_S) * 1e9).astype(np.int64)
        times = np.array(self._times, dtype=np.float64)
        arrived, spread = arrival_times(times, subject)
        usage = np.array(self._usage, dtype=np.float64).reshape(-1, len(NOT_REPORTED))
        moments = np.array(self._moments, dtype=np.float64).reshape(-1, len(UNKNOWN))
        sessions = self._sessions.to_array()
        observed = align_times(times, moments, np.array(self._lines, dtype=np.int64), subject)
        graph, of_calls = self._graph(sessions, times, observed)
        waits = waits if graph is None else graph.waits_ns
        return Log(
            format=name,
            ids=ids or (Ids.CHAINED if is_chained(pieces, starts) else Ids.CONTENT),
            pieces=pieces,
            lengths=self._expanded(starts, lengths),
            opens=opens,
            free=_marked(self._free, len(pieces)),
            starts=starts,
            arrived_ns=arrived,
            output_lens=np.array(self._outputs, dtype=np.int32),
            sessions=sessions,
            tenants=self._tenants.to_array(),
            tenant_names=tuple(str(name) for name in self._tenants.numbers),
            waits_ns=waits if waits.any() else None,
            block=block,
            notes=(*notes, *self._apart(), *spread, *([UNDIVIDED] if undivided else []), *of_calls),
            observed=observed,
            lines=np.array(self._lines, dtype=np.int64),
            usage=None if np.isnan(usage).all() else usage,
            identities=self._identities.to_array(),
            identity_names=self._identity_names,
            fronts=np.array(self._fronts, dtype=np.int32),
            families=None if graph is None else graph.families,
            after=None if graph is None else graph.after,
        )

    def _graph(
        self, sessions: NDArray[np.int32] | None, times: Seconds, observed: Observed | None
    ) -> tuple[CallGraph | None, tuple[str, ...]]:
        """Return what calls waited for, with notes; None if the log does not tell it, or each
        session is a line."""
        if self._names:
            graph, missing = graph_of_names(
                self._names, self._after, np.array(self._waits), sessions
            )
            notes = () if sessions is None else graph.notes(sessions)
            lost = (
                (f"{missing:,} calls that others wait for do not come before them in the log",)
                if missing
                else ()
            )
            return graph, (*notes, *lost)
        if sessions is None or observed is None:
            return None, ()
        numbers = self._sessions.numbers
        callers = {
            numbers[session]: numbers[caller]
            for session, caller in self._callers.items()
            if caller in numbers and caller != session
        }
        timed = graph_of_times(sessions, callers, times - times[0], observed.last_token)
        return timed, () if timed is None else timed.notes(sessions)

    @property
    def _identity_names(self) -> tuple[Identity, ...]:
        return tuple(self._identities.numbers)  # type: ignore[arg-type]

    def _apart(self) -> tuple[str, ...]:
        """Return a note about cache identities, if there are several."""
        identities = self._identity_names
        if len(identities) < 2:
            return ()
        parts = ", ".join(sorted({name for identity in identities for name, _ in identity}))
        return (
            f"{len(identities):,} cache identities ({parts}): requests of different ones share nothing",
        )


def _ranks(keys: Keys) -> NDArray[np.int32]:
    """Return the rank of each key among the distinct ones.

    Each batch is ranked by itself, and only its distinct keys among all: prompts near each other
    repeat each other.
    """
    batches = range(0, len(keys), _BATCH)
    distinct_by_batch = list[Keys]()
    ranks = np.empty(len(keys), dtype=np.int32)
    for start in batches:
        order = np.argsort(keys[start : start + _BATCH])
        ordered = keys[start : start + _BATCH][order]
        is_new = _is_new(ordered)
        ranks[start : start + _BATCH][order] = np.cumsum(is_new, dtype=np.int32) - 1
        distinct_by_batch.append(ordered[is_new])
    distinct = np.sort(np.concatenate([keys[:0], *distinct_by_batch]))
    distinct = distinct[_is_new(distinct)]
    for start, of_batch in zip(batches, distinct_by_batch, strict=True):
        # in order, which makes it fast
        in_all = np.searchsorted(distinct, of_batch).astype(np.int32)
        ranks[start : start + _BATCH] = in_all[ranks[start : start + _BATCH]]
    return ranks


def _is_new(ordered: Keys) -> NDArray[np.bool_]:
    """Return whether each key differs from the one before it."""
    return np.append(np.ones(min(1, len(ordered)), dtype=np.bool_), ordered[1:] != ordered[:-1])


def _marked(indexes: array[int], count: int) -> NDArray[np.bool_]:
    marks = np.zeros(count, dtype=np.bool_)
    marks[np.frombuffer(indexes, dtype=np.int64)] = True
    return marks


def is_chained(pieces: NDArray[np.int32], starts: Ints) -> bool:
    """Return whether each content always follows the same content, so that its id may include its
    prefix."""
    before = np.empty_like(pieces)
    before[1:] = pieces[:-1]
    before[starts[:-1][np.diff(starts) > 0]] = -1
    # predecessor of each content at its last occurrence
    last = np.empty(int(pieces.max(initial=-1)) + 1, dtype=pieces.dtype)
    last[pieces] = before
    return np.array_equal(last[pieces], before)


def arrival_times(
    seconds: NDArray[np.float64], subject: str = "log"
) -> tuple[Ints, tuple[str, ...]]:
    """Return nanoseconds since the first request, and notes about changes to the times.

    Requests of one coarse time stamp are spread evenly up to the next time stamp.
    """
    if not len(seconds) or np.isnan(seconds).all():
        return np.zeros(len(seconds), dtype=np.int64), (
            "the log has no times: requests are taken in its order",
        )
    if np.isnan(seconds).any():
        return np.zeros(len(seconds), dtype=np.int64), (
            "some requests have no time: all are taken in the log's order",
        )
    if np.ptp(seconds) >= LONGEST_S:
        raise ValueError(
            f"{subject}: timestamp: expected a range of at most {LONGEST_S:.0e} s, not {np.ptp(seconds):.3g}"
        )
    stamps, first, counts = np.unique(seconds, return_index=True, return_counts=True)
    gaps = np.diff(stamps)
    median_gap = float(np.median(gaps)) if len(gaps) else 0.0
    step = np.append(gaps, median_gap) / counts
    within = np.arange(len(seconds)) - np.repeat(first, counts)
    spread = np.repeat(stamps - stamps[0], counts) + within * np.repeat(step, counts)
    shared = int((counts > 1).sum())
    note = f"{shared:,} time stamps are shared by up to {counts.max()} requests, which are spread up to the next stamp"
    return np.rint(spread * 1e9).astype(np.int64), (note,) if shared else ()
