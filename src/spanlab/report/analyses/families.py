"""Tables of the analysis `families`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.analysis.families import SMALLEST_LEAD
from spanlab.report import cells
from spanlab.report.measures import interval
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import MISSING, Cell, Column, Table

NO_LEAD = f"no lead above {100 * (SMALLEST_LEAD - 1):.0f} %"
_FAMILY_COLUMNS = (
    Column("family", "family", left=True),
    Column("arm", "best arm", left=True),
    Column("ttft_mean_s", "mean TTFT"),
    Column("speedup", "speedup"),
    Column("token_hit_rate", "token\nhit rate"),
    Column("any_position_share", "any-position\nbound", 2),
    Column("regret_points", "regret,\npoints", 3),
    Column("resident_bytes", "resident", 1),
)
_NOTES = (
    "best arm = the one with the lowest mean TTFT of its family; speedup = mean TTFT of the first family's best arm ÷ "
    "its own, same requests, [a, b] = 95 % interval",
    "any-position bound = share of prompt tokens that an infinite position-independent cache reuses; regret = "
    "offline bound under the arm's memory − reused, in points of prompt tokens",
)


def families_table(findings: Mapping[str, Any]) -> Table:
    """One row per family of one study."""
    rows = tuple(_row(entry) for entry in findings["entries"])
    return Table("families", f"Families: {lead_text(findings['lead'])}", _FAMILY_COLUMNS, rows, _NOTES)


def lead_text(lead: Mapping[str, Any] | None) -> str:
    """Describe which family leads, and by which factor."""
    if lead is None:
        return "nothing to compare"
    if not lead["shown"]:
        return f"{NO_LEAD} is shown between {family_text(lead['family'])} and {family_text(lead['next'])}"
    ratio = lead["ratio"]
    return f"{family_text(lead['family'])} leads {family_text(lead['next'])} by {_ratio(ratio).text}"


def family_text(family: str) -> str:
    """Return the name of a family as text."""
    return family.replace("_", " ")


def winners_table(table: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point: the leading family, its lead, and token hit rates of all families."""
    names = list(dict.fromkeys(e["family"] for point in points for e in families_of(point)["entries"]))
    columns = (
        Column("point", "point", left=True),
        Column("family", "lowest\nmean TTFT", left=True),
        Column("arm", "its arm", left=True),
        Column("lead", "lead over\nthe next"),
        *(Column(f"speedup_{name}", f"speedup\n{family_text(name)}", 2) for name in names[1:]),
        *(Column(f"token_hit_rate_{name}", f"token hit rate\n{family_text(name)}", 1) for name in names),
        Column("any_position_share", "any-position\nbound"),
    )
    rows = tuple(_winner(point, names) for point in points)
    first = family_text(names[0])
    note = f"speedup = mean TTFT of the best arm of {first} ÷ that of the family; {_NOTES[1].partition(';')[0]}"
    leads = f"[a, b] = 95 % interval; where a lead's interval goes below {SMALLEST_LEAD:g}, {NO_LEAD} is shown"
    return Table(table, "Which family has the lowest mean TTFT", columns, rows, (note, leads))


def _row(entry: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        cells.word(family_text(entry["family"])),
        cells.word(entry["arm"]),
        cells.seconds(entry["ttft_mean_s"], interval(entry["ttft_mean_s_interval"])),
        _ratio(entry["speedup"]),
        cells.percent(entry["token_hit_rate"]),
        cells.percent(entry["any_position_share"]),
        _points(entry["regret_points"]),
        cells.byte_size(entry["resident_bytes"]),
    )


def _points(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, f"{value:.1f}")


def _ratio(ratio: Mapping[str, Any] | None) -> Cell:
    return MISSING if ratio is None else cells.ratio(ratio["mean"], interval((ratio["low"], ratio["high"])))


def _winner(point: SweepPoint, names: Sequence[str]) -> tuple[Cell, ...]:
    findings = families_of(point)
    by_family = {entry["family"]: entry for entry in findings["entries"]}
    lead = findings["lead"]
    first = by_family[lead["family"]] if lead else next(iter(by_family.values()))
    rates = [cells.percent(by_family[name]["token_hit_rate"]) if name in by_family else MISSING for name in names]
    return (
        cells.word(" ".join(f"{key}={value}" for key, value in point.settings.items())),
        cells.word(family_text(first["family"])),
        cells.word(first["arm"]),
        _ratio(lead["ratio"] if lead else None),
        *(_ratio(by_family[name]["speedup"]) if name in by_family else MISSING for name in names[1:]),
        *rates,
        cells.percent(first["any_position_share"]),
    )


def families_of(point: SweepPoint) -> Mapping[str, Any]:
    """Return the findings of the analysis at a point that ran."""
    assert point.summary is not None, "only points that ran are shown"
    findings: Mapping[str, Any] = point.summary["families"]
    return findings
