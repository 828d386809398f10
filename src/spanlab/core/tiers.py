"""The tiers below the device's memory: when blocks are written to them, and loads from them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from spanlab.registry import REQUIRED, not_negative, one_of, positive

# ------------------------------------------------------------------------------
# A link whose transfers in flight share its bandwidth equally: processor sharing, in whole
# nanoseconds.
# ------------------------------------------------------------------------------

Due = list[tuple[float, int, "Transfer"]]  # a heap; the number keeps the order of equal ones


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes in flight. `ends_at` is when the last byte arrives if no other transfer begins
    before."""

    num_bytes: int
    begun_at: int
    ends_at: int = -1


@dataclass(slots=True)
class _Flow:
    """Transfers in flight at the last event.

    `time`     time of the last event in nanoseconds, not rounded
    `served`   bytes delivered to each transfer that has shared the bandwidth from the start
    `joining`  transfers in their latency, by its end
    `sharing`  transfers that move, by the value of `served` at their end
    """

    ns_per_byte: float
    time: float = 0.0
    served: float = 0.0
    joining: Due = field(default_factory=list)
    sharing: Due = field(default_factory=list)
    area: float = 0.0  # transfers in flight, times nanoseconds

    def copy(self) -> _Flow:
        return _Flow(
            self.ns_per_byte, self.time, self.served, self.joining.copy(), self.sharing.copy()
        )

    def __len__(self) -> int:
        return len(self.joining) + len(self.sharing)

    def first_end(self) -> float:
        """Return when the first of the moving transfers ends, if none joins before."""
        if not self.sharing:
            return math.inf
        return self.time + (self.sharing[0][0] - self.served) * len(self.sharing) * self.ns_per_byte

    def move_to(self, until: float) -> None:
        """Advance time without an event."""
        if self.sharing and self.ns_per_byte:
            self.served += (until - self.time) / (len(self.sharing) * self.ns_per_byte)
        self._pass(until)

    def _pass(self, until: float) -> None:
        self.area += len(self) * (until - self.time)
        self.time = until

    def next_event(self, until: float) -> tuple[bool, Transfer | None]:
        """Process the next join or end up to `until`: whether there was one, and the transfer that
        has ended."""
        join, end = self.joining[0][0] if self.joining else math.inf, self.first_end()
        if not len(self) or min(join, end) > until:
            return False, None
        if end <= join:
            self._pass(end)
            self.served, _, ended = heappop(self.sharing)
            return True, ended
        self.move_to(join)
        _, number, joined = heappop(self.joining)
        heappush(self.sharing, (self.served + joined.num_bytes, number, joined))
        return True, None


