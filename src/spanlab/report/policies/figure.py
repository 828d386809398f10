"""The figure of the analysis `policies`: the best rule of each family over resident bytes, by workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.policies import RuleResult
from spanlab.report.drawing import scales, style
from spanlab.report.policies.points import PolicyPoint, panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2.0**30
_COLS = 3
_STROKES = (("#56b4e9", "o"), ("#0072b2", "s"), ("#d55e00", "D"), ("#009e73", "^"), ("#cc79a7", "v"))
_BOUNDS = {"offline": ("offline bound", (0, (4, 2))), "infinite": ("cache without limit", (0, (1, 1.5)))}
_TITLES = {
    "token_hit_rate": "Prompt tokens reused over resident bytes: the best rule of each family",
    "ttft_mean_s": "Mean TTFT over resident bytes: the best rule of each family",
}


def draw_policies(points: Sequence[PolicyPoint], footer: str, measure: str) -> Figure:
    """Draw a panel per workload: a line per family through its best rules by `measure`, a dot per rule.

    `measure`  token_hit_rate, with its bounds, or ttft_mean_s
    """
    panels = panels_of(sorted(points, key=lambda point: point.gib or 0.0))
    panels = {name: panels[name] for name in dict.fromkeys(point.panel for point in points)}
    margins = style.Margins(top=0.65, bottom=0.95)
    figure, [*axes, legend] = style.panels(
        footer, _TITLES[measure], len(panels) + 1, _COLS, (1.4, 2.55), margins=margins, hspace=0.42, wspace=0.3
    )
    families = list(dict.fromkeys(rule.family for point in points for rule in point.rules))
    for ax, (name, panel_points) in zip(axes, panels.items(), strict=True):
        _draw_panel(ax, panel_points, families, measure)
        ax.set_title(name.replace("_", " "), fontsize=style.LABEL_PT, color=style.INK, loc="left")
    for ax in axes[::_COLS]:
        ax.set_ylabel(_LABELS[measure], fontsize=style.LABEL_PT)
    legend.set_axis_off()
    _legend(legend, families, measure)
    return figure


_LABELS = {"token_hit_rate": "reused (% of prompt tokens)", "ttft_mean_s": "mean TTFT (s)"}


def _draw_panel(ax: Axes, points: Sequence[PolicyPoint], families: Sequence[str], measure: str) -> None:
    all_rules = [rule for point in points for rule in point.rules if _value(rule, measure) is not None]
    resident = np.array([rule.resident for rule in all_rules]) / GIB
    values = np.array([_value(rule, measure) for rule in all_rules], dtype=np.float64)
    ax.scatter(resident, values, s=7, color="#bbbbbb", linewidths=0)
    for family, (colour, marker) in zip(families, _STROKES, strict=False):
        family_rules = [[rule for rule in point.rules if rule.family == family] for point in points]
        _draw_family(ax, [_best(rules, measure) for rules in family_rules], measure, colour, marker)
    if measure == "token_hit_rate":
        for bound in _BOUNDS:
            _draw_bound(ax, points, bound)
        ax.set_ylim(0, 100)
    else:
        scales.log_scale(ax.yaxis, *scales.positive_range(np.array([_value(rule, measure) for rule in all_rules])))
    _scale_bytes(ax, sorted(point.gib for point in points if point.gib is not None), resident)
    ax.set_xlabel("resident (GiB)", fontsize=style.TICK_PT)


def _scale_bytes(ax: Axes, budgets: Sequence[float], resident: NDArray[np.float64]) -> None:
    """Set ticks at the budgets, or by the range of resident bytes without budgets."""
    if not budgets:
        scales.log_scale(ax.xaxis, resident.min(), resident.max())
        return
    ax.set_xscale("log")
    ax.set_xticks(budgets, [f"{gib:g}" for gib in budgets])
    ax.minorticks_off()
    ax.set_xlim(budgets[0] / 2.5, budgets[-1] * 1.15)


def _value(rule: RuleResult, measure: str) -> float | None:
    return 100 * rule.hit_rate.mean if measure == "token_hit_rate" else rule.ttft_s["mean"]


def _best(rules: Sequence[RuleResult], measure: str) -> RuleResult | None:
    """Return the rule with most reuse or the lowest TTFT; None where no rule has a steady state."""
    measured = [rule for rule in rules if _value(rule, measure) is not None]
    sign = 1.0 if measure == "token_hit_rate" else -1.0
    return max(measured, key=lambda rule: sign * (_value(rule, measure) or 0.0), default=None)


def _draw_family(ax: Axes, rules: Sequence[RuleResult | None], measure: str, colour: str, marker: str) -> None:
    shown = [rule for rule in rules if rule is not None]
    x = [rule.resident / GIB for rule in shown]
    y = np.array([_value(rule, measure) for rule in shown], dtype=np.float64)
    ax.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.5, zorder=3)
    if measure == "token_hit_rate":
        halves = [0.0 if rate.high is None else 100 * (rate.high - rate.mean) for rate in (r.hit_rate for r in shown)]
        ax.errorbar(x, y, yerr=halves, fmt="none", ecolor=colour, elinewidth=1, capsize=2, zorder=3)


def _draw_bound(ax: Axes, points: Sequence[PolicyPoint], bound: str) -> None:
    """Draw the largest bound of any rule by budget, because units differ; points are left of their budget."""
    options: dict[str, Any] = {"color": style.INK, "linewidth": 1.1, "linestyle": _BOUNDS[bound][1], "zorder": 2}
    bounds = [[getattr(rule, bound) for rule in point.rules] for point in points]
    levels = [100 * max(value for value in values if value is not None) for values in bounds]
    budgets = [point.gib for point in points if point.gib is not None]
    if len(budgets) < len(points):
        ax.axhline(max(levels), **options)
    else:
        ax.step([budgets[0] / 2.5, *budgets], [levels[0], *levels], where="pre", **options)


def _legend(ax: Axes, families: Sequence[str], measure: str) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=colour, marker=marker, markersize=5, linewidth=1.5, label=f"best of {family}")
        for family, (colour, marker) in zip(families, _STROKES, strict=False)
    ]
    lines.append(Line2D([], [], color="#bbbbbb", marker="o", markersize=3, linewidth=0, label="every rule and budget"))
    if measure == "token_hit_rate":
        lines += [Line2D([], [], color=style.INK, linestyle=dash, label=name) for name, dash in _BOUNDS.values()]
    ax.legend(handles=lines, loc="center left", fontsize=8.5, frameon=False)
