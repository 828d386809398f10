"""Tables of the analysis `families`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spanlab.analysis.families import SMALLEST_LEAD
from spanlab.report.cells import byte_size, one_decimal, percent, ratio_interval, seconds_interval, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.measures import estimate
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import Cell, Table

NO_LEAD = f"no lead above {100 * (SMALLEST_LEAD - 1):.0f} %"
_NOTES = (
    "best arm = the one with the lowest mean TTFT of its family; speedup = mean TTFT of the first family's best arm ÷ "
    "its own, same requests, [a, b] = 95 % interval",
    "any-position bound = share of prompt tokens that an infinite position-independent cache reuses; regret = "
    "offline bound under the arm's memory − reused, in points of prompt tokens",
)


def families_table(findings: Mapping[str, Any]) -> Table:
    """One row per family of one study."""
    return tabulate("families", f"Families: {lead_text(findings['lead'])}", _FIELDS, findings["entries"], _NOTES)


def lead_text(lead: Mapping[str, Any] | None) -> str:
    """Describe which family leads, and by which factor."""
    if lead is None:
        return "nothing to compare"
    if not lead["shown"]:
        return f"{NO_LEAD} is shown between {family_text(lead['family'])} and {family_text(lead['next'])}"
    return f"{family_text(lead['family'])} leads {family_text(lead['next'])} by {ratio_interval(lead['ratio']).text}"


def family_text(family: str) -> str:
    """Return the name of a family as text."""
    return family.replace("_", " ")


def family_name(family: str) -> Cell:
    """A cell with the name of a family."""
    return word(family_text(family))


_FIELDS = (
    Field("family", "family", family_name, left=True),
    Field("arm", "best arm", word, left=True),
    Field(
        "ttft_mean_s",
        "mean TTFT",
        seconds_interval,
        lambda entry: estimate(entry["ttft_mean_s"], entry["ttft_mean_s_interval"]),
    ),
    Field("speedup", "speedup", ratio_interval),
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("any_position_share", "any-position\nbound", percent, keep=2),
    Field("regret_points", "regret,\npoints", one_decimal, keep=3),
    Field("resident_bytes", "resident", byte_size, keep=1),
)


def _yes_or_no(shown: bool | None) -> Cell:
    return Cell(bool(shown), "yes" if shown else "no")


def winners_table(table: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point: the leading family, its lead, and token hit rates of all families."""
    names = families_at(points)
    fields = (
        Field("point", "point", word, left=True),
        Field("family", "lowest\nmean TTFT", family_name, "first.family", left=True),
        Field("arm", "its arm", word, "first.arm", left=True),
        Field("lead", "lead over\nthe next", ratio_interval, "lead.ratio"),
        Field("lead_shown", "shown", _yes_or_no, "lead.shown"),
        *(family_field("speedup", "speedup", ratio_interval, name, 2) for name in names[1:]),
        *(family_field("token_hit_rate", "token hit rate", percent, name, 1) for name in names),
        Field("any_position_share", "any-position\nbound", percent, "first.any_position_share"),
    )
    first = family_text(names[0])
    note = f"speedup = mean TTFT of the best arm of {first} ÷ that of the family; {_NOTES[1].partition(';')[0]}"
    leads = (
        f"[a, b] = 95 % interval of each point alone; shown = after Holm's correction for all points, a lead is above "
        f"{SMALLEST_LEAD:g}, with the arms of each seed chosen on the other seeds; else {NO_LEAD} is shown"
    )
    return tabulate(table, "Which family has the lowest mean TTFT", fields, map(_winner, points), (note, leads))


def families_at(points: Sequence[SweepPoint]) -> list[str]:
    """Return the names of all families of these points, in the order of their first points."""
    return list(dict.fromkeys(entry["family"] for point in points for entry in point.findings("families")["entries"]))


def family_field(key: str, label: str, cell: Callable[[Any], Cell], family: str, keep: int = 0) -> Field:
    """Return the field of the entry `key` of one family, in rows with `families` by name."""
    heading = f"{label}\n{family_text(family)}"
    return Field(f"{key}_{family}", heading, cell, lambda row: row["families"].get(family, {}).get(key), keep)


def _winner(point: SweepPoint) -> dict[str, Any]:
    findings = point.findings("families")
    families = {entry["family"]: entry for entry in findings["entries"]}
    lead = findings["lead"]
    first = families[lead["family"]] if lead else next(iter(families.values()))
    return {"point": point.name, "lead": lead, "first": first, "families": families}
