"""Curves and table of the analysis `state_ratio`: token hit rates by the ratio of two pools, or with one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.report import cells
from spanlab.report.measures import interval
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import MISSING, Cell, Column, Table

RATIO = "store.state_ratio"


@dataclass(frozen=True)
class HitRate:
    """A token hit rate with the ends of its 95 % interval, where it has one."""

    value: float
    ends: tuple[float, float] | None


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
    curves: Mapping[str, Mapping[float, HitRate]]
    common: Mapping[str, HitRate]


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
        curves={arm: {summary["state_ratio"]["ratio"]: _hit_rate(summary, arm) for summary in ordered} for arm in arms},
        common={arm: _hit_rate(summary, arm) for summary in without_ratio for arm in arms},
    )


def _hit_rate(summary: Mapping[str, Any], arm: str) -> HitRate:
    arm_summary = summary["arms"][arm]
    return HitRate(arm_summary["token_hit_rate"], interval(arm_summary["token_hit_rate_interval"]))


def ratios_table(panels: Sequence[RatioCurves]) -> Table:
    """Return a row per panel and arm: one budget, the best ratio, and the measured ratios next to SGLang's."""
    columns = (
        Column("panel", "model and workload", left=True),
        Column("arm", "arm", left=True),
        Column("common", "one budget"),
        Column("best_ratio", "best\nratio"),
        Column("best", "at the best\nratio"),
        Column("default", "at SGLang's\ndefault"),
        Column("formula_ratio", "SGLang's\nformula"),
        Column("formula", "next to\nthe formula"),
    )
    rows = [_row(panel, arm) for panel in panels for arm in panel.curves]
    notes = (
        "token hit rates; [a, b] = 95 % interval; ratio = bytes of states ÷ bytes of KV; one budget = states and KV "
        "take from the same bytes, without a ratio",
        "SGLang's formula = 5 states of a running request ÷ KV of the mean request; shown is the closest ratio tried",
    )
    return Table("state_ratio", "States ÷ KV: one budget or two pools", columns, tuple(rows), notes)


def _row(panel: RatioCurves, arm: str) -> tuple[Cell, ...]:
    curve = panel.curves[arm]
    best = max(curve, key=lambda ratio: curve[ratio].value)
    near = {target: min(curve, key=lambda ratio: abs(ratio - target)) for target in (panel.default, panel.formula)}
    return (
        cells.word(panel.panel.replace("_", " ")),
        cells.word(arm),
        _cell(panel.common[arm]) if arm in panel.common else MISSING,
        Cell(best, f"{best:g}"),
        _cell(curve[best]),
        _cell(curve[near[panel.default]]),
        Cell(panel.formula, f"{panel.formula:.2g}"),
        _cell(curve[near[panel.formula]]),
    )


def _cell(rate: HitRate) -> Cell:
    return cells.percent_between(rate.value, rate.ends)
