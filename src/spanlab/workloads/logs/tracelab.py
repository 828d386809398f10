"""TraceLab's table of agent sessions: the prefix that each round shares with the previous one, and new tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from spanlab.workloads.logs.csv_lines import csv_rows, has_header
from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Identity, Ids
from spanlab.workloads.logs.pieces import block_lengths
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, identity_of

HEADER = ("round_idx", "prefix_len", "input_len", "output_len")
ALONE = "sessions share nothing with each other, for the table says only what a round shares with the one before it"
NO_TIMES = "the table has no arrival times: rounds are taken in its order"
WAITS = "a round follows the one before it after the wait for tools: how long an answer took, the table does not say"


@LOG_FORMATS.register("tracelab")
def tracelab() -> LogFormat:
    """One CSV row per round: the first `prefix_len` tokens of the conversation so far, then `input_len` new ones."""
    return LogFormat(
        looks_for=f"CSV with the columns session_id or id, {', '.join(HEADER)}",
        recognises=lambda file: has_header(file, HEADER),
        read=_read_entries,
        ids=Ids.CHAINED,
        fields=HEADER,
    )


@dataclass(frozen=True, slots=True)
class _Round:
    line: int
    session: str
    prefix_tokens: int
    new_tokens: int
    output: int
    arrived_s: float | None
    wait_s: float
    identity: Identity


def _round(row: Row, line: int) -> _Round:
    return _Round(
        line,
        str(row.get("session_id", "id")),
        row.count("prefix_len"),
        row.count("input_len"),
        row.count("output_len"),
        row.seconds("arrival_time", scale=1e-3),
        row.duration("tool_wait_after_ms", scale=1e-3) or 0.0,
        identity_of(row),
    )


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the rounds by time; contents are generated one round at a time, so only lengths are in memory."""
    rounds = list(csv_rows(_round, HEADER)(file))
    timed = any(item.arrived_s is not None for item in rounds)
    file.notes.extend((ALONE, WAITS if timed else NO_TIMES))
    sessions, fresh_keys = dict[str, _Conversation](), count()
    for time, round_ in (
        sorted(_timed(rounds), key=lambda both: both[0]) if timed else ((None, round_) for round_ in rounds)
    ):
        session = sessions.setdefault(round_.session, _Conversation())
        if 0 < session.tokens < round_.prefix_tokens:
            file.refuse(
                round_.line,
                f"prefix_len: expected at most {session.tokens}, the tokens so far, not {round_.prefix_tokens}",
            )
            continue
        tokens = round_.prefix_tokens + round_.new_tokens
        try:
            file.check_length(tokens + round_.output, "input_len")
        except BadFieldError as error:
            file.refuse(round_.line, str(error))
            continue
        keys = session.extend(round_, file.piece, fresh_keys)[: -(-tokens // file.piece)]
        entry = Entry(
            np.array(keys, dtype=np.int64), block_lengths(tokens, file.piece), round_.line, time, round_.output
        )
        yield replace(entry, session=round_.session, wait=session.wait_s, identity=round_.identity)
        session.wait_s = round_.wait_s


def _timed(rounds: list[_Round]) -> Iterator[tuple[float, _Round]]:
    """Yield each round with its time: the session's start plus all earlier waits."""
    clock: dict[str, float] = {}
    for item in rounds:
        time = clock.get(item.session, item.arrived_s or 0.0)
        yield time, item
        clock[item.session] = time + item.wait_s


@dataclass
class _Conversation:
    """State of one session: pieces of prompt and output, length in tokens, and the wait after its last round."""

    pieces: list[int] = field(default_factory=list)
    tokens: int = 0
    wait_s: float = 0.0

    def extend(self, round_: _Round, size: int, fresh_keys: Iterator[int]) -> list[int]:
        """Append a round and return the pieces: the complete pieces of its prefix, and fresh ones."""
        self.tokens = round_.prefix_tokens + round_.new_tokens + round_.output
        shared = self.pieces[: round_.prefix_tokens // size]
        self.pieces = shared + [next(fresh_keys) for _ in range(-(-self.tokens // size) - len(shared))]
        return self.pieces
