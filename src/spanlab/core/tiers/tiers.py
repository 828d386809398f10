"""The tiers below the device's memory: when blocks are written to them, and loads from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.core.tiers.link import Link, Transfer
from spanlab.core.tiers.load import Load
from spanlab.core.tiers.tier import Key, Tier


class Tiers:
    """Tiers, the nearest first, each behind a link that its reads and writes share.

    A block that is evicted from the device or a tier is copied out of a staging buffer: its memory is free at once,
    and the next tier stores it when its bytes have arrived. A transfer between two tiers uses only the link of the
    lower one.
    """

    def __init__(self, tiers: Sequence[Tier], links: Sequence[Link]) -> None:
        self.tiers, self.links = tuple(tiers), tuple(links)
        self.loaded_bytes = [0] * len(self.tiers)  #: in all, by tier
        self._writes: dict[Transfer, tuple[int, list[Key]]] = {}  # the tier's number and the blocks
        self._reads: dict[Transfer, tuple[int, Load]] = {}
        self._stored: list[Key] = []  # stored by the step that is running
        self._evicted: list[Key] = []  # evicted from the device and not yet written
        self._ended: list[Load] = []
        self._uses: dict[Key, int] = {}  # of blocks in the device's memory, where a tier counts them
        self._counts_uses = any(tier.rules.write == "second_hit" for tier in tiers)

    def __len__(self) -> int:
        return len(self.tiers)

    # -- what the device does -----------------------------------------------------------------------------------------

    def published(self, key: Key) -> None:
        """Note that the step being scheduled stores a block in the device's memory."""
        self._stored.append(key)

    def evicted(self, key: Key) -> None:
        """Note that the device evicts a block."""
        self._evicted.append(key)
        self._uses.pop(key, None)

    def used(self, keys: Sequence[Key], now: int) -> None:
        """Count a reuse of blocks that the device stores or loads: the first blocks of a prompt, in order."""
        for tier in self.tiers:
            for key in reversed(keys):  # the end of a prompt is evicted first
                tier.touch(key)
        self._count_uses(keys, now)

    def _count_uses(self, keys: Iterable[Key], now: int) -> None:
        if not self._counts_uses:
            return
        second = []
        for key in keys:
            self._uses[key] = self._uses.get(key, 0) + 1
            if self._uses[key] == 2:
                second.append(key)
        for number, tier in enumerate(self.tiers):
            if tier.rules.write == "second_hit":
                self._write(number, second, now)

    def settle(self, now: int) -> None:
        """Write the blocks that the device has evicted."""
        if self._evicted:
            evicted, self._evicted = self._evicted, []
            if self.tiers[0].rules.write == "back":
                self._write(0, evicted, now)

    def advance(self, now: int) -> None:
        """Process transfers that have ended by now, and write the blocks that the previous step stored."""
        self._collect(now)
        self.settle(now)
        if self._stored:
            stored, self._stored = self._stored, []
            self._count_uses(stored, now)
            if self.tiers[0].rules.write == "through":
                self._write(0, stored[::-1], now)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(self, number: int, keys: Sequence[Key], now: int) -> None:
        """Write blocks to a tier in one transfer; blocks evicted for them go to the next tier or are lost.

        The last keys count as the most recently used, and are written where space does not suffice for all.
        """
        tier = self.tiers[number]
        begun: list[Key] = []
        evicted: list[Key] = []
        for key in reversed(keys):
            removed = None if tier.stores_or_receives(key) else tier.reserve(key)
            if removed is not None:
                begun.append(key)
                evicted += removed
        if evicted:
            self._pass_down(number, evicted, now)
        if begun:
            transfer = self.links[number].begin(len(begun) * tier.block_bytes, now)
            self._writes[transfer] = number, begun[::-1]
            self._collect(now)

    def _pass_down(self, number: int, keys: list[Key], now: int) -> None:
        """Count blocks evicted from a tier; write demoted ones to the next tier, unless it has them."""
        counts, moved = self.tiers[number].counts, []
        if self.tiers[number].rules.action == "demote":
            moved = [key for key in keys if not self.tiers[number + 1].stores_or_receives(key)]
        counts.demoted += len(moved)
        counts.evicted += len(keys) - len(moved)
        if moved:
            self._write(number + 1, moved, now)

    def _collect(self, now: int) -> None:
        """Process transfers that have ended."""
        for link in self.links:
            for transfer in link.advance(now):
                if transfer in self._writes:
                    self._complete_write(*self._writes.pop(transfer), now)
                else:
                    self._complete_read(*self._reads.pop(transfer), transfer)

    def _complete_write(self, number: int, keys: list[Key], now: int) -> None:
        self.tiers[number].complete_writes(keys)
        below = number + 1
        if below < len(self.tiers) and self.tiers[below].rules.write == "through":
            self._write(below, keys, now)

    # -- loading ------------------------------------------------------------------------------------------------------

    def holder(self, key: Key, depth: int) -> int | None:
        """Return the number of the first of `depth` tiers that stores a block; None where none does."""
        for number in range(depth):
            if key in self.tiers[number]:
                return number
        return None

    def load(self, keys: Sequence[Key], now: int) -> Load:
        """Load blocks, in order, each from the first tier that stores it, with one transfer per tier."""
        by_tier = self.by_tier(keys)
        num_bytes = {number: self.bytes_of(number, tier_keys) for number, tier_keys in by_tier.items()}
        load = Load(by_tier, num_bytes, now, 1 + max(by_tier), self.are_layerwise(by_tier), pending=len(by_tier))
        for number, tier_keys in by_tier.items():
            self.tiers[number].pin(tier_keys)
            self.loaded_bytes[number] += num_bytes[number]
            transfer = self.links[number].begin(num_bytes[number], now)
            load.transfers[number] = transfer
            self._reads[transfer] = number, load
        self._collect(now)
        return load

    def are_layerwise(self, numbers: Iterable[int]) -> bool:
        """Whether a step can follow a load from these tiers layer by layer, which each of them must allow."""
        return all(self.tiers[number].rules.load == "layerwise" for number in numbers)

    def _complete_read(self, number: int, load: Load, transfer: Transfer) -> None:
        self.tiers[number].unpin(reversed(load.keys[number]))  # the end of a prompt is evicted first
        load.pending -= 1
        load.ended_at = max(load.ended_at, transfer.ends_at)
        if not load.pending:
            self._ended.append(load)

    def ended(self) -> list[Load]:
        """Return the loads that have ended and were not returned before."""
        ended, self._ended = self._ended, []
        return ended

    def by_tier(self, keys: Iterable[Key]) -> dict[int, list[Key]]:
        """Group blocks by the number of the first tier that stores each."""
        keys_by_tier: dict[int, list[Key]] = {}
        for key in keys:
            number = self.holder(key, len(self.tiers))
            assert number is not None, "a block is read only from a tier that stores it"
            keys_by_tier.setdefault(number, []).append(key)
        return keys_by_tier

    def bytes_of(self, number: int, keys: Iterable[Key]) -> int:
        """Bytes of blocks of one tier."""
        return sum([self.tiers[number].bytes_of(key) for key in keys])

    def load_ends_at(self, load: Load) -> int:
        """Return when a load ends if no further transfer begins before."""
        return max(self.links[number].ends_at(transfer) for number, transfer in load.transfers.items())

    def check(self) -> None:
        """Recount every tier from scratch; slow, for tests."""
        for tier in self.tiers:
            tier.check()
