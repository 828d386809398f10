"""Pieces of token ids: runs of equal length, identified by a 64-bit hash of their content and prefix."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Keys = NDArray[np.int64]
#: Multipliers of positions in a piece, and of pieces in a span: odd, hence invertible modulo 2^64.
_ODD = np.random.default_rng(0).integers(0, 1 << 63, 4096, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_NEXT = np.uint64(0x9E3779B97F4A7C15)


def hash_pieces(tokens: NDArray[np.integer], size: int) -> tuple[Keys, Ints]:
    """Divide tokens into pieces of `size` and hash each piece with its prefix; return (keys, lengths).

    The last piece may be shorter. Two prompts share a piece if they are equal up to its end, so ids are chained.
    """
    count = -(-len(tokens) // size)
    padded = np.zeros(count * size, dtype=np.uint64)
    padded[: len(tokens)] = tokens.astype(np.uint64) + np.uint64(1)  # padding differs from every token
    piece_hashes = _mix_bits(
        (_mix_bits(padded.reshape(count, size) * _NEXT) * _multipliers(size)).sum(axis=1, dtype=np.uint64)
    )
    chained = np.cumsum(piece_hashes * _powers(count), dtype=np.uint64)
    return _mix_bits(chained).view(np.int64), block_lengths(len(tokens), size)


def block_lengths(tokens: int, size: int) -> Ints:
    """Return the tokens of each block of a prompt; the last block may be shorter."""
    lengths = np.full(-(-tokens // size), size, dtype=np.int64)
    if tokens % size:
        lengths[-1] = tokens % size
    return lengths


def hash_name(name: object) -> int:
    """Return a 64-bit number for a name, such as a hash given as text or a tenant's salt."""
    return int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little", signed=True)


def salt_keys(keys: Keys, identity: object) -> Keys:
    """Return keys that only requests with the same identity share."""
    return keys ^ np.int64(hash_name(identity))


def _mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all 64 bits; each step is invertible."""
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
    """Return `count` powers of an odd number; counts round up to powers of two, so that few arrays are cached."""
    return _powers_of(1 << max(6, (count - 1).bit_length()))[:count]


@lru_cache(maxsize=32)
def _powers_of(count: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(count, _NEXT, dtype=np.uint64), dtype=np.uint64)
