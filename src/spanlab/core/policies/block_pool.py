"""A pool of blocks of one size: published blocks can be matched until they are evicted (vLLM's
block pool).

Free blocks without a key are taken first; then those with a key, in the order in which they were
freed.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import gcd, lcm
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spanlab.core.releases import VLLM_0_32, Release
from spanlab.core.request import Budget, Request
from spanlab.core.token_string import BlockWeights, TokenString
from spanlab.model_spec import ModelSpec, layers_per_group

#: Digests of consecutive blocks, unsigned integers of 64 bits.
Digests: TypeAlias = "array[int]"
NO_DIGESTS: Digests = array("Q")


class BlockKey(NamedTuple):
    """Key of a published block: the group of layers that wrote it, and the digest of all tokens up
    to its end."""

    group: int
    digest: int


class Source(NamedTuple):
    """Tokens from which a block was computed: those of a request from its start to the block's end,
    or further."""

    cache_salt: str
    tokens: TokenString


class Run:
    """Consecutive blocks of one group that are allocated, shared and freed together; a single block
    is a run, too.

    `digests`  of its published blocks in order; empty for a single block that is not published
    `source`   distinguishes equal digests of different tokens; None for a block of a lower tier,
               which has digests only
    `users`    requests that hold it
    `stored`   whether it is in memory under its digests; a run that was evicted is remembered
    `missed`   whether a request has missed it since its eviction
    `forks`    whether a stored run may follow it: it then stays as long as it is
    `rest`     blocks that were cut off its end while a request held both
    `before`, `behind`  neighbours in the queue of free published runs
    """

    __slots__ = (
        "before",
        "behind",
        "digests",
        "forks",
        "group",
        "missed",
        "rest",
        "source",
        "stored",
        "users",
    )

    def __init__(self, group: int = 0, digests: Digests = NO_DIGESTS, users: int = 1) -> None:
        self.group, self.digests, self.users = group, digests, users
        self.stored = self.missed = self.forks = False
        self.source: Source | None = None
        self.rest: Run | None = None
        self.before: Run | None = None
        self.behind: Run | None = None

    def __len__(self) -> int:
        return max(1, len(self.digests))

    @property
    def key(self) -> BlockKey | None:
        """Key of the first block; None while a request holds it and it is not published."""
        return None if self.users and not self.stored else BlockKey(self.group, self.digests[0])

    def common(self, digests: Digests, at: int, stop: int) -> int:
        """Return how many leading blocks have the digests `[at, stop)`, the first of which is
        equal."""
        mine, most = self.digests, min(len(self.digests), stop - at)
        if mine[most - 1] == digests[at + most - 1]:  # a digest covers all tokens before it
            return most
        equal, differs = 0, most - 1
        while differs - equal > 1:
            middle = (equal + differs) // 2
            if mine[middle] == digests[at + middle]:
                equal = middle
            else:
                differs = middle
        return differs

    def cut(self, count: int) -> Run:
        """Keep the first `count` blocks; return a run of the others, with the same properties."""
        tail = Run(self.group, self.digests[count:], self.users)
        self.digests = self.digests[:count]
        tail.source, tail.stored, tail.missed = self.source, self.stored, self.missed
        tail.forks, tail.rest = self.forks, self.rest
        self.forks, self.rest = True, tail
        return tail


class LowerTiers(Protocol):
    """Lower tiers of a pool: `find` may return blocks that are not in the pool; the others report
    its changes."""

    def find(self, key: BlockKey) -> Run | None: ...

    def published(self, key: BlockKey) -> None: ...

    def evicted(self, key: BlockKey) -> None: ...


#: Placeholder for a block that a request no longer needs, or never had; it is never in the free
#: queue.
NULL_BLOCK = Run()


@dataclass(slots=True, eq=False)
class Prefix:
    """The runs that hold the first `count` blocks of a prompt in one group; of the last run, more
    may be stored."""

    runs: list[Run]
    count: int

    def first(self, count: int) -> Prefix:
        """Return the runs of the first `count` blocks."""
        if count >= self.count:
            return self
        covered = number = 0
        while covered < count:
            covered += len(self.runs[number])
            number += 1
        return Prefix(self.runs[:number], count)

    def unreferenced(self, first: int = 0) -> int:
        """Return the number of blocks behind the first ones that no request holds: they leave the
        free queue."""
        start = free = 0
        for run in self.runs:
            stop = min(start + len(run), self.count)
            if run.users == 0 and stop > first:
                free += stop - max(start, first)
            start = stop
        return free


EMPTY_PREFIX = Prefix([], 0)


def single_blocks(blocks: list[Run]) -> Prefix:
    """Return a prefix of single blocks, null blocks among them."""
    return Prefix(blocks, len(blocks))


@dataclass(slots=True)
class BlockTable:
    """Blocks of one request in one group.

    `blocks`       single blocks, by index; with `counts`, the published runs in order
    `counts`       blocks that the request holds of each run, and of the runs that were cut off it
                   since
    `length`       blocks of all runs, and those that are not published; counted where there are
                   runs
    `num_visited`  leading blocks that were published, or skipped
    `unkeyed`      the last ones of these, if they were only counted: their keys follow before the
                   table is released
    `last_state`   index of the state before the last allocation; None without one
    `num_retired`  leading blocks that were freed or are null, permanently
    `inner`        whether the chunk that is planned also stores the state at its last boundary
    `grown`        whether blocks were allocated behind the reused ones
    `tail`         key and tokens of the first block that is not full, if it has a key; None without
                   one
    """

    blocks: list[Run] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    length: int = 0
    num_visited: int = 0
    last_state: int | None = None
    num_retired: int = 0
    inner: bool = False
    grown: bool = False
    unkeyed: int = 0
    tail: tuple[int, Source] | None = None

    def runs(self) -> list[Run]:
        """Return the runs as they are cut now, in order."""
        runs = []
        for run, count in zip(self.blocks, self.counts, strict=True):
            runs.append(run)
            while len(run) < count:
                count -= len(run)
                assert run.rest is not None, "a run that was cut has a rest"
                run = run.rest
                runs.append(run)
        return runs

    def separate_last(self) -> None:
        """List the parts of the last run one by one."""
        while self.blocks and self.counts[-1] > len(run := self.blocks[-1]):
            assert run.rest is not None, "a run that was cut has a rest"
            self.blocks.append(run.rest)
            self.counts[-1:] = [len(run), self.counts[-1] - len(run)]


class BlockPool:
    """A fixed number of blocks of one size; several blocks may have the same content.

    Published blocks are kept as runs, so that an operation costs the runs that it changes and not
    their blocks. A run is cut where a prompt matches a part of it, or where memory for fewer blocks
    is needed. Runs of equal digests have equal ends: all are cut together.

    `remembered`  the group whose evicted runs are remembered
    """

    def __init__(self, num_blocks: int, remembered: int = 0) -> None:
        self._blank = num_blocks  # free blocks without a key
        self._ends = Run()  # of the ring of free published runs, in order of eviction
        self._ends.before = self._ends.behind = self._ends
        # by group and first digest
        self._runs: defaultdict[int, dict[int, Run]] = defaultdict(dict)
        # runs published after the stored one of a key, in order
        self._copies: dict[BlockKey, list[Run]] = {}
        self._num_unkeyed = 0  # blocks that were only counted as published
        self._num_owed = 0  # published blocks of group 0 that were only counted as evicted
        self.num_blocks = self.num_free = (
            num_blocks  #: the second: that no request uses, published ones included
        )
        self.remembered = remembered
        self.lower: LowerTiers | None = None
        self.num_published: Counter[int] = Counter()  #: blocks ever published, by group
        self.num_revived = 0  #: free published blocks that were reused
        self.num_evicted: Counter[int] = Counter()  #: published blocks that were evicted, by group

    def num_keyed(self, group: int) -> int:
        """Return the number of published blocks of one group."""
        return self.num_published[group] - self.num_evicted[group]

    # -- lookup ------------------------------------------------------------------------------------

    def find(self, group: int, digest: int) -> Run | None:
        """Return the first published run that begins with a digest, else a block of a lower tier;
        None without one."""
        self.evict_owed()
        run = self._runs[group].get(digest)
        if run is not None and run.stored:
            return run
        return None if self.lower is None else self.lower.find(BlockKey(group, digest))

    def find_run(self, group: int, digests: Digests, start: int, stop: int) -> Prefix:
        """Return the runs of the digests `[start, stop)` up to the first one without a block."""
        runs: list[Run] = []
        at = start
        while at < stop:
            run = self.find(group, digests[at])
            if run is None:
                break
            runs.append(run)
            at += run.common(digests, at, stop)
        return Prefix(runs, at - start)

    def count_behind(self, group: int, digests: Digests, start: int, stop: int) -> tuple[int, int]:
        """Return how many digests in `[start, stop)` have a block, and how many lost it and were
        not missed since."""
        self.evict_owed()
        present = evicted = at = 0
        runs = self._runs[group]
        while at < stop:
            run, count = runs.get(digests[at]), 1
            if run is not None:
                count = run.common(digests, at, stop)
            inside = at + count - max(at, start)
            if inside > 0:
                if (run is not None and run.stored) or self._is_lower(group, digests[at]):
                    present += inside
                elif run is not None and not run.missed:
                    evicted += inside
            at += count
        return present, evicted

    def _is_lower(self, group: int, digest: int) -> bool:
        return self.lower is not None and self.lower.find(BlockKey(group, digest)) is not None

    def miss(self, group: int, digests: Digests, start: int) -> None:
        """Note that a request misses the evicted blocks of the digests from `start` on."""
        self.evict_owed()
        at, runs = 0, self._runs[group]
        while at < len(digests):
            run, count = runs.get(digests[at]), 1
            if run is not None:
                count = run.common(digests, at, len(digests))
                if at + count > start and not run.stored and not run.missed:
                    if count < len(run):
                        self._cut(run, count)
                    if at < start:
                        run, count = self._cut(run, start - at), count - (start - at)
                        at = start
                    run.missed = True
            at += count

    # -- memory ------------------------------------------------------------------------------------

    def take(self, count: int) -> None:
        """Allocate `count` blocks: those without a key, then published ones, which are evicted."""
        self._evict_first(self._take_blank(count))

    def take_later(self, count: int) -> None:
        """Allocate as `take`, of a pool with one group; published blocks are evicted once the pool
        is read.

        A lower tier hears of evictions at once.
        """
        if self.lower is not None:
            self.take(count)
            return
        owed = self._take_blank(count)
        self._num_owed += owed
        self.num_evicted[0] += owed

    def _take_blank(self, count: int) -> int:
        """Allocate blocks without a key; returns the number of those that are missing."""
        assert count <= self.num_free, "more blocks were allocated than are free"
        self.num_free -= count
        blank = min(count, self._blank)
        self._blank -= blank
        return count - blank

    def evict_owed(self) -> None:
        """Evict what `take_later` allocated; call it before the runs of a table are listed, for it
        may cut them."""
        if self._num_owed:
            owed, self._num_owed = self._num_owed, 0
            self.num_evicted[0] -= owed
            self._evict_first(owed)

    def _evict_first(self, count: int) -> None:
        """Evict the first `count` free published blocks."""
        self.evict_owed()
        while count:
            run = self._ends.behind
            assert run is not None and run is not self._ends, (
                "free blocks are blank, or in the queue"
            )
            if len(run) > count:  # the last block of a request was freed first
                if self._cut_evicted(run, count):
                    return
                run = self._cut(run, len(run) - count)
            self._unlink(run)
            count -= len(run)
            self._evict(run)

    def take_single(self, count: int) -> list[Run]:
        """Allocate `count` blocks that are shared and freed one by one."""
        self.take(count)
        return [Run() for _ in range(count)]

    def release(self, count: int) -> None:
        """Free blocks that were not published."""
        self._blank += count
        self.num_free += count

    def _evict(self, run: Run) -> None:
        """Remove a run from its key; if it was the first one of the key, its next copy becomes the
        first."""
        group, runs, first = run.group, self._runs[run.group], run.digests[0]
        self.num_evicted[group] += len(run)
        run.stored, run.source = False, None
        if self._copies:
            key = BlockKey(group, first)
            if (copies := self._copies.get(key)) is not None:
                if runs[first] is run:
                    runs[first] = copies.pop(0)
                    runs[first].missed = run.missed
                else:
                    copies.remove(run)
                if not copies:
                    del self._copies[key]
                return
        if group == self.remembered:
            self._join_evicted(run, runs)
        else:
            del runs[first]
        if self.lower is not None:
            self.lower.evicted(BlockKey(group, first))

    def _cut_evicted(self, run: Run, count: int) -> bool:
        """Move the last blocks of a free run to those that were evicted behind them; False where
        there are none."""
        behind, runs = run.rest, self._runs[run.group]
        if (
            behind is None
            or behind.stored
            or behind.missed
            or not behind.digests
            or self._copies_of(run)
        ):
            return False
        if runs.get(behind.digests[0]) is not behind:
            return False
        del runs[behind.digests[0]]
        behind.digests = run.digests[-count:] + behind.digests
        del run.digests[-count:]
        runs[behind.digests[0]] = behind
        self.num_evicted[run.group] += count
        return True

    def _join_evicted(self, run: Run, runs: dict[int, Run]) -> None:
        """Join an evicted run with the evicted blocks that were cut off its end."""
        behind = run.rest
        if behind is None or behind.stored or behind.missed != run.missed or not behind.digests:
            return
        if runs.get(behind.digests[0]) is behind:
            del runs[behind.digests[0]]
            run.digests += behind.digests
            run.rest, behind.digests = behind.rest, NO_DIGESTS

    def _cut(self, run: Run, count: int) -> Run:
        """Cut a run, and all runs of equal digests, behind `count` blocks; return its second
        part."""
        key = BlockKey(run.group, run.digests[0])
        copies, runs = self._copies.get(key), self._runs[run.group]
        equal = [run] if copies is None else [runs[key.digest], *copies]
        tails = [self._cut_one(each, count) for each in equal]
        first = tails[0]
        runs[first.digests[0]] = first
        if copies is not None:
            self._copies[BlockKey(run.group, first.digests[0])] = tails[1:]
        return tails[equal.index(run)]

    def _cut_one(self, run: Run, count: int) -> Run:
        tail = run.cut(count)
        if run.before is not None:  # the end of a run is evicted before its beginning
            tail.before, tail.behind = run.before, run
            run.before.behind = run.before = tail
        return tail

    # -- publication and references ----------------------------------------------------------------

    def publish(
        self, group: int, table: BlockTable, digests: Digests, stop: int, source: Source
    ) -> None:
        """Publish the blocks of a request up to `stop`, each under its digest; all are computed
        from `source`.

        Blocks of a lower tier are published one by one, for it knows them by their keys.
        """
        self.evict_owed()
        at, runs = table.num_visited, self._runs[group]
        self.num_published[group] += stop - at
        table.separate_last()
        while at < stop:
            known, count = runs.get(digests[at]), stop - at
            if known is not None:
                count = known.common(digests, at, stop)
            if self.lower is not None:
                count = 1
            if known is not None and count < len(known):
                self._cut(known, count)
            new, last = digests[at : at + count], table.blocks[-1] if table.blocks else None
            copied = known is not None and known.stored
            if last is not None and not copied and self._may_grow(last):
                if known is not None:
                    del runs[digests[at]]
                last.digests.extend(new)
                last.source, last.rest = source, None
                table.counts[-1] += count
            else:
                if last is not None:
                    self._note_fork(last)
                run = Run(group, new)
                run.source, run.stored = source, True
                if not copied:
                    runs[digests[at]] = run
                else:
                    # As in vLLM, two blocks may hold the same tokens: a running request's table is
                    # never changed, so that the second block is kept, and is found once the first
                    # one is evicted.
                    assert known is not None, "the copied run is stored"
                    known.missed = False
                    self._copies.setdefault(BlockKey(group, digests[at]), []).append(run)
                table.blocks.append(run)
                table.counts.append(count)
            at += count
        if self.lower is not None:
            for digest in digests[table.num_visited : stop]:
                self.lower.published(BlockKey(group, digest))
        table.num_visited = stop

    def count(self, group: int, table: BlockTable, stop: int) -> None:
        """Count the blocks of a request up to `stop` as published; no other request has their
        digests."""
        added = stop - table.num_visited
        self.num_published[group] += added
        self._num_unkeyed += added
        table.unkeyed += added
        table.num_visited = stop

    def publish_counted(
        self, group: int, table: BlockTable, digests: Digests, source: Source
    ) -> None:
        """Publish the blocks that `count` has counted."""
        stop, counted = table.num_visited, table.unkeyed
        self.num_published[group] -= counted
        self._num_unkeyed -= counted
        table.num_visited, table.unkeyed = stop - counted, 0
        self.publish(group, table, digests, stop, source)

    def _may_grow(self, run: Run) -> bool:
        """Whether further blocks of the only request that holds a run may join it."""
        return run.users == 1 and not run.forks and self.lower is None and not self._copies_of(run)

    def _copies_of(self, run: Run) -> list[Run]:
        """Return the runs of equal digests but the first; empty where there is one run."""
        return self._copies.get(BlockKey(run.group, run.digests[0]), []) if self._copies else []

    def _note_fork(self, run: Run) -> None:
        """Note that a stored run follows a run, and all that are equal to it."""
        run.forks = True
        if copies := self._copies_of(run):
            for equal in (self._runs[run.group][run.digests[0]], *copies):
                equal.forks = True

    def publish_single(
        self, group: int, block: Run, digest: int, source: Source | None = None
    ) -> None:
        """Publish one block; without a source, of a lower tier, an eviction that was missed stays
        so."""
        assert not block.stored, "a block is published once"
        runs = self._runs[group]
        known = runs.get(digest)
        self.num_published[group] += 1
        block.group = group
        block.digests = array("Q", (digest,))
        block.source = source
        block.stored = True
        if known is not None and known.stored:
            self._copies.setdefault(BlockKey(group, digest), []).append(block)
            known.missed = known.missed and source is None
        else:
            block.missed = source is None and (known is None or known.missed)
            runs[digest] = block
        if self.lower is not None:
            self.lower.published(BlockKey(group, digest))

    def use(self, prefix: Prefix) -> None:
        """Add one reference to each block of a prefix; null blocks are not counted."""
        self.evict_owed()
        start = 0
        for run in prefix.runs:
            if start + len(run) > prefix.count:
                self._cut(run, prefix.count - start)
            start += len(run)
            if run is NULL_BLOCK:
                continue
            if run.users == 0:
                self._unlink(run)
                self.num_revived += len(run)
                self.num_free -= len(run)
            run.users += 1

    def free(self, runs: Iterable[Run]) -> None:
        """Drop one reference to each block; published ones without references join the queue in
        this order."""
        self.evict_owed()
        for run in runs:
            if run is NULL_BLOCK:
                continue
            run.users -= 1
            if run.users:
                continue
            self.num_free += len(run)
            if not run.stored:  # of no use to anyone: taken before all others
                self._blank += 1
                continue
            last, ends = self._ends.before, self._ends
            assert last is not None, "the queue is a ring"
            run.before, run.behind = last, ends
            last.behind = ends.before = run

    def _unlink(self, run: Run) -> None:
        before, behind = run.before, run.behind
        assert before is not None and behind is not None, "the run is in the queue"
        before.behind, behind.before = behind, before
        run.before = run.behind = None

    def waiting(self) -> Iterator[BlockKey]:
        """Return an iterator over the keys of published blocks without references, in order of
        eviction."""
        self.evict_owed()
        run = self._ends.behind
        while run is not None and run is not self._ends:
            for digest in reversed(run.digests):
                yield BlockKey(run.group, digest)
            run = run.behind

    def check(self) -> None:
        """Verify the counts and the queue by recounting; slow, for tests."""
        self.evict_owed()
        published = [run for first in self._runs.values() for run in first.values() if run.stored]
        for key, copies in self._copies.items():
            assert all(
                run.digests == self._runs[key.group][key.digest].digests for run in copies
            ), "copies differ"
            published += copies
        for group, first in self._runs.items():
            assert all(
                run.group == group and run.digests[0] == digest for digest, run in first.items()
            ), "a wrong key"
        counted: Counter[int] = Counter({0: self._num_unkeyed} if self._num_unkeyed else {})
        for run in published:
            counted[run.group] += len(run)
        assert self.num_published - self.num_evicted == counted, "published blocks are miscounted"
        free = Counter(
            BlockKey(run.group, digest)
            for run in published
            if not run.users
            for digest in run.digests
        )
        assert free == Counter(self.waiting()), "a free block is in use, or does not wait"
        assert self.num_free == self._blank + free.total(), "free blocks are miscounted"
        assert 0 <= self.num_free <= self.num_blocks, "the number of blocks changed"


# ------------------------------------------------------------------------------
# The sizes of a pool of hashed blocks in bytes.
# ------------------------------------------------------------------------------


class BlockStore:
    """A pool of hashed blocks, measured in bytes."""

    def __init__(self, pool: BlockPool, block_bytes: int, state_bytes: int) -> None:
        self.pool, self.block_bytes, self.state_bytes = pool, block_bytes, state_bytes
        self.kv_groups = frozenset({0})  #: groups of attention layers; the others hold states

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self.pool.num_free

    @property
    def kv_cached(self) -> int:
        """Bytes of published attention blocks."""
        return sum([self.pool.num_keyed(group) for group in self.kv_groups]) * self.block_bytes

    @property
    def state_cached(self) -> int:
        """Bytes of published state blocks."""
        states = [group for group in self.pool.num_published if group not in self.kv_groups]
        return sum([self.pool.num_keyed(group) for group in states]) * self.block_bytes

    @property
    def inserted_bytes(self) -> int:
        """Bytes of all blocks ever published."""
        return self.pool.num_published.total() * self.block_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes of published blocks that were evicted."""
        return self.pool.num_evicted.total() * self.block_bytes


