"""TraceLab's table of agent sessions: how much of each round's prompt the one before it had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from spanlab.workloads.logs.csv_lines import csv_rows, has_header
from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.mooncake import block_lengths
from spanlab.workloads.logs.source import LogFile, LogFormat, Row

HEADER = ("round_idx", "prefix_len", "input_len", "output_len")
ALONE = "sessions share nothing with each other, for the table says only what a round shares with the one before it"
NO_TIMES = "the table has no arrival times: rounds are taken in its order"
WAITS = "a round follows the one before it after the wait for tools: how long an answer took, the table does not say"


@LOG_FORMATS.register("tracelab")
def tracelab() -> LogFormat:
    """A CSV row per round: the first `prefix_len` tokens of the conversation so far, then `input_len` new ones."""
    return LogFormat(
        looks_for=f"CSV with the columns session_id or id, {', '.join(HEADER)}",
        recognises=lambda file: has_header(file, HEADER),
        read=_read,
        ids=Ids.CHAINED,
    )


@dataclass(frozen=True, slots=True)
class _Round:
    line: int
    session: str
    kept: int
    fresh: int
    output: int
    arrived_s: float | None
    wait_s: float


def _round(row: Row, line: int) -> _Round:
    return _Round(
        line,
        str(row.get("session_id", "id")),
        row.count("prefix_len"),
        row.count("input_len"),
        row.count("output_len"),
        row.seconds("arrival_time", scale=1e-3),
        row.seconds("tool_wait_after_ms", scale=1e-3) or 0.0,
    )


def _read(file: LogFile) -> Iterator[Entry]:
    """Rounds by time; only their lengths are held, for contents are invented one round after another."""
    rounds = list(csv_rows(_round)(file))
    timed = any(one.arrived_s is not None for one in rounds)
    file.notes.extend((ALONE, WAITS if timed else NO_TIMES))
    sessions, fresh = dict[str, _Conversation](), count()
    for at, one in sorted(_timed(rounds), key=lambda both: both[0]) if timed else ((None, one) for one in rounds):
        session = sessions.setdefault(one.session, _Conversation())
        if 0 < session.tokens < one.kept:
            file.refuse(one.line, f"prefix_len: expected at most {session.tokens}, the tokens so far, not {one.kept}")
            continue
        tokens = one.kept + one.fresh
        keys = session.go_on(one, file.piece, fresh)[: -(-tokens // file.piece)]
        entry = Entry(np.array(keys, dtype=np.int64), block_lengths(tokens, file.piece), one.line, at, one.output)
        yield replace(entry, session=one.session, wait=session.wait_s)
        session.wait_s = one.wait_s


def _timed(rounds: list[_Round]) -> Iterator[tuple[float, _Round]]:
    """Each round with its time: the session's start, and its waits so far."""
    clock: dict[str, float] = {}
    for one in rounds:
        at = clock.get(one.session, one.arrived_s or 0.0)
        yield at, one
        clock[one.session] = at + one.wait_s


@dataclass
class _Conversation:
    """The pieces of one session so far, prompt and output, its length in tokens, and the wait after its last round."""

    pieces: list[int] = field(default_factory=list)
    tokens: int = 0
    wait_s: float = 0.0

    def go_on(self, one: _Round, size: int, fresh: Iterator[int]) -> list[int]:
        """The pieces after a round: whole ones that it keeps, and fresh ones."""
        self.tokens = one.kept + one.fresh + one.output
        kept = self.pieces[: one.kept // size]
        self.pieces = kept + [next(fresh) for _ in range(-(-self.tokens // size) - len(kept))]
        return self.pieces
