"""Calls of models as spans of traces: OpenTelemetry, Langfuse and LiteLLM.

A file is read twice: first for the times and the tree of its calls, then for their prompts, one at
a time.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.bodies import as_json, is_gemini
from spanlab.workloads.logs.log import Entry, Identity, hash_name
from spanlab.workloads.logs.observed import NOT_REPORTED, Moments, Usage
from spanlab.workloads.logs.rendering import BodyReader
from spanlab.workloads.logs.rows import BadFieldError, Row, actual, inclusive, parse_json
from spanlab.workloads.logs.source import LogFile, parse_object

SUFFIXES = (".json", ".jsonl")  # of the files of a folder
REPEATED = "spans that repeat an earlier one"
WRAPPERS = "spans around a call of a model that is a span itself"
FAILED = "calls that failed, without a count of tokens"
EMPTY = "calls with neither a prompt nor a count of its tokens"
NUMBERED = "several calls stand in one line, item or folder: requests are numbered by their order in the file"
WITHHELD = "prompts that the log does not have"
_MAX_OUTPUT = (1 << 31) - 1


@dataclass
class Span:
    """A span of a trace; only those that are calls of a model have the last fields.

    `path`   where it stands in its item, for error messages
    `start`  seconds, `end` and `first_token` NaN if unknown
    `kind`   what it is about, if it is no call
    `body`   returns the body of its request; None: the log does not have it
    `missing`  what such a request is called
    """

    path: str
    trace: str
    name: str | None
    parent: str | None
    start: float | None
    end: float = np.nan
    is_call: bool = False
    kind: str = "other"
    failed: bool = False
    first_token: float = np.nan
    session: str | None = None
    tenant: str | float | None = None
    usage: Usage = NOT_REPORTED
    output: float = 0.0
    identity: Identity = ()
    body: Callable[[], Mapping[str, Any] | None] = lambda: None
    missing: str = WITHHELD


#: Returns the spans of an item of a file; a span with an invalid field is refused through the last
#: argument.
SpansOf = Callable[[Row, "Refuse"], Iterator[Span]]
Refuse = Callable[[str], None]


@dataclass
class _Tree:
    """Times and parents of the spans of a file, and the calls around others."""

    spans: dict[tuple[str, str], tuple[str | None, float | None, float, bool]] = field(
        default_factory=dict
    )
    order: list[float] = field(default_factory=list)
    has_batches: bool = False  # whether an item has several calls
    wrappers: set[tuple[str, str]] = field(default_factory=set)

    def add(self, span: Span) -> None:
        """Take a span."""
        if span.name is not None:
            key = span.trace, span.name
            if span.is_call and key in self.spans:
                return
            self.spans[key] = (span.parent, span.start, span.end, span.is_call)
        if span.is_call and span.start is not None:
            self.order.append(span.start)

    def close(self) -> None:
        """Find the calls that contain another one in their time."""
        for (trace, _), (parent, start, end, is_call) in self.spans.items():
            steps = 0
            while is_call and parent is not None and start is not None and steps < len(self.spans):
                above = self.spans.get((trace, parent))
                if above is None:
                    break
                key, steps = (trace, parent), steps + 1
                parent, begin, stop, is_wrapper = above
                if is_wrapper and begin is not None and begin <= start and end <= stop:
                    self.wrappers.add(key)

    @property
    def is_sorted(self) -> bool:
        return all(
            first <= second for first, second in zip(self.order, self.order[1:], strict=False)
        )


def read_spans(spans_of: SpansOf, around: str) -> Callable[[LogFile], Iterator[Entry]]:
    """Return a reader of spans; `around` says what becomes of calls around others: leave, or a
    note."""

    def entries(file: LogFile) -> Iterator[Entry]:
        tree = _Tree(has_batches=file.content.file.is_dir())
        for inner in map(replace, file.files(SUFFIXES)):
            # a span with an invalid field is passed over; the second reading names it
            for spans in inner.parsed(
                lambda item, _: [*spans_of(parse_object(item), lambda problem: None)], counts=False
            ):
                tree.has_batches |= sum(span.is_call for span in spans) > 1
                for span in spans:
                    tree.add(span)
        tree.close()
        # the second reading counts bad lines, so those of the first are forgotten
        file.start_over()
        requests: Iterable[Entry] = _Requests(file, tree, around).entries(spans_of)
        if not tree.is_sorted:
            requests = sorted(requests, key=lambda entry: entry.at or 0.0)
        # the wait since the latest call of the session that had ended
        ended: dict[Any, float] = {}
        running: dict[Any, list[float]] = {}
        for entry in requests:
            if entry.at is not None and entry.session is not None:
                ends = running.setdefault(entry.session, [])
                while ends and ends[0] <= entry.at:
                    ended[entry.session] = heapq.heappop(ends)
                entry.wait = entry.at - ended.get(entry.session, entry.at)
                if not np.isnan(entry.moments.last_token):
                    heapq.heappush(ends, entry.moments.last_token)
            yield entry

    return entries


class _Requests:
    """Requests from spans."""

    def __init__(self, file: LogFile, tree: _Tree, around: str) -> None:
        self._file, self._tree, self._around, self._reader = file, tree, around, BodyReader(file)
        self._seen: set[tuple[str, str]] = set()
        self._number = 0

    def entries(self, spans_of: SpansOf) -> Iterator[Entry]:
        """Yield the requests in the order of the file."""
        file, is_batch = self._file, self._tree.has_batches
        if is_batch and NUMBERED not in file.notes:
            file.notes.append(NUMBERED)

        for inner in map(replace, file.files(SUFFIXES)):

            def parse(item: Any, line: int, inner: LogFile = inner) -> list[Entry]:
                size = len(item) if isinstance(item, bytes) else 0
                requests = []
                for span in spans_of(
                    parse_object(item), lambda problem: inner.refuse(line, problem, size)
                ):
                    self._number += span.is_call
                    try:
                        if (
                            entry := self._entry(span, self._number if is_batch else line)
                        ) is not None:
                            requests.append(entry)
                    except BadFieldError as error:
                        inner.refuse(line, f"{span.path}{error}", size)
                return requests

            for requests in inner.parsed(parse, counts=False):
                yield from requests

    def _entry(self, span: Span, line: int) -> Entry | None:
        if not span.is_call:
            self._file.set_aside(f"spans that are no call of a model ({span.kind:.40})")
            return None
        if not self._counts(span):
            return None
        if span.failed and not span.usage.prompt > 0:
            self._file.set_aside(FAILED)
            return None
        body = span.body()
        session = span.session or span.trace
        if body is not None:
            keys, lengths, opens, prompt = self._reader.pieces(body, is_line=False)
        elif not np.isnan(span.usage.prompt):
            self._file.unread.leave(span.missing, 0)
            self._file.unread.withhold()
            keys = np.array([hash_name(("withheld", self._number))], dtype=np.int64)
            lengths, opens, prompt = np.array([int(span.usage.prompt)], dtype=np.int64), (), None
        else:
            self._file.set_aside(EMPTY)
            return None
        return Entry(
            keys,
            lengths,
            line,
            span.start,
            int(min(max(np.nan_to_num(span.output), 0), _MAX_OUTPUT)),
            session or None,
            span.tenant,
            opens,
            moments=Moments(first_token=span.first_token, last_token=span.end),
            usage=span.usage,
            identity=span.identity,
            prompt=prompt,
        )

    def _counts(self, span: Span) -> bool:
        """Return whether a span is a call that no other span is about."""
        if span.name is None:
            return True
        key = span.trace, span.name
        if key in self._seen:
            self._file.set_aside(REPEATED)
            return False
        self._seen.add(key)
        if key not in self._tree.wrappers:
            return True
        if self._around == "leave":
            self._file.set_aside(WRAPPERS)
            return False
        if self._around not in self._file.notes:
            self._file.notes.append(self._around)
        return True


# ------------------------------------------------------------------------------
# Fields of several formats: JSON inside texts, messages with parts, and counts of which the sum
# tells whether one includes the others.
# ------------------------------------------------------------------------------

_ROLES = {
    "human": "user",
    "ai": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
}
_ITEMS = (
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


#: Keys of a body beside its messages that a prompt has.
_BESIDE = ("system", "instructions", "tools", "toolConfig")
#: Begin of JSON in a text that `unpacked` left as it is: a tracer has cut it.
_CUT = re.compile(r"\s*(\{\s*\"|\[\s*\{\s*\")")


def unpacked(value: Any) -> Any:
    """Return the JSON that a text holds; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(value)
        except orjson.JSONDecodeError:
            return value
    return value


