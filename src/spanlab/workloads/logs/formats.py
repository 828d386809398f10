"""Log formats with hashed blocks, lengths or token ids."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.workloads.logs.log import (
    Entry,
    Ids,
    Keys,
    block_lengths,
    hash_name,
    hash_pieces,
    salt_keys,
)
from spanlab.workloads.logs.rows import BadFieldError, Row, actual, identity_of, record_of
from spanlab.workloads.logs.source import (
    LOG_FORMATS,
    LogFile,
    LogFormat,
    csv_rows,
    first_row,
    has_header,
    head_rows,
    json_lines,
    lengths_only,
    parse_object,
)
from spanlab.workloads.ragpulse import TRACE, read_trace
from spanlab.workloads.shape import INDEPENDENT, Shape

# ------------------------------------------------------------------------------
# Azure LLM inference traces: times and lengths, without prompt content.
# ------------------------------------------------------------------------------

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@LOG_FORMATS.register("azure")
def azure() -> LogFormat:
    """One CSV row per request; dates in local time."""
    return LogFormat(
        looks_for=f"CSV with the header {','.join(AZURE_HEADER)}",
        recognises=lambda file: has_header(file, AZURE_HEADER),
        read=csv_rows(_azure_parse_row, AZURE_HEADER),
        ids=Ids.NONE,
        fields=AZURE_HEADER,
    )


def _azure_parse_row(row: Row, line: int) -> Entry:
    tokens, output = row.count("ContextTokens"), row.count("GeneratedTokens")
    return lengths_only(tokens, line, row.seconds("TIMESTAMP"), output)


# ------------------------------------------------------------------------------
# BurstGPT: times and lengths of requests to one deployment, without prompt content.
# ------------------------------------------------------------------------------

BURSTGPT_HEADER = ("Timestamp", "Request tokens", "Response tokens")


@LOG_FORMATS.register("burstgpt")
def burstgpt() -> LogFormat:
    """One CSV row per request; seconds since the start of the trace."""
    return LogFormat(
        looks_for=f"CSV with the columns {', '.join(BURSTGPT_HEADER)}",
        recognises=lambda file: has_header(file, BURSTGPT_HEADER),
        read=csv_rows(_burstgpt_parse_row, BURSTGPT_HEADER),
        ids=Ids.NONE,
        fields=BURSTGPT_HEADER,
    )


def _burstgpt_parse_row(row: Row, line: int) -> Entry:
    tokens, output = row.count("Request tokens"), row.count("Response tokens")
    entry = lengths_only(tokens, line, row.seconds("Timestamp"), output)
    return replace(entry, session=row.label("Session ID"), tenant=row.label("Model"))


# ------------------------------------------------------------------------------
# Mooncake and timed-trace JSONL: prompts as block ids, with lengths and times.
#
# The ids of Mooncake's traces identify a block and its whole prefix. Ids of other traces
# (Bailian) identify the block alone. The ids show which is the case: a chained id never follows
# two different ids.
# ------------------------------------------------------------------------------

BLOCKS = (512, 16, 32, 64, 128, 256, 1024)  # tokens; the size of Mooncake's traces first
INCREMENTS = (
    "later rows of a session are the new tokens of a turn, as AIPerf and Dynamo define rows with a delay: a prompt is "
    "all tokens and answers of its session before, and its row; workload.log.rows=whole takes each row as a prompt"
)
REPEATED = (
    "rows with a delay repeat the ids of the row before them: each is a whole prompt; workload.log.rows=increments "
    "takes them as the new tokens of a turn"
)
_TURN = {"input_length", "session_id"}
MOONCAKE_TOGETHER = (
    "sessions without a timestamp start together: nobody recorded when each one started"
)


@LOG_FORMATS.register("mooncake")
def mooncake() -> LogFormat:
    """One request, or one turn, per line; `timestamp` in milliseconds, or in seconds with `chat_id`
    (Bailian)."""
    return LogFormat(
        looks_for="JSONL with hash_ids and input_length, or turns with input_length, session_id and delay",
        recognises=_mooncake_recognises,
        read=_mooncake_read_entries,
        ids=None,
        block=lambda file: None if INCREMENTS in file.notes else find_block_size(file),
        fields=("hash_ids", "input_length"),
    )


def _mooncake_recognises(file: LogFile) -> bool:
    if {"hash_ids", "input_length"} <= first_row(file).keys():
        return True
    rows = [row.keys() for row in head_rows(file)]
    return all(row >= _TURN for row in rows) and any("delay" in row for row in rows)


def find_block_size(file: LogFile) -> int:
    """Return the tokens per block: `block_size` of the lines, or the size with one id per block in
    most prompts."""
    rows = [row for row in map(Row, head_rows(file)) if isinstance(row.get("hash_ids"), list)]
    declared = {size for row in rows if (size := _declared_size(row))}
    if len(declared) == 1:
        return declared.pop()
    fitting = {size: sum(_has_id_per_block(row, size) for row in rows) for size in BLOCKS}
    best = max(BLOCKS, key=lambda size: fitting[size])
    # turns without ids have no blocks; a line of another size raises its own error
    if 2 * fitting[best] > len(rows) or not rows:
        return best
    sizes = ", ".join(map(str, sorted(BLOCKS)))
    raise ValueError(
        f"log={file.path}: hash_ids: expected one id per block of {sizes} tokens, or a field block_size"
    )


def _declared_size(row: Row) -> int:
    """Return the field block_size; 0 if it is missing or invalid, which the reader reports with its
    line."""
    try:
        return row.count("block_size", least=1, default=0)
    except BadFieldError:
        return 0


def _has_id_per_block(row: Row, size: int) -> bool:
    try:
        return -(-row.count("input_length") // size) == len(row.get("hash_ids"))
    except BadFieldError:  # which the reader reports with its line
        return False


def _mooncake_read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield requests; those of a file with delays are held and sorted by time."""
    size, sessions = find_block_size(file), dict[Hashable, _MooncakeSession]()
    has_delays = any("delay" in row for row in head_rows(file))
    later: list[Entry] = []

    def parse(row: Row, line: int) -> tuple[Entry, bool]:
        entry = _mooncake_entry(row, line, size, file)
        is_session = file.rows != "whole" and row.get("session_id") is not None
        if not is_session:
            return entry, False
        before, has_delay = sessions.get(entry.session), row.get("delay") is not None
        if before is None:
            if entry.at is None and has_delays:
                file.notes.append(MOONCAKE_TOGETHER)
                entry = replace(entry, at=0.0)
            sessions[entry.session] = _MooncakeSession(entry, entry.keys)
            return entry, False
        is_increment = file.rows == "increments" or (has_delay and entry.at is None)
        if is_increment and file.rows == "auto" and _repeats(before.own_keys, entry.keys):
            file.notes.append(REPEATED)
            is_increment = False
        elif is_increment:
            file.notes.append(INCREMENTS)
        sessions[entry.session] = after = _MooncakeSession(
            before.followed_by(entry, is_increment), entry.keys
        )
        return after.entry, is_increment or entry.at is None

    for entry, is_later in file.parsed(lambda item, line: parse(parse_object(item), line)):
        if is_later or later or has_delays:
            later.append(entry)
        else:
            yield entry
    yield from sorted(later, key=lambda entry: entry.at or 0.0)


