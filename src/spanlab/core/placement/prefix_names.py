"""Names of a prompt's prefixes, by which a later prompt with the same prefix is recognised without its tokens."""

from __future__ import annotations

import numpy as np

from spanlab.core.request import Tokens

_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # odd, with pseudo-random bits


def prefix_names(tokens: Tokens, unit: int) -> list[int]:
    """Return 64-bit hashes of the first unit, 2 · unit, … tokens: sums over tokens, each mixed with its position.

    They guide placement and never identify stored content, so a collision costs at most one badly placed state.
    """
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _FIRST
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.arange(1, 2 * len(tokens), 2, dtype=np.uint64) * _SECOND
    mixed ^= mixed >> np.uint64(32)
    names: list[int] = np.cumsum(mixed, dtype=np.uint64)[unit - 1 :: unit].tolist()
    return names
