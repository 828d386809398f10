"""The contents of one tier: blocks of equal size by key, full or quantised, in order of their last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from spanlab.core.tiers.rules import TierRules

Key = Hashable


@dataclass(slots=True)
class TierCounts:
    """Counts of one tier, in blocks; `refused` ones found all evictable blocks in use."""

    written: int = 0
    loaded: int = 0
    loaded_small: int = 0
    evicted: int = 0
    demoted: int = 0
    taken: int = 0
    quantised: int = 0
    refused: int = 0


class Tier:
    """Blocks within a capacity in bytes. A block being written takes space and cannot be matched.

    A block being read is pinned: it can be matched, but not evicted. `used` never exceeds `capacity`.
    """

    def __init__(self, name: str, rules: TierRules, block_bytes: int, small_bytes: int) -> None:
        """`small_bytes`  bytes of a quantised block; `block_bytes` where the tier does not quantise"""
        self.name, self.rules, self.capacity = name, rules, rules.num_bytes
        self.block_bytes, self.small_bytes = block_bytes, small_bytes
        self.used = self.peak = 0
        self.counts = TierCounts()
        self._high, self._low = int(rules.high * self.capacity), int(rules.low * self.capacity)
        self._writing: set[Key] = set()
        self._full: OrderedDict[Key, None] = OrderedDict()  # least recently used first
        self._small: OrderedDict[Key, None] = OrderedDict()
        self._pins: dict[Key, int] = {}
        self._pinned_small: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._full or key in self._small or key in self._pins

    def stores_or_receives(self, key: Key) -> bool:
        """Whether a block is stored or being written."""
        return key in self._writing or key in self

    def bytes_of(self, key: Key) -> int:
        """Return the bytes of a stored block."""
        return self.small_bytes if key in self._small or key in self._pinned_small else self.block_bytes

    # -- writing ------------------------------------------------------------------------------------------------------

    def reserve(self, key: Key) -> list[Key] | None:
        """Reserve space for a block to be written; returns the evicted blocks, None where space is short."""
        evictable = len(self._full) * self.block_bytes + len(self._small) * self.small_bytes
        if self.used - evictable + self.block_bytes > self._high:
            self.counts.refused += 1
            return None
        evicted: list[Key] = []
        if self.used + self.block_bytes > self._high:
            self._shrink(max(0, min(self._low, self._high - self.block_bytes)), evicted)
        self._writing.add(key)
        self.used += self.block_bytes
        self.peak = max(self.peak, self.used)
        return evicted

    def _shrink(self, target: int, evicted: list[Key]) -> None:
        """Quantise, then evict, least recently used blocks, until `target` bytes remain or all others are in use."""
        while self.rules.action == "quantise" and self.used > target and self._full:
            key, _ = self._full.popitem(last=False)
            self._small[key] = None
            self.used -= self.block_bytes - self.small_bytes
            self.counts.quantised += 1
        while self.used > target and (self._small or self._full):
            blocks, size = (self._small, self.small_bytes) if self._small else (self._full, self.block_bytes)
            evicted.append(blocks.popitem(last=False)[0])
            self.used -= size

    def complete_writes(self, keys: Iterable[Key]) -> None:
        """Make blocks readable whose bytes have arrived."""
        for key in keys:
            self._writing.remove(key)
            self._full[key] = None
            self.counts.written += 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def touch(self, key: Key) -> None:
        """Count a use of a block, if it is stored."""
        for blocks in (self._full, self._small):
            if key in blocks:
                blocks.move_to_end(key)

    def pin(self, keys: Iterable[Key]) -> None:
        """Protect blocks that are being read from eviction."""
        for key in keys:
            if key in self._small:
                del self._small[key]
                self._pinned_small.add(key)
            self._full.pop(key, None)
            self._pins[key] = self._pins.get(key, 0) + 1
            self.counts.loaded += 1
            self.counts.loaded_small += key in self._pinned_small

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin` of each key; the last one becomes the most recently used. An exclusive tier removes them."""
        for key in keys:
            self._pins[key] -= 1
            if self._pins[key]:
                continue
            del self._pins[key]
            small = key in self._pinned_small
            self._pinned_small.discard(key)
            if self.rules.exclusive:
                self.used -= self.small_bytes if small else self.block_bytes
                self.counts.taken += 1
            else:
                (self._small if small else self._full)[key] = None

    def check(self) -> None:
        """Recount from scratch; slow, for tests."""
        small = len(self._small) + len(self._pinned_small)
        full = len(self._full) + len(self._pins) - len(self._pinned_small) + len(self._writing)
        assert self.used == small * self.small_bytes + full * self.block_bytes, "bytes are miscounted"
        assert 0 <= self.used <= self.peak <= self.capacity, "above its capacity"
        counts, stored = self.counts, small + full - len(self._writing)
        assert counts.written - counts.evicted - counts.demoted - counts.taken == stored, "block counts disagree"
        assert not self._pins.keys() & (self._full.keys() | self._small.keys()), "a pinned block is evictable"