def _mooncake_entry(row: Row, line: int, size: int, file: LogFile) -> Entry:
    """Return the tokens of one row as a request."""
    row.count("block_size", least=1, default=size)
    tokens = file.check_length(row.count("input_length"), "input_length")
    # a turn of new tokens alone
    if row.get("hash_ids") is None and row.get("session_id") is not None:
        keys = np.array([hash_name((line, "new"))], dtype=np.int64)
        lengths = np.array([tokens], dtype=np.int64)
    else:
        keys, lengths = block_keys(row), block_lengths(tokens, size)
    if len(keys) != len(lengths):
        raise BadFieldError("hash_ids", f"{len(lengths)} ids for {tokens} tokens, not {len(keys)}")
    scale = 1.0 if row.get("chat_id") is not None else 1e-3
    return Entry(
        keys,
        lengths,
        line,
        row.seconds("timestamp", scale=scale),
        row.count("output_length", default=0),
        row.label("session_id", "chat_id"),
        wait=row.duration("delay", scale=1e-3) or 0.0,
        identity=identity_of(row),
    )


@dataclass(frozen=True)
class _MooncakeSession:
    """Last request of a session, and the ids of its own row."""

    entry: Entry
    own_keys: Keys

    def followed_by(self, entry: Entry, is_increment: bool) -> Entry:
        """Return the request of the next row; without a time, it arrives `delay` after the arrival
        before.

        The prompt of an increment is everything before it, with the answer to the last request, and
        its own tokens.
        """
        last = self.entry
        if entry.at is None and last.at is not None:
            entry = replace(entry, at=last.at + entry.wait)
        if not is_increment:
            return entry
        answer = [hash_name((last.session, last.line, "answer"))] if last.output_len else []
        keys = np.concatenate([last.keys, np.array(answer, dtype=np.int64), entry.keys])
        lengths = np.concatenate(
            [last.lengths, [last.output_len] * len(answer), entry.lengths]
        ).astype(np.int64)
        return replace(entry, keys=keys, lengths=lengths)


