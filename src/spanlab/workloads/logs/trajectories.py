"""Whole conversations of agents and of chats, in which each answer is a request, and traces of
their calls."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.bodies import as_json
from spanlab.workloads.logs.formats import block_keys, find_block_size
from spanlab.workloads.logs.log import Entry, Ids, block_lengths, salt_keys
from spanlab.workloads.logs.observed import NOT_REPORTED, Moments, Usage
from spanlab.workloads.logs.rendering import BodyReader
from spanlab.workloads.logs.rows import (
    BadFieldError,
    Row,
    actual,
    count_of,
    counted,
    identity_of,
    output_in,
)
from spanlab.workloads.logs.source import (
    LOG_FORMATS,
    LogFile,
    LogFormat,
    first_row,
    folder_has,
    has_row,
    head_rows,
    header_count,
    parse_object,
)
from spanlab.workloads.logs.spans import message_of, unpacked


@dataclass
class _Call:
    """A call of a model: the messages before it, its answer, and what was reported.

    `wait`  seconds of the tool before it
    """

    body: Mapping[str, Any]
    answer: str
    at: float | None = None
    end: float = np.nan
    wait: float = 0.0
    usage: Usage = NOT_REPORTED
    output: int | None = None
    record: str | None = None


@dataclass
class _Requests:
    """Requests from the calls of conversations, numbered in their order."""

    file: LogFile
    _number: int = 0
    _ends: dict[str, float] = field(default_factory=dict)
    # names of records, by their content
    _records: dict[bytes, set[object]] = field(default_factory=dict)
    _calls: dict[bytes, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reader = BodyReader(self.file)

    def is_copy(self, row: Row, name: object) -> bool:
        """Return whether an earlier record had the same id and content; a record without an id is
        never a copy."""
        content = blake2b(
            orjson.dumps(row.fields, option=orjson.OPT_SORT_KEYS), digest_size=16
        ).digest()
        names = self._records.setdefault(content, set())
        is_alike, is_copy = bool(names), name is not None and name in names
        names.add(name)
        if is_copy:
            self.file.set_aside(COPIES)
        elif is_alike:
            self.file.remark(ALIKE)
        return is_copy

    def entry(self, call: _Call, session: str, record: object) -> Entry:
        """Return the request of a call of a record, which is known by `record`."""
        self._number += 1
        if call.record is None:
            call_bytes = orjson.dumps(
                (session, call.body, call.answer), option=orjson.OPT_SORT_KEYS
            )
            first = self._calls.setdefault(blake2b(call_bytes, digest_size=16).digest(), record)
            if first != record:
                self.file.remark(ALIKE_CALLS)
        keys, lengths, opens, prompt = self._reader.pieces(call.body, is_line=False)
        output = len(self.file.encode(call.answer)) if call.output is None else call.output
        before = self._ends.get(session)
        wait = call.wait if before is None or call.at is None else max(0.0, call.at - before)
        if not np.isnan(call.end):
            self._ends[session] = call.end
        moments = Moments(last_token=call.end)
        return Entry(
            keys,
            lengths,
            self._number,
            call.at,
            output,
            session,
            opens=opens,
            moments=moments,
            wait=wait,
            usage=call.usage,
            prompt=prompt,
            record=call.record,
        )


COPIES = "records that repeat an earlier one, with its id"
ALIKE = "records that equal an earlier one count, since they have no id or another one"
ALIKE_CALLS = (
    "calls that equal one of another record with the same id count, since calls have no ids"
)
NUMBERED = "several calls stand in one line or file: requests are numbered by their order"


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadFieldError(name, f"a list of objects{actual(value)}")
    return value


# ------------------------------------------------------------------------------
# Trajectories of SWE-agent and mini-swe-agent.
# ------------------------------------------------------------------------------

_ENDINGS = (".traj", ".json", ".jsonl")
STEPS = "steps without a call of the model"
OTHER_ROLES = "messages of the role exit, which are not sent"


@LOG_FORMATS.register("trajectory")
def trajectory() -> LogFormat:
    """A trajectory of SWE-agent or mini-swe-agent, lines of them, or a folder; one request per call
    of the model."""
    return LogFormat(
        looks_for="JSON with trajectory and history or info, or with messages and info, or a folder of such files",
        recognises=lambda file: folder_has(file, _is_trajectory, _ENDINGS),
        read=_trajectory_entries,
        ids=Ids.CONTENT,
        fields=("trajectory", "history"),
        marks=(frozenset({"trajectory", "info"}), frozenset({"trajectory_format"})),
    )


def _is_trajectory(row: dict[str, Any]) -> bool:
    if isinstance(row.get("attempts"), list):
        return any(
            isinstance(attempt, dict) and _is_trajectory(attempt) for attempt in row["attempts"]
        )
    if isinstance(row.get("trajectory"), list):
        return True
    info = row.get("info")
    return (
        isinstance(row.get("messages"), list) and isinstance(info, dict) and "model_stats" in info
    )


def _trajectory_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the requests of all trajectories, sorted by time if they have times."""
    file.notes.append(NUMBERED)
    requests = _Requests(file)
    from_first_time: list[Entry] = []
    is_folder = file.content.file.is_dir()
    for inner in map(replace, file.files(_ENDINGS)):
        if is_folder and not has_row(inner, _is_trajectory, in_folder=True):
            file.set_aside("files of the folder that are no trajectories")
            continue

        def parse(item: Any, line: int, inner: LogFile = inner) -> list[Entry]:
            row = parse_object(item)
            of_file = inner.path.stem if is_folder else None  # of which each holds one instance
            given = row.label("instance_id", "info.instance_id") or of_file
            if requests.is_copy(row, given):
                return []
            name = str(given or f"{inner.path.stem} {line}")
            return [
                requests.entry(call, name, f"{inner.path} {line}") for call in _calls_of(row, file)
            ]

        for entries in inner.parsed(parse, counts=False):
            for entry in entries:
                if entry.at is None and not from_first_time:
                    yield entry
                else:
                    from_first_time.append(entry)
    times = [entry.at for entry in from_first_time if entry.at is not None]
    has_all = len(times) == len(from_first_time)
    yield from (
        sorted(from_first_time, key=lambda entry: entry.at or 0.0) if has_all else from_first_time
    )


