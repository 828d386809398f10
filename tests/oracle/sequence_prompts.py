"""Random requests for servers that cache whole sequences: documents in any order, growing chats, repeats, and tails.

Token ids are numbers of words. The driver of a server maps them to ids of its vocabulary.
"""

from __future__ import annotations

import random
from typing import Any

WORDS = 20_000
DOCUMENT, PREAMBLE, TAIL, ANSWER = 1_000, 100, 5_000, 19_000
LONGEST_DOCUMENT = 40


def document(number: int, length: int = LONGEST_DOCUMENT) -> list[int]:
    """The beginning of a document."""
    first = DOCUMENT + 100 * number
    return list(range(first, first + length))


class Requests:
    """Draws prompts with known answers: an answer is one word, repeated."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.lengths = [draw.randint(12, LONGEST_DOCUMENT) for _ in range(6)]
        self.chats: list[list[int]] = [[], [], []]
        self.prompts: list[list[int]] = []

    def tail(self) -> list[int]:
        """Words that no other prompt has."""
        first = TAIL + 20 * len(self.prompts)
        return list(range(first, first + self.draw.randint(1, 12)))

    def documents(self) -> list[int]:
        """A preamble, some documents in any order, and a question."""
        numbers = self.draw.sample(range(6), self.draw.randint(1, 4))
        if self.draw.random() < 0.5:
            numbers.sort()
        texts = [document(number, self.lengths[number]) for number in numbers]
        preamble = list(range(PREAMBLE, PREAMBLE + 16))
        return [*preamble, *(word for text in texts for word in text), *self.tail()]

    def cut(self) -> list[int]:
        """A beginning of a document, cut anywhere, and a tail."""
        return document(self.draw.randrange(6), self.draw.randint(1, LONGEST_DOCUMENT)) + self.tail()

    def chat(self) -> list[int]:
        """The next turn of a conversation, which starts again when it is long."""
        number = self.draw.randrange(3)
        if len(self.chats[number]) > 120:
            self.chats[number] = []
        self.chats[number] += self.tail()
        return list(self.chats[number])

    def repeat(self) -> list[int]:
        """An earlier prompt, its beginning, or one with a tail."""
        if not self.prompts:
            return self.documents()
        prompt = self.draw.choice(self.prompts)
        kind = self.draw.randrange(3)
        return list(prompt) if kind == 0 else prompt[: self.draw.randint(1, len(prompt))] + self.tail() * (kind == 2)

    def next(self, output: int) -> dict[str, Any]:
        """A request with an answer of so many tokens."""
        kind = self.draw.choice([self.documents, self.documents, self.cut, self.chat, self.chat, self.repeat])
        prompt = kind()
        answer = ANSWER + len(self.prompts) % 500
        self.prompts.append(prompt)
        for chat in self.chats:
            if chat == prompt:
                chat += [answer] * output
        return {"prompt": prompt, "answer": answer, "output": output}


def waves_of(draw: random.Random, count: int, most: int) -> list[list[dict[str, Any]]]:
    """`count` requests in waves of up to `most`; a wave's answers are long, and end far apart."""
    requests, waves = Requests(draw), []
    while count > 0:
        size = min(count, draw.randint(1, most))
        lengths = [draw.randint(1, 6)] if size == 1 else draw.sample(range(24, 24 + 8 * size, 8), size)
        waves.append([requests.next(length) for length in lengths])
        count -= size
    return waves


def slots_case(seed: int) -> dict[str, Any]:
    """A case for llama.cpp: its settings, and requests one after another or, in every third case, several at once."""
    draw = random.Random(seed)
    several = seed % 3 == 2
    slots, unified = draw.choice([2, 3, 4] if several else [1, 2, 4]), draw.random() < 0.6
    cells = 1024 if several and unified else 512 if unified else 512 * slots
    return {
        "slots": slots,
        "unified": unified,
        "cells": cells,
        "similarity": draw.choice([0.1, 0.1, 0.5, 0.0]),
        "chunk": draw.choice([0, 0, 8, 16]),
        "host_mib": draw.choice([0, 6, 12, 64]),
        "idle_to_host": draw.random() < 0.7,
        "waves": waves_of(draw, 40, slots + 1 if several else 1),
    }


def sequences_case(seed: int) -> dict[str, Any]:
    """A case for mistral.rs: requests one after another."""
    return {"waves": waves_of(random.Random(1000 + seed), 60, 1)}
