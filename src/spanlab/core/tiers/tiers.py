"""The tiers below the device's memory: which blocks are written to them and when, and loads from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.core.tiers.load import Link, Load, Transfer
from spanlab.core.tiers.tier import Key, Tier


class Tiers:
    """Tiers, the nearest first, each behind a link of its own that its reads and writes share.

    A block that leaves the device or a tier is copied out of a staging buffer: its memory is free at once, and the next
    tier has it when its bytes have arrived. A transfer between two tiers takes the link of the lower one alone.
    """

    def __init__(self, tiers: Sequence[Tier], links: Sequence[Link]) -> None:
        self.tiers, self.links = tuple(tiers), tuple(links)
        self.loaded_bytes = [0] * len(self.tiers)  #: ever read, by tier
        self._writes: dict[Transfer, tuple[int, list[Key]]] = {}  # the tier's number and the blocks
        self._reads: dict[Transfer, tuple[int, Load]] = {}
        self._new: list[Key] = []  # stored by the step that is running
        self._gone: list[Key] = []  # given up by the device and not yet written
        self._ended: list[Load] = []
        self._uses: dict[Key, int] = {}  # of blocks in the device's memory; where a tier counts them
        self._counts_uses = any(tier.rules.write == "second_hit" for tier in tiers)

    def __len__(self) -> int:
        return len(self.tiers)

    # -- what the device does -----------------------------------------------------------------------------------------

    def published(self, key: Key) -> None:
        """Note that the step being scheduled stores a block in the device's memory."""
        self._new.append(key)

    def evicted(self, key: Key) -> None:
        """Note that the device gives up a block."""
        self._gone.append(key)
        self._uses.pop(key, None)

    def used(self, keys: Sequence[Key], now: int) -> None:
        """Count a reuse of blocks that the device has or loads: the first ones of a prompt, in order."""
        for tier in self.tiers:
            for key in reversed(keys):  # the end of a prompt leaves first
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
        """Write what the device has given up."""
        if self._gone:
            gone, self._gone = self._gone, []
            if self.tiers[0].rules.write == "back":
                self._write(0, gone, now)

    def advance(self, now: int) -> None:
        """Let transfers end up to now, and write what the step before has stored."""
        self._collect(now)
        self.settle(now)
        if self._new:
            new, self._new = self._new, []
            self._count_uses(new, now)
            if self.tiers[0].rules.write == "through":
                self._write(0, new[::-1], now)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(self, number: int, keys: Sequence[Key], now: int) -> None:
        """Write blocks to a tier in one transfer; what must leave for them goes to the next tier or is lost.

        The last ones count as the most recently used. Where there is not room for all, those are written.
        """
        tier = self.tiers[number]
        begun: list[Key] = []
        left: list[Key] = []
        for key in reversed(keys):
            gone = None if tier.claims(key) else tier.reserve(key)
            if gone is not None:
                begun.append(key)
                left += gone
        if left:
            self._leave(number, left, now)
        if begun:
            transfer = self.links[number].begin(len(begun) * tier.block_bytes, now)
            self._writes[transfer] = number, begun[::-1]
            self._collect(now)

    def _leave(self, number: int, keys: list[Key], now: int) -> None:
        """Count what has left a tier, and hand it on where it is demoted and the next tier does not have it."""
        counts, moved = self.tiers[number].counts, []
        if self.tiers[number].rules.action == "demote":
            moved = [key for key in keys if not self.tiers[number + 1].claims(key)]
        counts.demoted += len(moved)
        counts.evicted += len(keys) - len(moved)
        if moved:
            self._write(number + 1, moved, now)

    def _collect(self, now: int) -> None:
        """Take note of transfers that have ended."""
        for link in self.links:
            for transfer in link.advance(now):
                if transfer in self._writes:
                    self._written(*self._writes.pop(transfer), now)
                else:
                    self._read(*self._reads.pop(transfer), transfer)

    def _written(self, number: int, keys: list[Key], now: int) -> None:
        self.tiers[number].written(keys)
        below = number + 1
        if below < len(self.tiers) and self.tiers[below].rules.write == "through":
            self._write(below, keys, now)

    # -- loading ------------------------------------------------------------------------------------------------------

    def holder(self, key: Key, depth: int) -> int | None:
        """Number of the first of `depth` tiers that has a block; None where none has."""
        for number in range(depth):
            if key in self.tiers[number]:
                return number
        return None

    def load(self, keys: Sequence[Key], now: int) -> Load:
        """Read blocks, in order, each from the first tier that has it, by one transfer for each tier."""
        parts = self.by_tier(keys)
        num_bytes = {number: self.bytes_of(number, part) for number, part in parts.items()}
        load = Load(parts, num_bytes, now, 1 + max(parts), self.are_layerwise(parts), left=len(parts))
        for number, part in parts.items():
            self.tiers[number].pin(part)
            self.loaded_bytes[number] += num_bytes[number]
            transfer = self.links[number].begin(num_bytes[number], now)
            load.transfers[number] = transfer
            self._reads[transfer] = number, load
        self._collect(now)
        return load

    def are_layerwise(self, numbers: Iterable[int]) -> bool:
        """Whether a step can follow a load from these tiers layer by layer: only where it can in each of them."""
        return all(self.tiers[number].rules.load == "layerwise" for number in numbers)

    def _read(self, number: int, load: Load, transfer: Transfer) -> None:
        self.tiers[number].unpin(reversed(load.keys[number]))  # the end of a prompt leaves first
        load.left -= 1
        load.ended_at = max(load.ended_at, transfer.ends_at)
        if not load.left:
            self._ended.append(load)

    def ended(self) -> list[Load]:
        """Loads that have ended and were not returned before."""
        ended, self._ended = self._ended, []
        return ended

    def by_tier(self, keys: Iterable[Key]) -> dict[int, list[Key]]:
        """Blocks that tiers have, by number of the first tier that has each."""
        parts: dict[int, list[Key]] = {}
        for key in keys:
            number = self.holder(key, len(self.tiers))
            assert number is not None, "only what a tier has is read from it"
            parts.setdefault(number, []).append(key)
        return parts

    def bytes_of(self, number: int, keys: Iterable[Key]) -> int:
        """Bytes of blocks of one tier."""
        return sum([self.tiers[number].bytes_of(key) for key in keys])

    def load_ends_at(self, load: Load) -> int:
        """When a load ends if no further transfer begins before."""
        return max(self.links[number].ends_at(transfer) for number, transfer in load.transfers.items())

    def check(self) -> None:
        """Recount every tier from scratch; slow, for tests."""
        for tier in self.tiers:
            tier.check()
