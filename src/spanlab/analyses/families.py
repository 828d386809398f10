"""Tables of the analysis `families`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spanlab.analyses.base import Findings, Finished, findings_by_axis, point_entries
from spanlab.analyses.leads import SMALLEST_LEAD, compare_families, plain, shown_together, without_ratios
from spanlab.report.cells import Cell, Table, byte_size, one_decimal, percent, ratio_interval, seconds_interval, word
from spanlab.report.data import estimate
from spanlab.report.sweep import COLOURS, PALE, GridCell, SweepPoint, draw_grid
from spanlab.report.table import Field, tabulate
from spanlab.report.units import MISSING
from spanlab.settings.analyses import ANALYSES, ARMS, REPEAT, STEPS, Analysis
from spanlab.settings.arms import check_names
from spanlab.settings.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


# ------------------------------------------------------------------------------
# The figure of the analysis `families`: the family with the lowest mean TTFT at each point.
# ------------------------------------------------------------------------------


def draw_winners(points: Sequence[SweepPoint]) -> Figure:
    """Draw a cell per point of a product of settings, coloured by the family with the lowest mean TTFT."""
    from matplotlib.patches import Patch

    names = families_at(points)
    colours = dict(zip(names, COLOURS, strict=False))
    title = f"The family with the lowest mean TTFT, and its speedup over {family_text(names[0])}"
    legend = {family_text(name): colour for name, colour in colours.items()}
    pale = Patch(facecolor="#888888", alpha=PALE, label=f"pale: {NO_LEAD}")
    text_key = Patch(facecolor="none", label="a × · b %: speedup · token hit rate")
    return draw_grid(points, title, legend, (pale, text_key), partial(_cell, colours))


def _cell(colours: Mapping[str, str], point: SweepPoint) -> GridCell | None:
    findings = point.findings("families")
    lead = findings["lead"]
    if lead is None:
        return None
    best = next(entry for entry in findings["entries"] if entry["family"] == lead["family"])
    text = f"{_speedup(best, findings)} · {100 * best['token_hit_rate']:.0f} %"
    return GridCell(colours[best["family"]], text, lead["shown"])


def _speedup(best: Mapping[str, Any], findings: Mapping[str, Any]) -> str:
    """Return the speedup over the first family; missing where a queue grew or the machine was noisy."""
    if best is findings["entries"][0]:
        return "1 ×"
    return MISSING if best["speedup"] is None else f"{best['speedup']['mean']:.2f} ×"


# ------------------------------------------------------------------------------
# The analysis `families`: the best arm of each family of methods, and the family that leads at
# each point.
# ------------------------------------------------------------------------------


def families_of_study(finished: Finished) -> Findings:
    """Return the comparison of the families of one study; no speedups where the machine was noisy."""
    compared = compare_families(finished.measured, finished.study.families)
    entry = plain(*(without_ratios(*compared) if finished.noise_sentence("speedups") else compared))
    return Findings(summary={"families": entry}, tables=(families_table(entry),))


def families_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that leads at each point: one table and one figure per axis of the sweep."""
    points = _corrected(points)
    winners = point_entries(points, "families")
    figure = draw_winners
    return findings_by_axis("winners", points, winners_table, figure, {"winners": winners})


def _corrected(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the points with leads as they are shown together: `shown`; `shown_alone` is that of the point's study."""
    leads = [point.findings("families")["lead"] for point in points]
    return [
        _with_lead(point, lead and lead | {"shown": shown, "shown_alone": lead["shown"]})
        for point, lead, shown in zip(points, leads, shown_together(leads), strict=True)
    ]


def _with_lead(point: SweepPoint, lead: dict[str, Any] | None) -> SweepPoint:
    return replace(point, summary={**(point.summary or {}), "families": point.findings("families") | {"lead": lead}})


def check_families(study: Study) -> None:
    """Raise ValueError for fewer than two families, and for unknown arms."""
    is_read = not {"families", "policies", "break_even"}.isdisjoint(study.chosen_analyses())
    if {"families", "policies"} & set(study.chosen_analyses()) and len(study.families) < 2:
        raise ValueError(f"families={study.families}: expected two families or more")
    if "break_even" in study.chosen_analyses() and set(study.families) != set(STEPS):
        raise ValueError(f"families={study.families} with analyses=break_even: expected {', '.join(STEPS)}")
    for name, arms in study.families.items():
        check_names(f"families.{name}", arms, study.arms, is_read)
        if not arms and is_read:
            raise ValueError(f"families.{name}=[]: expected one or more of {', '.join(study.arms)}")


ANALYSES.add(
    Analysis(
        "families",
        families_of_study,
        needs=(ARMS, REPEAT),
        check=check_families,
        check_unread=check_families,
        of_points=families_of_points,
    )
)
