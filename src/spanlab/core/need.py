"""The largest memory of one request, whatever the store contains."""

from __future__ import annotations

from typing import NamedTuple


class Need(NamedTuple):
    """Largest memory of one request by itself: tokens, its private copies among them, and sequences of blocks.

    Every sequence of blocks, of a cache span or of a copy, ends in a block that may be nearly empty.
    """

    tokens: int
    copies: int
    sequences: int
    kv_bytes: int
    state_bytes: int
