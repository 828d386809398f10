"""Chained block ids of prompts: an id identifies the tokens of a block and its whole prefix."""

from __future__ import annotations

from spanlab.core.request import Request
from spanlab.workloads.logs.mooncake import BLOCKS


class BlockIds:
    """Block numbers in order of first appearance; equal numbers mean equal prompts up to the block's end.

    A partial last block has a separate number, so that a number always stands for the same number of tokens.
    """

    def __init__(self, size: int) -> None:
        if size not in BLOCKS:
            sizes = ", ".join(map(str, sorted(BLOCKS)))
            raise ValueError(f"writer.block_size={size}: expected one of {sizes}, the sizes that log readers recognise")
        self._size = size
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._salts: dict[str, int] = {}

    def of(self, request: Request) -> list[int]:
        """Return the block numbers of a prompt; requests with different salts share no blocks."""
        tokens, numbers = request.string, []
        parent = -1 - self._salts.setdefault(request.cache_salt, len(self._salts))
        for start in range(0, len(tokens), self._size):
            block = parent, tokens.key(start, self._size)
            parent = self._numbers.setdefault(block, len(self._numbers))
            numbers.append(parent)
        return numbers