def _repeats(before: Keys, ids: Keys) -> bool:
    """Return whether a row has the ids of the row before, apart from its last, partial block."""
    full = max(len(before) - 1, 1)
    return bool(len(ids) >= len(before) > 0) and np.array_equal(before[:full], ids[:full])


def block_keys(row: Row, name: str = "hash_ids") -> np.ndarray:
    """Return block ids as numbers; hashes given as text become 64-bit numbers."""
    ids = row.get(name)
    if isinstance(ids, list) and ids and all(isinstance(text, str) for text in ids):
        return np.array([hash_name(text) for text in ids], dtype=np.int64)
    return row.ids(name)


# ------------------------------------------------------------------------------
# LMCache's lookup log: the chunk hashes of each request; a hash covers its chunk and the whole
# prefix.
# ------------------------------------------------------------------------------

CHUNK = 256  # tokens, the default of LMCache
TAIL = "only full chunks are looked up: the end of a prompt behind them counts as new, as LMCache counts it"


@LOG_FORMATS.register("lmcache")
def lmcache() -> LogFormat:
    """One lookup per line; different models and salts share nothing."""
    return LogFormat(
        looks_for="JSONL with chunk_hashes",
        recognises=lambda file: "chunk_hashes" in first_row(file),
        read=json_lines(_lmcache_parse_row),
        ids=Ids.CHAINED,
        block=lambda file: Row(first_row(file)).count("chunk_size", least=1, default=CHUNK),
        fields=("chunk_hashes",),
    )


def _lmcache_parse_row(row: Row, line: int, file: LogFile) -> Entry:
    keys, size = block_keys(row, "chunk_hashes"), row.count("chunk_size", least=1, default=CHUNK)
    if row.get("chunk_size") is None:
        file.notes.append(
            f"the log names no chunk_size: chunks of {CHUNK} tokens, LMCache's default, are assumed"
        )
    tokens = row.count("seq_len", "num_tokens", default=len(keys) * size)
    if not len(keys) * size <= tokens < (len(keys) + 1) * size:
        raise BadFieldError(
            "seq_len", f"{len(keys) * size} to {(len(keys) + 1) * size - 1} for {len(keys)} chunks"
        )
    file.notes.append(TAIL)
    lengths = keys * 0 + size
    if tail := tokens - len(keys) * size:
        keys, lengths = np.append(keys, hash_name(("tail", line))), np.append(lengths, tail)
    return Entry(
        keys,
        lengths,
        line,
        row.seconds("timestamp", "time", "ts"),
        tenant=row.label("tenant", "salt"),
        identity=identity_of(row),
    )


