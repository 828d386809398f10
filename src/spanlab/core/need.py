"""What one request may hold, whatever the store contains when it comes."""

from __future__ import annotations

from typing import NamedTuple


class Need(NamedTuple):
    """What one request may hold by itself: tokens, its own copies among them, and sequences of blocks.

    Every sequence of blocks, a cache span's or a copy's, ends on a block that may be all but empty.
    """

    tokens: int
    copies: int
    sequences: int
    kv_bytes: int
    state_bytes: int