def _calls_of(row: Row, file: LogFile) -> Iterator[_Call]:
    if row.get("attempts") is not None:
        for attempt in _objects(row.get("attempts"), "attempts"):
            yield from _calls_of(Row(attempt), file)
        return
    calls = [*(_mini_calls(row, file) if row.get("trajectory") is None else _steps(row, file))]
    beyond = count_of(row.get("info.model_stats"), "api_calls") - len(calls)
    if beyond > 0:
        file.set_aside(
            "calls that model_stats counts beyond those of the trajectories", int(beyond)
        )
    yield from calls


def _steps(row: Row, file: LogFile) -> Iterator[_Call]:
    """Yield the calls of SWE-agent: the queries of its steps, or else the answers in its
    history."""
    steps = _objects(row.get("trajectory"), "trajectory")
    if steps and all("role" in step for step in steps):
        yield from _answers(steps, "trajectory", file)
        return
    if not any("query" in step for step in steps):
        times = [Row(step).duration("execution_time") or 0.0 for step in steps]
        yield from _answers(_objects(row.get("history"), "history"), "history", file, times)
        return
    wait = 0.0
    for index, step in enumerate(steps):
        query = _objects(step.get("query") or [], f"trajectory[{index}].query")
        messages = [_cleaned(message) for message in query if message]
        if messages:
            yield _Call(
                {"messages": messages},
                str(step.get("response") or step.get("thought") or ""),
                wait=wait,
            )
        else:
            file.set_aside(STEPS)
        wait = Row(step).duration("execution_time") or 0.0


def _answers(
    messages: list[dict[str, Any]], name: str, file: LogFile, waits: list[float] | None = None
) -> Iterator[_Call]:
    """Yield a call for each answer of the model in a history, apart from those of
    demonstrations."""
    before: list[dict[str, Any]] = []
    number = 0
    for index, message in enumerate(messages):
        cleaned = _cleaned(message)
        is_answer = cleaned["role"] == "assistant" and not message.get("is_demo")
        if is_answer and before:
            wait = waits[number - 1] if waits and 0 < number <= len(waits) else 0.0
            yield _call_of(message, cleaned, before, f"{name}[{index}].", wait)
            number += 1
        if cleaned["role"] == "exit":
            file.set_aside(OTHER_ROLES)
        else:
            before.append(cleaned)


