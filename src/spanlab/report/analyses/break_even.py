"""Tables of the analysis `break_even`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.analyses.families import family_field, family_name
from spanlab.report.cells import percent, ratio_interval, seconds, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import Table

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
