"""What a request finds in a pool of hashed blocks, and what it holds of it while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.core.policies.block_groups import BlockTable
from spanlab.core.policies.block_pool import Block
from spanlab.core.reuse import ReusePlan
from spanlab.core.work import Work


@dataclass(slots=True, eq=False)
class BlockPlan(ReusePlan):
    """What was found, per group, and where a shared prefix has keys and values but no state.

    `declined`  tokens that lower tiers have and that are computed all the same, because that is faster
    """

    found: list[list[Block]] = field(default_factory=list)
    junction: int = 0
    declined: int = 0

    def without_reuse(self) -> BlockPlan:
        """The plan itself: free blocks that it reuses are never in its own way."""
        return self


@dataclass(slots=True, eq=False)
class BlockAllocation:
    """What a running request holds: one table of blocks per group.

    `captures`  positions of the states that the last extension made findable
    `captured`  how many that were in all
    `room`      tokens up to which nothing need be done; 0 where states may be freed, or steps are planned ahead
    `begun`     where its last step began, and in `step` the number of that step, where steps are planned ahead
    """

    plan: BlockPlan
    work: tuple[Work, ...]
    tables: list[BlockTable]
    captures: list[int] = field(default_factory=list)
    captured: int = 0
    captured_maps: int = 0
    loading: bool = False
    room: int = 0
    begun: int = 0
    step: int = -1

    @property
    def loads_state(self) -> bool:
        """Whether its first step starts from a stored state."""
        return len(self.tables) > 1 and self.plan.resume > 0