# ------------------------------------------------------------------------------
# Rules of a pool of hashed blocks: block size, and which recurrent states are stored.
# ------------------------------------------------------------------------------

BLOCK = 16  # tokens, vLLM's usual block; blocks of other sizes are multiples of it
StateMode = Literal["none", "align"]
GroupKind = Literal["full", "window", "chunk", "state", "ring"]


class GroupRule(NamedTuple):
    """Rule of one group of layers.

    `kind`  full: every token reads all tokens before it; window: the last `span`, itself among
            them; chunk: those since the last multiple of `span`; state: a recurrent state; ring:
            `size` raw keys, of the request alone
    `size`  tokens per block
    """

    kind: GroupKind
    size: int
    span: int = 0


def check_layout(layout: Sequence[GroupRule]) -> None:
    """Raise ValueError, one sentence, for groups that one pool cannot serve together."""
    kinds = [rule.kind for rule in layout]
    full = sorted({rule.size for rule in layout if rule.kind == "full"})
    if len(full) > 1:
        raise ValueError(f"blocks of {full} tokens in groups of kind=full: expected one size")
    if not set(kinds) - {"ring"}:
        raise ValueError(
            f"groups of kinds {', '.join(kinds)}: expected one whose blocks a prefix can reuse"
        )
    for rule in layout:
        if rule.kind in ("window", "chunk") and rule.span < 1:
            raise ValueError(
                f"span={rule.span} of a group of kind={rule.kind}: expected 1 token or more"
            )
    sizes = sorted({rule.size for rule in layout})
    equal = [kind for kind in ("chunk", "state") if kind in kinds]
    if len(sizes) > 1 and equal:
        raise ValueError(
            f"blocks of {sizes} tokens with a group of kind={equal[0]}: expected one size, as in vLLM"
        )


