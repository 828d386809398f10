"""Tables of the analysis `break_even`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report import cells
from spanlab.report.measures import interval
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import MISSING, Cell, Column, Table

#: Labels of verdicts, in the order of the legend. Where only plain PIC pays, repair costs as much as PIC gains.
VERDICTS = {
    "prefix": "prefix caching suffices",
    "cached_order": "cached order suffices",
    "plain": "only plain PIC pays",
    "repaired": "repaired PIC pays",
}
NOTE = (
    "gain = mean TTFT of the best exact arm ÷ that of the family's best arm, same requests; of cached order: over "
    "prefix caching; a family pays where the 95 % interval of its gain lies above 1.05"
)
_STEP_COLUMNS = (
    Column("family", "family", left=True),
    Column("arm", "best arm", left=True),
    Column("ttft_mean_s", "mean TTFT"),
    Column("token_hit_rate", "token\nhit rate"),
    Column("gain", "gain"),
)


def steps_table(findings: Mapping[str, Any]) -> Table:
    """One row per family of one study."""
    rows = tuple(
        (
            cells.word(_family_text(step["family"])),
            cells.word(step["arm"]),
            cells.seconds(step["ttft_mean_s"]),
            cells.percent(step["token_hit_rate"]),
            gain_cell(step["gain"]),
        )
        for step in findings["steps"]
    )
    return Table("break_even", f"Break-even: {VERDICTS[findings['verdict']]}", _STEP_COLUMNS, rows, (NOTE,))


def break_even_table(table: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point: the verdict, and the gains of all families."""
    families = [step["family"] for step in break_even_of(points[0])["steps"]]
    columns = (
        Column("point", "point", left=True),
        Column("verdict", "verdict", left=True),
        *(Column(f"gain_{name}", f"gain\n{_family_text(name)}") for name in families[1:]),
        *(Column(f"token_hit_rate_{name}", f"token hit rate\n{_family_text(name)}", 1) for name in families),
    )
    return Table(table, "Where position-independent caching pays", columns, tuple(map(_row, points)), (NOTE,))


def break_even_of(point: SweepPoint) -> Mapping[str, Any]:
    """Return the findings of the analysis at a point that ran."""
    assert point.summary is not None, "only points that ran are shown"
    findings: Mapping[str, Any] = point.summary["break_even"]
    return findings


def gain_cell(gain: Mapping[str, Any] | None) -> Cell:
    """A gain with its interval."""
    return MISSING if gain is None else cells.ratio(gain["mean"], interval((gain["low"], gain["high"])))


def _row(point: SweepPoint) -> tuple[Cell, ...]:
    findings = break_even_of(point)
    return (
        cells.word(" ".join(f"{key}={value}" for key, value in point.settings.items())),
        cells.word(VERDICTS[findings["verdict"]]),
        *(gain_cell(step["gain"]) for step in findings["steps"][1:]),
        *(cells.percent(step["token_hit_rate"]) for step in findings["steps"]),
    )


def _family_text(family: str) -> str:
    return family.replace("_", " ")
