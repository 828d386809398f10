"""The rows of runs with lower tiers: loads of each request, and transfers of each tier."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spanlab.core.policies.tiered import OverTiers
from spanlab.records import NS, Record, RunRow


@dataclass(frozen=True, slots=True)
class TieredRecord(Record):
    """A record with what tiers did for the request. `reused_tokens` counts loaded tokens too.

    loaded_tokens      that came from lower tiers, in all its admissions
    declined_tokens    that lower tiers had and that it computed, because that was faster
    critical_load_s    time by which its first token was later for its loads
    loaded_bytes       by tier
    """

    loaded_tokens: int
    declined_tokens: int
    critical_load_s: float
    loaded_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class TierRow:
    """What one tier held and moved in one run; a block counts once for each time it was written or loaded.

    `small_loaded_blocks`      loaded blocks that were quantised
    `taken_blocks`             that a load took out of an exclusive tier
    `refused_blocks`           that were not written, because all that could leave was in use
    `mean_transfers`           in flight, mean over time
    """

    name: str
    capacity_bytes: int
    resident_peak_bytes: int
    loaded_bytes: int
    written_bytes: int
    loaded_blocks: int
    small_loaded_blocks: int
    taken_blocks: int
    written_blocks: int
    quantised_blocks: int
    demoted_blocks: int
    evicted_blocks: int
    refused_blocks: int
    mean_transfers: float


@dataclass(frozen=True, slots=True)
class TieredRunRow(RunRow):
    """A run with what its tiers did."""

    tiers: list[TierRow] = field(default_factory=list)


def tiered_record(record: Record, policy: OverTiers[Any]) -> TieredRecord:
    """Return a finished request's record with its loads."""
    note = policy.take_note(record.request_id)
    loaded = {tier.name: num_bytes for tier, num_bytes in zip(policy.tiers.tiers, note.bytes, strict=True)}
    return TieredRecord(
        **asdict(record),
        loaded_tokens=note.tokens,
        declined_tokens=note.declined,
        critical_load_s=note.critical_ns * NS,
        loaded_bytes=loaded,
    )


def tiered_row(row: RunRow, policy: OverTiers[Any]) -> TieredRunRow:
    """Return the row of a finished run with the transfers of its tiers."""
    shared = {column.name: getattr(row, column.name) for column in fields(row)}
    end = round(row.makespan_s / NS)
    tiers = [_tier_row(policy, number, end) for number in range(len(policy.tiers))]
    return TieredRunRow(**shared, tiers=tiers)


def _tier_row(policy: OverTiers[Any], number: int, end: int) -> TierRow:
    tier = policy.tiers.tiers[number]
    counts = tier.counts
    return TierRow(
        name=tier.name,
        capacity_bytes=tier.capacity,
        resident_peak_bytes=tier.peak,
        loaded_bytes=policy.tiers.loaded_bytes[number],
        written_bytes=counts.written * tier.block_bytes,
        loaded_blocks=counts.loaded,
        small_loaded_blocks=counts.loaded_small,
        taken_blocks=counts.taken,
        written_blocks=counts.written,
        quantised_blocks=counts.quantised,
        demoted_blocks=counts.demoted,
        evicted_blocks=counts.evicted,
        refused_blocks=counts.refused,
        mean_transfers=policy.tiers.links[number].mean_in_flight(end),
    )
