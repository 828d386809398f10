"""A prompt that did not fit into the pool, and what must happen before looking again can help.

A prompt needs memory for all its blocks but those that others are using. No further one can be among these before a
free block is used again, or the block behind those found is published, or one of those found is evicted and computed
anew by somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.core.policies.block_pool import BlockPool
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan


@dataclass(slots=True, eq=False)
class Refusal:
    """What was refused, and the pool at that time; for one group of blocks without lower tiers.

    `needed`     blocks that had to be free
    `waiting`    of these, findable ones that nobody used
    `next`       digest of the block behind those found; None where the prompt reuses no more
    `revived`, `evicted`  the pool's counts
    """

    plan: ReusePlan
    generated: int
    needed: int
    waiting: int
    next: int | None
    revived: int
    evicted: int

    def is_of(self, request: Request, generated: int) -> bool:
        """Whether it is this request that was refused, with as much output."""
        return self.plan.request is request and self.generated == generated

    def holds(self, pool: BlockPool) -> bool:
        """Whether the prompt certainly does not fit yet."""
        computed_anew = min(self.waiting, pool.num_evicted[0] - self.evicted)
        if pool.num_revived != self.revived or self.needed - computed_anew <= pool.num_free:
            return False
        return self.next is None or pool.find(0, self.next) is None