# ------------------------------------------------------------------------------
# SGLang's request log: token ids of prompts, in JSON lines or in the `Finish:` lines of its
# text log.
# ------------------------------------------------------------------------------

_IDS = re.compile(rb"input_ids=\[([\d,\s]*)\]")
_TIME = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)")
_OUTPUT = re.compile(rb"""['"]completion_tokens['"]: (\d+)""")
FIELDS = ("input_ids", "obj.input_ids")


@LOG_FORMATS.register("sglang")
def sglang() -> LogFormat:
    """One finished request per line; lines of other events are skipped."""
    return LogFormat(
        looks_for="JSONL with input_ids or obj.input_ids, or a text log with `Finish: … input_ids=[`",
        recognises=lambda file: (
            _is_json(file) or (b"Finish:" in file.head and _IDS.search(file.head) is not None)
        ),
        read=_sglang_read_entries,
        ids=Ids.CHAINED,
        fields=("input_ids",),
    )


def _is_json(file: LogFile) -> bool:
    return any(Row(row).get(*FIELDS) is not None for row in head_rows(file))


def _sglang_read_entries(file: LogFile) -> Iterator[Entry]:
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
        row.count(
            "out.meta_info.completion_tokens",
            "meta_info.completion_tokens",
            "output_length",
            default=0,
        ),
        row.label("session_id", "obj.session_params.id", "obj.session_id"),
        row.label("tenant", "user", "obj.user"),
        identity=identity_of(row, "obj.", ""),
        record=record_of(row, "rid", "obj.rid", "out.meta_info.id"),
    )


def _parse_text(line: bytes, number: int, file: LogFile) -> Entry | None:
    if b"Finish:" not in line:
        file.set_aside("lines of text about other events than a finished request")
        return None
    ids = _IDS.search(line)
    if ids is None:
        raise BadFieldError(
            "input_ids", "a list of token ids, as --log-requests-level 2 and up writes"
        )
    try:
        tokens = np.array(ids[1].split(b",") if ids[1].strip() else [], dtype=np.int32)
    except (ValueError, OverflowError) as error:
        raise BadFieldError(
            "input_ids", f"a list of token ids, not {ids[1][:40].decode()!r}"
        ) from error
    matches = {"timestamp": _TIME.search(line), "completion_tokens": _OUTPUT.search(line)}
    row = Row({name: match[1].decode() for name, match in matches.items() if match})
    keys, lengths = hash_pieces(tokens, file.piece)
    return Entry(
        keys, lengths, number, row.seconds("timestamp"), row.count("completion_tokens", default=0)
    )


# ------------------------------------------------------------------------------
# RAGPulse trace: content ids of prompt components, with tables of their lengths.
# ------------------------------------------------------------------------------

CONTENT = (
    "ids name contents, wherever they stand: a tool that takes them for a chain would report reuse at any position as "
    "that of a prefix cache"
)


@LOG_FORMATS.register("ragpulse")
def ragpulse() -> LogFormat:
    """The folder of the trace, or its file 0_trace.jsonl."""
    return LogFormat(
        looks_for=f"a folder with {TRACE} and the tables of lengths, or that file",
        recognises=lambda file: (
            (_folder(file.path) / TRACE).is_file()
            and (file.path.is_dir() or file.path.name == TRACE)
        ),
        read=_ragpulse_read_entries,
        ids=Ids.CONTENT,
    )


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _ragpulse_read_entries(file: LogFile) -> Iterator[Entry]:
    file.notes.append(CONTENT)
    yield from entries(read_trace(_folder(file.path), "local trace"))


