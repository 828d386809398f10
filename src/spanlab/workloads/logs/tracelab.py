"""TraceLab's table of agent sessions: how much of each round's prompt the one before it had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from spanlab.workloads.logs.azure import csv_rows, has_header
from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row

HEADER = ("session_id", "round_idx", "prefix_len", "input_len", "output_len")
INVENTED = (
    "sessions share nothing with each other, for the table says only what a round shares with the one before it; it "
    "has no arrival times, so that rounds are taken in its order"
)


@LOG_FORMATS.register("tracelab")
def tracelab() -> LogFormat:
    """A CSV row per round: the first `prefix_len` tokens of the conversation so far, then `input_len` new ones."""
    return LogFormat(
        looks_for=f"CSV with the columns {', '.join(HEADER)}",
        recognises=lambda file: has_header(file, HEADER),
        read=_read,
        ids=Ids.CHAINED,
    )


@dataclass
class _Conversation:
    """The pieces of one session so far, prompt and output, and its length in tokens."""

    pieces: list[int] = field(default_factory=list)
    tokens: int = 0


def _read(file: LogFile) -> Iterator[Entry]:
    sessions: dict[str, _Conversation] = {}
    counter = 0
    file.notes.append(INVENTED)

    def parse(row: Row, line: int) -> Entry:
        nonlocal counter
        name, output = str(row.get("session_id")), row.count("output_len")
        kept, tokens = row.count("prefix_len"), row.count("prefix_len") + row.count("input_len")
        session = sessions.setdefault(name, _Conversation())
        if kept > session.tokens and session.tokens:
            raise BadFieldError("prefix_len", f"at most {session.tokens}, the tokens of the session so far, not {kept}")
        pieces = session.pieces[: kept // file.piece]
        whole = (tokens + output) // file.piece + 1
        fresh = list(range(counter, counter + whole - len(pieces)))
        counter += len(fresh)
        session.pieces, session.tokens = pieces + fresh, tokens + output
        used = -(-tokens // file.piece)
        return Entry(
            np.array(session.pieces[:used], dtype=np.int64), _lengths(tokens, file.piece), line, None, output, name
        )

    return csv_rows(parse)(file)


def _lengths(tokens: int, piece: int) -> np.ndarray:
    lengths = np.full(-(-tokens // piece), piece, dtype=np.int64)
    if tokens % piece:
        lengths[-1] = tokens % piece
    return lengths
