"""Settings of one memory tier."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import REQUIRED, not_negative, one_of, positive

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
    `write`           through: a block is written once the tier above has it; back: once the tier above gives it up, and
                      a load takes it out again; second_hit: at its second use in the device's memory
    `load`            blocking: a request waits for all that it loads; layerwise: its prefill follows the load layer by
                      layer
    `high`            share of the size above which room is made
    `low`             share of the size down to which room is made
    `action`          how room is made: evict, demote to the next tier, or quantise what was used longest ago
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
            raise ValueError(f"{path}.bandwidth_gb_s={self.bandwidth_gb_s}: expected a number above zero")
        not_negative(f"{path}.latency_s", self.latency_s)
        one_of(f"{path}.write", self.write, WRITES)
        one_of(f"{path}.load", self.load, LOADS)
        one_of(f"{path}.action", self.action, ACTIONS)
        if not 0 < self.high <= 1:
            raise ValueError(f"{path}.high={self.high}: expected a share above 0 and up to 1")
        if not 0 <= self.low <= self.high:
            raise ValueError(f"{path}.low={self.low}: expected a share from 0 to {path}.high={self.high}")
        if self.action == "quantise":
            one_of(f"{path}.quantise_to", self.quantise_to or "null", FORMAT_BITS)
        elif self.quantise_to is not None:
            raise ValueError(f"{path}.quantise_to={self.quantise_to} with {path}.action={self.action}: expected null")

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
        """Return the bytes of a block once quantised, without scales; its numbers have `itemsize` bytes."""
        if self.quantise_to is None:
            return num_bytes
        return -(-num_bytes * FORMAT_BITS[self.quantise_to] // (8 * itemsize))
