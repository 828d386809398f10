"""The contents of one tier: blocks of equal size by key, whole or quantised, the least recently used leaving first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from spanlab.core.tiers.rules import TierRules

Key = Hashable


@dataclass(slots=True)
class TierCounts:
    """What has come and gone, in blocks; `refused` found everything that could leave in use."""

    written: int = 0
    loaded: int = 0
    loaded_small: int = 0
    evicted: int = 0
    demoted: int = 0
    taken: int = 0
    quantised: int = 0
    refused: int = 0


class Tier:
    """Blocks under a number of bytes. A block that is being written takes room and cannot be found.

    A block that is being read is pinned: it is found, and cannot leave. Never above `capacity`.
    """

    def __init__(self, name: str, rules: TierRules, block_bytes: int, small_bytes: int) -> None:
        """`small_bytes`  of a quantised block; `block_bytes` where the tier does not quantise"""
        self.name, self.rules, self.capacity = name, rules, rules.num_bytes
        self.block_bytes, self.small_bytes = block_bytes, small_bytes
        self.used = self.peak = 0
        self.counts = TierCounts()
        self._high, self._low = int(rules.high * self.capacity), int(rules.low * self.capacity)
        self._writing: set[Key] = set()
        self._whole: OrderedDict[Key, None] = OrderedDict()  # least recently used first
        self._small: OrderedDict[Key, None] = OrderedDict()
        self._pins: dict[Key, int] = {}
        self._pinned_small: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._whole or key in self._small or key in self._pins

    def claims(self, key: Key) -> bool:
        """Whether a block is here or on its way."""
        return key in self._writing or key in self

    def bytes_of(self, key: Key) -> int:
        """Bytes of a block that is here."""
        return self.small_bytes if key in self._small or key in self._pinned_small else self.block_bytes

    # -- writing ------------------------------------------------------------------------------------------------------

    def reserve(self, key: Key) -> list[Key] | None:
        """Make room for a block that will be written; returns what has left, None where there is no room."""
        may_leave = len(self._whole) * self.block_bytes + len(self._small) * self.small_bytes
        if self.used - may_leave + self.block_bytes > self._high:
            self.counts.refused += 1
            return None
        left: list[Key] = []
        if self.used + self.block_bytes > self._high:
            self._shrink(max(0, min(self._low, self._high - self.block_bytes)), left)
        self._writing.add(key)
        self.used += self.block_bytes
        self.peak = max(self.peak, self.used)
        return left

    def _shrink(self, target: int, left: list[Key]) -> None:
        """Quantise, then drop, what was used longest ago, until `target` bytes are left or all else is in use."""
        while self.rules.action == "quantise" and self.used > target and self._whole:
            key, _ = self._whole.popitem(last=False)
            self._small[key] = None
            self.used -= self.block_bytes - self.small_bytes
            self.counts.quantised += 1
        while self.used > target and (self._small or self._whole):
            blocks, size = (self._small, self.small_bytes) if self._small else (self._whole, self.block_bytes)
            left.append(blocks.popitem(last=False)[0])
            self.used -= size

    def written(self, keys: Iterable[Key]) -> None:
        """Let blocks be found whose bytes have arrived."""
        for key in keys:
            self._writing.remove(key)
            self._whole[key] = None
            self.counts.written += 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def touch(self, key: Key) -> None:
        """Count a use of a block, where it is here."""
        for blocks in (self._whole, self._small):
            if key in blocks:
                blocks.move_to_end(key)

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep blocks that are read from leaving."""
        for key in keys:
            if key in self._small:
                del self._small[key]
                self._pinned_small.add(key)
            self._whole.pop(key, None)
            self._pins[key] = self._pins.get(key, 0) + 1
            self.counts.loaded += 1
            self.counts.loaded_small += key in self._pinned_small

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin` of each; the last one is the most recently used. An exclusive tier has them no more."""
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
                (self._small if small else self._whole)[key] = None

    def check(self) -> None:
        """Recount from scratch; slow, for tests."""
        small = len(self._small) + len(self._pinned_small)
        whole = len(self._whole) + len(self._pins) - len(self._pinned_small) + len(self._writing)
        assert self.used == small * self.small_bytes + whole * self.block_bytes, "bytes are miscounted"
        assert 0 <= self.used <= self.peak <= self.capacity, "above its size"
        counts, stored = self.counts, small + whole - len(self._writing)
        assert counts.written - counts.evicted - counts.demoted - counts.taken == stored, "blocks were lost or made"
        assert not self._pins.keys() & (self._whole.keys() | self._small.keys()), "a pinned block may leave"
