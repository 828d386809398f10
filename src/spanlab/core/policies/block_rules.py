"""Rules of a pool of hashed blocks: block size, and which recurrent states are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StateMode = Literal["none", "align"]


@dataclass(frozen=True, slots=True)
class BlockRules:
    """Block size, and which states are stored.

    `size`          tokens per block
    `states`        none: attention alone; align: chunks end on block boundaries, and the state at a
                    chunk's end may be stored
    `state_groups`  blocks per state, one per group of recurrent layers
    `retention`     None: every written state; 0: states at the last block boundary of the prompt and at the end of
                    a shared prefix without a state; n: also one per n tokens
    `junctions`     whether a shared prefix without a state gets one, as since vLLM's pull request 37898
    `cut`           whether chunks also end at each multiple of `retention`; else a state exists only where a chunk
                    happens to end; proposed for vLLM in its pull request 54076
    `ahead`         whether a step is planned while the previous one runs: the token of the previous step is not known
                    yet, so that its block is published, and the state before it freed, one step later
    `drops_last`    whether the last block of a match is computed again: with a drafter like EAGLE, whose keys and
                    values at a block's end depend on the next token
    """

    size: int
    states: StateMode = "none"
    state_groups: int = 1
    retention: int | None = 0
    junctions: bool = True
    cut: bool = False
    ahead: bool = False
    drops_last: bool = False

    def usable(self, matched: int) -> int:
        """Return how many of the matched blocks are reused."""
        return max(0, matched - self.drops_last)
