"""How a pool of hashed blocks is cut, and which recurrent states it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StateMode = Literal["none", "align"]


@dataclass(frozen=True, slots=True)
class BlockRules:
    """How blocks are cut and which states are kept.

    `size`          tokens per block
    `states`        none: attention alone; align: chunks end on block boundaries, and the state at a
                    chunk's end may be kept
    `state_groups`  blocks that one state takes, one per group of recurrent layers
    `retention`     None: every state that was written; 0: those at the last block boundary of the
                    prompt and where a shared prefix has no state yet; n: also one per n tokens
    `junctions`     whether a shared prefix without a state gets one, as since vLLM's pull request 37898
    `cut`           whether chunks end at each multiple of `retention`, too; else there is a state only where a chunk
                    happens to end; proposed for vLLM in its pull request 54076
    `ahead`         whether a step is planned while the one before it runs: the token that this one yields is not known
                    yet, so that its block is found, and the state before it is freed, one step later
    `drops_last`    whether the last block of a match is computed again: behind a drafter like EAGLE, whose keys and
                    values at a block's end depend on the token after it
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
        """How many of the blocks that match are read."""
        return max(0, matched - self.drops_last)
