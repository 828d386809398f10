"""Prompts as numbers of blocks, each of which names its tokens and all before them."""

from __future__ import annotations

from spanlab.core.request import Request
from spanlab.workloads.logs.mooncake import BLOCKS


class BlockIds:
    """Numbers blocks in order of first appearance; equal numbers mean equal prompts up to the block's end.

    A shorter last block has a number of its own, so that a number always stands for as many tokens.
    """

    def __init__(self, size: int) -> None:
        if size not in BLOCKS:
            sizes = ", ".join(map(str, sorted(BLOCKS)))
            raise ValueError(f"writer.block_size={size}: expected one of {sizes}, which readers recognise")
        self._size = size
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._salts: dict[str, int] = {}

    def of(self, request: Request) -> list[int]:
        """The blocks of a prompt; requests with different salts share none."""
        tokens, found = request.string, []
        parent = -1 - self._salts.setdefault(request.cache_salt, len(self._salts))
        for start in range(0, len(tokens), self._size):
            block = parent, tokens.key(start, self._size)
            parent = self._numbers.setdefault(block, len(self._numbers))
            found.append(parent)
        return found
