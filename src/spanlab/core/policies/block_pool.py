"""A pool of equal blocks: hashed ones stay findable until their memory is taken (vLLM's block pool).

Freed blocks wait in one queue. Blocks without a key come first, last freed first; then the blocks
that were never used; then those with a key, in the order in which they were freed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from spanlab.core.token_string import TokenString


class BlockKey(NamedTuple):
    """What finds a block: the group of layers that wrote it, and the digest of all tokens so far."""

    group: int
    digest: int


class Source(NamedTuple):
    """What a block was computed from: the tokens from the start of a request up to the block's end, or further."""

    cache_salt: str
    tokens: TokenString


class Block:
    """Memory of one block; `digest` is None while it cannot be found.

    `source`  tells equal digests of different tokens apart; None where a lower tier keeps digests alone
    """

    __slots__ = ("digest", "group", "source", "users")

    def __init__(self, group: int = 0, digest: int | None = None) -> None:
        self.group, self.digest = group, digest
        self.users = 0
        self.source: Source | None = None

    @property
    def key(self) -> BlockKey | None:
        """What finds it; None while nothing does."""
        return None if self.digest is None else BlockKey(self.group, self.digest)


class LowerTiers(Protocol):
    """What lies below a pool: it is told what the pool stores and gives up, and may have what the pool has not."""

    def find(self, key: BlockKey) -> Block | None: ...

    def published(self, key: BlockKey) -> None: ...

    def evicted(self, key: BlockKey) -> None: ...


#: Placeholder for a block that a request does not need any more, or never had; it never waits in a queue.
NULL_BLOCK = Block()
NULL_BLOCK.users = 1


class BlockPool:
    """Blocks of one size under a fixed count; several blocks may hold the same content."""

    def __init__(self, num_blocks: int) -> None:
        self._unused = num_blocks
        self._unkeyed: list[Block] = []
        self._keyed: OrderedDict[Block, None] = OrderedDict()
        self._first: defaultdict[int, dict[int, Block]] = defaultdict(dict)  # by group and digest
        self._copies: dict[BlockKey, list[Block]] = {}  # published after the first, and behind it in line
        self.num_blocks = num_blocks
        self.lower: LowerTiers | None = None
        self.num_published: Counter[int] = Counter()  #: blocks ever made findable, by group
        self.num_revived = 0  #: free blocks ever used again
        self.num_evicted: Counter[int] = Counter()  #: findable blocks whose memory was taken, by group

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, findable ones among them."""
        return self._unused + len(self._unkeyed) + len(self._keyed)

    def num_keyed(self, group: int) -> int:
        """Findable blocks of one group."""
        return self.num_published[group] - self.num_evicted[group]

    def find(self, group: int, digest: int) -> Block | None:
        """The block that was published first under a key, else what lower tiers offer; None where there is none."""
        block = self._first[group].get(digest)
        if block is None and self.lower is not None:
            return self.lower.find(BlockKey(group, digest))
        return block

    def find_run(self, group: int, digests: Iterable[int]) -> list[Block]:
        """The blocks of `digests` up to the first that is not found."""
        found: list[Block] = []
        first = self._first[group]
        for digest in digests:
            block = first.get(digest)
            if block is None and self.lower is not None:
                block = self.lower.find(BlockKey(group, digest))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, count: int) -> list[Block]:
        """Give `count` blocks to a request, from the head of the queue; they lose their keys."""
        assert count <= self.num_free, "more blocks were taken than are free"
        kept = max(0, len(self._unkeyed) - count)
        taken = self._unkeyed[kept:][::-1]
        del self._unkeyed[kept:]
        new = min(count - len(taken), self._unused)
        self._unused -= new
        taken += [Block() for _ in range(new)]
        taken += self._evict(count - len(taken))
        for block in taken:
            block.users = 1
        return taken

    def _evict(self, count: int) -> list[Block]:
        evicted = [self._keyed.popitem(last=False)[0] for _ in range(count)]
        self.num_evicted.update([block.group for block in evicted])
        plain = not self._copies and self.lower is None
        for block in evicted:
            digest = block.digest
            assert digest is not None, "only a block with a key waits among those with keys"
            if plain:
                del self._first[block.group][digest]
            else:
                self._forget(block, BlockKey(block.group, digest))
            block.digest = block.source = None
        return evicted

    def _forget(self, block: Block, key: BlockKey) -> None:
        """Let a key find one block less; where that was the first, the next in line takes its place."""
        copies, first = self._copies.get(key), self._first[key.group]
        if copies is None:
            del first[key.digest]
            if self.lower is not None:
                self.lower.evicted(key)
            return
        if first[key.digest] is block:
            first[key.digest] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]

    def publish(self, group: int, blocks: Sequence[Block], digests: Sequence[int]) -> None:
        """Make full blocks findable, each under its digest."""
        first = self._first[group]
        self.num_published[group] += len(blocks)
        for block, digest in zip(blocks, digests, strict=True):
            assert block.digest is None, "a block is published once"
            block.group, block.digest = group, digest
            if first.setdefault(digest, block) is not block:
                self._copies.setdefault(BlockKey(group, digest), []).append(block)
        if self.lower is not None:
            for digest in digests:
                self.lower.published(BlockKey(group, digest))

    def use(self, blocks: Iterable[Block]) -> None:
        """Note one more user of each; null blocks have none."""
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            if block.users == 0:
                del self._keyed[block]
                self.num_revived += 1
            block.users += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each; free blocks join the queue in this order."""
        unkeyed = []
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            block.users -= 1
            if block.users:
                continue
            if block.digest is None:
                unkeyed.append(block)
            else:
                self._keyed[block] = None
        self._unkeyed.extend(reversed(unkeyed))

    def waiting(self) -> Iterator[Block]:
        """Findable blocks without references, next to be evicted first."""
        return iter(self._keyed)

    def check(self) -> None:
        """Recount from scratch; slow, for tests."""
        findable = [block for first in self._first.values() for block in first.values()]
        findable += [block for copies in self._copies.values() for block in copies]
        assert all(block.digest is not None for block in findable), "a findable block has no key"
        counted = Counter(block.group for block in findable)
        assert self.num_published - self.num_evicted == counted, "findable blocks are miscounted"
        assert all(block.users == 0 for block in self._keyed), "a waiting block is in use"
        assert {block for block in findable if block.users == 0} == set(self._keyed)
        assert 0 <= self.num_free <= self.num_blocks, "blocks were lost or made"