def _call_of(
    message: dict[str, Any],
    cleaned: dict[str, Any],
    before: list[dict[str, Any]],
    path: str,
    wait: float = 0.0,
) -> _Call:
    """Return the call that a message answers, with the usage and the time in its field `extra`."""
    row = Row(message)
    usage = row.get("extra.response.usage", "extra.usage", "response.usage", "usage")
    output = output_in(usage)
    try:
        end = row.seconds("extra.timestamp", "timestamp")
        started = row.seconds("extra.started", "extra.start_time")
    except BadFieldError as error:
        raise BadFieldError(f"{path}timestamp", "a number or a date") from error
    content = cleaned.get("content")
    text = content if isinstance(content, str) else "" if content is None else as_json(content)
    if cleaned.get("tool_calls"):
        text += as_json(cleaned["tool_calls"])
    return _Call(
        {"messages": list(before)},
        text,
        end if started is None else started,
        np.nan if end is None else end,
        wait,
        counted(usage),
        record=None if (name := row.get("extra.response.id", "response.id")) is None else str(name),
        output=None if np.isnan(output) else int(output),
    )


def _mini_calls(row: Row, file: LogFile) -> Iterator[_Call]:
    """Yield the calls of mini-swe-agent: answers in its messages, or whole responses of
    /v1/responses."""
    messages = _objects(row.get("messages"), "messages")
    if not any(message.get("object") == "response" for message in messages):
        times = list(map(_time_of, messages))
        for call in _answers(messages, "messages", file):
            # a call begins at the time of the message before it, where messages have times
            index = len(call.body["messages"]) - 1
            before = times[index] if index < len(times) else None
            if call.at is not None and before is not None:
                call.at = min(call.at, before)
            yield call
        return
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.get("object") != "response":
            if message.get("role") == "exit":
                file.set_aside(OTHER_ROLES)
            else:
                is_item = message.get("type") not in (None, "message")
                known: dict[str, Any] = {
                    key: message[key] for key in ("type", "call_id", "output") if key in message
                }
                items.append(known if is_item else {"type": "message", **message_of(message)})
            continue
        output = _objects(message.get("output"), "messages[].output")
        call = _call_of(
            message, {"role": "assistant", "content": as_json(output)}, [], "messages[]."
        )
        yield replace(call, body={"input": list(items)})
        items.extend(output)


def _time_of(message: dict[str, Any]) -> float | None:
    """Return the time of a message; None if it has none, or one that is no time."""
    try:
        return Row(message).seconds("extra.timestamp", "timestamp")
    except BadFieldError:
        return None


def _cleaned(message: dict[str, Any]) -> dict[str, Any]:
    """Return what of a message is sent; the rest says what the agent made of it."""
    ids = message.get("tool_call_ids")
    named = (
        {"tool_call_id": ids[0]}
        if isinstance(ids, list) and ids and not message.get("tool_call_id")
        else {}
    )
    cleaned = message_of(message | named)
    thoughts = message.get("thinking_blocks")
    if isinstance(thoughts, list) and thoughts:
        content = cleaned["content"]
        cleaned["content"] = [
            *thoughts,
            *(content if isinstance(content, list) else [content] if content else []),
        ]
    return cleaned


# ------------------------------------------------------------------------------
# ShareGPT and other lists of conversations.
# ------------------------------------------------------------------------------

_LISTS = ("conversations", "conversation", "items")
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
}
UNANSWERED = "turns at the end of a conversation without an answer"
UNASKED = "answers at the beginning of a conversation, without a question"
ONE_BY_ONE = "the file has no times: conversations are taken one after another"


