"""Curves and table of the analysis `state_ratio`: token hit rates by the ratio of two pools, or with one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.report.cells import number, percent_interval, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.measures import token_hit_rate
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import Table
from spanlab.stats import Interval

RATIO = "store.state_ratio"


@dataclass(frozen=True)
class RatioCurves:
    """Token hit rates of every arm in one panel: its points differ in the ratio only.

    `formula`, `default`  SGLang's ratios
    `curves`   hit rates by arm and ratio, ratios increasing
    `common`   hit rate by arm with one budget for both; empty where it was not measured
    """

    panel: str
    formula: float
    default: float
    curves: Mapping[str, Mapping[float, Interval]]
    common: Mapping[str, Interval]


def ratio_curves(points: Sequence[SweepPoint]) -> list[RatioCurves]:
    """Return the curves of a sweep by panel, in the order of its points."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        name = " ".join(value for key, value in point.settings.items() if key != RATIO)
        panels.setdefault(name, []).append(point.summary or {})
    return [_curves(name, summaries) for name, summaries in panels.items()]


def _curves(panel: str, summaries: Sequence[Mapping[str, Any]]) -> RatioCurves:
    with_ratio = [summary for summary in summaries if summary["state_ratio"]["ratio"] is not None]
    ordered = sorted(with_ratio, key=lambda summary: summary["state_ratio"]["ratio"])
    without_ratio = [summary for summary in summaries if summary["state_ratio"]["ratio"] is None]
    ratios, arms = summaries[0]["state_ratio"], list(summaries[0]["arms"])
    return RatioCurves(
        panel=panel,
        formula=ratios["formula"],
        default=ratios["default"],
        curves={
            arm: {summary["state_ratio"]["ratio"]: token_hit_rate(summary["arms"][arm]) for summary in ordered}
            for arm in arms
        },
        common={arm: token_hit_rate(summary["arms"][arm]) for summary in without_ratio for arm in arms},
    )


def ratios_table(panels: Sequence[RatioCurves]) -> Table:
    """Return a row per panel and arm: one budget, the best ratio, and the measured ratios next to SGLang's."""
    fields = (
        Field("panel", "model and workload", word, left=True),
        Field("arm", "arm", word, left=True),
        Field("common", "one budget", percent_interval),
        Field("best_ratio", "best\nratio", number("g")),
        Field("best", "at the best\nratio", percent_interval),
        Field("default", "at SGLang's\ndefault", percent_interval),
        Field("formula_ratio", "SGLang's\nformula", number(".2g")),
        Field("formula", "next to\nthe formula", percent_interval),
    )
    rows = [_row(panel, arm) for panel in panels for arm in panel.curves]
    notes = (
        "token hit rates; [a, b] = 95 % interval; ratio = bytes of states ÷ bytes of KV; one budget = states and KV "
        "take from the same bytes, without a ratio",
        "SGLang's formula = 5 states of a running request ÷ KV of the mean request; shown is the closest ratio tried",
    )
    return tabulate("state_ratio", "States ÷ KV: one budget or two pools", fields, rows, notes)


def _row(panel: RatioCurves, arm: str) -> dict[str, Any]:
    curve = panel.curves[arm]
    best = max(curve, key=lambda ratio: curve[ratio].mean)
    near = {target: min(curve, key=lambda ratio: abs(ratio - target)) for target in (panel.default, panel.formula)}
    return {
        "panel": panel.panel.replace("_", " "),
        "arm": arm,
        "common": panel.common.get(arm),
        "best_ratio": best,
        "best": curve[best],
        "default": curve[near[panel.default]],
        "formula_ratio": panel.formula,
        "formula": curve[near[panel.formula]],
    }
