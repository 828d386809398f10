"""Mends of the prompts of a log: changes of order or of words after which more of each prompt is an
earlier one's.

Each is tried on the log itself. A mend changes what a model reads.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np

from spanlab.workloads.logs.bodies import (
    Block,
    Message,
    Opaque,
    Prompt,
    Rewrite,
    as_json,
    tools_text,
)
from spanlab.workloads.logs.break_classes import CLOCK, STAMP, without_thoughts
from spanlab.workloads.logs.log import Ints

# ------------------------------------------------------------------------------
# Other orders of the same prompts: text that changes behind text that recurs, and tools in one
# order.
#
# A rule finds what changes: a line, image or sentence is *volatile* if the text that follows it
# in its message is in at least twice as many requests as itself. What a volatile line moves
# behind is then shared by more prompts.
# ------------------------------------------------------------------------------

LONGEST_LINE = 400  # characters; longer lines are divided into sentences
FOLLOWING_BYTES = 64  # of recurring text that must follow a volatile line: one block of 16 tokens
RATIO = 2  # a line that is in at most this fraction of the requests of what follows it is volatile
# messages at the end of a prompt, of which one ended an earlier prompt that it goes on from
_LOOKED_BACK = 16
_UNITS_IN_MEMORY = 1 << 18  # of the last prompts of conversations
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_SENTENCE = re.compile(r".+?(?:[.!?]\s+|$)", re.DOTALL)


@lru_cache(maxsize=256)
def _lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text with their ends; long lines as sentences."""
    lines = _LINE.findall(text)
    return tuple(
        piece
        for line in lines
        for piece in (_SENTENCE.findall(line) if len(line) > LONGEST_LINE else [line])
    )


def _units(message: Message) -> list[Block]:
    """Return the units of a message that can move: lines and parts that are no text."""
    return [
        unit
        for block in message.blocks
        for unit in ((block,) if isinstance(block, Opaque) else _lines(block))
    ]


def _stripped(unit: Block) -> Block:
    """Return a unit without its line end, which it has or not by its position."""
    return unit.rstrip("\n") if isinstance(unit, str) else unit


class _Part:
    """A message, or all tools of a prompt, with the names of its units and the prompts of its chain
    before it came."""

    def __init__(self, content: Message | tuple[Any, ...], since: int) -> None:
        self.content, self.since = content, since
        units = (
            map(_stripped, _units(content))
            if isinstance(content, Message)
            else map(as_json, content)
        )
        self.names = np.fromiter(map(hash, units), np.int64)


