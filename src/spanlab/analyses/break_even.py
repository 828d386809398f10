"""Tables of the analysis `break_even`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spanlab.analyses.base import Findings, Finished, findings_by_axis, point_entries
from spanlab.analyses.families import break_even, check_families, family_field, family_name
from spanlab.report.cells import Table, percent, ratio_interval, seconds, word
from spanlab.report.sweep import COLOURS, GridCell, SweepPoint, draw_grid
from spanlab.report.table import Field, tabulate
from spanlab.report.units import MISSING
from spanlab.settings.analyses import ANALYSES, ARMS, REPEAT, STEPS, Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Labels of verdicts, in the order of the legend. Where only plain PIC pays, repair costs as much as PIC gains.
VERDICTS = {
    "prefix": "prefix caching suffices",
    "cached_order": "cached order suffices",
    "plain": "only plain PIC pays",
    "repaired": "repaired PIC pays",
}
NOTE = (
    "gain = mean TTFT of the best exact arm ÷ that of the family's best arm, same requests; of cached order: over "
    "prefix caching; a family pays where the 95 % interval of its gain lies above 1.05: each gain alone, without a "
    "correction for the number of points or for the choice of arms"
)
_STEP_FIELDS = (
    Field("family", "family", family_name, left=True),
    Field("arm", "best arm", word, left=True),
    Field("ttft_mean_s", "mean TTFT", seconds),
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("gain", "gain", ratio_interval),
)


def steps_table(findings: Mapping[str, Any]) -> Table:
    """One row per family of one study."""
    return tabulate(
        "break_even", f"Break-even: {VERDICTS[findings['verdict']]}", _STEP_FIELDS, findings["steps"], (NOTE,)
    )


def break_even_table(table: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point: the verdict, and the gains of all families."""
    families = [step["family"] for step in points[0].findings("break_even")["steps"]]
    fields = (
        Field("point", "point", word, left=True),
        Field("verdict", "verdict", lambda verdict: word(VERDICTS[verdict]), left=True),
        *(family_field("gain", "gain", ratio_interval, name) for name in families[1:]),
        *(family_field("token_hit_rate", "token hit rate", percent, name, 1) for name in families),
    )
    return tabulate(table, "Where position-independent caching pays", fields, map(_row, points), (NOTE,))


def _row(point: SweepPoint) -> dict[str, Any]:
    findings = point.findings("break_even")
    families = {step["family"]: step for step in findings["steps"]}
    return {"point": point.name, "verdict": findings["verdict"], "families": families}


# ------------------------------------------------------------------------------
# The figure of the analysis `break_even`: points where PIC pays, and points where an exact
# method suffices.
# ------------------------------------------------------------------------------

_COLOURS = dict(zip(VERDICTS, COLOURS, strict=False))


def draw_break_even(points: Sequence[SweepPoint]) -> Figure:
    """Draw a cell per point of a product of settings, coloured by the verdict."""
    legend = {label: _COLOURS[verdict] for verdict, label in VERDICTS.items()}
    title = "Where PIC pays: gain of repaired / plain over the best exact method"
    return draw_grid(points, title, legend, (), _cell)


def _cell(point: SweepPoint) -> GridCell:
    findings = point.findings("break_even")
    gains = {step["family"]: step["gain"] for step in findings["steps"]}
    return GridCell(_COLOURS[findings["verdict"]], f"{_short(gains['repaired'])} / {_short(gains['plain'])}")


def _short(gain: dict[str, Any] | None) -> str:
    return MISSING if gain is None else f"{gain['mean']:.2g}"


# ------------------------------------------------------------------------------
# The analysis `break_even`: whether position-independent caching pays over prefix caching and
# cached order.
# ------------------------------------------------------------------------------


def break_even_of_study(finished: Finished) -> Findings:
    """Return the families of one study and the one that suffices; None where a family has no arm that ran."""
    arms, families = finished.measured, finished.study.analyses.families.arms
    names = {arm.name for arm in arms}
    missing = [name for name in STEPS if names.isdisjoint(families[name])]
    if missing:
        return Findings({"break_even": None}, caveats=(f"no break-even: no arm of {', '.join(missing)} ran",))
    entry = break_even(arms, families).plain()
    return Findings({"break_even": entry}, tables=(steps_table(entry),))


def break_even_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that suffices at each point: one table and one figure per axis of the sweep."""
    ran = [point for point in points if (point.summary or {})["break_even"] is not None]
    summary = {"break_even": point_entries(ran, "break_even")}
    figure = draw_break_even
    return findings_by_axis("break_even", ran, break_even_table, figure, summary)


ANALYSES.add(
    Analysis(
        "break_even", break_even_of_study, needs=(ARMS, REPEAT), check=check_families, of_points=break_even_of_points
    )
)
