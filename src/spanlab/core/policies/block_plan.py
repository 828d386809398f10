"""The plan and the allocation of a request in a pool of hashed blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.core.policies.block_groups import BlockTable
from spanlab.core.policies.block_pool import Block
from spanlab.core.reuse import ReusePlan
from spanlab.core.work import Work


@dataclass(slots=True, eq=False)
class BlockPlan(ReusePlan):
    """A reuse plan over hashed blocks.

    `reused_blocks`  blocks per group, from the first token to the resume position
    `junction`       end of a shared prefix that has KV but no state; 0 without one
    `declined`       tokens in lower tiers that are computed nevertheless, because that is faster
    """

    reused_blocks: list[list[Block]] = field(default_factory=list)
    junction: int = 0
    declined: int = 0

    def without_reuse(self) -> BlockPlan:
        """Return the plan itself: its reused blocks never reduce the memory that is available to it."""
        return self


@dataclass(slots=True, eq=False)
class BlockAllocation:
    """Blocks of a running request: one table per group.

    `captures`  positions of the states that the last extension published
    `captured`  number of published states in total
    `room`      tokens up to which `append` does nothing; 0 where states may be freed, or steps are planned ahead
    `begun`     start position of the last step, where steps are planned ahead
    `step`      number of that step
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
        """Whether the first step starts from a stored state."""
        return len(self.tables) > 1 and self.plan.resume > 0