@LOG_FORMATS.register("sharegpt")
def sharegpt() -> LogFormat:
    """Conversations as JSON or JSONL; one request per answer, with all turns before it."""
    return LogFormat(
        looks_for="JSON or JSONL with conversations: lists of turns with from and value, or role and content",
        recognises=lambda file: any(_turns_of(row) is not None for row in head_rows(file)),
        read=_sharegpt_entries,
        ids=Ids.CONTENT,
        fields=("conversations",),
        marks=(frozenset({"conversations"}),),
    )


def _turns_of(row: dict[str, Any]) -> tuple[str, list[Any]] | None:
    for name in _LISTS:
        turns = unpacked(row.get(name))
        if (
            isinstance(turns, list)
            and turns
            and isinstance(turns[0], dict)
            and {"from", "role"} & turns[0].keys()
        ):
            return name, turns
    return None


def _sharegpt_entries(file: LogFile) -> Iterator[Entry]:
    file.notes.extend((ONE_BY_ONE, NUMBERED))
    requests = _Requests(file)

    def parse(item: Any, line: int) -> list[Entry]:
        row = parse_object(item)
        name = row.label("id", "conversation_id", "conversation_hash")
        if requests.is_copy(row, name):
            return []
        calls = _turn_calls(row, file)
        return [
            requests.entry(call, f"{line}" if name is None else f"{line} {name}", line)
            for call in calls
        ]

    for entries in file.parsed(parse, counts=False):
        yield from entries


def _turn_calls(row: Row, file: LogFile) -> list[_Call]:
    listed = _turns_of(row.fields)
    if listed is None:
        name = next((name for name in _LISTS if row.fields.get(name) is not None), _LISTS[0])
        if row.fields.get(name) == []:
            file.set_aside("conversations without turns")
            return []
        raise BadFieldError(
            name, f"a list of turns with from and value{actual(row.fields.get(name))}"
        )
    name, turns = listed
    system = row.get("system", "system_prompt")
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    calls: list[_Call] = []
    questions = 0
    for index, turn in enumerate(turns):
        role, content = _turn(turn, f"{name}[{index}]")
        if role != "assistant":
            questions += role != "system"
        elif questions:
            calls.append(_Call({"messages": list(before)}, content))
        else:
            file.set_aside(UNASKED)
        before.append({"role": role, "content": content})
    if before and before[-1]["role"] not in ("assistant", "system"):
        file.set_aside(UNANSWERED)
    return calls


