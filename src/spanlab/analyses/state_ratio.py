"""Curves and table of the analysis `state_ratio`: token hit rates by the ratio of two pools, or
with one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.base import Findings, Finished, point_entries
from spanlab.core.request import Request
from spanlab.model_spec import ModelSpec
from spanlab.report import style
from spanlab.report.data import token_hit_rate
from spanlab.report.sweep import SweepPoint, footer_of
from spanlab.report.table import Field, Table, number_format, percent_interval, tabulate, word
from spanlab.settings.analyses import ANALYSES, ARMS, Analysis
from spanlab.settings.study import Study
from spanlab.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    curves = []
    for name, summaries in panels.items():
        split = [summary for summary in summaries if summary["state_ratio"]["ratio"] is not None]
        split.sort(key=lambda summary: summary["state_ratio"]["ratio"])
        common = [summary for summary in summaries if summary["state_ratio"]["ratio"] is None]
        ratios, arms = summaries[0]["state_ratio"], list(summaries[0]["arms"])
        rates = {
            arm: {
                summary["state_ratio"]["ratio"]: token_hit_rate(summary["arms"][arm])
                for summary in split
            }
            for arm in arms
        }
        common_rates = {
            arm: token_hit_rate(summary["arms"][arm]) for summary in common for arm in arms
        }
        curves.append(RatioCurves(name, ratios["formula"], ratios["default"], rates, common_rates))
    return curves


def ratios_table(panels: Sequence[RatioCurves]) -> Table:
    """Return a row per panel and arm: one budget, the best ratio, and the measured ratios next to
    SGLang's."""
    fields = (
        Field("panel", "model and workload", word, left=True),
        Field("arm", "arm", word, left=True),
        Field("common", "one budget", percent_interval),
        Field("best_ratio", "best\nratio", number_format("g")),
        Field("best", "at the best\nratio", percent_interval),
        Field("default", "at SGLang's\ndefault", percent_interval),
        Field("formula_ratio", "SGLang's\nformula", number_format(".2g")),
        Field("formula", "next to\nthe formula", percent_interval),
    )
    rows = []
    for panel in panels:
        for arm, curve in panel.curves.items():
            best = max(curve, key=lambda ratio: curve[ratio].mean)
            default = min(curve, key=lambda ratio: abs(ratio - panel.default))
            formula = min(curve, key=lambda ratio: abs(ratio - panel.formula))
            row = {
                "panel": panel.panel.replace("_", " "),
                "arm": arm,
                "common": panel.common.get(arm),
                "best_ratio": best,
                "best": curve[best],
                "default": curve[default],
                "formula_ratio": panel.formula,
                "formula": curve[formula],
            }
            rows.append(row)
    notes = (
        "token hit rates; [a, b] = 95 % interval; ratio = bytes of states ÷ bytes of KV; one budget = states and KV "
        "take from the same bytes, without a ratio",
        "SGLang's formula = 5 states of a running request ÷ KV of the mean request; shown is the closest ratio tried",
    )
    return tabulate("state_ratio", "States ÷ KV: one budget or two pools", fields, rows, notes)


# ------------------------------------------------------------------------------
# SGLang's split of memory.
# ------------------------------------------------------------------------------

#: SGLang splits memory as mamba_full_memory_ratio = states ÷ KV. Its default, and its formula for a
#: balanced split: states that a running request takes (5 with its radix cache) × state bytes ÷ (KV
#: bytes per token × mean length).
SGLANG_DEFAULT = 0.9
SGLANG_SLOTS = 5


def balanced(model: ModelSpec, requests: Sequence[Request]) -> float:
    """Return the ratio at which both pools fill up together, by SGLang's formula."""
    length = np.mean([request.num_tokens + request.output_len for request in requests])
    return float(SGLANG_SLOTS * model.state_bytes / (model.kv_bytes_per_token * length))


# ------------------------------------------------------------------------------
# The figure of the analysis `state_ratio`: token hit rate over the ratio of two pools, and with
# one budget.
# ------------------------------------------------------------------------------

_COLS = 3
_STROKES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))
_MARKS = {
    "default": ("SGLang's default", (0, (1, 1.5))),
    "formula": ("SGLang's formula", (0, (5, 2))),
}


