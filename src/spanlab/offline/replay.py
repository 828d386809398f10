"""Requests through one LRU cache, one after another: what each would reuse, and what its other tokens were lost to.

A replay decides as the policies of `core` do when nothing runs at the same time, and knows nodes instead of token ids:
a log of a hundred million tokens takes a second. States of recurrent layers share the budget with KV.
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

#: Causes of `spanlab.records` that a replay can meet: it stores all, locks nothing and repairs nothing.
CAUSES = ("never_seen", "kv_evicted", "state_evicted", "state_never_placed", "alignment", "last_token")
Entry = int | tuple[int, int]  # the KV of a node; what one request alone used, below zero; a node's state at a position


@dataclass(frozen=True)
class CacheRules:
    """What a cache keeps, and of what size.

    `block`           tokens per block, the unit of matching
    `block_bytes`     bytes of a block's KV
    `capacity_bytes`  of KV and states together
    `state_bytes`     of one state
    `unit`            states stand at multiples of it
    `placer`          where states are put; None: the model has none
    `pooled`          memory is taken in whole blocks, not by the token
    `outputs`         output tokens stay until they are evicted, though nobody finds them
    `to_state`        KV behind a prompt's deepest state is not kept
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
        """Full blocks of output tokens, which stay behind those of the prompt."""
        used = prompt + np.maximum(output - 1, 0) if self.outputs else prompt
        return used // self.block - prompt // self.block

    def passing_bytes(self, prompt: Ints, output: Ints) -> Ints:
        """Memory that a request takes while it runs only: its last block, or tokens, and its running state."""
        used = prompt + np.maximum(output - 1, 0)
        kept = prompt // self.block + self.output_blocks(prompt, output)
        taken = -(-used // self.block) * self.block if self.pooled else used
        tokens = taken - kept * self.block
        return tokens * self.block_bytes // self.block + (self.state_bytes if self.placer is not None else 0)


@dataclass(frozen=True)
class Asked:
    """Requests of a replay.

    `output_lens`  tokens of each answer, 0 where nobody knows
    `boundaries`   positions in each prompt that a workload could mark: where its first span ends
    """

    paths: Paths
    output_lens: Ints
    boundaries: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Replayed:
    """Tokens by request, shape (requests,): `reused`, and `lost` by cause; they sum to the prompts.

    `states`  how many were stored
    """

    reused: Ints
    lost: dict[str, Ints]
    states: int = 0


def replay(asked: Asked, rules: CacheRules) -> Replayed:
    """What each request would find."""
    cache, paths = _Cache(asked.paths, rules), asked.paths
    nodes, starts, seen = paths.nodes.tolist(), paths.starts.tolist(), paths.seen_tokens.tolist()
    lengths = paths.prompt_tokens, asked.output_lens
    behind, passing = rules.output_blocks(*lengths).tolist(), rules.passing_bytes(*lengths).tolist()
    rows = []
    for request, prompt in enumerate(paths.prompt_tokens.tolist()):
        path = nodes[starts[request] : starts[request + 1]]
        found = cache.look(path, prompt, seen[request], asked.boundaries[request])
        rows.append((found.resume, *cache.losses(path, found)))
        if behind[request]:
            cache.use_output(request, behind[request])
        cache.use(path, found)
        cache.evict(passing[request])
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 1 + len(CAUSES)).T
    return Replayed(columns[0], dict(zip(CAUSES, columns[1:], strict=True)), cache.states)


