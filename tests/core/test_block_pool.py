"""A pool of runs against a slow pool of single blocks in a list."""

from array import array
from random import Random

import pytest

from spanlab.core.policies.block_groups import AttentionBlocks
from spanlab.core.policies.block_pool import EMPTY_PREFIX, BlockKey, BlockPool, BlockTable, Source
from spanlab.core.policies.blocks import NO_BOUNDARIES
from spanlab.core.token_string import EMPTY

SOURCE = Source("", EMPTY)


class SlowBlock:
    """One block; `digest` is None while it is not published."""

    def __init__(self):
        self.digest, self.users = None, 1


class SlowPool:
    """vLLM's rules block by block: a queue of free blocks as a list, and the published blocks of a digest in order."""

    def __init__(self, blocks):
        self.blank, self.queue, self.stored, self.kept = blocks, [], {}, set()

    @property
    def num_free(self):
        return self.blank + len(self.queue)

    def take(self, count):
        for _ in range(count):
            if self.blank:
                self.blank -= 1
                continue
            block = self.queue.pop(0)
            self.stored[block.digest].remove(block)
            if not self.stored[block.digest]:
                del self.stored[block.digest]
        return [SlowBlock() for _ in range(count)]

    def find(self, digests):
        found = []
        for digest in digests:
            if digest not in self.stored:
                break
            found.append(self.stored[digest][0])
        return found

    def use(self, blocks):
        for block in blocks:
            if not block.users:
                self.queue.remove(block)
            block.users += 1

    def publish(self, blocks, digests):
        for block, digest in zip(blocks, digests, strict=True):
            block.digest = digest
            self.stored.setdefault(digest, []).append(block)
            self.kept.add(digest)

    def free(self, blocks):
        for block in reversed(blocks):
            block.users -= 1
            if block.users:
                continue
            if block.digest is None:
                self.blank += 1
            else:
                self.queue.append(block)

    def behind(self, digests):
        present = sum(digest in self.stored for digest in digests)
        return present, sum(digest in self.kept and digest not in self.stored for digest in digests)

    def miss(self, digests):
        self.kept.difference_update(digest for digest in digests if digest not in self.stored)


def digests_of(tokens):
    """Digests of blocks of one token each, that cover all tokens before, as those of a request."""
    digests, before = array("Q"), 1
    for token in tokens:
        before = before * 4 + token
        digests.append(before)
    return digests


class Holder:
    """A request in both pools: its table of runs, and its blocks one by one."""

    def __init__(self, digests):
        self.digests, self.table, self.blocks = digests, BlockTable(), []


class Both:
    """Requests that reuse, allocate, publish and free blocks in both pools, which agree on every count and order."""

    def __init__(self, random, blocks):
        self.random, self.pool, self.slow = random, BlockPool(blocks), SlowPool(blocks)
        self.group = AttentionBlocks(self.pool, 1)
        self.prompts, self.holders = [[]], []
        for _ in range(random.randint(2, 8)):  # each begins as another one
            other = random.choice(self.prompts)
            beginning = other[: random.randint(0, len(other))]
            self.prompts.append(beginning + random.choices(range(3), k=random.randint(1, 9)))

    def arrive(self):
        holder = Holder(digests_of(self.random.choice(self.prompts[1:])))
        found, slow = self.group.find(holder.digests, len(holder.digests)), self.slow.find(holder.digests)
        assert found.count == len(slow)
        share = self.random.choice([found.count, self.random.randint(0, found.count)])
        reused, slow = found.first(share), slow[:share]
        for first in range(share + 1):
            assert reused.unreferenced(first) == sum(not block.users for block in slow[first:])
        for start in range(len(holder.digests) + 1):
            counted = self.pool.count_behind(0, holder.digests, start, len(holder.digests))
            assert counted == self.slow.behind(holder.digests[start:])
        self.group.attach(holder.table, reused)
        self.slow.use(slow)
        holder.blocks = list(slow)
        self.holders.append(holder)

    def miss(self):
        digests = self.random.choice(self.holders).digests
        start = self.random.randint(0, len(digests))
        self.pool.miss(0, digests, start)
        self.slow.miss(digests[start:])

    def extend(self):
        holder = self.random.choice(self.holders)
        held = len(holder.blocks)
        new = min(held + self.random.randint(1, 5), len(holder.digests) + 1) - held
        assert self.group.needed(holder.table, held + new, EMPTY_PREFIX) == max(new, 0)
        if 0 < new <= self.slow.num_free:
            self.group.extend(holder.table, held + new)
            holder.blocks += self.slow.take(new)

    def publish(self):
        holder = self.random.choice(self.holders)
        start = holder.table.num_visited
        stop = min(start + self.random.randint(1, 5), len(holder.digests), len(holder.blocks))
        if stop > start:
            published = self.group.publish(holder.table, holder.digests, stop, NO_BOUNDARIES, SOURCE)
            assert list(published) == [*range(start, stop)]
            self.slow.publish(holder.blocks[start:stop], holder.digests[start:stop])

    def leave(self):
        holder = self.holders.pop(self.random.randrange(len(self.holders)))
        self.group.release(holder.table)
        self.slow.free(holder.blocks)

    def act(self):
        acts = {self.arrive: 6 - len(self.holders)}
        if self.holders:
            acts |= {self.extend: 8, self.publish: 8, self.leave: len(self.holders), self.miss: 1}
        self.random.choices(list(acts), list(acts.values()))[0]()

    def compare(self):
        assert list(self.pool.waiting()) == [BlockKey(0, block.digest) for block in self.slow.queue]
        assert self.pool.num_free == self.slow.num_free
        assert self.pool.num_keyed(0) == sum(map(len, self.slow.stored.values()))
        self.pool.check()


@pytest.mark.parametrize("blocks", [2, 10, 20, 60])
def test_runs_are_the_blocks_that_they_hold(blocks):
    for seed in range(100):
        both = Both(Random(seed), blocks)
        for _ in range(200):
            both.act()
            both.compare()


class Told(list):
    """A lower tier that has no blocks, and lists the digests of those that were evicted."""

    def find(self, key):
        return None

    def published(self, key):
        pass

    def evicted(self, key):
        self.append(key.digest)


@pytest.mark.parametrize("below", [False, True])
def test_blocks_that_are_taken_later_are_counted_at_once(below):
    pool = BlockPool(3)
    pool.lower = told = Told() if below else None
    for block, digest in zip(blocks := pool.take_single(3), (7, 8, 9), strict=True):
        pool.publish_single(0, block, digest)
    pool.free(blocks)
    pool.take_later(2)
    assert (pool.num_free, pool.num_keyed(0)) == (1, 1)
    assert told == ([7, 8] if below else None), "a tier writes what is evicted"
    assert [pool.find(0, digest) is not None for digest in (7, 8, 9)] == [False, False, True]
    pool.check()