class _Chain:
    """The prompts of a conversation: the parts of the last one, and the earlier parts that it no
    longer has."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.gone: list[tuple[_Part, int]] = []  # and the prompts before it left
        self.prompts = self.size = 0

    def go_on(self, contents: Sequence[Message | tuple[Any, ...]]) -> None:
        """Take the next prompt."""
        before, self.parts = self.parts, []
        left = before[len(contents) :]
        for member, content in zip_longest(before[: len(contents)], contents):
            if member is None or member.content is not content:
                left += [] if member is None else [member]
                member = _Part(content, self.prompts)
                self.size += len(member.names)
            self.parts.append(member)
        self.gone += [(member, self.prompts) for member in left]
        self.prompts += 1

    def counts(self) -> tuple[Ints, Ints]:
        """Return the names of all units, and the number of prompts that have each."""
        ranges = [*self.gone, *((member, self.prompts) for member in self.parts)]
        sizes = [len(member.names) for member, _ in ranges]
        names = np.concatenate([member.names for member, _ in ranges])
        first = np.repeat([member.since for member, _ in ranges], sizes)
        stop = np.repeat([end for _, end in ranges], sizes)
        order = np.lexsort((first, names))
        names, first, stop = names[order], first[order], stop[order]
        begins = np.flatnonzero(
            np.append(np.ones(min(1, len(names)), np.bool_), names[1:] != names[:-1])
        )
        # a prompt counts once, however many of its parts have the unit: ranges of one name may
        # overlap
        apart = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(names))) * (
            self.prompts + 1
        )
        covered = np.maximum.accumulate(np.concatenate([[0], (apart + stop)[:-1]]))
        more = np.maximum(apart + stop - np.maximum(apart + first, covered), 0)
        return names[begins], np.add.reduceat(more, begins) if len(begins) else begins


class Survey:
    """Number of requests with each unit and each tool."""

    def __init__(self, names: Ints, requests: Ints) -> None:
        self._names, numbers = np.unique(names, return_inverse=True)
        self._requests = np.bincount(numbers, requests, len(self._names)).astype(np.int64)
        self._moves: dict[int, list[bool] | None] = {}  # by content of a message

    @classmethod
    def of(cls, prompts: Iterable[Prompt | None]) -> Survey:
        """Return the survey of these prompts. A prompt costs what it does not share with one of the
        last ones."""
        chains, size, counts = OrderedDict[int, _Chain](), 0, list[tuple[Ints, Ints]]()
        for prompt in filter(None, prompts):
            contents: list[Message | tuple[Any, ...]] = [prompt.tools, *prompt.messages]
            ends = (id(content) for content in contents[: -_LOOKED_BACK - 1 : -1])
            end = next((end for end in ends if end in chains), None)
            chain = _Chain() if end is None else chains.pop(end)
            size -= chain.size
            chain.go_on(contents)
            size += chain.size
            replaced = chains.pop(id(contents[-1]), None)
            chains[id(contents[-1])] = chain
            ended = [] if replaced is None else [replaced]
            while size - sum(chain.size for chain in ended) > _UNITS_IN_MEMORY and len(chains) > 1:
                ended.append(chains.popitem(last=False)[1])
            size -= sum(chain.size for chain in ended)
            counts += [chain.counts() for chain in ended]
        counts += [chain.counts() for chain in chains.values()]
        nothing = np.zeros(0, dtype=np.int64)
        names, requests = zip((nothing, nothing), *counts, strict=True)
        return cls(np.concatenate(names), np.concatenate(requests))

    def requests(self, units: Iterable[Block]) -> Ints:
        """Return the number of requests that have each of these units or texts of tools."""
        names = np.fromiter(map(hash, units), np.int64)
        if not len(self._names):
            return np.zeros(len(names), dtype=np.int64)
        places = np.minimum(np.searchsorted(self._names, names), len(self._names) - 1)
        return np.where(self._names[places] == names, self._requests[places], 0)

    def moves(self, message: Message) -> list[bool] | None:
        """Return which units of a message are volatile; None if none is."""
        name = hash(message.blocks)
        if name not in self._moves:
            moves = self._volatile(_units(message))
            self._moves[name] = moves if any(moves) else None
        return self._moves[name]

    def _volatile(self, units: Sequence[Block]) -> list[bool]:
        """Return which units of a message are followed by text that recurs more often than they
        do."""
        moves, requests = [False] * len(units), self.requests(map(_stripped, units))
        if not (requests[1:] >= RATIO * requests[:-1]).any():
            return moves
        counts = requests.tolist()
        # requests and size of the units that stay, the nearest last
        following: list[tuple[int, int]] = []
        for index in range(len(units) - 1, -1, -1):
            count = counts[index]
            # a text recurs at most as often as its nearest unit, which is the one that mostly
            # decides
            nearest = following[-1][0] if following else 0
            if nearest >= RATIO * count and _least(following) >= RATIO * count:
                moves[index] = True
            else:
                unit = units[index]
                size = 4 * (unit.tokens or 0) if isinstance(unit, Opaque) else len(unit)
                following.append((count, size))
        return moves


def _least(following: Sequence[tuple[int, int]]) -> int:
    """Return how many requests have the nearest recurring text, of `FOLLOWING_BYTES` or more; 0 if
    it is shorter."""
    size, least = 0, 0
    for count, length in reversed(following):
        least = count if not size else min(least, count)
        size += length
        if size >= FOLLOWING_BYTES:
            return least
    return 0


class VolatileLast:
    """Volatile text behind text that recurs: to the end of its message, or of the last message.

    `to_end`  lines of the system prompt move to the end of the last message
    """

    def __init__(self, survey: Survey, *, to_end: bool = False) -> None:
        self.survey, self.to_end = survey, to_end

    def __call__(self, prompt: Prompt) -> Prompt:
        """Return the prompt in the new order; the same object where nothing changes."""
        tail: list[Block] = []
        memos = [each.memo for each in prompt.messages]
        survey = self.survey
        for each, memo in zip(prompt.messages, memos, strict=True):
            if survey not in memo:
                moves = survey.moves(each)
                memo[survey] = moves and _divided(each, moves)
        divided = [(number, memo[survey]) for number, memo in enumerate(memos) if memo[survey]]
        if not divided:
            return prompt
        messages = list(prompt.messages)
        for number, (reordered, apart) in divided:
            if self.to_end and apart is not None and number + 1 < len(messages):
                messages[number], moved = apart
                tail += moved
            else:
                messages[number] = reordered
        if tail:
            messages[-1] = replace(messages[-1], blocks=_appended(messages[-1].blocks, tail))
        return replace(prompt, messages=tuple(messages))


def _divided(
    message: Message, moves: Sequence[bool]
) -> tuple[Message, tuple[Message, list[Block]] | None]:
    """Return a message with its volatile units at the end; for one of the system also without them,
    and these units."""
    moved = [unit for unit, moving in zip(_units(message), moves, strict=True) if moving]
    blocks: list[Block] = []
    rest = iter(moves)
    for block in message.blocks:
        if isinstance(block, Opaque):
            if not next(rest):
                blocks.append(block)
        elif text := "".join(line for line in _lines(block) if not next(rest)):
            blocks.append(text)
    stays = replace(message, blocks=tuple(blocks))
    reordered = replace(stays, blocks=_appended(stays.blocks, moved))
    return reordered, (stays, moved) if message.is_system else None


def _with_messages(prompt: Prompt, messages: Sequence[Message]) -> Prompt:
    """Return a prompt with other messages; the same object if they are the same."""
    same = all(new is old for new, old in zip(messages, prompt.messages, strict=True))
    return prompt if same else replace(prompt, messages=tuple(messages))


class SortedTools:
    """Tools in one order: those of most requests first, then by text."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        # by the text of all tools; None: in order
        self._sorted: dict[int, tuple[Any, ...] | None] = {}

    def __call__(self, prompt: Prompt) -> Prompt:
        """Return the prompt in the new order; the same object where nothing changes."""
        name = hash(tools_text(prompt.tools))
        if name not in self._sorted:
            texts = [as_json(tool) for tool in prompt.tools]
            rows = zip((-self.survey.requests(texts)).tolist(), texts, prompt.tools, strict=True)
            ordered = sorted(rows, key=lambda row: row[:2])
            same = [text for _, text, _ in ordered] == texts
            self._sorted[name] = None if same else tuple(tool for *_, tool in ordered)
        tools = self._sorted[name]
        return prompt if tools is None else replace(prompt, tools=tools)


