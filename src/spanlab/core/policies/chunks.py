"""A store of KV in chunks by chained hash, as LMCache keeps it in the memory of the host; semantics: LMCache 0.5.6.

It differs from the pool of `blocks` in three rules. Prompts are stored, outputs are not. A chunk that is stored, behind
a gap where an earlier one has left, is not stored again, and keeps its age. And chunks leave in another order: those
that were read age from the last to the first, those that are new from the first to the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.ledger import Ledger
from spanlab.core.policies.block_groups import AttentionBlocks, BlockTable, Boundaries
from spanlab.core.policies.block_plan import BlockAllocation
from spanlab.core.policies.block_rules import BlockRules
from spanlab.core.policies.block_store import BlockStore
from spanlab.core.policies.blocks import BlockPolicy


class Chunks(AttentionBlocks):
    """Attention layers whose content is stored once."""

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, kept: Boundaries) -> Sequence[int]:
        start, stop = table.looked_at, max(table.looked_at, count)
        new = [at for at in range(start, stop) if self.pool.find(self.index, chain[at]) is None]
        self.pool.publish(self.index, [table.blocks[at] for at in new], [chain[at] for at in new])
        table.looked_at = stop
        return new


class ChunkPolicy(BlockPolicy):
    """Finds the stored chunks that a prompt begins with; for models of attention layers alone."""

    def __init__(self, rules: BlockRules, store: BlockStore, ledger: Ledger | None = None) -> None:
        super().__init__(rules, store, 1, ledger, Chunks(store.pool, rules.size))

    def _publish(self, allocation: BlockAllocation, stop: int) -> None:
        """Make full chunks of the prompt findable."""
        super()._publish(allocation, min(stop, allocation.plan.prompt))

    def finish(self, allocation: BlockAllocation, generated: int, now: int) -> None:
        """Output is not stored, so there is nothing to remember."""

    def free(self, allocation: BlockAllocation, now: int) -> None:
        """Free every chunk: those that were read, the last one first, then what was computed."""
        blocks, read = allocation.tables[0].blocks, allocation.plan.resume // self.blocks.size
        allocation.tables[0].blocks = [*reversed(blocks[read:]), *blocks[:read]]  # freed from its end
        super().free(allocation, now)
