"""SGLang's request log: token ids of prompts, in JSON lines or in the `Finish:` lines of its text log."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.pieces import hash_pieces, salt_keys
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, head_rows, parse_object

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
    return file.parsed(lambda line, number: (_parse_json if line.startswith(b"{") else _parse_text)(line, number, file))


def _parse_json(line: bytes, number: int, file: LogFile) -> Entry | None:
    row = parse_object(line)
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
        row.label("session_id", "obj.session_params.id", "obj.session_id"),
        row.label("tenant", "user", "obj.user"),
    )


def _parse_text(line: bytes, number: int, file: LogFile) -> Entry | None:
    if b"Finish:" not in line:
        return None
    ids = _IDS.search(line)
    if ids is None:
        raise BadFieldError("input_ids", "a list of token ids, as --log-requests-level 2 and up writes")
    try:
        tokens = np.array(ids[1].split(b","), dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise BadFieldError("input_ids", f"a list of token ids, not {ids[1][:40].decode()!r}") from error
    matches = {"timestamp": _TIME.search(line), "completion_tokens": _OUTPUT.search(line)}
    row = Row({name: match[1].decode() for name, match in matches.items() if match})
    keys, lengths = hash_pieces(tokens, file.piece)
    return Entry(keys, lengths, number, row.seconds("timestamp"), row.count("completion_tokens", default=0))
