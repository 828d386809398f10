"""A load of blocks from lower tiers, and the delay of the request that waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.core.tiers.link import Transfer
from spanlab.core.tiers.tier import Key


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
    """Return the nanoseconds of a step whose `layers` equal layers each wait for an equal part of a load.

    The first layer begins when its part has arrived; the last one finishes its work after the last part.
    """
    if not load_ns:
        return compute_ns
    return max(load_ns, compute_ns) + min(load_ns, compute_ns) // layers