def body_of(value: Any) -> dict[str, Any] | None:
    """Return the body of a request from what a call got as its input; None for nothing, or for JSON
    that is cut."""
    value = unpacked(value)
    if value is None or value in ("", [], {}):
        return None
    if isinstance(value, list):
        flat = value[0] if len(value) == 1 and isinstance(value[0], list) else value
        if all(type(token) is int for token in flat):
            return {"prompt": flat}
        if any(isinstance(item, dict) and item.get("type") in _ITEMS for item in flat):
            return {"input": flat}
        return {"messages": [message_of(item) for item in flat]}
    if not isinstance(value, dict):
        text = str(value)
        return None if _CUT.match(text) else {"prompt": text}
    if is_gemini(value) and not any(value.get(key) for key in ("messages", "input", "prompt")):
        return value
    for key in ("messages", "input", "prompt", "contents"):
        inner = unpacked(value.get(key))
        if isinstance(inner, (list, dict, str)) and inner:
            body = body_of(inner)
            known = {name: unpacked(value[name]) for name in _BESIDE if value.get(name)}
            return None if body is None else body | known
    if "content" in value or "parts" in value:
        return {"messages": [message_of(value)]}
    return {"prompt": as_json(value)}


def message_of(value: Any) -> dict[str, Any]:
    """Return a message in the form of chat completions, from that of any tracer."""
    value = unpacked(value)
    if isinstance(value, str):
        return {"role": "user", "content": value}
    if not isinstance(value, dict):
        raise BadFieldError("messages", f"a text or an object with role and content{actual(value)}")
    role = value.get("role") or value.get("type")
    role = role if isinstance(role, str) and role != "message" else "user"
    extra = value.get("additional_kwargs")
    calls = value.get("tool_calls") or (
        extra.get("tool_calls") if isinstance(extra, dict) else None
    )
    content = next(
        (value[name] for name in ("parts", "content", "text") if value.get(name) is not None), None
    )
    message: dict[str, Any] = {"role": _ROLES.get(role, role), "content": content_of(content)}
    if calls:
        message["tool_calls"] = unpacked(calls)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value.get(name):
            message[name] = value[name]
    return message


