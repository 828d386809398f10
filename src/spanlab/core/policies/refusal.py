"""A prompt that did not fit into the pool, and the changes of the pool after which it may fit.

A prompt needs memory for all its blocks except those that other requests are using. More of its blocks can be in use
only after a free block is reused, or the block after the matched ones is published, or a matched block is evicted and
computed again by another request.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.core.policies.block_pool import BlockPool
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan


@dataclass(slots=True, eq=False)
class Refusal:
    """A refused plan, and the pool at that time; for one group of blocks without lower tiers.

    `needed`        blocks that had to be free
    `unreferenced`  of these, matched blocks that no request used
    `next_digest`   digest of the block after the matched ones; None where the prompt cannot reuse more
    `revived`, `evicted`  the pool's counts
    """

    plan: ReusePlan
    generated: int
    needed: int
    unreferenced: int
    next_digest: int | None
    revived: int
    evicted: int

    def matches(self, request: Request, generated: int) -> bool:
        """Whether this request was refused, with the same number of output tokens."""
        return self.plan.request is request and self.generated == generated

    def still_applies(self, pool: BlockPool) -> bool:
        """Whether the prompt certainly does not fit yet."""
        recomputed = min(self.unreferenced, pool.num_evicted[0] - self.evicted)
        if pool.num_revived != self.revived or self.needed - recomputed <= pool.num_free:
            return False
        return self.next_digest is None or pool.find(0, self.next_digest) is None
