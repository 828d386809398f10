"""Tables of the analysis `tiers`: arms, traffic of tiers, lengths from which loading pays, and points of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import byte_size, count, percent, placeholder, seconds, word
from spanlab.report.sweep.data import SweepPoint, axis_name, value_text
from spanlab.report.tables import Cell, Column, Table

Arms = Mapping[str, Mapping[str, Any]]

_LOADED = "loaded = came from lower tiers ÷ prompt tokens, in all admissions; reused tokens count them too"
_DECLINED = "declined = tokens in lower tiers that were computed, because that was faster ÷ prompt tokens"
_CRITICAL = "load on path = delay of the first token by loads, mean over requests"
_NOTES = (_LOADED, _DECLINED, _CRITICAL, "TTFT – = saturated, no steady-state delay")
_MEASURES = (
    Column("token_hit_rate", "token\nhit rate"),
    Column("loaded_share", "loaded"),
    Column("declined_share", "declined"),
    Column("critical_load_s", "load\non path"),
    Column("ttft_mean_s", "TTFT\nmean"),
)


def arms_table(arms: Arms, caveats: tuple[str, ...] = ()) -> Table:
    """Return loads and mean TTFT of each arm; `caveats` are notes of the table."""
    rows = [(word(name), *_measures(arm)) for name, arm in arms.items()]
    columns = (Column("arm", "arm", left=True), *_MEASURES)
    return Table("tiers", "Loads from lower tiers", columns, tuple(rows), (*_NOTES, *caveats))


def _measures(arm: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        percent(arm["token_hit_rate"]),
        percent(arm["loaded_share"]),
        percent(arm["declined_share"]),
        seconds(arm["critical_load_s"]),
        seconds(arm["ttft_mean_s"]),
    )


def break_even_table(rules: Mapping[str, Mapping[str, Any]], tokens: Mapping[str, int | None]) -> Table:
    """Return the shortest length at which loading from an idle tier is faster than computing, by tier."""
    columns = (
        Column("tier", "tier", left=True),
        Column("gib", "GiB"),
        Column("bandwidth_gb_s", "GB/s"),
        Column("latency_s", "latency"),
        Column("break_even_tokens", "loading pays\nfrom (tokens)"),
    )
    rows = [
        (
            word(name),
            Cell(rule["gib"], f"{rule['gib']:g}"),
            Cell(rule["bandwidth_gb_s"], f"{rule['bandwidth_gb_s']:g}"),
            seconds(rule["latency_s"]),
            placeholder("never") if tokens[name] is None else Cell(tokens[name], f"{tokens[name]:,}"),
        )
        for name, rule in rules.items()
    ]
    note = "prefix of a prompt alone on the device, over an idle link; transfers in flight move it up"
    return Table("tiers_break_even", "Load or compute", columns, tuple(rows), (note,))


def tiers_table(arms: Arms) -> Table:
    """Return resident bytes and traffic of each tier, mean over runs; tiers that an arm does not use are absent."""
    columns = (
        Column("arm", "arm", left=True),
        Column("tier", "tier", left=True),
        Column("resident_peak_bytes", "peak"),
        Column("loaded_bytes", "loaded"),
        Column("written_bytes", "written"),
        Column("evicted_blocks", "evicted\nblocks", 1),
        Column("demoted_blocks", "demoted\nblocks", 3),
        Column("quantised_blocks", "quantised\nblocks", 4),
        Column("refused_blocks", "refused\nblocks", 2),
        Column("mean_transfers", "transfers\nin flight"),
    )
    rows = [(word(name), *_traffic(tier)) for name, arm in arms.items() for tier in arm["tiers"]]
    note = "refused = not written, because every evictable block was in use; transfers in flight = mean over time"
    return Table("tiers_traffic", "Traffic of tiers", columns, tuple(rows), (note,))


def _traffic(tier: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        word(tier["name"]),
        *(byte_size(tier[key]) for key in ("resident_peak_bytes", "loaded_bytes", "written_bytes")),
        *(count(tier[f"{key}_blocks"]) for key in ("evicted", "demoted", "quantised", "refused")),
        Cell(tier["mean_transfers"], f"{tier['mean_transfers']:.2f}"),
    )


def points_table(name: str, points: Sequence[SweepPoint]) -> Table:
    """Every arm at every point of one axis."""
    axis = axis_name(points[0].axis)
    length = Column("break_even_tokens", "loading pays\nfrom (tokens)", 1)
    columns = (Column("point", axis, left=True), Column("arm", "arm", left=True), *_MEASURES, length)
    findings = [(point, (point.summary or {})["tiers"]) for point in points]
    rows = [
        (word(value_text(point.value)), word(arm), *_measures(arm_summary), _lengths(tiers["break_even_tokens"]))
        for point, tiers in findings
        for arm, arm_summary in tiers["arms"].items()
    ]
    return Table(name, f"Loads from lower tiers by {axis}", columns, tuple(rows), _NOTES)


def _lengths(tokens: Mapping[str, int | None]) -> Cell:
    """Return the break-even lengths of all tiers in one cell."""
    lengths = {name: "never" if length is None else f"{length:,}" for name, length in tokens.items()}
    return word(", ".join(f"{name} {length}" for name, length in lengths.items()))