class _Cache:
    """A cache between two requests; the entry used longest ago stands first."""

    def __init__(self, paths: Paths, rules: CacheRules) -> None:
        self.rules, self.states = rules, 0
        self._weights = paths.blocks(rules.block).tolist()
        self._start, self._stop = paths.node_start.tolist(), paths.node_stop.tolist()
        self._bytes, self._entries = 0, OrderedDict[Entry, int]()
        self._ever: dict[int, list[int]] = {}  # positions of a node at which a state was ever put

    def look(self, path: list[int], prompt: int, seen: int, boundaries: tuple[int, ...]) -> PrefillInfo:
        """What a prompt finds; changes nothing."""
        block, rules = self.rules.block, self.rules
        matched = self._matched(path) * block
        limit = min(matched, max(prompt - 1, 0) // block * block)
        resume = limit if rules.placer is None else self._resume(path, limit)
        return PrefillInfo(prompt, matched, max(seen, matched), resume, boundaries)

    def losses(self, path: list[int], found: PrefillInfo) -> tuple[int, ...]:
        """Tokens lost to each of `CAUSES`, from the prompt's end to the resume position."""
        unit = self.rules.block if self.rules.placer is None else max(self.rules.unit, self.rules.block)
        usable = min(found.seen, max(found.prompt - 1, 0))
        aligned = usable // unit * unit
        present = min(found.matched, aligned) // unit * unit
        lost = found.resume if self.rules.placer is None else self._tombstone(path, found.resume, present)
        states = (0, 0) if self.rules.placer is None else (lost - found.resume, present - lost)
        return (
            found.prompt - found.seen,
            aligned - present,
            *states,
            usable - aligned,
            found.seen - usable,
        )

    def use_output(self, request: int, blocks: int) -> None:
        """Keep blocks of output tokens."""
        self._put(-1 - request, blocks * self.rules.block_bytes)

    def use(self, path: list[int], found: PrefillInfo) -> None:
        """Use a prompt, from its end to its start, and put its states."""
        states = self._captures(found)
        stop = max(found.resume, *states, 0) if self.rules.to_state else found.prompt
        for node in reversed(path):
            self._use_kv(node, stop)
            if self.rules.placer is not None:
                self._use_states(node, states, found.resume)

    def _use_kv(self, node: int, stop: int) -> None:
        """Keep a node's blocks up to a position of the prompt, and those that are there already."""
        blocks, block = self._weights[node], self.rules.block
        if stop < self._stop[node]:
            blocks = max(0, stop // block - self._start[node] // block)
        size, held = blocks * self.rules.block_bytes, self._entries.get(node, 0)
        if held and held >= size:
            self._entries.move_to_end(node)
        elif size:
            self._put(node, size)

    def _put(self, entry: Entry, size: int) -> None:
        self._bytes += size - self._entries.pop(entry, 0)
        self._entries[entry] = size

    def _matched(self, path: list[int]) -> int:
        blocks = 0
        for node in path:
            there = self._entries.get(node, 0) // self.rules.block_bytes
            blocks += there
            if there < self._weights[node]:
                break
        return blocks

    def _resume(self, path: list[int], limit: int) -> int:
        """The deepest position within `limit` tokens that has a state; 0 without one."""
        for node in reversed(path):
            for position in reversed(self._ever.get(node, ())):
                if position <= limit and (node, position) in self._entries:
                    return position
        return 0

    def _tombstone(self, path: list[int], above: int, limit: int) -> int:
        """The deepest position in (above, limit] that once had a state; `above` where there is none."""
        for node in reversed(path):
            positions = self._ever.get(node, ())
            within = bisect_right(positions, limit)
            if within and positions[within - 1] > above:
                return positions[within - 1]
        return min(above, limit)

    def _captures(self, found: PrefillInfo) -> list[int]:
        """Positions of the states that a prefill leaves: on the grid, and computed by it."""
        if self.rules.placer is None:
            return []
        unit, placer = self.rules.unit, self.rules.placer
        placer.observe(found)
        floored = {position // unit * unit for position in placer.place(found)}
        return sorted(position for position in floored if found.resume < position <= found.prompt)

    def _use_states(self, node: int, states: list[int], kept_from: int) -> None:
        """Make a node's states from a position on the last ones used, and put new ones."""
        positions = self._ever.get(node, [])
        for position in positions:
            if position >= kept_from and (node, position) in self._entries:
                self._entries.move_to_end((node, position))
        for position in states:
            if self._start[node] < position <= self._stop[node]:
                self.states += (node, position) not in self._entries
                self._put((node, position), self.rules.state_bytes)
                if position not in positions:
                    self._ever[node] = positions = sorted([*positions, position])

    def evict(self, passing: int) -> None:
        """Let entries go, the one used longest ago first, until the rest fits beside bytes that a request took.

        A node loses its last blocks first.
        """
        size, capacity = self.rules.block_bytes, self.rules.capacity_bytes - passing
        while self._bytes > capacity and self._entries:
            entry, held = next(iter(self._entries.items()))
            over = -(-(self._bytes - capacity) // size) * size
            given = held if isinstance(entry, tuple) else min(held, over)
            self._bytes -= given
            if given == held:
                del self._entries[entry]
            else:
                self._entries[entry] = held - given
