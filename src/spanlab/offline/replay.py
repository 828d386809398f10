"""Replay of requests through one LRU cache, one after another: reused tokens, and lost tokens by
cause.

A replay decides as the policies of `core` do without concurrent requests. It works on nodes instead
of token ids, so that a log of a hundred million tokens takes a second. States of recurrent layers
share the budget with KV.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from spanlab.core.placement.rules import Placer, PrefillInfo
from spanlab.core.plan import Match, losses_of
from spanlab.core.protocol import greedy
from spanlab.core.token_string import common_prefix, string_of, sums_before
from spanlab.core.tree import Node, PrefixTree, take_apart
from spanlab.offline.forest import Flags, Floats, Forest, Ints, paths_to

# ------------------------------------------------------------------------------
# Prompts as paths through a trie of their contents: the shared prefixes of a log without token
# ids.
#
# Consecutive pieces with the same prompts form one node, so that a path is short even for a
# long prompt.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """Request r visits `nodes[starts[r]:starts[r + 1]]`, from the prompt's start down.

    `node_start`, `node_stop`  tokens of each node in its prompts, half-open, shape (nodes,)
    `pieces`                   pieces of each node, shape (nodes,)
    `prompt_tokens`            shape (requests,)
    """

    nodes: Ints
    starts: Ints
    node_start: Ints
    node_stop: Ints
    pieces: Ints
    prompt_tokens: Ints

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.starts) - 1

    @cached_property
    def owner(self) -> Ints:
        """The request of each visit."""
        return np.repeat(np.arange(self.requests), np.diff(self.starts))

    @cached_property
    def first(self) -> Flags:
        """Whether each visit is the first one of its node."""
        first = np.zeros(len(self.nodes), dtype=np.bool_)
        first[np.unique(self.nodes, return_index=True)[1]] = True
        return first

    @property
    def tokens(self) -> Ints:
        """Tokens of each node."""
        return self.node_stop - self.node_start

    def blocks(self, size: int) -> Ints:
        """Return the number of full blocks of `size` tokens that end in each node, by their last
        token."""
        return self.node_stop // size - self.node_start // size

    def per_request(self, values: Ints) -> Ints:
        """Return sums of values of visits by request."""
        return np.bincount(self.owner, values, self.requests).astype(np.int64)

    def repeated(self, requests: Ints) -> Paths:
        """Return the paths of these requests, of which some can come again."""
        counts = np.diff(self.starts)[requests]
        starts = np.concatenate([[0], np.cumsum(counts)])
        visits = np.arange(starts[-1]) - np.repeat(starts[:-1] - self.starts[requests], counts)
        return replace(
            self,
            nodes=self.nodes[visits],
            starts=starts,
            prompt_tokens=self.prompt_tokens[requests],
        )

    @cached_property
    def seen_tokens(self) -> Ints:
        """Longest prefix of each prompt that an earlier prompt had, in tokens."""
        return self.per_request(np.where(self.first, 0, self.tokens[self.nodes]))

    def forest(self, size: int) -> Forest:
        """Return the same paths in whole blocks, for bounds; at least one token of a prompt is
        computed.

        A node in which a prompt of whole blocks ends becomes two: that prompt cannot reuse the last
        block alone.
        """
        blocks, nodes, last = self.blocks(size), len(self.tokens), self.nodes[self.starts[1:] - 1]
        tail = np.zeros(nodes, dtype=np.int64)
        tail[last] = (self.node_stop[last] % size == 0) & (blocks[last] > 1)
        lengths = np.concatenate([blocks - tail, tail]) * size
        stop = np.concatenate([self.node_stop // size - tail, self.node_stop // size]) * size
        path_nodes = np.stack([self.nodes, self.nodes + nodes], axis=1).ravel()
        owner = np.repeat(self.owner, 2)
        visited = lengths[path_nodes] > 0
        usable = visited & (stop[path_nodes] < self.prompt_tokens[owner])
        return Forest(
            lengths=lengths,
            path_nodes=path_nodes[visited],
            path_starts=np.concatenate([[0], np.cumsum(visited)])[2 * self.starts],
            path_usable=np.bincount(owner, usable, self.requests).astype(np.int64),
            path_prompt=np.bincount(owner, visited, self.requests).astype(np.int64),
            prompt_paths=np.arange(self.requests + 1),
            unit=size,
        )


_CHUNK = 1 << 20  # pieces that are looked up at once


def build_paths(
    pieces: NDArray[np.int32],
    lengths: NDArray[np.integer],
    starts: Ints,
    sessions: NDArray[np.integer] | None = None,
) -> Paths:
    """Return the paths of requests with pieces `pieces[starts[r]:starts[r + 1]]` of `lengths`
    tokens each.

    A request costs what it does not share with the last one of its session; `sessions` None: with
    the one before it.
    """
    tree = PrefixTree()
    root = tree.new_root()
    paths = paths_to(_ends(tree, root, pieces, starts, sessions))
    take_apart(root)
    counts = paths.depth - paths.above
    # tokens of each node, from its pieces in the request that came first
    request = np.searchsorted(paths.starts, paths.first, side="right") - 1
    begins = np.concatenate([[0], np.cumsum(counts)])
    indexes = np.arange(begins[-1]) + np.repeat(starts[request] + paths.above - begins[:-1], counts)
    tokens = np.diff(sums_before(lengths[indexes], begins))
    # tokens up to the end of each node on its first path
    sums = np.concatenate([[0], np.cumsum(tokens[paths.nodes])])
    node_stop = sums[paths.first + 1] - sums[paths.starts[request]]
    return Paths(
        nodes=paths.nodes,
        starts=paths.starts,
        node_start=node_stop - tokens,
        node_stop=node_stop,
        pieces=counts,
        prompt_tokens=np.diff(sums[paths.starts]),
    )


def _ends(
    tree: PrefixTree,
    root: Node,
    pieces: NDArray[np.int32],
    starts: Ints,
    sessions: NDArray[np.integer] | None,
) -> list[Node]:
    """Return the node of a tree at which each request ends, when it holds all of them."""
    ends = list[Node]()
    bounds = starts.tolist()
    latest = dict[int, tuple[Node, NDArray[np.int32]]]()
    names = [0] * (len(bounds) - 1) if sessions is None else sessions.tolist()
    for session, (start, stop) in zip(names, pairwise(bounds), strict=True):
        prompt = pieces[start:stop]
        node, before = latest.get(session, (root, prompt))
        most = min(len(prompt), len(before))
        shared = common_prefix(prompt[:most], before[:most]) if most else 0
        while node.depth > shared:
            assert node.parent is not None, "the root has no depth"
            node = node.parent
        end = tree.extend(node, string_of([prompt]), len(prompt), 0)
        ends.append(end)
        latest[session] = end, prompt
    return ends


#: Causes of `spanlab.records` that occur in a replay, which stores all, locks nothing and repairs
#: nothing.
CAUSES = (
    "never_seen",
    "never_stored",
    "kv_evicted",
    "state_evicted",
    "state_never_placed",
    "alignment",
    "last_token",
)
_EVICTED = CAUSES.index("kv_evicted")
EXPIRED = "expired"  # tokens whose entry was unused for longer than its time to live
# KV of a node; output of a request, below zero; a node's state at a position
Entry = int | tuple[int, int]


@dataclass(frozen=True)
class CacheRules:
    """Entries that a cache stores, and their sizes.

    `block`           tokens per block, the unit of matching
    `block_bytes`     bytes of a block's KV
    `capacity_bytes`  of KV and states together
    `state_bytes`     of one state
    `unit`            states are at multiples of it
    `placer`          placement of states; None: the model has no states
    `pooled`          memory is allocated in whole blocks, not by the token
    `outputs`         output tokens stay until they are evicted, though no request reuses them
    `to_state`        KV behind a prompt's deepest state is not stored
    `ttl_ns`          entries also end so many nanoseconds after their last use; None: only to make
                      room
    """

    block: int
    block_bytes: int
    capacity_bytes: int
    state_bytes: int = 0
    unit: int = 1
    placer: Placer | None = None
    pooled: bool = False
    outputs: bool = True
    to_state: bool = False
    ttl_ns: int | None = None

    def output_blocks(self, prompt: Ints, output: Ints) -> Ints:
        """Return the full blocks of output tokens, which are stored behind those of the prompt."""
        used = prompt + np.maximum(output - 1, 0) if self.outputs else prompt
        return used // self.block - prompt // self.block

    def transient_bytes(self, prompt: Ints, output: Ints) -> Ints:
        """Return the bytes that a request holds only while it runs: partial block or tokens, and
        running state."""
        used = prompt + np.maximum(output - 1, 0)
        stored_blocks = prompt // self.block + self.output_blocks(prompt, output)
        allocated = -(-used // self.block) * self.block if self.pooled else used
        tokens = allocated - stored_blocks * self.block
        return tokens * self.block_bytes // self.block + (
            self.state_bytes if self.placer is not None else 0
        )


@dataclass(frozen=True)
class ReplayRequests:
    """Requests of a replay.

    `output_lens`  tokens of each answer, 0 where unknown
    `boundaries`   positions in each prompt that a workload could mark: the end of its first span
    `arrived_ns`   arrivals, which never decrease; None: unknown, so that no entry expires
    """

    paths: Paths
    output_lens: Ints
    boundaries: Sequence[tuple[int, ...]]
    arrived_ns: Ints | None = None


@dataclass(frozen=True)
class ReplayResult:
    """Tokens by request, shape (requests,): `reused`, and `lost` by cause; their sum is the prompt
    length.

    The cause `expired` is there if entries have a time to live.

    `states`  number of stored states
    """

    reused: Ints
    lost: dict[str, Ints]
    states: int = 0


def replay(requests: ReplayRequests, rules: CacheRules) -> ReplayResult:
    """Return the reused and lost tokens of each request."""
    cache, paths = _Cache(requests.paths, rules), requests.paths
    nodes, starts, seen = paths.nodes.tolist(), paths.starts.tolist(), paths.seen_tokens.tolist()
    lengths = paths.prompt_tokens, requests.output_lens
    outputs = rules.output_blocks(*lengths).tolist()
    transient = rules.transient_bytes(*lengths).tolist()
    arrived = requests.arrived_ns
    if rules.ttl_ns is not None and (arrived is None or (np.diff(arrived) < 0).any()):
        raise ValueError("rules.ttl_ns: expected arrivals that never decrease")
    times = [0] * paths.requests if arrived is None else arrived.tolist()
    rows = []
    for request, prompt in enumerate(paths.prompt_tokens.tolist()):
        cache.expire(times[request])
        path = nodes[starts[request] : starts[request + 1]]
        prefill = cache.match(path, prompt, seen[request], requests.boundaries[request])
        rows.append((prefill.resume, *cache.losses(path, prefill)))
        if outputs[request]:
            cache.use_output(request, outputs[request])
        cache.use(path, prefill)
        cache.evict(transient[request])
    causes = (*CAUSES, EXPIRED)
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 1 + len(causes)).T
    lost = dict(zip(causes, columns[1:], strict=True))
    if rules.ttl_ns is None:
        del lost[EXPIRED]
    return ReplayResult(columns[0], lost, cache.states)


class _Cache:
    """The cache between two requests; entries are in order of last use, the least recent first."""

    def __init__(self, paths: Paths, rules: CacheRules) -> None:
        self.rules, self.states = rules, 0
        self._weights = paths.blocks(rules.block).tolist()
        self._start, self._stop = paths.node_start.tolist(), paths.node_stop.tolist()
        self._bytes, self._entries = 0, OrderedDict[Entry, int]()
        # positions of a node at which a state was ever stored
        self._ever: dict[int, list[int]] = {}
        self._kept: dict[int, int] = {}  # blocks of a node after its last use
        # time of each entry's last use, if entries expire
        self._now, self._used = 0, dict[Entry, int]()
        self._ended = set[Entry]()  # entries that expired and were not stored again
        self._reduced = set[int]()  # nodes of which blocks left the cache since their last use

    def match(
        self, path: list[int], prompt: int, seen: int, boundaries: tuple[int, ...]
    ) -> PrefillInfo:
        """Return the stored and reusable prefix of a prompt; read-only."""
        block, rules = self.rules.block, self.rules
        blocks = 0
        for node in path:
            stored = self._entries.get(node, 0) // self.rules.block_bytes
            blocks += stored
            if stored < self._weights[node]:
                break
        matched = blocks * block
        limit = min(matched, max(prompt - 1, 0) // block * block)
        resume = limit if rules.placer is None else self._resume(path, limit)
        return PrefillInfo(prompt, matched, max(seen, matched), resume, boundaries)

    def expire(self, now: int) -> None:
        """Remove the entries whose time to live has ended; the order of entries is that of their
        last use."""
        self._now, ttl = now, self.rules.ttl_ns
        while ttl is not None and self._entries:
            entry = next(iter(self._entries))
            if now - self._used[entry] <= ttl:
                break
            self._bytes -= self._entries.pop(entry)
            self._ended.add(entry)
            if isinstance(entry, int):
                self._reduced.add(entry)

    def losses(self, path: list[int], prefill: PrefillInfo) -> tuple[int, ...]:
        """Return the tokens lost to each of `CAUSES` and to expiry, from the prompt's end to the
        resume position."""
        unit = (
            self.rules.block
            if self.rules.placer is None
            else max(self.rules.unit, self.rules.block)
        )
        usable = min(prefill.seen, max(prefill.prompt - 1, 0))
        aligned = usable // unit * unit
        matched = min(prefill.matched, usable)
        present, resume = min(matched // unit * unit, aligned), prefill.resume
        tombstone = resume if self.rules.placer is None else self._tombstone(path, resume, present)
        lengths = prefill.prompt, prefill.seen, usable, aligned, matched, present, resume, tombstone
        lost = losses_of(Match(*lengths, unit), self._evicted(path, usable))[: len(CAUSES)]
        ended = [node for node in path if node in self._ended]
        expired = min(lost[_EVICTED], self._evicted(ended, usable))
        return (*lost[:_EVICTED], lost[_EVICTED] - expired, *lost[_EVICTED + 1 :], expired)

    def _evicted(self, nodes: Iterable[int], limit: int) -> int:
        """Return the tokens of nodes up to `limit` that their last use stored, and that left the
        cache since."""
        tokens, block = 0, self.rules.block
        for node in self._reduced.intersection(nodes):
            begin = self._start[node] // block
            once = self._kept.get(node, 0)
            stored = self._entries.get(node, 0) // self.rules.block_bytes
            tokens += max(0, min(begin + once, limit // block) - (begin + stored)) * block
        return tokens

    def use_output(self, request: int, blocks: int) -> None:
        """Store blocks of output tokens."""
        self._store(-1 - request, blocks * self.rules.block_bytes)

    def use(self, path: list[int], prefill: PrefillInfo) -> None:
        """Use and store a prompt, from its end to its start, with its states."""
        states: list[int] = []
        if self.rules.placer is not None:
            # on the grid, and computed by this prefill
            unit, placer = self.rules.unit, self.rules.placer
            placer.observe(prefill)
            floored = {position // unit * unit for position in placer.place(prefill)}
            states = sorted(
                position for position in floored if prefill.resume < position <= prefill.prompt
            )
        self._reduced.difference_update(path)
        stop = max(prefill.resume, *states, 0) if self.rules.to_state else prefill.prompt
        for node in reversed(path):
            # store a node's blocks up to `stop`; blocks that are stored already stay
            blocks, block = self._weights[node], self.rules.block
            if stop < self._stop[node]:
                blocks = max(0, stop // block - self._start[node] // block)
            size, stored = blocks * self.rules.block_bytes, self._entries.get(node, 0)
            if stored and stored >= size:
                self._touch(node)
            elif size:
                self._store(node, size)
            self._kept[node] = self._entries.get(node, 0) // self.rules.block_bytes
            if self.rules.placer is not None:
                self._use_states(node, states, prefill.resume)

    def _store(self, entry: Entry, size: int) -> None:
        self._bytes += size - self._entries.pop(entry, 0)
        self._entries[entry] = size
        self._ended.discard(entry)
        self._touch(entry)

    def _touch(self, entry: Entry) -> None:
        self._entries.move_to_end(entry)
        if self.rules.ttl_ns is not None:
            self._used[entry] = self._now

    def _resume(self, path: list[int], limit: int) -> int:
        """Return the deepest position within `limit` tokens that has a state; 0 without one."""
        for node in reversed(path):
            for position in reversed(self._ever.get(node, ())):
                if position <= limit and (node, position) in self._entries:
                    return position
        return 0

    def _tombstone(self, path: list[int], above: int, limit: int) -> int:
        """Return the deepest position in (above, limit] that ever had a state; `above` without
        one."""
        for node in reversed(path):
            positions = self._ever.get(node, ())
            within = bisect_right(positions, limit)
            if within and positions[within - 1] > above:
                return positions[within - 1]
        return min(above, limit)

    def _use_states(self, node: int, states: list[int], refresh_from: int) -> None:
        """Refresh a node's states at or after a position, and store new ones."""
        positions = self._ever.get(node, [])
        for position in positions:
            if position >= refresh_from and (node, position) in self._entries:
                self._touch((node, position))
        for position in states:
            if self._start[node] < position <= self._stop[node]:
                self.states += (node, position) not in self._entries
                self._store((node, position), self.rules.state_bytes)
                if position not in positions:
                    self._ever[node] = positions = sorted([*positions, position])

    def evict(self, transient: int) -> None:
        """Evict the least recently used entries until the others fit beside the transient bytes of
        a request.

        The last blocks of a node are evicted first.
        """
        size, capacity = self.rules.block_bytes, self.rules.capacity_bytes - transient
        while self._bytes > capacity and self._entries:
            entry, stored = next(iter(self._entries.items()))
            excess = -(-(self._bytes - capacity) // size) * size
            freed = stored if isinstance(entry, tuple) else min(stored, excess)
            self._bytes -= freed
            if isinstance(entry, int):
                self._reduced.add(entry)
            if freed == stored:
                del self._entries[entry]
            else:
                self._entries[entry] = stored - freed


# ------------------------------------------------------------------------------
# Reuse of an LRU cache at every size in one pass: stack distances of nodes of several blocks.
#
# Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9 (1970):
# a cache of C blocks holds the C most recently used blocks, so a block is resident if fewer
# than C others were used since. A request uses its blocks from the last to the first, as
# engines free them, so that a prompt's end is evicted before its start. The blocks of one node
# are always used together, and are counted with a Fenwick tree over the order of use.
# ------------------------------------------------------------------------------

_UNLIMITED = 1 << 62  # blocks of a cache without limit


@dataclass(frozen=True)
class Distances:
    """Stack distances by visit.

    `above`   blocks used since the last use of the visit's node; infinite at the first visit
    `blocks`  blocks of the node
    """

    above: Floats
    blocks: Ints

    def resident_blocks(self, capacity: float) -> Ints:
        """Return the blocks of each visit, the first ones of its node, in a cache of `capacity`
        blocks."""
        available = min(capacity, _UNLIMITED) - self.above
        return np.clip(available, 0, self.blocks).astype(np.int64)

    @property
    def largest(self) -> int:
        """Blocks of the smallest cache that reuses as much as an unlimited one."""
        finite = np.isfinite(self.above)
        return int((self.above[finite] + self.blocks[finite]).max(initial=0))


def stack_distances(paths: Paths, blocks: Ints, private: Ints) -> Distances:
    """Return the distances of every visit.

    `blocks`   blocks of each node, shape (nodes,)
    `private`  blocks of each request that are never reused: a partly filled one, and those of its
               output
    """
    weights, nodes, starts = blocks.tolist(), paths.nodes.tolist(), paths.starts.tolist()
    slots = len(nodes) + paths.requests
    order, above = _Order(slots), np.full(len(nodes), np.inf)
    for request, num_private in enumerate(private.tolist()):
        first, stop = starts[request], starts[request + 1]
        path = nodes[first:stop]
        for index, distance in enumerate(order.distances(path, weights)):
            above[first + index] = distance
        order.use(num_private)
        for node in reversed(path):
            order.move(node, weights[node])
    return Distances(above, blocks[paths.nodes])


class _Order:
    """Nodes by their last use, with the blocks of each as a Fenwick tree over uses."""

    def __init__(self, slots: int) -> None:
        self._sums, self._slots, self._next = [0] * (slots + 1), slots, 1
        self._slot: dict[int, int] = {}
        self._total = 0

    def distances(self, path: list[int], weights: list[int]) -> list[int]:
        """Return the blocks used since the last use of each node of a path, up to the first unused
        node."""
        distances: list[int] = []
        before = -1
        for index, node in enumerate(path):
            slot = self._slot.get(node)
            if slot is None:
                break
            adjacent = slot == before - 1  # used by the same request, just before the node above it
            distances.append(
                distances[-1] + weights[path[index - 1]]
                if adjacent
                else self._total - self._sum_to(slot)
            )
            before = slot
        return distances

    def move(self, node: int, weight: int) -> None:
        """Make a node the most recently used one."""
        slot = self._slot.get(node)
        if slot is not None:
            self._add(slot, -weight)
        self._slot[node] = self._next
        self.use(weight)

    def use(self, weight: int) -> None:
        """Append a use of `weight` blocks to the order."""
        if weight:
            self._add(self._next, weight)
        self._next += 1

    def _add(self, slot: int, weight: int) -> None:
        sums, slots = self._sums, self._slots
        self._total += weight
        while slot <= slots:
            sums[slot] += weight
            slot += slot & -slot

    def _sum_to(self, slot: int) -> int:
        sums, total = self._sums, 0
        while slot:
            total += sums[slot]
            slot -= slot & -slot
        return total


# ------------------------------------------------------------------------------
# Reuse of the contents of a log beyond equal prefixes: at any position, and by reordering.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """Prompts as contents; request r consists of the pieces `starts[r]:starts[r + 1]`.

    `pieces`   int32 numbers of contents, `lengths` their tokens
    `opens`    whether a piece is the first of a span
    `free`     whether a piece is a span that may be reordered among its neighbours
    `sessions` number of each request's session; None if sessions are unknown
    """

    pieces: NDArray[np.int32]
    lengths: NDArray[np.uint16] | NDArray[np.int32]
    opens: Flags
    free: Flags
    starts: Ints
    sessions: NDArray[np.integer] | None = None

    def paths(self) -> Paths:
        """Return whole prompts as paths."""
        return build_paths(self.pieces, self.lengths, self.starts, self.sessions)

    def seen_anywhere(self) -> Ints:
        """Return the tokens of each prompt in pieces that occurred before, in an earlier prompt or
        in the same one."""
        tokens, contents = self.lengths.copy(), int(self.pieces.max(initial=-1)) + 1
        seen, first = np.zeros(contents, dtype=np.bool_), np.zeros(contents, dtype=np.int64)
        for start in range(0, len(self.pieces), _CHUNK):
            chunk = self.pieces[start : start + _CHUNK]
            fresh = np.flatnonzero(~seen[chunk])
            first[chunk[fresh[::-1]]] = fresh[::-1]  # of equal ones, the last assignment stays
            tokens[start + fresh[first[chunk[fresh]] == fresh]] = 0
            seen[chunk] = True
        return np.diff(sums_before(tokens, self.starts))

    def span_starts(self) -> Ints:
        """Return the start of each span, and the end of the last one."""
        return np.append(np.flatnonzero(self.opens), len(self.pieces)).astype(np.int64)


@dataclass(frozen=True)
class SpanReuse:
    """Spans of all prompts, each stored once and reusable at any position, under LRU.

    `distances`  stack distances of the visits of `paths`, whose requests are spans
    `request`    the request of each span; `leads` marks the first span of a prompt, `ends` the last
                 one
    """

    paths: Paths
    distances: Distances
    request: Ints
    leads: Flags
    ends: Flags

    def reused(self, capacity_tokens: float) -> Ints:
        """Return the reused tokens of each span in a cache of that capacity; a prompt's last token
        is computed."""
        resident = self.paths.per_request(self.distances.resident_blocks(capacity_tokens))
        return np.minimum(resident, self.paths.prompt_tokens - self.ends)

    def repaired(self, reused: Ints, first: int, share: float) -> Ints:
        """Return the reused tokens less those that a repair computes: the `first` ones and a share
        of the others.

        A span at the start of a prompt needs no repair.
        """
        repaired = np.minimum(reused, first) + np.floor(
            share * np.maximum(reused - first, 0)
        ).astype(np.int64)
        return np.where(self.leads, reused, reused - repaired)


def span_reuse(contents: Contents) -> SpanReuse:
    """Return the reuse of spans, each as a separate path."""
    starts = contents.span_starts()
    # the path of each span; those of equal spans are found once
    numbers, content = dict[bytes, int](), contents.pieces.data.cast("B")
    size = contents.pieces.itemsize
    bounds = pairwise((starts * size).tolist())
    repeats = np.array(
        [numbers.setdefault(bytes(content[a:b]), len(numbers)) for a, b in bounds], dtype=np.int64
    )
    first = np.zeros(len(repeats), dtype=np.bool_)
    first[np.unique(repeats, return_index=True)[1]] = True
    counts = np.diff(starts)
    in_first = np.repeat(first, counts)
    alone = np.concatenate([[0], np.cumsum(counts[first])])
    paths = build_paths(contents.pieces[in_first], contents.lengths[in_first], alone).repeated(
        repeats
    )
    request = np.searchsorted(contents.starts, starts[:-1], side="right") - 1
    tokens = paths.tokens
    distances = stack_distances(paths, tokens, np.zeros(paths.requests, dtype=np.int64))
    changes = request[1:] != request[:-1]
    leads, ends = np.append(True, changes), np.append(changes, True)
    return SpanReuse(paths, distances, request, leads, ends)


class _ServedTree:
    """A tree of prompts in served order, with the number of prompts through each node."""

    def __init__(self) -> None:
        # (node, piece) to (child node, count)
        self._children: dict[tuple[int, int], tuple[int, int]] = {}

    def count(self, node: int, pieces: Sequence[int], last: int) -> int:
        """Return how often `last` has followed `pieces` below a node."""
        for piece in pieces:
            node = self._children[node, piece][0]
        return self._children.get((node, last), (0, 0))[1]

    def follow(self, node: int, piece: int) -> int:
        """Count a piece that follows a node; return its child node."""
        child, count = self._children.get((node, piece), (len(self._children) + 1, 0))
        self._children[node, piece] = child, count + 1
        return child


def in_cached_order(contents: Contents) -> Contents:
    """Return the prompts with free spans reordered, so that each follows the longest path that was
    served before.

    The algorithm is that of `spanlab.core.protocol`. A log does not record what was cached, so the
    next span is the one that has most often followed the spans chosen so far; the others keep their
    order.
    """
    order: list[int] = []
    pieces, free = contents.pieces.tolist(), contents.free.tolist()
    served = _ServedTree()
    for first, stop in pairwise(contents.starts.tolist()):
        node = 0
        for moves, run in groupby(range(first, stop), free.__getitem__):
            for index in _reorder(pieces, list(run), node, served) if moves else run:
                node = served.follow(node, pieces[index])
                order.append(index)
    columns = {
        name: getattr(contents, name)[order] for name in ("pieces", "lengths", "opens", "free")
    }
    return replace(contents, **columns)


def _reorder(pieces: list[int], run: list[int], node: int, served: _ServedTree) -> list[int]:
    """Return the indices of free spans, those first that most often followed a node."""

    def ranks(chosen: list[int], remaining: list[int]) -> list[int]:
        path = [pieces[index] for index in chosen]
        return [served.count(node, path, pieces[index]) for index in remaining]

    return greedy(run, ranks)