def draw_ratios(panels: Sequence[RatioCurves], footer: str) -> Figure:
    """Draw a panel per model and workload; markers at its right end are hit rates with one
    budget."""
    from matplotlib.lines import Line2D

    title = "Token hit rate by the split of memory; diamonds: one budget for states and KV"
    margins = style.Margins(top=0.95, bottom=0.95)
    figure, axes = style.panels(
        footer,
        title,
        len(panels),
        _COLS,
        (1.6, 2.45),
        margins=margins,
        share=("none", "all"),
        hspace=0.5,
    )
    arms = list(panels[0].curves)
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, panel, arms)
    for ax in axes[::_COLS]:
        ax.set_ylabel("reused (%)", fontsize=style.LABEL_PT)
    lines = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=arm)
        for arm, (colour, marker) in zip(arms, _STROKES, strict=False)
    ]
    lines += [
        Line2D([], [], color=style.INK, linestyle=dash, label=name)
        for name, dash in _MARKS.values()
    ]
    top = 1 - 0.33 / figure.get_figheight()
    figure.legend(
        handles=lines,
        loc="upper left",
        bbox_to_anchor=(0.01, top),
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return figure


def _draw_panel(ax: Axes, panel: RatioCurves, arms: Sequence[str]) -> None:
    ratios = list(panel.curves[arms[0]])
    common_x = ratios[-1] * 2
    for arm, (colour, marker) in zip(arms, _STROKES, strict=False):
        rates = list(panel.curves[arm].values())
        y = [100 * rate.mean for rate in rates]
        ends = [rate.ends or (rate.mean, rate.mean) for rate in rates]
        reach = [
            [100 * abs(end[side] - rate.mean) for end, rate in zip(ends, rates, strict=True)]
            for side in (0, 1)
        ]
        ax.errorbar(
            ratios,
            y,
            yerr=reach,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.3,
            elinewidth=0.7,
        )
        if arm in panel.common:
            ax.plot(
                [common_x],
                [100 * panel.common[arm].mean],
                color=colour,
                marker="D",
                markersize=6,
                clip_on=False,
            )
    for name, (_, dash) in _MARKS.items():
        ax.axvline(getattr(panel, name), color=style.INK, linewidth=0.9, linestyle=dash, zorder=0)
    style.log_scale(ax.xaxis, ratios[0], common_x)
    ticks = [tick for tick in ax.get_xticks() if ratios[0] <= tick <= ratios[-1]]
    ax.set_xticks([*ticks, common_x], [*(f"{tick:g}" for tick in ticks), "one"])
    ax.set_ylim(0, 100)
    ax.set_title(panel.panel.replace("_", " "), fontsize=style.TICK_PT, color=style.INK, loc="left")
    ax.set_xlabel("states ÷ KV (bytes)", fontsize=style.TICK_PT)


# ------------------------------------------------------------------------------
# The analysis `state_ratio`: two pools for states and KV by their ratio, compared with one
# shared budget.
# ------------------------------------------------------------------------------


def ratio_of_study(finished: Finished) -> Findings:
    """Return the ratio of the study and the ratios of SGLang's rules; the analysis `summary` has
    the arms."""
    study = finished.study
    rules = {
        "default": SGLANG_DEFAULT,
        "formula": balanced(study.model, finished.workload.requests),
    }
    return Findings({"state_ratio": {"ratio": study.store.state_ratio, **rules}})


def ratios_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return reuse at every ratio of a sweep, at SGLang's ratios, and with one shared budget."""
    curves = ratio_curves(points)
    return Findings(
        summary={"state_ratio": point_entries(points, "state_ratio")},
        tables=(ratios_table(curves),),
        figures={"state_ratio": partial(draw_ratios, curves, footer_of(points))},
    )


def _check(study: Study) -> None:
    """Raise ValueError for a model without states."""
    if not study.model.is_hybrid:
        raise ValueError(
            f"analyses=state_ratio with model.name={study.model.name}: expected a hybrid model"
        )


ANALYSES.add(
    Analysis("state_ratio", ratio_of_study, needs=(ARMS,), check=_check, of_points=ratios_of_points)
)
