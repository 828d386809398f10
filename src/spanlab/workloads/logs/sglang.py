"""SGLang's request log: token ids of prompts, in JSON lines or in the `Finish:` lines of its text log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.pieces import hash_pieces
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, head_rows, identity_of, parse_object

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
        fields=("input_ids",),
    )


def _recognises(file: LogFile) -> bool:
    return _is_json(file) or (b"Finish:" in file.head and _IDS.search(file.head) is not None)


def _is_json(file: LogFile) -> bool:
    return any(Row(row).get(*FIELDS) is not None for row in head_rows(file))


def _read_entries(file: LogFile) -> Iterator[Entry]:
    parse = _parse_json if _is_json(file) else _parse_text
    return file.parsed(lambda item, number: parse(item, number, file))


def _parse_json(item: Any, number: int, file: LogFile) -> Entry | None:
    row = parse_object(item)
    event = row.get("event")
    if event is not None and "finish" not in str(row.label("event")).lower():
        file.set_aside("lines about other events than a finished request")
        return None
    return token_entry(row, number, file)


def token_entry(row: Row, number: int, file: LogFile) -> Entry:
    """Return a request from a row with token ids."""
    keys, lengths = hash_pieces(row.counts(*FIELDS), file.piece)
    return Entry(
        keys,
        lengths,
        number,
        row.seconds("timestamp", "time", "created", "ts"),
        row.count("out.meta_info.completion_tokens", "meta_info.completion_tokens", "output_length", default=0),
        row.label("session_id", "obj.session_params.id", "obj.session_id"),
        row.label("tenant", "user", "obj.user"),
        identity=identity_of(row, "obj.", ""),
    )


def _parse_text(line: bytes, number: int, file: LogFile) -> Entry | None:
    if b"Finish:" not in line:
        file.set_aside("lines of text about other events than a finished request")
        return None
    ids = _IDS.search(line)
    if ids is None:
        raise BadFieldError("input_ids", "a list of token ids, as --log-requests-level 2 and up writes")
    try:
        tokens = np.array(ids[1].split(b",") if ids[1].strip() else [], dtype=np.int32)
    except (ValueError, OverflowError) as error:
        raise BadFieldError("input_ids", f"a list of token ids, not {ids[1][:40].decode()!r}") from error
    matches = {"timestamp": _TIME.search(line), "completion_tokens": _OUTPUT.search(line)}
    row = Row({name: match[1].decode() for name, match in matches.items() if match})
    keys, lengths = hash_pieces(tokens, file.piece)
    return Entry(keys, lengths, number, row.seconds("timestamp"), row.count("completion_tokens", default=0))
