"""Tables of the analysis `tiers`: arms, traffic of tiers, lengths from which loading pays, and points of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import byte_size, count, number, percent, seconds, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.sweep.data import SweepPoint, axis_name, value_text
from spanlab.report.tables import Cell, Table

Arms = Mapping[str, Mapping[str, Any]]

_LOADED = "loaded = came from lower tiers ÷ prompt tokens, in all admissions; reused tokens count them too"
_DECLINED = "declined = tokens in lower tiers that were computed, because that was faster ÷ prompt tokens"
_CRITICAL = "load on path = delay of the first token by loads, mean over requests"
_NOTES = (_LOADED, _DECLINED, _CRITICAL, "TTFT – = saturated, no steady-state delay")
_MEASURES = (
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("loaded_share", "loaded", percent),
    Field("declined_share", "declined", percent),
    Field("critical_load_s", "load\non path", seconds),
    Field("ttft_mean_s", "TTFT\nmean", seconds),
)
_ARM = Field("arm", "arm", word, left=True)


def arms_table(arms: Arms, caveats: tuple[str, ...] = ()) -> Table:
    """Return loads and mean TTFT of each arm; `caveats` are notes of the table."""
    rows = [{"arm": name, **arm} for name, arm in arms.items()]
    return tabulate("tiers", "Loads from lower tiers", (_ARM, *_MEASURES), rows, (*_NOTES, *caveats))


def break_even_table(rules: Mapping[str, Mapping[str, Any]], tokens: Mapping[str, int | None]) -> Table:
    """Return the shortest length at which loading from an idle tier is faster than computing, by tier."""
    fields = (
        Field("tier", "tier", word, left=True),
        Field("gib", "GiB", number("g")),
        Field("bandwidth_gb_s", "GB/s", number("g")),
        Field("latency_s", "latency", seconds),
        Field("break_even_tokens", "loading pays\nfrom (tokens)", lambda length: Cell(length, _length(length))),
    )
    rows = [{**rule, "tier": name, "break_even_tokens": tokens[name]} for name, rule in rules.items()]
    note = "prefix of a prompt alone on the device, over an idle link; transfers in flight move it up"
    return tabulate("tiers_break_even", "Load or compute", fields, rows, (note,))


def tiers_table(arms: Arms) -> Table:
    """Return resident bytes and traffic of each tier, mean over runs; tiers that an arm does not use are absent."""
    fields = (
        _ARM,
        Field("tier", "tier", word, "name", left=True),
        Field("resident_peak_bytes", "peak", byte_size),
        Field("loaded_bytes", "loaded", byte_size),
        Field("written_bytes", "written", byte_size),
        Field("evicted_blocks", "evicted\nblocks", count, keep=1),
        Field("demoted_blocks", "demoted\nblocks", count, keep=3),
        Field("quantised_blocks", "quantised\nblocks", count, keep=4),
        Field("refused_blocks", "refused\nblocks", count, keep=2),
        Field("mean_transfers", "transfers\nin flight", number(".2f")),
    )
    rows = [{"arm": name, **tier} for name, arm in arms.items() for tier in arm["tiers"]]
    note = "refused = not written, because every evictable block was in use; transfers in flight = mean over time"
    return tabulate("tiers_traffic", "Traffic of tiers", fields, rows, (note,))


def points_table(name: str, points: Sequence[SweepPoint]) -> Table:
    """Every arm at every point of one axis."""
    axis = axis_name(points[0].axis)
    lengths = Field("break_even_tokens", "loading pays\nfrom (tokens)", _lengths, keep=1)
    fields = (Field("point", axis, word, left=True), _ARM, *_MEASURES, lengths)
    rows = [
        {"point": value_text(point.value), "arm": name, "break_even_tokens": tiers["break_even_tokens"], **arm}
        for point, tiers in ((point, point.findings("tiers")) for point in points)
        for name, arm in tiers["arms"].items()
    ]
    return tabulate(name, f"Loads from lower tiers by {axis}", fields, rows, _NOTES)


def _lengths(tokens: Mapping[str, int | None]) -> Cell:
    """Return the break-even lengths of all tiers in one cell."""
    return word(", ".join(f"{name} {_length(length)}" for name, length in tokens.items()))


def _length(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"
