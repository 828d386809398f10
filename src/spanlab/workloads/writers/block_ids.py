"""Traces of prompts as chained block ids: an id identifies the tokens of a block and its whole prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from spanlab.core.request import Request
from spanlab.workloads.logs.mooncake import BLOCKS
from spanlab.workloads.writers.formats import Line, Writer


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


def block_trace(block_size: int, timestamp: Callable[[Request], float]) -> Writer:
    """Return a writer of Mooncake's fields; `timestamp` returns the arrival in the trace's unit of time."""
    ids = BlockIds(block_size)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "timestamp": timestamp(request),
                "input_length": request.num_tokens,
                "output_length": request.output_len,
                "hash_ids": ids.of(request),
            }

    return write
