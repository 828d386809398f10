"""A pool of blocks of one size: published blocks can be matched until they are evicted (vLLM's block pool).

Free blocks form one queue. Blocks without a key come first, last freed first; then the blocks that were
never used; then those with a key, in the order in which they were freed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from spanlab.core.token_string import TokenString


class BlockKey(NamedTuple):
    """Key of a published block: the group of layers that wrote it, and the digest of all tokens up to its end."""

    group: int
    digest: int


class Source(NamedTuple):
    """Tokens from which a block was computed: those of a request from its start to the block's end, or further."""

    cache_salt: str
    tokens: TokenString


class Block:
    """Memory of one block; `digest` is None while the block is not published.

    `source`  distinguishes equal digests of different tokens; None for a block of a lower tier, which has digests only
    """

    __slots__ = ("digest", "group", "source", "users")

    def __init__(self, group: int = 0, digest: int | None = None) -> None:
        self.group, self.digest = group, digest
        self.users = 0
        self.source: Source | None = None

    @property
    def key(self) -> BlockKey | None:
        """Key of the block; None while it is not published."""
        return None if self.digest is None else BlockKey(self.group, self.digest)


class LowerTiers(Protocol):
    """Lower tiers of a pool: `find` may return blocks that are not in the pool; the others report its changes."""

    def find(self, key: BlockKey) -> Block | None: ...

    def published(self, key: BlockKey) -> None: ...

    def evicted(self, key: BlockKey) -> None: ...


#: Placeholder for a block that a request no longer needs, or never had; it is never in the free queue.
NULL_BLOCK = Block()
NULL_BLOCK.users = 1


class BlockPool:
    """A fixed number of blocks of one size; several blocks may have the same content."""

    def __init__(self, num_blocks: int) -> None:
        self._unused = num_blocks
        self._unkeyed: list[Block] = []
        self._keyed: OrderedDict[Block, None] = OrderedDict()
        self._first: defaultdict[int, dict[int, Block]] = defaultdict(dict)  # by group and digest
        self._copies: dict[BlockKey, list[Block]] = {}  # blocks published after the first one of a key, in order
        self.num_blocks = num_blocks
        self.lower: LowerTiers | None = None
        self.num_published: Counter[int] = Counter()  #: blocks ever published, by group
        self.num_revived = 0  #: free published blocks that were reused
        self.num_evicted: Counter[int] = Counter()  #: published blocks that were evicted, by group

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, published ones included."""
        return self._unused + len(self._unkeyed) + len(self._keyed)

    def num_keyed(self, group: int) -> int:
        """Return the number of published blocks of one group."""
        return self.num_published[group] - self.num_evicted[group]

    def find(self, group: int, digest: int) -> Block | None:
        """Return the first published block of a key, else the block of a lower tier; None without one."""
        block = self._first[group].get(digest)
        if block is None and self.lower is not None:
            return self.lower.find(BlockKey(group, digest))
        return block

    def find_run(self, group: int, digests: Iterable[int]) -> list[Block]:
        """Return the blocks of `digests` up to the first one without a block."""
        blocks: list[Block] = []
        first = self._first[group]
        for digest in digests:
            block = first.get(digest)
            if block is None and self.lower is not None:
                block = self.lower.find(BlockKey(group, digest))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[Block]:
        """Allocate `count` blocks from the head of the free queue; they lose their keys."""
        assert count <= self.num_free, "more blocks were allocated than are free"
        first = max(0, len(self._unkeyed) - count)
        blocks = self._unkeyed[first:][::-1]
        del self._unkeyed[first:]
        new = min(count - len(blocks), self._unused)
        self._unused -= new
        blocks += [Block() for _ in range(new)]
        blocks += self._evict(count - len(blocks))
        for block in blocks:
            block.users = 1
        return blocks

    def _evict(self, count: int) -> list[Block]:
        evicted = [self._keyed.popitem(last=False)[0] for _ in range(count)]
        self.num_evicted.update([block.group for block in evicted])
        plain = not self._copies and self.lower is None
        for block in evicted:
            digest = block.digest
            assert digest is not None, "the queue of keyed blocks has only blocks with keys"
            if plain:
                del self._first[block.group][digest]
            else:
                self._forget(block, BlockKey(block.group, digest))
            block.digest = block.source = None
        return evicted

    def _forget(self, block: Block, key: BlockKey) -> None:
        """Remove a block from its key; if it was the first one, its next copy becomes the first."""
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
        """Publish full blocks, each under its digest."""
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
        """Add one reference to each block; null blocks are not counted."""
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            if block.users == 0:
                del self._keyed[block]
                self.num_revived += 1
            block.users += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block; blocks without references join the free queue in this order."""
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
        """Return an iterator over published blocks without references, in order of eviction."""
        return iter(self._keyed)

    def check(self) -> None:
        """Verify the counts and the queue by recounting; slow, for tests."""
        published = [block for first in self._first.values() for block in first.values()]
        published += [block for copies in self._copies.values() for block in copies]
        assert all(block.digest is not None for block in published), "a published block has no key"
        counted = Counter(block.group for block in published)
        assert self.num_published - self.num_evicted == counted, "published blocks are miscounted"
        assert all(block.users == 0 for block in self._keyed), "a free block is in use"
        assert {block for block in published if block.users == 0} == set(self._keyed)
        assert 0 <= self.num_free <= self.num_blocks, "the number of blocks changed"
