"""Sessions of coding agents: each call of a model is a request with the history before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from spanlab.workloads.logs.bodies import check_block, is_body
from spanlab.workloads.logs.log import Entry, Identity, Ids, hash_name
from spanlab.workloads.logs.observed import BYTES_PER_TOKEN, NOT_REPORTED, Moments, Usage
from spanlab.workloads.logs.rendering import UNKNOWN_TOKENS, BodyReader
from spanlab.workloads.logs.rows import BadFieldError, Row, count_of, counted, output_in
from spanlab.workloads.logs.source import (
    FOLDER,
    LOG_FORMATS,
    LogFile,
    LogFormat,
    by_time,
    folder_has,
    parse_object,
)

FRONT = "system prompt and tools, which the log does not have"
UNSEEN = (
    "system prompt and tools are not in the log: at the first call of a session they are what the provider counts "
    "beyond the messages; they count as one unknown text that is the same in all calls of the session, and in no other"
)
_TIMES = ("timestamp", "payload.timestamp")
_LONGEST_OUTPUT = (1 << 31) - 1


@dataclass
class Call:
    """One call of a model by an agent.

    `body`    the messages before it, as the body of a request
    `key`     what tells the call from others, if it may stand in several files
    `at`      seconds at which it was sent, and `end` at which its answer was complete; None if
              unknown
    `caller`  session of the agent that started this one; None if there is none
    """

    line: int
    session: str
    body: Mapping[str, Any]
    usage: Usage = NOT_REPORTED
    output: int = 0
    at: float | None = None
    end: float | None = None
    identity: Identity = ()
    key: object = None
    caller: str | None = None


class Calls:
    """Requests from the calls of sessions: what stands before the messages, and the waits between
    calls."""

    def __init__(self, file: LogFile) -> None:
        self._file, self._reader = file, BodyReader(file, repeats=True)
        self._fronts: dict[str, int] = {}
        self._ends: dict[str, float] = {}

    def entry(self, call: Call) -> Entry:
        """Return the request of a call; calls of a session come in order of time."""
        unread, endless = self._file.unread, self._file.unread.endless
        if any(call.body.get(key) for key in ("messages", "input", "contents")):
            keys, lengths, opens, prompt = self._reader.pieces(call.body, is_line=False)
        else:
            keys = np.zeros(0, dtype=np.int64)
            lengths = np.zeros(0, dtype=np.int64)
            opens = ()
            prompt = None
            unread.finish()
        known, counted = call.session in self._fronts, int(lengths.sum())
        if not known and not np.isnan(call.usage.prompt):
            self._fronts[call.session] = max(0, int(call.usage.prompt) - counted)
            known = True
        if UNSEEN not in self._file.notes:
            self._file.notes.append(UNSEEN)
        tokens = self._fronts.get(call.session, UNKNOWN_TOKENS)
        if not known:
            unread.mark_endless(endless)
        unread.leave(FRONT, BYTES_PER_TOKEN * tokens)
        if tokens:
            keys = np.concatenate([[np.int64(hash_name(("front", call.session, known)))], keys])
            lengths = np.concatenate([[np.int64(tokens)], lengths])
            opens = (1, *(index + 1 for index in opens)) if len(keys) > 1 else ()
        before = self._ends.get(call.session)
        wait = max(0.0, call.at - before) if before is not None and call.at is not None else 0.0
        if call.end is not None:
            self._ends[call.session] = max(call.end, before or call.end)
        return Entry(
            keys,
            lengths,
            call.line,
            call.at,
            min(call.output, _LONGEST_OUTPUT),
            call.session,
            opens=opens,
            moments=Moments(last_token=np.nan if call.end is None else call.end),
            wait=wait,
            usage=call.usage,
            identity=call.identity,
            caller=call.caller,
            prompt=prompt,
            front=int(tokens > 0),
        )


def read_sessions(
    read: Callable[[LogFile, set[object]], Iterator[Call]],
    suffixes: tuple[str, ...] = (".jsonl",),
    times: tuple[str, ...] = _TIMES,
) -> Callable[[LogFile], Iterator[Entry]]:
    """Return a reader of one file of sessions, or of a folder of them; `read` yields the calls of a
    file by time.

    A file of a folder is opened when the time of its first line is reached, so that few are in
    memory at once. `read` also gets the set of calls that files before it had, since a session that
    goes on may repeat them.
    """

    def entries(file: LogFile) -> Iterator[Entry]:
        calls, seen, is_folder = Calls(file), set[object](), file.content.file.is_dir()
        if is_folder:
            file.notes.append(FOLDER)
        files = file.files(suffixes)
        for number, (inner, call) in enumerate(
            by_time(files, lambda inner: read(inner, seen), times), 1
        ):
            line = call.line
            call.line = number if is_folder else line
            try:
                entry = calls.entry(call)
            except BadFieldError as error:
                inner.refuse(line, str(error))
            else:
                yield entry

    return entries


def output_of(usage: Any) -> int:
    """Return the output tokens that a usage reports; 0 if it reports none."""
    return int(np.nan_to_num(count_of(usage, "output_tokens")))


# ------------------------------------------------------------------------------
# Claude Code: one JSON object per line, a tree of messages by `uuid` and `parentUuid`.
#
# A message of the model is written as several lines, one per content block, with the same id and
# with the usage as it was when the line was written: the largest output is the final one. Lines
# may go on from any earlier line, so the messages of a file are in memory until its end.
# ------------------------------------------------------------------------------

_SPEAKERS = ("user", "assistant")
_NAMES = ("sessionId", "session_id")
_OTHER_TYPE = re.compile(r"[a-z]+(-[a-z]+)*")
_SYNTHETIC = "<synthetic>"
SYNTHETIC = "messages that Claude Code wrote itself, such as errors of the API"
REPEATED_LINES = "lines that repeat an earlier line"
REPEATED_CALLS = "calls that another file has too"
SUBAGENTS = (
    "calls of subagents are in files of their own: the folder of the session's file, given as "
    "log, has all of them"
)
DIFFERENT = "runs whose result line differs from the sum of their calls"
FIRST_DIFFERENT = "the first result line that differs from the sum of its calls is"
OUTPUT_BEFORE = "; lines of a message have its output as it was when they were written"
MISSING_CALLS = "; the log may lack calls, such as those of subagents or of small models"
_OF_RUN = ("usage", "modelUsage")
NO_PARENT = "messages whose parent is not in the log: the history before them is unknown"


@LOG_FORMATS.register("claude_code")
def claude_code() -> LogFormat:
    """A session of Claude Code, one with subagents, or a folder of sessions; one request per call
    of the model."""
    return LogFormat(
        looks_for="JSONL with sessionId, type and message, or a folder of such files",
        recognises=lambda file: folder_has(file, _is_claude_code),
        read=read_sessions(_claude_code_calls),
        ids=Ids.CONTENT,
        fields=("sessionId", "type", "message"),
        marks=(frozenset({"parentUuid", "sessionId"}),),
    )


def _is_claude_code(row: dict[str, Any]) -> bool:
    kind, has_name = row.get("type"), isinstance(row.get("sessionId"), str)
    if kind in _SPEAKERS:
        return isinstance(row.get("message"), dict) and (
            has_name or isinstance(row.get("session_id"), str)
        )
    if kind in ("system", "result") and "subtype" in row:
        return has_name or isinstance(row.get("session_id"), str)
    is_other = (
        isinstance(kind, str)
        and _OTHER_TYPE.fullmatch(kind) is not None
        and has_name
        and not is_body(row)
    )
    return is_other or (kind, True) in (
        ("summary", "leafUuid" in row),
        ("file-history-snapshot", "snapshot" in row),
    )


@dataclass(eq=False)
class _Node:
    """A line with a place in the tree; `content` is that of its message, None if no prompt has
    it."""

    line: int
    parent: _Node | None
    role: str
    content: list[Any] | None
    time: float | None
    is_first: bool
    message: _Message | None = None

    @cached_property
    def as_message(self) -> dict[str, Any]:
        """The line as a message of the user."""
        return {"role": "user", "content": self.content}


@dataclass(eq=False)
class _Message:
    """A message of the model: the lines with its blocks, and the usage with the largest output."""

    nodes: list[_Node]
    session: str
    agent: str | None
    model: str | None
    usage: Mapping[str, Any] = field(default_factory=dict)
    _sent: dict[int, dict[str, Any]] = field(default_factory=dict)

    def before(self, line: int) -> dict[str, Any]:
        """Return the message as far as it was written before a line."""
        nodes = [node for node in self.nodes if node.line < line]
        if len(nodes) in self._sent:
            return self._sent[len(nodes)]
        blocks: list[Any] = []
        tools: set[str] = set()
        for block in (block for node in nodes for block in node.content or ()):
            is_call = isinstance(block, dict) and block.get("type") == "tool_use"
            if is_call and block.get("id") is not None:
                if str(block["id"]) in tools:  # a call of a tool stands once
                    continue
                tools.add(str(block["id"]))
            blocks.append(block)
        self._sent[len(nodes)] = {"role": "assistant", "content": blocks}
        return self._sent[len(nodes)]

    def report(self, usage: Any) -> None:
        """Take the usage of a line, unless an earlier one had more output."""
        if isinstance(usage, dict) and usage and output_of(usage) >= output_of(self.usage):
            self.usage = usage


@dataclass(frozen=True)
class _Run:
    """The line at the end of a run of `claude -p`, whose usage is a sum of calls.

    `usage`   of the calls of the session itself since the run before; older versions count from its
              beginning
    `models`  by model, of all calls since the beginning of the session
    """

    line: int
    session: str
    usage: Mapping[str, Any]
    models: Mapping[str, Any]


class _Tree:
    """Lines of a file by uuid, messages of the model by id, and results of tools by the id of their
    call."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._nodes: dict[str, _Node] = {}
        self._last: dict[tuple[str, str | None], _Node] = {}
        self._latest: dict[str, _Message] = {}
        self.messages: dict[object, _Message] = {}
        self.results: dict[str, list[_Node]] = {}
        self.runs: list[_Run] = []
        self._streaming: dict[tuple[str, str | None], str] = {}
        self._streamed: dict[str, dict[str, Any]] = {}
        self.without_parent: set[_Node] = set()

    def add(self, row: Row, line: int) -> None:
        """Take a line of a file."""
        kind, uuid = str(row.get("type")), row.get("uuid")
        node = _Node(line, None, kind, None, row.seconds("timestamp"), False)
        message = row.get("message")
        is_message = kind in _SPEAKERS and message is not None
        if is_message and not isinstance(message, dict):
            raise BadFieldError("message", f"an object with role and content, not {message!r:.40}")
        if isinstance(uuid, str) and uuid in self._nodes:
            self._file.set_aside(REPEATED_LINES)
            if (repeated := self._nodes[uuid].message) is not None and is_message:
                repeated.report(message.get("usage"))
            return
        session = str(row.label(*_NAMES) or "")
        agent = row.label("agentId", "parent_tool_use_id")
        branch = session, None if agent is None else str(agent)
        node.parent = self._parent(row, node, branch)
        node.is_first = bool(row.get("isCompactSummary"))
        if isinstance(uuid, str):
            self._nodes[uuid] = node
        if isinstance(uuid, str) or is_message:
            self._last[branch] = node
        if kind == "attachment":
            node.role = "user"
            node.content = [{"type": "attachment", "attachment": row.get("attachment")}]
        elif not is_message:
            subtype = row.get("subtype")
            beside = f" ({subtype:.40})" if isinstance(subtype, str) else ""
            self._file.set_aside(f"lines of the type {kind}{beside}")
            if kind == "result":
                usage, models = (
                    value if isinstance(value, dict) else {} for value in map(row.get, _OF_RUN)
                )
                self.runs.append(_Run(line, session, usage, models))
            elif kind == "stream_event":
                self._stream(row, branch)
        elif message.get("model") == _SYNTHETIC or row.get("isApiErrorMessage"):
            self._file.set_aside(SYNTHETIC)
        elif row.get("isVisibleInTranscriptOnly") and not node.is_first:
            self._file.set_aside("messages that only the transcript shows")
        else:
            self._add_message(row, message, node, branch)

    def _stream(self, row: Row, branch: tuple[str, str | None]) -> None:
        """Take an event of a stream: the end of a message has its final output."""
        name, usage = row.get("event.message.id"), row.get("event.usage")
        if isinstance(name, str):
            self._streaming[branch] = name
        if (
            row.get("event.type") == "message_delta"
            and isinstance(usage, dict)
            and branch in self._streaming
        ):
            known = {key: count for key, count in usage.items() if count is not None}
            self._streamed[self._streaming[branch]] = known

    def close(self) -> None:
        """Give messages their final usage, and compare the sums of runs with those of their
        calls."""
        for name, usage in self._streamed.items():
            if (message := self._latest.get(name)) is not None:
                message.report({**message.usage, **usage})
        for problem in _differences(self.runs, list(self.messages.values())):
            self._file.remark(DIFFERENT)
            if not any(note.startswith(FIRST_DIFFERENT) for note in self._file.notes):
                name = self._file.path.name
                self._file.notes.append(f"{FIRST_DIFFERENT} in {name}, {problem}")

    def _parent(self, row: Row, node: _Node, branch: tuple[str, str | None]) -> _Node | None:
        if "parentUuid" not in row.fields:  # the output stream of `claude -p` is a single branch
            return self._last.get(branch)
        parent = row.get("parentUuid")
        if parent is None:
            return None
        if str(parent) not in self._nodes:
            self.without_parent.add(node)
        return self._nodes.get(str(parent))

    def _add_message(
        self, row: Row, message: dict[str, Any], node: _Node, branch: tuple[str, str | None]
    ) -> None:
        content = message.get("content")
        if content is None:
            raise BadFieldError("message.content", "a text or a list of blocks, and it is missing")
        node.content = content if isinstance(content, list) else [content]
        for block in node.content:
            check_block(block, "message.content")
        if node.role == "user":
            for block in node.content:
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    self.results.setdefault(str(block.get("tool_use_id")), []).append(node)
            return
        name, request = message.get("id"), row.get("requestId")
        of_line = (
            ("uuid", row.get("uuid")) if "uuid" in row.fields else (str(self._file.path), node.line)
        )
        key: object = of_line if name is None else (str(name), request)
        known = self.messages.get(key)
        if (
            known is None
            and name is not None
            and (latest := self._latest.get(str(name))) is not None
        ):
            is_same = request is None or (str(name), None) in self.messages
            known = latest if is_same else None
        if known is None:
            agent = branch[1]
            if agent is None and row.get("isSidechain"):
                root = node
                while root.parent is not None:
                    root = root.parent
                agent = f"sidechain {root.line}"
            model = message.get("model")
            known = _Message([], branch[0], agent, model if isinstance(model, str) else None)
            self.messages[key] = known
            if name is not None:
                self._latest[str(name)] = known
        if known.session == branch[0]:
            known.nodes.append(node)
        else:  # a session that goes on under another name begins with a copy of its messages
            self._file.set_aside(REPEATED_LINES)
        node.message = known
        known.report(message.get("usage"))

    def call(self, message: _Message) -> Call:
        """Return the call that a message of the model answers."""
        first, last = message.nodes[0], message.nodes[-1]
        # the lines before it, from the root of its tree or from the summary that took the place of
        # a history
        chain, node = [], first.parent
        while node is not None:
            chain.append(node)
            node = None if node.is_first else node.parent
        chain.reverse()
        oldest = chain[0] if chain else first
        usage = counted(message.usage)
        if oldest in self.without_parent and not oldest.is_first:
            self._file.set_aside(NO_PARENT)
        name = message.session if message.agent is None else f"{message.session}/{message.agent}"
        return Call(
            first.line,
            name,
            {"messages": self._prompt(chain, first.line)},
            usage,
            output_of(message.usage),
            _sent_at(message),
            last.time,
            identity=() if message.model is None else (("model", message.model),),
            caller=None if message.agent is None else message.session,
        )

    def _prompt(self, chain: list[_Node], line: int) -> list[dict[str, Any]]:
        """Return the messages of a chain of lines before a line.

        Results of tools that ran side by side are on branches of their own: they follow the message
        that called them.
        """
        messages: list[dict[str, Any]] = []
        results: set[_Node] = {node for node in chain if node.role == "user"}
        taken: set[_Message] = set()
        for node in chain:
            if node.content is None:
                continue
            if node.message is None:
                messages.append(node.as_message)
                continue
            if node.message in taken:
                continue
            taken.add(node.message)
            message = node.message.before(line)
            messages.append(message)
            for block in message["content"]:
                name = (
                    str(block.get("id"))
                    if isinstance(block, dict) and block.get("type") == "tool_use"
                    else None
                )
                for result in self.results.get(name, ()) if name is not None else ():
                    if result.line < line and result not in results and result.content is not None:
                        results.add(result)
                        messages.append(result.as_message)
        return messages


