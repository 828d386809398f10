"""SGLang's request log: token ids of prompts, in JSON lines or in the `Finish:` lines of its text log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np
import orjson

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.pieces import hash_pieces, salt_keys
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, head_rows

_IDS = re.compile(rb"input_ids=\[([\d,\s]*)\]")
_TIME = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)")
_OUTPUT = re.compile(rb"""['"]completion_tokens['"]: (\d+)""")
FIELDS = ("input_ids", "obj.input_ids")


@LOG_FORMATS.register("sglang")
def sglang() -> LogFormat:
    """One finished request per line; lines of other events are skipped."""
    return LogFormat(
        looks_for="JSONL with input_ids or obj.input_ids, or a text log with `Finish: … input_ids=[`",
        recognises=_recognises,
        read=_read_entries,
        ids=Ids.CHAINED,
    )


def _recognises(file: LogFile) -> bool:
    if any(Row(row).get(*FIELDS) is not None for row in head_rows(file)):
        return True
    return b"Finish:" in file.head() and _IDS.search(file.head()) is not None


def _read_entries(file: LogFile) -> Iterator[Entry]:
    for number, line in file.lines():
        try:
            entry = _parse_json(line, number, file) if line.startswith(b"{") else _parse_text(line, number, file)
        except BadFieldError as error:
            file.refuse(number, str(error))
            continue
        if entry is not None:
            yield entry


def _parse_json(line: bytes, number: int, file: LogFile) -> Entry | None:
    try:
        row = Row(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        raise BadFieldError("line", "JSON") from error
    event = str(row.get("event") or "request.finished")
    if "finish" not in event.lower():
        return None
    return token_entry(row, number, file)


def token_entry(row: Row, number: int, file: LogFile) -> Entry:
    """Return a request from a row with token ids."""
    keys, lengths = hash_pieces(row.whole_numbers(*FIELDS), file.piece)
    return Entry(
        salt_keys(keys, row.get("obj.cache_salt", "cache_salt", "obj.extra_key", "extra_key")),
        lengths,
        number,
        row.seconds("timestamp", "time", "created", "ts"),
        row.count("out.meta_info.completion_tokens", "meta_info.completion_tokens", "output_length", default=0),
        row.get("session_id", "obj.session_params.id", "obj.session_id"),
        row.get("tenant", "user", "obj.user"),
    )


def _parse_text(line: bytes, number: int, file: LogFile) -> Entry | None:
    if b"Finish:" not in line:
        return None
    ids = _IDS.search(line)
    if ids is None:
        raise BadFieldError("input_ids", "a list of token ids, as --log-requests-level 2 and up writes")
    keys, lengths = hash_pieces(np.array(ids[1].split(b","), dtype=np.int64), file.piece)
    time_match, output_match = _TIME.search(line), _OUTPUT.search(line)
    seconds = datetime.fromisoformat(time_match[1].decode()).replace(tzinfo=UTC).timestamp() if time_match else None
    return Entry(keys, lengths, number, seconds, int(output_match[1]) if output_match else 0)