def unit_of(layout: Iterable[GroupRule]) -> int:
    """Return the tokens per digest: every shared block is a multiple of it."""
    return gcd(*[rule.size for rule in layout if rule.kind != "ring"])


def block_of(layout: Sequence[GroupRule]) -> int:
    """Return the tokens of a block of full attention; else of a whole block in every group."""
    full = next((rule.size for rule in layout if rule.kind == "full"), 0)
    return full or alignment_of(layout)


def alignment_of(layout: Iterable[GroupRule]) -> int:
    """Return the tokens that a reused prefix is a multiple of: whole blocks in every group."""
    return lcm(*[rule.size for rule in layout])


def blocks_of(tokens: int, size: int) -> int:
    """Return the number of blocks for `tokens` tokens, the last one possibly partly filled."""
    return -(-tokens // size)


class BlockShape(NamedTuple):
    """Blocks of a pool for one model: tokens and bytes of each, blocks per recurrent state, and
    groups of layers."""

    size: int
    block_bytes: int
    state_groups: int
    layout: tuple[GroupRule, ...] = ()

    def limit(self, budget: Budget) -> int:
        """Return the bytes of a budget that the blocks may take; without states, no budget of
        states is theirs."""
        return min(
            budget.total_bytes, budget.kv_bytes + (budget.state_bytes if self.state_groups else 0)
        )

    def pool(self, budget_bytes: int) -> BlockPool:
        """Return the pool for a budget; one block of it is the null block, which stores nothing."""
        return BlockPool(max(0, budget_bytes // self.block_bytes - 1))


class _Layers(NamedTuple):
    """Equal layers of a model, for their groups."""

    rule: GroupRule
    layers: int
    page_bytes: int


def block_multiple(model: ModelSpec, *, inner: bool) -> int:
    """Return the tokens of which a hybrid's blocks are multiples; `inner`: states inside a chunk
    lie on its grid."""
    return lcm(BLOCK, model.grid) if inner else BLOCK


def block_shape(
    model: ModelSpec,
    token_bytes: int,
    block_size: int | None = None,
    multiple: int = BLOCK,
    drafts: int = 0,
) -> BlockShape:
    """Return the blocks of `block_size` tokens; None: vLLM's size for the model, in hybrids a
    multiple of `multiple`.

    All groups share one pool, so that a block holds the KV of any of them, or a state. vLLM
    therefore raises a hybrid's block size until the KV of a layer is no smaller than the state of a
    layer, pads the smaller of the two, and gives layers with less KV per token blocks of more
    tokens. `drafts` tokens are drafted ahead of a step; `token_bytes` include the layers of their
    drafter.
    """
    more = (token_bytes - model.kv_bytes_per_token) // model.drafter_layer_bytes
    if model.packed:
        return _packed_shape(model, more, block_size)
    if model.local:
        return _local_shape(model, more, block_size or model.block_size)
    if not model.is_hybrid:
        size = block_size or model.block_size
        return BlockShape(size, size * token_bytes, 0, (GroupRule("full", size),))
    size = block_size or model.block_tokens_per_state(lcm(multiple, model.block_size), drafts)
    layers = model.attention_layers + more
    page_bytes = max(size * model.layer_kv_bytes, model.layer_state_bytes(drafts))
    states = _Layers(GroupRule("state", size), model.recurrent_layers, page_bytes)
    attention = _Layers(GroupRule("full", size), layers, page_bytes)
    each, layout = _grouped([attention, states] if model.attention_first else [states, attention])
    return BlockShape(size, each * page_bytes, sum(rule.kind == "state" for rule in layout), layout)


def _local_shape(model: ModelSpec, more: int, size: int) -> BlockShape:
    """Return the blocks of a model with windows or chunks: those of layers with less KV have more
    tokens."""
    of_full = model.attention_layers + (0 if model.has_own_drafter else more)
    kinds = (
        [_Layers(GroupRule("full", size), of_full, size * model.layer_kv_bytes)] if of_full else []
    )
    for kind in model.local:
        rule = GroupRule("window" if kind.reach == "window" else "chunk", size, kind.span)
        layers = kind.layers + (more if kind.drafts else 0)
        local = _Layers(rule, layers, size * kind.kv_size * model.kv_itemsize)
        kinds = [local, *kinds] if kind.first else [*kinds, local]
    largest = max(kind.page_bytes for kind in kinds)
    widened = [
        kind._replace(rule=kind.rule._replace(size=size * (largest // kind.page_bytes)))
        if largest % kind.page_bytes == 0
        else kind
        for kind in kinds
    ]
    each, layout = _grouped(widened)
    return BlockShape(block_of(layout), each * largest, 0, layout)


def _packed_shape(model: ModelSpec, more: int, block_size: int | None) -> BlockShape:
    """Return the blocks of a model whose entries are packed: as large as the widest of its groups
    needs.

    Tables of one rule and of several sizes stay together, and others are split into groups of about
    as many layers.
    """
    if block_size not in (None, model.block_size):
        reason = "its entries are packed into blocks of this size"
        raise ValueError(
            f"block_size={block_size} with model.name={model.name}: expected {model.block_size}, {reason}"
        )
    buckets: dict[GroupRule, dict[int, int]] = {}  # layers by the bytes of their entries in a block
    for table in model.packed:
        rule = GroupRule("window" if table.span else "full", table.block_size, table.span)
        pages = buckets.setdefault(rule, {})
        layers = table.layers + (more if table.drafts else 0)
        pages[table.page_bytes] = pages.get(table.page_bytes, 0) + layers
    balanced = [pages for pages in buckets.values() if len(set(pages.values())) == 1]
    fewest = max([max(pages.values()) for pages in balanced if len(pages) > 1], default=0)
    each = _least_padding([max(pages.values()) for pages in balanced], fewest) if fewest else 0
    counts = {
        rule: blocks_of(max(pages.values()), each) if each and pages in balanced else 1
        for rule, pages in buckets.items()
    }
    # windows take no more than the widest other group, or one layer of theirs
    if not each and len(buckets) > 1:
        anchor = max(
            _widest(pages, sum(pages.values()) if rule.kind == "window" else 1)
            for rule, pages in buckets.items()
        )
        for rule, pages in buckets.items():
            if rule.kind == "window":
                counts[rule] = blocks_of(sum(pages.values()), max(anchor // next(iter(pages)), 1))
    layout = tuple(rule for rule, count in counts.items() for _ in range(count))
    return BlockShape(
        block_of(layout),
        max(_widest(buckets[rule], count) for rule, count in counts.items()),
        0,
        layout,
    )


def _widest(pages: Mapping[int, int], groups: int) -> int:
    """Return the bytes of the largest of the groups into which layers of these page sizes are
    split."""
    return sum(blocks_of(layers, groups) * page for page, layers in pages.items())


def _least_padding(layers: Sequence[int], fewest: int) -> int:
    """Return the layers per group, `fewest` or more, that leave the fewest places empty; of equals
    the most."""
    return min(
        range(fewest, max(layers) + 1),
        key=lambda each: (sum(-count % each for count in layers), -each),
    )


def _grouped(kinds: Sequence[_Layers]) -> tuple[int, tuple[GroupRule, ...]]:
    """Return the layers per group, and the groups, kind by kind."""
    each = layers_per_group(*[kind.layers for kind in kinds])
    return each, tuple(kind.rule for kind in kinds for _ in range(blocks_of(kind.layers, each)))


@dataclass(frozen=True, slots=True)
class BlockRules:
    """Block size, and which states are stored.

    `size`          tokens per block
    `states`        none: attention alone; align: chunks end on block boundaries, and the state at a
                    chunk's end may be stored
    `state_groups`  blocks per state, one per group of recurrent layers
    `retention`     None: every written state; 0: states at the last block boundary of the prompt
                    and at the end of a shared prefix without a state; n: also one per n tokens
    `junctions`     whether a shared prefix without a state gets one, as since vLLM's pull request
                    37898
    `cut`           whether chunks also end at each multiple of `retention`; else a state exists
                    only where a chunk happens to end; proposed for vLLM in its pull request 54076
    `ahead`         whether a step is planned while the previous one runs: the token of the previous
                    step is not known yet, so that its block is published, and the state before it
                    freed, one step later
    `inner_states`  whether the last chunk of a prompt also stores the state at its last boundary,
                    so that the chunk need not end there: in vLLM with FlashInfer's GatedDeltaNet on
                    Hopper since 0.33, and for KDA
    `drafts`        tokens drafted ahead of a step
    `drafter`       tokens behind a position on which the keys and values of a drafter there depend:
                    1, or more with several modules of multi-token prediction; 0: the drafter has
                    none
    `release`       rules of the release of vLLM
    `groups`        groups of layers, in the order in which their blocks are freed; empty: the
                    groups of states, and full attention behind them, as where a model's first layer
                    is recurrent
    `in_flight`     tokens that are planned and not yet computed, at most; a prompt's windows take
                    no more memory
    """

    size: int
    states: StateMode = "none"
    state_groups: int = 1
    retention: int | None = 0
    junctions: bool = True
    cut: bool = False
    ahead: bool = False
    inner_states: bool = False
    drafts: int = 0
    drafter: int = 0
    release: Release = VLLM_0_32
    groups: tuple[GroupRule, ...] = ()
    in_flight: int = 0

    def __post_init__(self) -> None:
        if self.groups:
            check_layout(self.groups)
            kinds = [rule.kind for rule in self.groups]
            if self.drops_last and "full" not in kinds and len(kinds) > 1:
                raise ValueError(
                    f"groups of kinds {', '.join(kinds)} with a drafter's KV: expected one of kind=full, or a release "
                    "with lookahead; which groups drop a block is not modelled"
                )
            if self.lookahead > 1 and "full" not in kinds:
                reason = "vLLM fails at a prompt that ends among the tokens that they read ahead"
                raise ValueError(
                    f"groups of kinds {', '.join(kinds)} with several modules of a drafter: expected one of kind=full, "
                    f"one module, or a release without lookahead, for {reason}"
                )
        if self.inner_states and self.drops_last:
            reason = (
                "the state inside a chunk is then stored a block earlier, which is not modelled"
            )
            raise ValueError(
                f"inner_states=true with a drafter's KV: expected a release with lookahead, for {reason}"
            )
        if self.drafter > self.size:
            expected = f"expected {self.drafter} or more, for its modules read as many tokens ahead, as in vLLM"
            raise ValueError(f"block_size={self.size} with a drafter's KV: {expected}")

    @property
    def layout(self) -> tuple[GroupRule, ...]:
        """The groups of layers, in order."""
        states = self.state_groups if self.states != "none" else 0
        return self.groups or (
            *[GroupRule("state", self.size)] * states,
            GroupRule("full", self.size),
        )

    @property
    def drops_last(self) -> bool:
        """Whether the last block of a match is computed again."""
        return self.drafter > 0 and self.release.drafter == "drop"

    @property
    def keys_tails(self) -> bool:
        """Whether the last block of a prompt gets a key before it is full: attention beside smaller
        blocks."""
        return self.drops_last and block_of(self.layout) != unit_of(self.layout)

    @property
    def lookahead(self) -> int:
        """Tokens behind a block that its key has, too."""
        return self.drafter if self.release.drafter == "lookahead" else 0

    def final(self, computed: int) -> int:
        """Return how many of `computed` tokens have KV of attention that no later step computes
        again.

        Several modules write the keys of the last ones again. Keys with lookahead cover them beside
        other groups.
        """
        return (
            computed
            if self.lookahead and len(self.layout) > 1
            else max(0, computed - max(0, self.drafter - 1))
        )

    def usable(self, matched: int) -> int:
        """Return how many of the matched blocks are reused."""
        return max(0, matched - self.drops_last)

    def reusable(self, matched: int, length: int) -> int:
        """Return how many of the matched blocks `length` tokens may reuse; at least one token is
        computed."""
        # Beside other groups, attention may match the block of the last token, too, if it is
        # dropped.
        if len(self.layout) == 1 or not self.drops_last:
            matched = min(matched, (length - 1) // self.size)
        return self.usable(matched)

    def last_state(self, length: int) -> int:
        """Return the last boundary of the first `length` tokens at which another request may
        resume."""
        return (
            self.usable((length if self.drops_last else self._resumed(length)) // self.size)
            * self.size
        )

    def _resumed(self, length: int) -> int:
        """Return the tokens of a prompt up to which an equal one may resume: it computes at least
        the last one."""
        return max(0, length - max(1, self.lookahead))

    def resumed_at(self, length: int) -> tuple[int, ...]:
        """Return positions in the blocks behind the states at which a prompt of `length` tokens may
        be resumed.

        A prompt that continues it resumes from its last whole block, and an equal one computes its
        last token again.
        """
        if not self.drops_last:
            of_states = self.lookahead > 1 and self.states != "none"
            return (length - 1, self._resumed(length)) if of_states else (length - 1,)
        unit = alignment_of(self.layout)
        return tuple(max(0, end // unit - 1) * unit for end in (length - 1, length))

    def stores_inside(self, start: int, stop: int, length: int) -> bool:
        """Whether chunk `[start, stop)` stores the state at the last block boundary before
        `length`, inside of it."""
        boundary, size = self._resumed(length) // self.size * self.size, self.size
        if not self.inner_states or start % size or not start + size <= boundary < stop:
            return False
        return blocks_of(stop, size) - 2 > (start - 1) // size


# ------------------------------------------------------------------------------
# Digests of a request's full blocks, each of all tokens up to its end.
#
# A block's ids are hashed by a multilinear function modulo 2^64 (arXiv 1202.4961); a digest is
# the sum over all blocks so far of their hashes, mixed with their positions. All blocks of a
# prompt take a few operations on arrays. Two of n different prefixes have the same digest with
# a probability of about n² / 2^65: three in a million for ten million blocks. Matched blocks
# are compared token by token, so that such a collision, or a forged one, is a miss.
# ------------------------------------------------------------------------------

_AHEAD = 512  # tokens that are digested at once of an output without known ids
_STRIDE = 0x9E3779B97F4A7C15  # between positions: 2^64 over the golden ratio
_MIX = (  # splitmix64
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)


class Chain:
    """Digests of the full blocks of a prompt, and of its output up to the requested length.

    `lookahead`  number of tokens behind a block that its digest covers, too
    `digests`    digest of each block; there may be more than were requested
    """

    __slots__ = (
        "_digest_of_blocks",
        "_reach",
        "_size",
        "_source",
        "digests",
        "lookahead",
        "prompt",
        "request",
    )

    def __init__(self, request: Request, size: int, lookahead: int = 0) -> None:
        self.request, self._size, self.lookahead = request, size, lookahead
        self.prompt = request.string
        self._source, self._reach = Source(request.cache_salt, self.prompt), len(self.prompt)
        self._digest_of_blocks = _seed(request.cache_salt)
        self.digests = array("Q")
        self._digest(self.prompt)

    def digests_to(self, length: int) -> Digests:
        """Return digests of at least the full blocks in the first `length` tokens of prompt and
        output."""
        if length // self._size > len(self.digests):
            reach, output = length + self.lookahead, self.request.output
            if output is not None:
                self._digest(self.string(min(reach, len(self.prompt) + len(output))))
            elif self.lookahead:
                self._digest(self.string(reach + _AHEAD))
            else:
                self._number_output(reach + _AHEAD)
        return self.digests

    def string(self, length: int) -> TokenString:
        """Return the first `length` tokens of prompt and output, but at least the whole prompt."""
        generated = length - len(self.prompt)
        return self.prompt + self.request.output_string(generated) if generated > 0 else self.prompt

    def source(self, length: int) -> Source:
        """Return the tokens from which blocks in the first `length` tokens are computed, or more of
        them."""
        if length > self._reach:
            output = self.request.output
            self._reach = length + _AHEAD if output is None else len(self.prompt) + len(output)
            self._source = Source(self.request.cache_salt, self.string(self._reach))
        return self._source

    def verified(self, prefix: Prefix, size: int, length: int) -> Prefix:
        """Return the beginning of a prefix that was computed from these tokens, despite possible
        collisions.

        A block has `size` tokens. Null blocks, and blocks of a lower tier, are not compared.
        """
        expected, last, common, start = self.source(length), None, 0, 0
        for run in prefix.runs:
            stop = min(start + len(run), prefix.count)
            source = run.source
            if source is not None and source is not last:
                last = source
                common = (
                    expected.tokens.common(0, source.tokens)
                    if source.cache_salt == expected.cache_salt
                    else 0
                )
            if source is not None and stop * size + self.lookahead > common:
                return prefix.first(max(start, (common - self.lookahead) // size))
            start = stop
        return prefix

    def _digest(self, tokens: TokenString) -> None:
        """Append digests of the further full blocks of `tokens`, which begin with those that were
        digested."""
        size, first = self._size, len(self.digests)
        count = max(0, len(tokens) - self.lookahead) // size - first
        if count <= 0:
            return
        sums = tokens.weighted_sums(first * size, count, _weights(size))
        digests = _mixed(sums + _of_positions(first, first + count)).cumsum()
        digests += np.uint64(self._digest_of_blocks)
        self._digest_of_blocks = int(digests[-1])
        for ahead in range(self.lookahead):
            behind = tokens.cut(
                (first + 1) * size + ahead, (first + count) * size + ahead + 1
            ).array()[::size]
            digests += _mixed(
                (behind.astype(np.int64).view(np.uint64) + np.uint64(1))
                * np.uint64(2 * ahead + 1)
                * np.uint64(_STRIDE)
            )
        self.digests.frombytes(digests.tobytes())

    def _number_output(self, length: int) -> None:
        """Append digests of blocks with unknown ids, which no other request has.

        Each is one of the prompt, the request and the position: ids need not be compared.
        """
        of_request = np.uint64((self.request.id % (1 << 32) << 32) * _STRIDE % (1 << 64))
        digests = _mixed(_of_positions(len(self.digests), length // self._size) + of_request)
        digests += np.uint64(self._digest_of_blocks)
        self.digests.frombytes(digests.tobytes())


def _of_positions(first: int, stop: int) -> NDArray[np.uint64]:
    """Return the summands of blocks `[first, stop)`, a view of a table; not to be changed."""
    return _table(1 << stop.bit_length())[first:stop]


@functools.cache
def _table(count: int) -> NDArray[np.uint64]:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STRIDE)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of numbers in place, and return them."""
    for shift, factor in _MIX:
        numbers ^= numbers >> shift
        numbers *= factor
    numbers ^= numbers >> _LAST_SHIFT
    return numbers


@functools.cache
def _seed(cache_salt: str) -> int:
    """Return the digest before the first block, so that requests of different salts share no
    digest."""
    return int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest())


_weights = functools.cache(BlockWeights)
