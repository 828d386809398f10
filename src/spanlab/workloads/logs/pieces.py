"""Token ids and text become pieces: runs of equal length, each known by a 64-bit hash of its content."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from spanlab.workloads.logs.log import Ints, Keys

#: Multipliers of a position in a piece, and of a piece in a span: odd, so that no content is lost.
_ODD = np.random.default_rng(0).integers(0, 1 << 63, 4096, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_NEXT = np.uint64(0x9E3779B97F4A7C15)


def cut(tokens: NDArray[np.integer], size: int) -> tuple[Keys, Ints]:
    """Pieces of `size` tokens and a shorter last one, each hashed with what stands before it; (keys, lengths).

    Two prompts share a piece where they are equal up to its end, so that a prompt's pieces are a chain.
    """
    count = -(-len(tokens) // size)
    padded = np.zeros(count * size, dtype=np.uint64)
    padded[: len(tokens)] = tokens.astype(np.uint64) + np.uint64(1)  # padding differs from every token
    own = _mixed((_mixed(padded.reshape(count, size) * _NEXT) * _multipliers(size)).sum(axis=1, dtype=np.uint64))
    chained = np.cumsum(own * _powers(count), dtype=np.uint64)
    lengths = np.full(count, size, dtype=np.int64)
    if count:
        lengths[-1] = len(tokens) - (count - 1) * size
    return _mixed(chained).view(np.int64), lengths


def named(name: object) -> int:
    """A 64-bit number for a name: a hash that a log spells out, a tenant's salt."""
    return int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little", signed=True)


def salted(keys: Keys, cache_salt: object) -> Keys:
    """Keys that only requests of one salt share."""
    return keys if cache_salt is None else keys ^ np.int64(named(cache_salt))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all 64; each step can be undone."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


@lru_cache(maxsize=8)
def _multipliers(size: int) -> NDArray[np.uint64]:
    return (
        np.resize(_ODD, size)
        if size <= len(_ODD)
        else np.random.default_rng(1).integers(0, 1 << 63, size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    )


def _powers(count: int) -> NDArray[np.uint64]:
    """Powers of one odd number, a power of two of them at a time, so that few are ever made."""
    return _powers_of(1 << max(6, (count - 1).bit_length()))[:count]


@lru_cache(maxsize=32)
def _powers_of(count: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(count, _NEXT, dtype=np.uint64), dtype=np.uint64)