def _appended(blocks: tuple[Block, ...], units: Sequence[Block]) -> tuple[Block, ...]:
    """Return blocks with units behind them; texts become lines of the last text."""
    result, lines = list(blocks), list[str]()  # lines of the last block, without their ends
    for unit in units:
        if isinstance(unit, str) and result and isinstance(result[-1], str):
            lines = lines or [result[-1].rstrip("\n")]
            if lines[1:] and not lines[-1]:
                lines.pop()  # an empty line is one only at the end
            lines.append(unit.rstrip("\n"))
            continue
        if lines:
            result[-1], lines = "\n".join(lines), []
        result.append(_stripped(unit))
    return (*result[:-1], "\n".join(lines)) if lines else tuple(result)


# ------------------------------------------------------------------------------
# Other words: sorted keys, times cut to the day, reasoning that stays.
# ------------------------------------------------------------------------------


def sorted_keys(prompt: Prompt) -> Prompt:
    """Return a prompt with sorted keys in tools, calls of tools and documents; the same object if
    they are sorted."""
    tools, documents = _sorted(list(prompt.tools)), _sorted(list(prompt.documents))
    messages = [
        _with_sorted_calls(message) if message.fields else message for message in prompt.messages
    ]
    if (as_json(tools), as_json(documents)) != (
        as_json(list(prompt.tools)),
        as_json(list(prompt.documents)),
    ):
        prompt = replace(prompt, tools=tuple(tools), documents=tuple(documents))
    return _with_messages(prompt, messages)