def entries(shape: Shape) -> Iterator[Entry]:
    """Yield the requests of a trace; each component is a span."""
    assert shape.arrivals_s is not None, "a trace has arrival times"
    for number, spans in enumerate(shape.requests()):
        keys = np.array(spans, dtype=np.int64)
        arrived_s, output = float(shape.arrivals_s[number]), int(shape.output_lens[number])
        marks = (
            tuple(range(1, len(keys))),
            tuple(np.flatnonzero(shape.flags[keys] & INDEPENDENT).tolist()),
        )
        yield Entry(
            keys,
            shape.lengths[keys],
            number + 1,
            arrived_s,
            output,
            int(shape.groups[number]),
            None,
            *marks,
        )


# ------------------------------------------------------------------------------
# Records of finished requests of a spanlab study: lengths, times and groups, without prompt
# content.
# ------------------------------------------------------------------------------

OTHER_RUNS = "records of other runs than that of the first seed and rate"


@LOG_FORMATS.register("spanlab_records")
def spanlab_records() -> LogFormat:
    """The file records/ARM.jsonl of a study, whose records are in order of completion."""
    return LogFormat(
        looks_for="JSONL with prompt_tokens, reused_tokens and arrived_s",
        recognises=lambda file: (
            {"prompt_tokens", "reused_tokens", "arrived_s"} <= first_row(file).keys()
        ),
        read=_spanlab_records_read_entries,
        ids=Ids.NONE,
        fields=("prompt_tokens", "reused_tokens", "arrived_s"),
    )


def _spanlab_records_read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the records of one run, sorted by arrival."""
    first_run: tuple[int, float | None] | None = None

    def parse(row: Row, line: int, file: LogFile) -> Entry | None:
        nonlocal first_run
        run = row.count("seed", default=0), row.number("rate_rps")
        first_run = first_run or run
        if run != first_run:
            file.set_aside(OTHER_RUNS)
            return None
        tokens, output = row.count("prompt_tokens"), row.count("output_tokens")
        entry = lengths_only(tokens, line, row.seconds("arrived_s"), output)
        return replace(entry, session=row.label("group_id"))

    yield from sorted(json_lines(parse)(file), key=lambda entry: entry.at or 0.0)


# ------------------------------------------------------------------------------
# Parquet table of prompts as token ids, with the columns group_id, idx, tokens and n_tokens.
# ------------------------------------------------------------------------------

COLUMNS = ["group_id", "tokens"]


@LOG_FORMATS.register("parquet")
def parquet() -> LogFormat:
    """One row per request in file order; groups are sessions."""
    return LogFormat(
        looks_for="Parquet with the columns group_id and tokens",
        recognises=lambda file: file.content.file.is_file() and file.head[:4] == b"PAR1",
        read=_parquet_read_entries,
        ids=Ids.CHAINED,
        fields=tuple(COLUMNS),
    )


def _parquet_read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the requests, with one batch of rows in memory at a time."""
    import pyarrow
    from pyarrow import parquet as tables

    try:
        with tables.ParquetFile(file.content.file) as table:
            names = table.schema_arrow.names
            if any(names.count(column) != 1 for column in COLUMNS):
                raise ValueError(
                    f"log={file.path}: expected one of each of the columns {', '.join(COLUMNS)}"
                )
            group_type, token_type = (table.schema_arrow.field(column).type for column in COLUMNS)
            if pyarrow.types.is_nested(group_type):
                raise ValueError(
                    f"log={file.path}: group_id: expected texts or numbers, not {group_type}"
                )
            is_list = pyarrow.types.is_nested(token_type) and hasattr(token_type, "value_type")
            if not is_list or not pyarrow.types.is_integer(token_type.value_type):
                raise ValueError(
                    f"log={file.path}: tokens: expected lists of integers, not {token_type}"
                )
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=COLUMNS):
                for group, tokens in zip(
                    batch["group_id"].to_pylist(), batch["tokens"], strict=True
                ):
                    number += 1
                    if tokens.values is None or tokens.values.null_count:
                        file.refuse(number, "tokens: expected a list of token ids, not null")
                        continue
                    values = tokens.values.to_numpy()
                    if len(values) and not 0 <= values.min() <= values.max() < 1 << 31:
                        file.refuse(number, "tokens: expected token ids from 0 to below 2^31")
                        continue
                    keys, lengths = hash_pieces(values, file.piece)
                    yield Entry(keys, lengths, number, session=group)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"log={file.path}: expected a readable Parquet file") from error