def _differences(runs: list[_Run], messages: list[_Message]) -> Iterator[str]:
    """Yield a sentence for each run whose counts are not the sum of its calls."""
    begin: dict[str, int] = {}
    for number, run in enumerate(runs):
        of_session = [
            each
            for each in messages
            if each.session == run.session and each.nodes[0].line < run.line
        ]
        main = [each for each in of_session if each.agent is None]
        since = [each for each in main if each.nodes[0].line > begin.get(run.session, 0)]
        begin[run.session] = run.line
        is_last = run.session not in {later.session for later in runs[number + 1 :]}
        models = [counts for counts in run.models.values() if isinstance(counts, dict)]
        if models and is_last:  # the sums by model include subagents, and are of the whole session
            total, calls = _total(models), of_session
        else:
            total = _total([run.usage])
            calls = main if _total([each.usage for each in main]) == total else since
        counted_ones = _total([each.usage for each in calls])
        if total != counted_ones:
            only_output = total[:-1] == counted_ones[:-1]
            yield (
                f"line {run.line}: it counts {_named(total)}, and its {len(calls):,} calls in the log "
                f"{_named(counted_ones)}{OUTPUT_BEFORE if only_output else MISSING_CALLS}"
            )


def _total(usages: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return fresh, cached, created and output tokens of several usages."""
    total = np.zeros(4)
    for usage in usages:
        prompt, cached, created = np.nan_to_num(counted(usage))
        total += [prompt - cached - created, cached, created, np.nan_to_num(output_in(usage))]
    return tuple(total.astype(int).tolist())


def _named(total: tuple[int, ...]) -> str:
    return "{:,} fresh, {:,} cached, {:,} created and {:,} output tokens".format(*total)


def _claude_code_calls(file: LogFile, seen: set[object]) -> Iterator[Call]:
    if (
        FOLDER not in file.notes
        and file.content.file.with_suffix("").joinpath("subagents").is_dir()
    ):
        file.notes.append(SUBAGENTS)
    tree = _Tree(file)
    for _ in file.parsed(lambda item, line: tree.add(parse_object(item), line), counts=False):
        pass
    tree.close()
    calls = []
    for key, message in tree.messages.items():
        if key in seen:
            file.set_aside(REPEATED_CALLS)
            continue
        seen.add(key)
        calls.append((message, _sent_at(message)))
    calls.sort(key=lambda pair: -np.inf if pair[1] is None else pair[1])
    for message, _ in calls:
        yield tree.call(message)


def _sent_at(message: _Message) -> float | None:
    """Return the time of the last line before a message of the model: then, its prompt was
    complete."""
    first = message.nodes[0]
    node = first.parent
    while node is not None and node.time is None:
        node = node.parent
    times = [time for time in (first.time, None if node is None else node.time) if time is not None]
    return min(times, default=None)