def _turn(turn: Any, path: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise BadFieldError(path, f"an object with from and value{actual(turn)}")
    speaker, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadFieldError(
            f"{path}.from", f"human, gpt, system, tool or another known speaker{actual(speaker)}"
        )
    if content is None and "text" in turn:
        content = turn["text"]
    if not isinstance(content, str):
        raise BadFieldError(f"{path}.value", f"a text{actual(content)}")
    return role, content


# ------------------------------------------------------------------------------
# Traces of agents with the calls that each call waits for: agentic Mooncake, as Dynamo replays it.
# ------------------------------------------------------------------------------

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
_FIRST_VERSION = ("wait_for", "branches", "prefix_reset", "tool_wait_ms", "tool_events")
COMPUTED = "rows without a timestamp arrive when those that they wait for have arrived, and their waits are over"
TRIGGERS = ("completion", "dispatch")


@LOG_FORMATS.register("agentic_mooncake")
def agentic_mooncake() -> LogFormat:
    """One call per line with its session and the calls that it waits for; the second version begins
    with a header."""
    return LogFormat(
        looks_for=f"JSONL with the schema {SCHEMA}, or with request_id, hash_ids and wait_for",
        recognises=_recognises,
        read=_read_entries,
        ids=None,
        block=_block_size,
        fields=("request_id", "session_id", "hash_ids"),
    )


def _recognises(file: LogFile) -> bool:
    if first_row(file).get("schema") == SCHEMA:
        return True
    rows = head_rows(file)
    is_named = bool(rows) and all("request_id" in row and "input_length" in row for row in rows)
    return is_named and any(name in row for row in rows for name in _FIRST_VERSION)


def _block_size(file: LogFile) -> int:
    header = Row(first_row(file))
    return (
        header_count(file, header, "block_size")
        if "schema" in header.fields
        else find_block_size(file)
    )


@dataclass
class _Calls:
    """Reader of the calls of a trace; `times` are the arrivals of those that were read, by name."""

    size: int
    is_local: bool = False
    times: dict[Hashable, float] = field(default_factory=dict)

    def entry(self, row: Row, line: int, file: LogFile) -> Entry | None:
        """Return the request of a line; None for the header."""
        if "schema" in row.fields:
            if row.get("schema") != SCHEMA:
                raise BadFieldError("schema", f"{SCHEMA}{actual(row.get('schema'))}")
            if row.count("version") != VERSION:
                raise BadFieldError("version", f"{VERSION}{actual(row.get('version'))}")
            self.is_local = row.get("hash_id_scope") == "local"
            return None
        name = row.label("request_id")
        if name is None:
            raise BadFieldError("request_id", "a text, and it is missing")
        if name in self.times:
            raise BadFieldError("request_id", f"a name that no earlier line has{actual(name)}")
        tokens = file.check_length(row.count("input_length", "input_tokens"), "input_length")
        keys, lengths = block_keys(row), block_lengths(tokens, self.size)
        if len(keys) != len(lengths):
            raise BadFieldError(
                "hash_ids", f"{len(lengths)} ids for {tokens} tokens, not {len(keys)}"
            )
        after, wait = self._waits(row, file)
        at = row.seconds("timestamp", "created_time", scale=1e-3)
        if at is None:
            # the earliest arrival of a call without a timestamp
            least = row.duration("not_before_ms", scale=1e-3) or 0.0
            if after and COMPUTED not in file.notes:
                file.notes.append(COMPUTED)
            at = max([least, *(self.times[name] + wait for name in after if name in self.times)])
        self.times[name] = at
        play = row.label("play_id") if self.is_local else None
        return Entry(
            keys if play is None else salt_keys(keys, play),
            lengths,
            line,
            at,
            row.count("output_length", "output_tokens", default=0),
            row.label("session_id"),
            wait=wait,
            identity=identity_of(row),
            name=name,
            after=after,
        )

    def _waits(self, row: Row, file: LogFile) -> tuple[tuple[Hashable, ...], float]:
        """Return the calls that a call waits for, and the seconds from the end of the last of
        them."""
        listed = row.get("dependencies")
        if listed is None:
            named = row.get("wait_for")
            if named is None:
                named = []
            if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
                raise BadFieldError("wait_for", f"a list of texts{actual(named)}")
            wait = (row.duration("delay", "delay_ms", scale=1e-3) or 0.0) + (
                row.duration("tool_wait_ms", scale=1e-3) or 0.0
            )
            return tuple(named), wait
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise BadFieldError("dependencies", f"a list of objects{actual(listed)}")
        after: list[Hashable] = []
        wait = 0.0
        for index, entry in enumerate(map(Row, listed)):
            name = entry.label("request_id")
            if name is None:
                raise BadFieldError(
                    f"dependencies[{index}].request_id", "a text, and it is missing"
                )
            trigger = entry.get("trigger")
            if trigger not in TRIGGERS:
                raise BadFieldError(
                    f"dependencies[{index}].trigger", f"{' or '.join(TRIGGERS)}{actual(trigger)}"
                )
            if trigger == "dispatch":
                file.set_aside(
                    "calls that wait for the start of others, which counts as a wait for their end"
                )
            after.append(name)
            wait = max(wait, entry.duration("delay_ms", scale=1e-3) or 0.0)
        return tuple(after), wait


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the calls by time; they are in memory, since rows of different sessions follow each
    other."""
    try:
        size = _block_size(file)
    except BadFieldError as error:
        raise ValueError(f"log={file.path}: {error}") from error
    calls = _Calls(size)

    def parse(item: Any, line: int) -> Entry | None:
        return calls.entry(parse_object(item), line, file)

    entries = [*file.parsed(parse)]
    if entries and not np.isfinite([entry.at or 0.0 for entry in entries]).all():
        raise ValueError(f"log={file.path}: timestamp: expected finite times")
    yield from sorted(entries, key=lambda entry: entry.at or 0.0)
