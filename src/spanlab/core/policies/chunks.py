"""A store of KV in chunks by chained hash, as in LMCache's host memory; semantics: LMCache 0.5.6.

It differs from the pool of `blocks` in three rules. Prompts are stored, outputs are not. A stored chunk after the gap
of an evicted one is not stored again, and keeps its age. The order of eviction is different: reused chunks age from the
last to the first, new chunks from the first to the last.
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
    """Attention layers whose content is stored at most once."""

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, boundaries: Boundaries) -> Sequence[int]:
        start, stop = table.num_visited, max(table.num_visited, count)
        new = [index for index in range(start, stop) if self.pool.find(self.index, chain[index]) is None]
        self.pool.publish(self.index, [table.blocks[index] for index in new], [chain[index] for index in new])
        table.num_visited = stop
        return new


class ChunkPolicy(BlockPolicy):
    """Reuses the stored chunks of a prompt's prefix; for models of attention layers alone."""

    def __init__(self, rules: BlockRules, store: BlockStore, ledger: Ledger | None = None) -> None:
        super().__init__(rules, store, 1, ledger, Chunks(store.pool, rules.size))

    def _publish(self, allocation: BlockAllocation, stop: int) -> None:
        """Publish full chunks of the prompt only."""
        super()._publish(allocation, min(stop, allocation.plan.prompt))

    def finish(self, allocation: BlockAllocation, generated: int, now: int) -> None:
        """Do nothing: output is not stored."""

    def free(self, allocation: BlockAllocation, now: int) -> None:
        """Free all chunks: reused ones, the last one first, then computed ones, the first one first."""
        blocks, reused = allocation.tables[0].blocks, allocation.plan.resume // self.blocks.size
        allocation.tables[0].blocks = [*reversed(blocks[reused:]), *blocks[:reused]]  # freed from its end
        super().free(allocation, now)
