"""Replay of requests through one LRU cache, one after another: reused tokens, and lost tokens by cause.

A replay decides as the policies of `core` do without concurrent requests. It works on nodes instead of token ids, so
that a log of a hundred million tokens takes a second. States of recurrent layers share the budget with KV.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanlab.core.placement import Placer, PrefillInfo
from spanlab.offline.forest import Ints
from spanlab.offline.paths import Paths

#: Causes of `spanlab.records` that occur in a replay, which stores all, locks nothing and repairs nothing.
CAUSES = ("never_seen", "never_stored", "kv_evicted", "state_evicted", "state_never_placed", "alignment", "last_token")
Entry = int | tuple[int, int]  # KV of a node; output of a request, below zero; a node's state at a position


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

    def output_blocks(self, prompt: Ints, output: Ints) -> Ints:
        """Return the full blocks of output tokens, which are stored behind those of the prompt."""
        used = prompt + np.maximum(output - 1, 0) if self.outputs else prompt
        return used // self.block - prompt // self.block

    def transient_bytes(self, prompt: Ints, output: Ints) -> Ints:
        """Return the bytes that a request holds only while it runs: partial block or tokens, and running state."""
        used = prompt + np.maximum(output - 1, 0)
        stored_blocks = prompt // self.block + self.output_blocks(prompt, output)
        allocated = -(-used // self.block) * self.block if self.pooled else used
        tokens = allocated - stored_blocks * self.block
        return tokens * self.block_bytes // self.block + (self.state_bytes if self.placer is not None else 0)


@dataclass(frozen=True)
class ReplayRequests:
    """Requests of a replay.

    `output_lens`  tokens of each answer, 0 where unknown
    `boundaries`   positions in each prompt that a workload could mark: the end of its first span
    """

    paths: Paths
    output_lens: Ints
    boundaries: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class ReplayResult:
    """Tokens by request, shape (requests,): `reused`, and `lost` by cause; their sum is the prompt length.

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
    outputs, transient = rules.output_blocks(*lengths).tolist(), rules.transient_bytes(*lengths).tolist()
    rows = []
    for request, prompt in enumerate(paths.prompt_tokens.tolist()):
        path = nodes[starts[request] : starts[request + 1]]
        prefill = cache.match(path, prompt, seen[request], requests.boundaries[request])
        rows.append((prefill.resume, *cache.losses(path, prefill)))
        if outputs[request]:
            cache.use_output(request, outputs[request])
        cache.use(path, prefill)
        cache.evict(transient[request])
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 1 + len(CAUSES)).T
    return ReplayResult(columns[0], dict(zip(CAUSES, columns[1:], strict=True)), cache.states)