# ------------------------------------------------------------------------------
# Recorded agent sessions: one object per session, with block ids, output lengths and think
# times of its requests.
# ------------------------------------------------------------------------------

BLOCK = 64  # tokens, if a session has no block_size
AGENT_SESSIONS_TOGETHER = (
    "sessions start together, at the first request of each: nobody recorded when each one started"
)
_OF_BLOCKS = ("in", "input_length", "input_tokens", "prompt_tokens")


@LOG_FORMATS.register("agent_sessions")
def agent_sessions() -> LogFormat:
    """A JSON file or JSONL; `t` is seconds since the session's start; without it, think times are
    summed."""
    return LogFormat(
        looks_for="JSON with a list requests of objects with hash_ids",
        recognises=lambda file: (
            isinstance(requests := first_row(file).get("requests"), list)
            and bool(requests)
            and isinstance(requests[0], dict)
            and "hash_ids" in requests[0]
        ),
        read=_agent_sessions_read_entries,
        ids=None,
        fields=("requests",),
        block=lambda file: Row(first_row(file)).count("block_size", least=1, default=BLOCK),
    )


@dataclass
class _AgentSessionsSession:
    row: Row
    line: int

    @property
    def name(self) -> str:
        """The session's id, or else its line."""
        return str(self.row.fields.get("id", self.line))


def _agent_sessions_read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the requests of all sessions by time; all sessions are in memory, because they are
    small."""
    file.notes.append(AGENT_SESSIONS_TOGETHER)
    sessions = file.parsed(lambda item, number: _AgentSessionsSession(parse_object(item), number))
    entries = [entry for session in sessions for entry in _session_entries(session, file)]
    yield from sorted(entries, key=lambda entry: entry.at or 0.0)


def _session_entries(session: _AgentSessionsSession, file: LogFile) -> Iterator[Entry]:
    try:
        size = session.row.count("block_size", least=1, default=BLOCK)
        requests = list(_requests(session.row))
    except BadFieldError as error:
        file.refuse(session.line, str(error))
        return
    clock = 0.0
    for index, row in enumerate(requests):
        try:
            milliseconds = row.duration("tool_wait_ms", scale=1e-3)
            wait = row.duration("think_time") or milliseconds or 0.0
            time = row.duration("t")
            time = row.seconds("timestamp") if time is None else time
            clock += wait
            keys = block_keys(row)
            if session.row.get("hash_id_scope") == "local":
                keys = salt_keys(keys, session.name)
            time = clock if time is None else time
            tokens = row.count(*_OF_BLOCKS, default=len(keys) * size)
            blocks = -(-tokens // size)
            if len(keys) not in (blocks, tokens // size):
                raise BadFieldError(
                    "hash_ids", f"{blocks} ids for {tokens} tokens, not {len(keys)}"
                )
            lengths = block_lengths(tokens, size)
            if len(keys) < len(lengths):  # a partial last block may have no id
                last = hash_name((session.name, session.line, time, len(keys)))
                keys = np.append(keys, np.int64(last))
            yield Entry(
                keys,
                lengths,
                session.line,
                time,
                row.count("out", "output_length", "output_tokens", default=0),
                session.name,
                wait=wait,
                identity=identity_of(row) or identity_of(session.row),
            )
            clock += row.duration("api_time", "duration") or 0.0
        except BadFieldError as error:
            file.refuse(session.line, f"requests[{index}].{error}")


def _requests(row: Row) -> Iterator[Row]:
    """Yield the requests in order; the requests of a subagent are at the position of its call."""
    requests = row.get("requests")
    if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
        raise BadFieldError("requests", f"a list of objects{actual(requests)}")
    for request in map(Row, requests):
        if isinstance(request.get("requests"), list):
            yield from _requests(request)
        else:
            yield request
