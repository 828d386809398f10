"""Random prompts for a store of chunks: beginnings of a few documents, cut at random, and distinct tails."""

from __future__ import annotations

import random

SIZE = 256


def make_case(seed: int) -> dict:
    """One case: a capacity in chunks, and prompts as runs of [first token id, count]; none is whole chunks."""
    draw = random.Random(seed)
    capacity, prompts = draw.randint(6, 30), []
    for number in range(80):
        document, length = draw.randrange(6), draw.randint(1, capacity * SIZE * 2 // 3)
        tail = draw.randint(1, SIZE)
        tail += (length + tail) % SIZE == 0
        prompts.append([[100_000 * document, length], [10_000_000 + 1_000 * number, tail]])
    return {"capacity": capacity, "prompts": prompts}


def tokens_of(runs: list[list[int]]) -> list[int]:
    """Token ids of a prompt."""
    return [token for first, count in runs for token in range(first, first + count)]
