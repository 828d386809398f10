"""Tables of the analysis `families`, from what `summary.json` holds of it."""

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
    "any-position bound = share of prompt tokens that an infinite cache reuses which finds spans anywhere; regret = "
    "offline bound under the arm's memory − reused, in points of prompt tokens",
)


def families_table(found: Mapping[str, Any]) -> Table:
    """One row per family of one study."""
    rows = tuple(_row(entry) for entry in found["entries"])
    return Table("families", f"Families: {lead_words(found['lead'])}", _FAMILY_COLUMNS, rows, _NOTES)


def lead_words(lead: Mapping[str, Any] | None) -> str:
    """Which family leads, in words."""
    if lead is None:
        return "nothing to compare"
    if not lead["shown"]:
        return f"{NO_LEAD} is shown between {words(lead['family'])} and {words(lead['next'])}"
    ratio = lead["ratio"]
    return f"{words(lead['family'])} leads {words(lead['next'])} by {_ratio(ratio).text}"


def words(family: str) -> str:
    """A family's name as text."""
    return family.replace("_", " ")


def winners_table(table: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point: the leading family, its lead, and token hit rates of all families."""
    names = list(dict.fromkeys(e["family"] for point in points for e in families_of(point)["entries"]))
    columns = (
        Column("point", "point", left=True),
        Column("family", "lowest\nmean TTFT", left=True),
        Column("arm", "its arm", left=True),
        Column("lead", "lead over\nthe next"),
        *(Column(f"speedup_{name}", f"speedup\n{words(name)}", 2) for name in names[1:]),
        *(Column(f"token_hit_rate_{name}", f"token hit rate\n{words(name)}", 1) for name in names),
        Column("any_position_share", "any-position\nbound"),
    )
    rows = tuple(_winner(point, names) for point in points)
    note = (
        f"speedup = mean TTFT of the best arm of {words(names[0])} ÷ that of the family; {_NOTES[1].partition(';')[0]}"
    )
    leads = f"[a, b] = 95 % interval; where a lead's interval goes below {SMALLEST_LEAD:g}, {NO_LEAD} is shown"
    return Table(table, "Which family has the lowest mean TTFT", columns, rows, (note, leads))


def _row(entry: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        cells.word(words(entry["family"])),
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
    found = families_of(point)
    of = {entry["family"]: entry for entry in found["entries"]}
    lead = found["lead"]
    first = of[lead["family"]] if lead else next(iter(of.values()))
    rates = [cells.percent(of[name]["token_hit_rate"]) if name in of else MISSING for name in names]
    return (
        cells.word(" ".join(f"{key}={value}" for key, value in point.settings.items())),
        cells.word(words(first["family"])),
        cells.word(first["arm"]),
        _ratio(lead["ratio"] if lead else None),
        *(_ratio(of[name]["speedup"]) if name in of else MISSING for name in names[1:]),
        *rates,
        cells.percent(first["any_position_share"]),
    )


def families_of(point: SweepPoint) -> Mapping[str, Any]:
    """What the analysis found at a point that ran."""
    assert point.summary is not None, "only points that ran are shown"
    found: Mapping[str, Any] = point.summary["families"]
    return found