class Link:
    """Moves bytes at a bandwidth that all transfers in flight share equally; each waits for the
    latency first.

    A transfer ends in the first whole nanosecond in which all of its bytes are there. `bytes_per_s`
    may be infinite.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._latency_ns = round(latency_s * 1e9)
        self._flow = _Flow(1e9 / bytes_per_s)
        self._ended: list[Transfer] = []
        self._begun = 0
        self._ends_known = True  # whether `ends_at` of those in flight is up to date

    def begin(self, num_bytes: int, now: int) -> Transfer:
        """Begin a transfer; `now` never decreases."""
        self._run(now)
        self._flow.move_to(now)
        transfer = Transfer(num_bytes, now)
        self._begun += 1
        heappush(self._flow.joining, (now + self._latency_ns, self._begun, transfer))
        self._ends_known = False
        return transfer

    def advance(self, now: int) -> list[Transfer]:
        """Return the transfers that have ended by now and were not returned before, in order."""
        self._run(now)
        ended, self._ended = self._ended, []
        return ended

    def _run(self, now: int) -> None:
        self._ended += _run(self._flow, now)

    def ends_at(self, transfer: Transfer) -> int:
        """Return when a transfer ends if no other begins before."""
        if not self._ends_known:
            _run(self._flow.copy(), math.inf)
            self._ends_known = True
        return transfer.ends_at

    def delay(self, num_bytes: int) -> int:
        """Return the nanoseconds of a further transfer at the share of the bandwidth that it would
        get now."""
        return self._latency_ns + math.ceil(
            num_bytes * (len(self._flow) + 1) * self._flow.ns_per_byte
        )

    def mean_in_flight(self, now: int) -> float:
        """Return the mean number of transfers in flight over the time from zero to `now`."""
        return (self._flow.area + len(self._flow) * (now - self._flow.time)) / now if now else 0.0


def _run(flow: _Flow, until: float) -> list[Transfer]:
    """Process every event up to a time; returns the transfers that end."""
    ended = []
    happened = True
    while happened:
        happened, transfer = flow.next_event(until)
        if transfer is not None:
            transfer.ends_at = math.ceil(flow.time)
            ended.append(transfer)
    return ended


# ------------------------------------------------------------------------------
# Settings of one memory tier.
# ------------------------------------------------------------------------------

WRITES = ("through", "back", "second_hit")
LOADS = ("blocking", "layerwise")
ACTIONS = ("evict", "demote", "quantise")
FORMAT_BITS = {"fp8": 8, "int4": 4}
LOAD_WHEN = ("break_even", "always", "never")


@dataclass
class TierRules:
    """A tier of memory below the device's.

    `gib`             its size in GiB
    `bandwidth_gb_s`  10^9 bytes a second, which all transfers in flight share
    `latency_s`       seconds before the first byte of a transfer
    `write`           through: a block is written once the tier above has it; back: once the tier
                      above gives it up, and a load takes it out again; second_hit: at its second
                      use in the device's memory
    `load`            blocking: a request waits for all that it loads; layerwise: its prefill
                      follows the load layer by layer
    `high`            share of the size above which room is made
    `low`             share of the size down to which room is made
    `action`          how room is made: evict, demote to the next tier, or quantise what was used
                      longest ago
    `quantise_to`     fp8 or int4; quantise only; answers change
    """

    gib: float = REQUIRED
    bandwidth_gb_s: float = REQUIRED
    latency_s: float = 0.0
    write: str = "through"
    load: str = "blocking"
    high: float = 1.0
    low: float = 1.0
    action: str = "evict"
    quantise_to: str | None = None

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        positive(f"{path}.gib", self.gib)
        if not self.bandwidth_gb_s > 0:  # may be infinite
            raise ValueError(
                f"{path}.bandwidth_gb_s={self.bandwidth_gb_s}: expected a number above zero"
            )
        not_negative(f"{path}.latency_s", self.latency_s)
        one_of(f"{path}.write", self.write, WRITES)
        one_of(f"{path}.load", self.load, LOADS)
        one_of(f"{path}.action", self.action, ACTIONS)
        if not 0 < self.high <= 1:
            raise ValueError(f"{path}.high={self.high}: expected a share above 0 and up to 1")
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"{path}.low={self.low}: expected a share from 0 to {path}.high={self.high}"
            )
        if self.action == "quantise":
            one_of(f"{path}.quantise_to", self.quantise_to or "null", FORMAT_BITS)
        elif self.quantise_to is not None:
            raise ValueError(
                f"{path}.quantise_to={self.quantise_to} with {path}.action={self.action}: expected null"
            )

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return int(self.gib * (1 << 30))

    @property
    def bytes_per_s(self) -> float:
        """Its bandwidth in bytes per second."""
        return self.bandwidth_gb_s * 1e9

    @property
    def exclusive(self) -> bool:
        """Whether a loaded block is removed from the tier."""
        return self.write == "back"

    def least_bytes(self, num_bytes: int, itemsize: int) -> int:
        """Return the bytes of a block once quantised, without scales; its numbers have `itemsize`
        bytes."""
        if self.quantise_to is None:
            return num_bytes
        return -(-num_bytes * FORMAT_BITS[self.quantise_to] // (8 * itemsize))


# ------------------------------------------------------------------------------
# The contents of one tier: blocks of equal size by key, full or quantised, in order of their
# last use.
# ------------------------------------------------------------------------------

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

    A block being read is pinned: it can be matched, but not evicted. `used` never exceeds
    `capacity`.
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
        return (
            self.small_bytes
            if key in self._small or key in self._pinned_small
            else self.block_bytes
        )

    # -- writing -----------------------------------------------------------------------------------

    def reserve(self, key: Key) -> list[Key] | None:
        """Reserve space for a block to be written; returns the evicted blocks, None where space is
        short."""
        evictable = len(self._full) * self.block_bytes + len(self._small) * self.small_bytes
        if self.used - evictable + self.block_bytes > self._high:
            self.counts.refused += 1
            return None
        evicted: list[Key] = []
        if self.used + self.block_bytes > self._high:
            # quantise, then evict, least recently used blocks; all others are in use
            target = max(0, min(self._low, self._high - self.block_bytes))
            while self.rules.action == "quantise" and self.used > target and self._full:
                quantised, _ = self._full.popitem(last=False)
                self._small[quantised] = None
                self.used -= self.block_bytes - self.small_bytes
                self.counts.quantised += 1
            while self.used > target and (self._small or self._full):
                blocks, size = (
                    (self._small, self.small_bytes)
                    if self._small
                    else (self._full, self.block_bytes)
                )
                evicted.append(blocks.popitem(last=False)[0])
                self.used -= size
        self._writing.add(key)
        self.used += self.block_bytes
        self.peak = max(self.peak, self.used)
        return evicted

    def complete_writes(self, keys: Iterable[Key]) -> None:
        """Make blocks readable whose bytes have arrived."""
        for key in keys:
            self._writing.remove(key)
            self._full[key] = None
            self.counts.written += 1

    # -- reading -----------------------------------------------------------------------------------

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
        """Undo one `pin` of each key; the last one becomes the most recently used. An exclusive
        tier removes them."""
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
        assert self.used == small * self.small_bytes + full * self.block_bytes, (
            "bytes are miscounted"
        )
        assert 0 <= self.used <= self.peak <= self.capacity, "above its capacity"
        counts, stored = self.counts, small + full - len(self._writing)
        assert counts.written - counts.evicted - counts.demoted - counts.taken == stored, (
            "block counts disagree"
        )
        assert not self._pins.keys() & (self._full.keys() | self._small.keys()), (
            "a pinned block is evictable"
        )


# ------------------------------------------------------------------------------
# A load of blocks from lower tiers, and the delay of the request that waits for it.
# ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Load:
    """Blocks being loaded to the device; keys, bytes and transfers by number of their tier.

    `depth`      number of the lowest tier that it reads, plus one
    `layerwise`  the step that reads the blocks follows their load layer by layer
    `pending`    number of transfers that have not ended
    `ended_at`   when the last one ended; -1 while some are pending
    """

    keys: dict[int, list[Key]]
    num_bytes: dict[int, int]
    begun_at: int
    depth: int
    layerwise: bool
    transfers: dict[int, Transfer] = field(default_factory=dict)
    pending: int = 0
    ended_at: int = -1


@dataclass(slots=True)
class LoadNote:
    """Loads from lower tiers for one request.

    `tokens`       prompt and output tokens that it loaded, or that another request's load brought
    `declined`     tokens that tiers held and that it computed, because that was faster
    `bytes`        loaded, by number of the tier
    `critical_ns`  delay of its first token that loads caused
    """

    bytes: list[int]
    tokens: int = 0
    declined: int = 0
    critical_ns: int = 0


def overlapped(load_ns: int, compute_ns: int, layers: int) -> int:
    """Return the nanoseconds of a step whose `layers` equal layers each wait for an equal part of a
    load.

    The first layer begins when its part has arrived; the last one finishes its work after the last
    part.
    """
    if not load_ns:
        return compute_ns
    return max(load_ns, compute_ns) + min(load_ns, compute_ns) // layers


class Tiers:
    """Tiers, the nearest first, each behind a link that its reads and writes share.

    A block that is evicted from the device or a tier is copied out of a staging buffer: its memory
    is free at once, and the next tier stores it when its bytes have arrived. A transfer between two
    tiers uses only the link of the lower one.
    """

    def __init__(self, tiers: Sequence[Tier], links: Sequence[Link]) -> None:
        self.tiers, self.links = tuple(tiers), tuple(links)
        self.loaded_bytes = [0] * len(self.tiers)  #: in all, by tier
        self._writes: dict[Transfer, tuple[int, list[Key]]] = {}  # the tier's number and the blocks
        self._reads: dict[Transfer, tuple[int, Load]] = {}
        self._stored: list[Key] = []  # stored by the step that is running
        self._evicted: list[Key] = []  # evicted from the device and not yet written
        self._ended: list[Load] = []
        # of blocks in the device's memory, where a tier counts them
        self._uses: dict[Key, int] = {}
        self._counts_uses = any(tier.rules.write == "second_hit" for tier in tiers)

    def __len__(self) -> int:
        return len(self.tiers)

    # -- what the device does ----------------------------------------------------------------------

    def published(self, key: Key) -> None:
        """Note that the step being scheduled stores a block in the device's memory."""
        self._stored.append(key)

    def evicted(self, key: Key) -> None:
        """Note that the device evicts a block."""
        self._evicted.append(key)
        self._uses.pop(key, None)

    def used(self, keys: Sequence[Key], now: int) -> None:
        """Count a reuse of blocks that the device stores or loads: the first blocks of a prompt, in
        order."""
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
        """Process transfers that have ended by now, and write the blocks that the previous step
        stored."""
        self._collect(now)
        self.settle(now)
        if self._stored:
            stored, self._stored = self._stored, []
            self._count_uses(stored, now)
            if self.tiers[0].rules.write == "through":
                self._write(0, stored[::-1], now)

    # -- writing -----------------------------------------------------------------------------------

    def _write(self, number: int, keys: Sequence[Key], now: int) -> None:
        """Write blocks to a tier in one transfer; blocks evicted for them go to the next tier or
        are lost.

        The last keys count as the most recently used, and are written where space does not suffice
        for all.
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
            # demoted blocks are written to the next tier, unless it has them
            counts, moved = self.tiers[number].counts, []
            if self.tiers[number].rules.action == "demote":
                moved = [
                    key for key in evicted if not self.tiers[number + 1].stores_or_receives(key)
                ]
            counts.demoted += len(moved)
            counts.evicted += len(evicted) - len(moved)
            if moved:
                self._write(number + 1, moved, now)
        if begun:
            transfer = self.links[number].begin(len(begun) * tier.block_bytes, now)
            self._writes[transfer] = number, begun[::-1]
            self._collect(now)

    def _collect(self, now: int) -> None:
        """Process transfers that have ended."""
        for link in self.links:
            for transfer in link.advance(now):
                if transfer in self._writes:
                    number, keys = self._writes.pop(transfer)
                    self.tiers[number].complete_writes(keys)
                    below = number + 1
                    if below < len(self.tiers) and self.tiers[below].rules.write == "through":
                        self._write(below, keys, now)
                else:
                    number, load = self._reads.pop(transfer)
                    # the end of a prompt is evicted first
                    self.tiers[number].unpin(reversed(load.keys[number]))
                    load.pending -= 1
                    load.ended_at = max(load.ended_at, transfer.ends_at)
                    if not load.pending:
                        self._ended.append(load)

    # -- loading -----------------------------------------------------------------------------------

    def holder(self, key: Key, depth: int) -> int | None:
        """Return the number of the first of `depth` tiers that stores a block; None where none
        does."""
        for number in range(depth):
            if key in self.tiers[number]:
                return number
        return None

    def load(self, keys: Sequence[Key], now: int) -> Load:
        """Load blocks, in order, each from the first tier that stores it, with one transfer per
        tier."""
        by_tier = self.by_tier(keys)
        num_bytes = {
            number: self.bytes_of(number, tier_keys) for number, tier_keys in by_tier.items()
        }
        load = Load(
            by_tier,
            num_bytes,
            now,
            1 + max(by_tier),
            self.are_layerwise(by_tier),
            pending=len(by_tier),
        )
        for number, tier_keys in by_tier.items():
            self.tiers[number].pin(tier_keys)
            self.loaded_bytes[number] += num_bytes[number]
            transfer = self.links[number].begin(num_bytes[number], now)
            load.transfers[number] = transfer
            self._reads[transfer] = number, load
        self._collect(now)
        return load

    def are_layerwise(self, numbers: Iterable[int]) -> bool:
        """Whether a step can follow a load from these tiers layer by layer, which each of them must
        allow."""
        return all(self.tiers[number].rules.load == "layerwise" for number in numbers)

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
        return max(
            self.links[number].ends_at(transfer) for number, transfer in load.transfers.items()
        )

    def check(self) -> None:
        """Recount every tier from scratch; slow, for tests."""
        for tier in self.tiers:
            tier.check()