def _sorted(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


def _with_sorted_calls(message: Message) -> Message:
    """Return a message with sorted keys in its calls of tools, also in arguments that are a
    text."""
    calls = message.fields.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = [_with_sorted_arguments(_sorted(call)) for call in calls]
    if as_json(changed) == as_json(calls):
        return message
    return replace(message, fields={**message.fields, "tool_calls": changed})


def _with_sorted_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = _sorted(json.loads(function["arguments"]))
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": as_json(arguments)}}


def sorted_documents(prompt: Prompt) -> Prompt:
    """Return a prompt with its documents sorted by text; the same object if they are sorted."""
    documents = sorted(prompt.documents, key=as_json)
    return (
        prompt
        if list(prompt.documents) == documents
        else replace(prompt, documents=tuple(documents))
    )


def days_alone(prompt: Prompt) -> Prompt:
    """Return a prompt whose system prompt and tools have dates without times; the same object if
    they have none.

    Clock times are left out. Numbers of seconds since 1970 are rounded down to a day.
    """
    messages = []
    for message in prompt.messages:
        if message.is_system:
            units = (_days_of(unit) if isinstance(unit, str) else unit for unit in message.blocks)
            blocks = tuple(units)
            message = message if blocks == message.blocks else replace(message, blocks=blocks)
        messages.append(message)
    text = tools_text(prompt.tools)
    if (days := _days_of(text)) != text:
        prompt = replace(prompt, tools=tuple(json.loads(days)))
    return _with_messages(prompt, messages)


@lru_cache(maxsize=256)
def _days_of(text: str) -> str:
    """Return a text with the times in its stamps left out."""
    return STAMP.sub(lambda match: _day_of(match.group()), text)


_EPOCH = re.compile(r"1\d{9}(\d{3}|\d{6}|\d{9})?(?:\.\d+)?")
_DAY_S = 86_400


def _day_of(stamp: str) -> str:
    if (number := _EPOCH.fullmatch(stamp)) is not None:
        unit = 10 ** len(number.group(1) or "")
        return str(int(stamp.partition(".")[0]) // (_DAY_S * unit) * _DAY_S * unit)
    return CLOCK.sub("", stamp)


@dataclass
class KeptReasoning:
    """Answers of the model with the reasoning that they had when they first stood in a prompt.

    `known`  answers with reasoning, by their text without it and the message before them
    """

    known: dict[int, Message] = field(default_factory=dict)

    def __call__(self, prompt: Prompt) -> Prompt:
        """Return the prompt with reasoning that an earlier one had; the same object where nothing
        changes."""
        messages: list[Message] = []
        for number, message in enumerate(prompt.messages):
            if message.role == "assistant":
                before = prompt.messages[number - 1].blocks if number else ()
                plain = {
                    key: value for key, value in message.fields.items() if key not in _THOUGHTS
                }
                blocks = tuple(
                    without_thoughts(block) if isinstance(block, str) else block
                    for block in message.blocks
                )
                name = hash((before, blocks, as_json(plain)))
                if blocks != message.blocks or len(plain) < len(message.fields):
                    self.known.setdefault(name, message)
                else:
                    message = self.known.get(name, message)
            messages.append(message)
        return _with_messages(prompt, messages)


_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Together:
    """Several mends by name, one after another; `effective` are those that changed a prompt."""

    mends: Mapping[str, Rewrite]
    effective: set[str] = field(default_factory=set)

    def __call__(self, prompt: Prompt) -> Prompt:
        """Return the prompt after all of them."""
        for name, mend in self.mends.items():
            before, prompt = prompt, mend(prompt)
            if prompt is not before:
                self.effective.add(name)
        return prompt


# ------------------------------------------------------------------------------
# The mends that are tried.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mend:
    """A mend by its name: what it does, and the classes of breaks that it is for; empty: it is
    always tried."""

    says: str
    make: Callable[[Survey], Rewrite]
    classes: frozenset[str] = frozenset()


MENDS: dict[str, Mend] = {
    "volatile_last": Mend(
        "lines and images that change between requests moved to the end of their message",
        VolatileLast,
    ),
    "volatile_at_end": Mend(
        "lines of the system prompt that change between requests moved to the end of the last message",
        lambda survey: VolatileLast(survey, to_end=True),
    ),
    "days_alone": Mend(
        "dates without times in the system prompt and in tools",
        lambda survey: days_alone,
        frozenset({"time_stamp"}),
    ),
    "keys_sorted": Mend(
        "keys of tools, calls and documents sorted",
        lambda survey: sorted_keys,
        frozenset({"reordered_keys"}),
    ),
    "tools_sorted": Mend("tools in one order, those of most requests first", SortedTools),
    "documents_sorted": Mend("documents in one order", lambda survey: sorted_documents),
    "reasoning_kept": Mend(
        "reasoning of earlier answers kept",
        lambda survey: KeptReasoning(),
        frozenset({"dropped_reasoning"}),
    ),
}
#: Mends that are tried together: words first, so that the same texts stand in one order.
TOGETHER = (
    "reasoning_kept",
    "keys_sorted",
    "days_alone",
    "documents_sorted",
    "tools_sorted",
    "volatile_last",
)
