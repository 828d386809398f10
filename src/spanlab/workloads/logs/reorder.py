"""Other orders of the same prompts: text that changes behind text that recurs, and tools in one order.

A rule finds what changes: a line, image or sentence is *volatile* if the text that follows it in its message is in at
least twice as many requests as itself. What a volatile line moves behind is then shared by more prompts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from spanlab.workloads.logs.bodies import Block, Message, Prompt, as_json
from spanlab.workloads.logs.opaque import Opaque

LONGEST_LINE = 400  # characters; longer lines are divided into sentences
FOLLOWING_BYTES = 64  # of recurring text that must follow a volatile line: one block of 16 tokens
RATIO = 2  # a line that is in at most this fraction of the requests of what follows it is volatile
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_SENTENCE = re.compile(r".+?(?:[.!?]\s+|$)", re.DOTALL)


@lru_cache(maxsize=4096)
def _lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text with their ends; long lines as sentences."""
    lines = _LINE.findall(text)
    return tuple(piece for line in lines for piece in (_SENTENCE.findall(line) if len(line) > LONGEST_LINE else [line]))


def _units(message: Message) -> list[Block]:
    """Return the units of a message that can move: lines and parts that are no text."""
    return [unit for block in message.blocks for unit in ((block,) if isinstance(block, Opaque) else _lines(block))]


def _size(unit: Block) -> int:
    return 4 * (unit.tokens or 0) if isinstance(unit, Opaque) else len(unit)


def _stripped(unit: Block) -> Block:
    """Return a unit without its line end, which it has or not by its position."""
    return unit.rstrip("\n") if isinstance(unit, str) else unit


@dataclass
class Survey:
    """Number of requests with each unit and each tool.

    `lines`  the lines of the log that count
    """

    lines: frozenset[int]
    requests: Counter[int] = field(default_factory=Counter)

    def add(self, line: int, prompt: Prompt) -> None:
        """Count the units of a prompt, each once."""
        if line in self.lines:
            units = {hash(_stripped(unit)) for message in prompt.messages for unit in _units(message)}
            self.requests.update(units | {hash(as_json(tool)) for tool in prompt.tools})

    def volatile(self, units: Sequence[Block]) -> list[bool]:
        """Return which units of a message are followed by text that recurs more often than they do."""
        moves = [False] * len(units)
        following: list[tuple[int, int]] = []  # requests and size of the units that stay, the nearest last
        for index in range(len(units) - 1, -1, -1):
            count = self.requests[hash(_stripped(units[index]))]
            if _least(following) >= RATIO * count:
                moves[index] = True
            else:
                following.append((count, _size(units[index])))
        return moves


def _least(following: Sequence[tuple[int, int]]) -> int:
    """Return how many requests have the nearest recurring text, of `FOLLOWING_BYTES` or more; 0 if it is shorter."""
    size, least = 0, 0
    for count, length in reversed(following):
        least = count if not size else min(least, count)
        size += length
        if size >= FOLLOWING_BYTES:
            return least
    return 0


@dataclass(frozen=True)
class Reorder:
    """A change of order, applied to every prompt of a log.

    `survey`    how often each unit occurs
    `volatile`  message: to the end of their message; prompt: those of the system prompt to the end of the last message;
                None: volatile text stays
    `tools`     whether tools are put in one order: those of most requests first, then by text
    """

    survey: Survey
    volatile: str | None = None
    tools: bool = False

    def __call__(self, line: int, prompt: Prompt) -> Prompt:
        """Return the prompt in the new order; the same object where nothing changes."""
        if self.tools and prompt.tools:
            prompt = self._with_sorted_tools(prompt)
        return prompt if self.volatile is None else self._with_volatile_last(prompt)

    def _with_sorted_tools(self, prompt: Prompt) -> Prompt:
        texts = [as_json(tool) for tool in prompt.tools]
        order = sorted(range(len(texts)), key=lambda index: (-self.survey.requests[hash(texts[index])], texts[index]))
        if order == list(range(len(texts))):
            return prompt
        return replace(prompt, tools=tuple(prompt.tools[index] for index in order))

    def _with_volatile_last(self, prompt: Prompt) -> Prompt:
        messages: list[Message] = []
        tail: list[Block] = []
        for number, message in enumerate(prompt.messages):
            units = _units(message)
            moves = self.survey.volatile(units)
            if not any(moves):
                messages.append(message)
                continue
            moved = [unit for unit, moving in zip(units, moves, strict=True) if moving]
            stays = replace(message, blocks=_without(message, moves))
            if self.volatile == "prompt" and message.is_system and number + 1 < len(prompt.messages):
                tail += moved
                messages.append(stays)
            else:
                messages.append(replace(stays, blocks=_appended(stays.blocks, moved)))
        if tail:
            messages[-1] = replace(messages[-1], blocks=_appended(messages[-1].blocks, tail))
        same = all(new is old for new, old in zip(messages, prompt.messages, strict=True))
        return prompt if same else replace(prompt, messages=tuple(messages))


def _without(message: Message, moves: Sequence[bool]) -> tuple[Block, ...]:
    """Return the blocks of a message without the units that move."""
    blocks: list[Block] = []
    moving = iter(moves)
    for block in message.blocks:
        if isinstance(block, Opaque):
            if not next(moving):
                blocks.append(block)
        elif text := "".join(line for line in _lines(block) if not next(moving)):
            blocks.append(text)
    return tuple(blocks)


def _appended(blocks: tuple[Block, ...], units: Sequence[Block]) -> tuple[Block, ...]:
    """Return blocks with units behind them; texts become lines of the last text."""
    result = list(blocks)
    for unit in units:
        if isinstance(unit, str) and result and isinstance(result[-1], str):
            result[-1] = f"{result[-1].rstrip(chr(10))}\n{unit.rstrip(chr(10))}"
        else:
            result.append(_stripped(unit))
    return tuple(result)