def content_of(content: Any) -> Any:
    """Return the content of a message: a text, or blocks as Anthropic and OpenAI write them."""
    if isinstance(content, dict):
        return as_json(content)
    if not isinstance(content, list):
        return "" if content is None else content if isinstance(content, str) else as_json(content)
    return [_block(block) for block in content]


def _block(block: Any) -> Any:
    """Return a block from a part of the conventions of OpenTelemetry; other blocks as they are."""
    if not isinstance(block, dict):
        return block if isinstance(block, str) else as_json(block)
    kind = block.get("type")
    if kind is None and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if kind == "text" and isinstance(block.get("content"), str):
        return {"type": "text", "text": block["content"]}
    if kind == "reasoning" and isinstance(block.get("content"), str):
        return {"type": "thinking", "thinking": block["content"]}
    if kind in ("tool_call", "tool-call"):
        name = block.get("name", block.get("toolName"))
        inputs = block.get("arguments", block.get("input"))
        return {
            "type": "tool_use",
            "id": block.get("id", block.get("toolCallId")),
            "name": name,
            "input": inputs,
        }
    if kind in ("tool_call_response", "tool-result"):
        answer = next(
            (
                block[name]
                for name in ("response", "result", "output")
                if block.get(name) is not None
            ),
            "",
        )
        name = block.get("id", block.get("toolCallId"))
        return {
            "type": "tool_result",
            "tool_use_id": name,
            "content": answer if isinstance(answer, str) else as_json(answer),
        }
    return block


def divided(
    prompt: float,
    cached: float,
    created: float,
    output: float,
    total: float,
    *,
    includes: bool,
    thoughts: float = 0.0,
) -> tuple[Usage, float]:
    """Return usage and output tokens from counts of which the sum `total` tells what includes what.

    `includes`  whether the prompt includes cached and created tokens where the sum does not tell it
    `thoughts`  tokens of reasoning, which belong to the output or stand beside it
    """
    parts_of_prompt = float(np.nansum((cached, created)))
    sums = {(False, False): prompt + output, (True, False): prompt + parts_of_prompt + output}
    sums |= {(apart, True): known + thoughts for (apart, _), known in sums.items()}
    apart, beside = not includes, False
    fitting = [case for case, known in sums.items() if known == total]
    if fitting and parts_of_prompt + thoughts:
        apart, beside = next((case for case in fitting if case[0] == apart), fitting[0])
    apart = apart or parts_of_prompt > prompt
    full = prompt + parts_of_prompt if apart else prompt
    return inclusive(full, cached, created), output + thoughts * beside
