"""The sizes of a pool of hashed blocks in bytes."""

from __future__ import annotations

from spanlab.core.policies.block_pool import BlockPool


class BlockStore:
    """A pool of hashed blocks, measured in bytes."""

    def __init__(self, pool: BlockPool, block_bytes: int, state_bytes: int) -> None:
        self.pool, self.block_bytes, self.state_bytes = pool, block_bytes, state_bytes

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self.pool.num_free

    @property
    def kv_cached(self) -> int:
        """Bytes of published attention blocks."""
        return self.pool.num_keyed(0) * self.block_bytes

    @property
    def state_cached(self) -> int:
        """Bytes of published state blocks."""
        return sum([self.pool.num_keyed(group) for group in self.pool.num_published if group]) * self.block_bytes

    @property
    def inserted_bytes(self) -> int:
        """Bytes of all blocks ever published."""
        return self.pool.num_published.total() * self.block_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes of published blocks that were evicted."""
        return self.pool.num_evicted.total() * self.block_bytes


def pool_of(budget_bytes: int, block_bytes: int) -> BlockPool:
    """Return the pool for a budget; one block of it is the null block, which stores nothing."""
    return BlockPool(max(0, budget_bytes // block_bytes - 1))
