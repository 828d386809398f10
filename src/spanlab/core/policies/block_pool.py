"""A pool of equal blocks: hashed ones stay findable until their memory is taken (vLLM's block pool).

Freed blocks wait in one queue. Blocks without a key come first, last freed first; then the blocks
that were never used; then those with a key, in the order in which they were freed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol


class BlockKey(NamedTuple):
    """What finds a block: the group of layers that wrote it, and the digest of all tokens so far."""

    group: int
    digest: bytes


class Block:
    """Memory of one block; `key` is None while it cannot be found."""

    __slots__ = ("key", "users")

    def __init__(self) -> None:
        self.key: BlockKey | None = None
        self.users = 0


class LowerTiers(Protocol):
    """What lies below a pool: it is told what the pool stores and gives up, and may have what the pool has not."""

    def find(self, key: BlockKey) -> Block | None: ...

    def published(self, key: BlockKey) -> None: ...

    def evicted(self, key: BlockKey) -> None: ...


#: Placeholder for a block that a request does not need any more, or never had.
NULL_BLOCK = Block()


class BlockPool:
    """Blocks of one size under a fixed count; several blocks may hold the same content."""

    def __init__(self, num_blocks: int) -> None:
        self._unused = num_blocks
        self._unkeyed: list[Block] = []
        self._keyed: OrderedDict[Block, None] = OrderedDict()
        self._table: dict[BlockKey, dict[Block, None]] = {}
        self.num_blocks = num_blocks
        self.lower: LowerTiers | None = None
        self.num_keyed: Counter[int] = Counter()  #: findable blocks, by group
        self.num_published: Counter[int] = Counter()  #: blocks ever made findable, by group
        self.num_evicted: Counter[int] = Counter()  #: findable blocks whose memory was taken, by group

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, findable ones among them."""
        return self._unused + len(self._unkeyed) + len(self._keyed)

    def find(self, key: BlockKey) -> Block | None:
        """The block that was published first under a key, else what lower tiers offer; None where there is none."""
        blocks = self._table.get(key)
        if blocks:
            return next(iter(blocks))
        return None if self.lower is None else self.lower.find(key)

    def take(self, count: int) -> list[Block]:
        """Give `count` blocks to a request, from the head of the queue; they lose their keys."""
        assert count <= self.num_free, "more blocks were taken than are free"
        taken = [self._pop() for _ in range(count)]
        for block in taken:
            block.users = 1
        return taken

    def _pop(self) -> Block:
        if self._unkeyed:
            return self._unkeyed.pop()
        if self._unused:
            self._unused -= 1
            return Block()
        block, _ = self._keyed.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: Block) -> None:
        assert block.key is not None, "only a block with a key waits among those with keys"
        same = self._table[block.key]
        del same[block]
        if not same:
            del self._table[block.key]
            if self.lower is not None:
                self.lower.evicted(block.key)
        self.num_keyed[block.key.group] -= 1
        self.num_evicted[block.key.group] += 1
        block.key = None

    def publish(self, block: Block, key: BlockKey) -> None:
        """Make a full block findable."""
        assert block.key is None, "a block is published once"
        block.key = key
        self._table.setdefault(key, {})[block] = None
        self.num_keyed[key.group] += 1
        self.num_published[key.group] += 1
        if self.lower is not None:
            self.lower.published(key)

    def use(self, blocks: Iterable[Block]) -> None:
        """Note one more user of each; null blocks have none."""
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            if block.users == 0:
                del self._keyed[block]
            block.users += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each; free blocks join the queue in this order."""
        unkeyed = []
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            block.users -= 1
            if block.users == 0 and block.key is None:
                unkeyed.append(block)
            elif block.users == 0:
                self._keyed[block] = None
        self._unkeyed.extend(reversed(unkeyed))

    def waiting(self) -> Iterator[Block]:
        """Findable blocks without references, next to be evicted first."""
        return iter(self._keyed)

    def check(self) -> None:
        """Recount from scratch; slow, for tests."""
        findable = [block for blocks in self._table.values() for block in blocks]
        assert all(block.key is not None for block in findable), "a findable block has no key"
        counted = Counter(block.key.group for block in findable if block.key is not None)
        assert +self.num_keyed == counted, "findable blocks are miscounted"
        assert all(block.users == 0 for block in self._keyed), "a waiting block is in use"
        assert {block for block in findable if block.users == 0} == set(self._keyed)
        assert 0 <= self.num_free <= self.num_blocks, "blocks were lost or made"
