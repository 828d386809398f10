"""Digests of a request's full blocks, each of all tokens up to its end.

A block's ids are hashed by a multilinear function modulo 2^64 (arXiv 1202.4961); a digest is the sum over all blocks so
far of their hashes, mixed with their positions. All blocks of a prompt take a few operations on arrays. Two of n
different prefixes have the same digest with a probability of about n² / 2^65: three in a million for ten million
blocks. Matched blocks are compared token by token, so that such a collision, or a forged one, is a miss.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from spanlab.core.policies.block_pool import Block, Source
from spanlab.core.request import Request, Tokens
from spanlab.core.token_string import TokenString

_AHEAD = 32  # blocks that are digested at once for an output without known ids
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # between positions: 2^64 over the golden ratio
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64, whose last shift is 31


class Chain:
    """Digests of the full blocks of a prompt, and of its output up to the requested length.

    `digests`  digest of each block; there may be more than were requested
    """

    __slots__ = ("_generated", "_partial_block", "_size", "_source", "digests", "prompt", "request")

    def __init__(self, request: Request, size: int) -> None:
        self.request, self._size, self._generated = request, size, 0
        self.prompt = request.string
        self._source = Source(request.cache_salt, self.prompt)
        self.digests: list[int] = []
        self._partial_block = self._digest(request.tokens)

    def digests_to(self, length: int) -> list[int]:
        """Return digests of at least the full blocks in the first `length` tokens of prompt and output."""
        if length // self._size > len(self.digests):
            self._generate(length - len(self.prompt))
        return self.digests

    def string(self, length: int) -> TokenString:
        """Return the first `length` tokens of prompt and output, but at least the whole prompt."""
        generated = length - len(self.prompt)
        return self.prompt + self.request.output_string(generated) if generated > 0 else self.prompt

    def source(self, length: int) -> Source:
        """Return the tokens from which blocks in the first `length` tokens are computed."""
        return self._source if length <= len(self.prompt) else Source(self.request.cache_salt, self.string(length))

    def count_verified(self, blocks: Sequence[Block], length: int) -> int:
        """Return the number of leading blocks that were computed from these tokens, despite possible collisions.

        Null blocks, and blocks of a lower tier, are not compared.
        """
        expected, last, common = self.source(length), None, 0
        for index, block in enumerate(blocks):
            source = block.source
            if source is None:
                continue
            if source is not last:
                last = source
                common = expected.tokens.common(0, source.tokens) if source.cache_salt == expected.cache_salt else 0
            if (index + 1) * self._size > common:
                return index
        return len(blocks)

    def _generate(self, generated: int) -> None:
        if self.request.output is None:  # all later ids are equal
            generated += _AHEAD * self._size
        new = self.request.output_tokens(generated)[self._generated :]
        self._partial_block, self._generated = self._digest(np.concatenate([self._partial_block, new])), generated

    def _digest(self, tokens: Tokens) -> Tokens:
        """Append digests of the full blocks of `tokens`; return the ids after the last full block."""
        size, first = self._size, len(self.digests)
        count = len(tokens) // size
        if count:
            last = self.digests[-1] if first else _seed(self.request.cache_salt)
            ids = tokens[: count * size].reshape(count, size).astype(np.int64).view(np.uint64)
            positions = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _STRIDE
            mixed = _mixed(ids @ _factors(size) + positions)
            self.digests += (mixed.cumsum() + np.uint64(last)).tolist()
        return tokens[count * size :]


def _seed(cache_salt: str) -> int:
    """Return the digest before the first block, so that requests of different salts share no digest."""
    return int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest())


@functools.cache
def _factors(size: int) -> NDArray[np.uint64]:
    """Return odd random numbers, one for each position in a block, shape (size,)."""
    return np.random.default_rng(size).integers(2**64, size=size, dtype=np.uint64) | np.uint64(1)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