class _Cache:
    """The cache between two requests; entries are in order of last use, the least recent first."""

    def __init__(self, paths: Paths, rules: CacheRules) -> None:
        self.rules, self.states = rules, 0
        self._weights = paths.blocks(rules.block).tolist()
        self._start, self._stop = paths.node_start.tolist(), paths.node_stop.tolist()
        self._bytes, self._entries = 0, OrderedDict[Entry, int]()
        self._ever: dict[int, list[int]] = {}  # positions of a node at which a state was ever stored
        self._kept: dict[int, int] = {}  # blocks of a node after its last use

    def match(self, path: list[int], prompt: int, seen: int, boundaries: tuple[int, ...]) -> PrefillInfo:
        """Return the stored and reusable prefix of a prompt; read-only."""
        block, rules = self.rules.block, self.rules
        matched = self._matched(path) * block
        limit = min(matched, max(prompt - 1, 0) // block * block)
        resume = limit if rules.placer is None else self._resume(path, limit)
        return PrefillInfo(prompt, matched, max(seen, matched), resume, boundaries)

    def losses(self, path: list[int], prefill: PrefillInfo) -> tuple[int, ...]:
        """Return the tokens lost to each of `CAUSES`, from the prompt's end to the resume position."""
        unit = self.rules.block if self.rules.placer is None else max(self.rules.unit, self.rules.block)
        usable = min(prefill.seen, max(prefill.prompt - 1, 0))
        aligned = usable // unit * unit
        matched = min(prefill.matched, usable)
        present = min(matched // unit * unit, aligned)
        unaligned = min(matched % unit, aligned - present)  # stored, in a unit of which the rest is missing
        missing = aligned - present - unaligned
        kv_evicted = min(self._evicted(path, usable), missing)
        tombstone = prefill.resume if self.rules.placer is None else self._tombstone(path, prefill.resume, present)
        states = (0, 0) if self.rules.placer is None else (tombstone - prefill.resume, present - tombstone)
        return (
            prefill.prompt - prefill.seen,
            missing - kv_evicted,
            kv_evicted,
            *states,
            usable - aligned + unaligned,
            prefill.seen - usable,
        )

    def _evicted(self, path: list[int], limit: int) -> int:
        """Return the tokens up to `limit` that the last use of their node stored, and that were evicted since."""
        tokens, block = 0, self.rules.block
        for node in path:
            begin = self._start[node] // block
            once, stored = self._kept.get(node, 0), self._entries.get(node, 0) // self.rules.block_bytes
            tokens += max(0, min(begin + once, limit // block) - (begin + stored)) * block
        return tokens

    def use_output(self, request: int, blocks: int) -> None:
        """Store blocks of output tokens."""
        self._store(-1 - request, blocks * self.rules.block_bytes)

    def use(self, path: list[int], prefill: PrefillInfo) -> None:
        """Use and store a prompt, from its end to its start, with its states."""
        states = self._captures(prefill)
        stop = max(prefill.resume, *states, 0) if self.rules.to_state else prefill.prompt
        for node in reversed(path):
            self._use_kv(node, stop)
            if self.rules.placer is not None:
                self._use_states(node, states, prefill.resume)

    def _use_kv(self, node: int, stop: int) -> None:
        """Store a node's blocks up to a position of the prompt; blocks that are stored already stay."""
        blocks, block = self._weights[node], self.rules.block
        if stop < self._stop[node]:
            blocks = max(0, stop // block - self._start[node] // block)
        size, stored = blocks * self.rules.block_bytes, self._entries.get(node, 0)
        if stored and stored >= size:
            self._entries.move_to_end(node)
        elif size:
            self._store(node, size)
        self._kept[node] = self._entries.get(node, 0) // self.rules.block_bytes

    def _store(self, entry: Entry, size: int) -> None:
        self._bytes += size - self._entries.pop(entry, 0)
        self._entries[entry] = size

    def _matched(self, path: list[int]) -> int:
        blocks = 0
        for node in path:
            stored = self._entries.get(node, 0) // self.rules.block_bytes
            blocks += stored
            if stored < self._weights[node]:
                break
        return blocks

    def _resume(self, path: list[int], limit: int) -> int:
        """Return the deepest position within `limit` tokens that has a state; 0 without one."""
        for node in reversed(path):
            for position in reversed(self._ever.get(node, ())):
                if position <= limit and (node, position) in self._entries:
                    return position
        return 0

    def _tombstone(self, path: list[int], above: int, limit: int) -> int:
        """Return the deepest position in (above, limit] that ever had a state; `above` without one."""
        for node in reversed(path):
            positions = self._ever.get(node, ())
            within = bisect_right(positions, limit)
            if within and positions[within - 1] > above:
                return positions[within - 1]
        return min(above, limit)

    def _captures(self, prefill: PrefillInfo) -> list[int]:
        """Return the positions of the states that a prefill stores: on the grid, and computed by it."""
        if self.rules.placer is None:
            return []
        unit, placer = self.rules.unit, self.rules.placer
        placer.observe(prefill)
        floored = {position // unit * unit for position in placer.place(prefill)}
        return sorted(position for position in floored if prefill.resume < position <= prefill.prompt)

    def _use_states(self, node: int, states: list[int], refresh_from: int) -> None:
        """Refresh a node's states at or after a position, and store new ones."""
        positions = self._ever.get(node, [])
        for position in positions:
            if position >= refresh_from and (node, position) in self._entries:
                self._entries.move_to_end((node, position))
        for position in states:
            if self._start[node] < position <= self._stop[node]:
                self.states += (node, position) not in self._entries
                self._store((node, position), self.rules.state_bytes)
                if position not in positions:
                    self._ever[node] = positions = sorted([*positions, position])

    def evict(self, transient: int) -> None:
        """Evict the least recently used entries until the others fit beside the transient bytes of a request.

        The last blocks of a node are evicted first.
        """
        size, capacity = self.rules.block_bytes, self.rules.capacity_bytes - transient
        while self._bytes > capacity and self._entries:
            entry, stored = next(iter(self._entries.items()))
            excess = -(-(self._bytes - capacity) // size) * size
            freed = stored if isinstance(entry, tuple) else min(stored, excess)
            self._bytes -= freed
            if freed == stored:
                del self._entries[entry]
            else:
                self._entries[entry] = stored - freed
