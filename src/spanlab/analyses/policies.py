"""Comparison of caching rules: the best rule of each family, and its lead over another rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished, point_entries
from spanlab.analyses.families import check_families
from spanlab.records import LOSS_CAUSES
from spanlab.report import style
from spanlab.report.sweep import SweepPoint, footer_of
from spanlab.report.table import (
    MISSING,
    Cell,
    Field,
    Table,
    byte_size,
    estimate,
    one_decimal,
    percent,
    percent_interval,
    seconds,
    tabulate,
    word,
)
from spanlab.settings.analyses import ANALYSES, ARMS, Analysis
from spanlab.stats import Interval, t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Floats = NDArray[np.float64]

#: Causes of lost tokens that no rule can avoid.
UNAVOIDABLE = ("never_seen", "out_of_reach", "last_token")


@dataclass(frozen=True)
class RuleResult:
    """One rule at one point of a study.

    `hit_rates`   reused ÷ prompt tokens, by seed
    `offline`     upper bound of the hit rate of any cache with this unit and memory; None where
                  unknown
    `infinite`    share of the prompt tokens that an infinite cache reuses
    `resident`    bytes of KV and states, mean over time and seeds
    `ttft_s`      mean, p50 and p95; None where the queue grows, or there are too few requests
    `ttft_regret_s`  mean TTFT - its lower bound for such caches; None as `offline`, and where the
                     queue grows
    `lost`        the avoidable cause to which most tokens were lost; empty where none were
    `lost_share`  its share of the prompt tokens
    """

    arm: str
    family: str
    hit_rates: tuple[float, ...]
    offline: float | None
    infinite: float
    resident: float
    ttft_s: Mapping[str, float | None]
    ttft_regret_s: float | None
    lost: str
    lost_share: float

    @property
    def hit_rate(self) -> Interval:
        """Mean over seeds with its 95 % interval, clipped to 0 to 1."""
        return t_interval(self.hit_rates).clipped()

    @property
    def regret_points(self) -> float | None:
        """Offline bound - token hit rate, in percent; None as `offline`."""
        return None if self.offline is None else 100 * (self.offline - self.hit_rate.mean)

    @property
    def of_bound(self) -> float | None:
        """Hit rate as a share of the offline bound."""
        return self.hit_rate.mean / self.offline if self.offline else None

    def plain(self) -> dict[str, Any]:
        """Return the result as an entry of `summary.json`."""
        return asdict(self) | {"hit_rate": self.hit_rate._asdict(), "of_bound": self.of_bound}


def rule_result(
    arm: str, family: str, summary: Mapping[str, Any], hit_rates: Sequence[float]
) -> RuleResult:
    """Return the result of one rule from the arm's entry in `summary.json`."""
    tokens, bounds, sizes = summary["tokens"], summary["bounds"], summary["bytes"]
    lost = {
        cause: tokens["lost_by_cause"][cause] for cause in LOSS_CAUSES if cause not in UNAVOIDABLE
    }
    main = max(lost, key=lambda cause: lost[cause])
    regret = bounds["regret_points"]
    return RuleResult(
        arm=arm,
        family=family,
        hit_rates=tuple(hit_rates),
        offline=None if regret is None else summary["token_hit_rate"] + regret / 100,
        infinite=bounds["infinite_prefix_tokens"] / tokens["prompt"],
        resident=sizes["kv_resident_mean"] + sizes["state_resident_mean"],
        ttft_regret_s=None if summary["ttft_s"]["mean"] is None else bounds["ttft_regret_s"],
        ttft_s={name: summary["ttft_s"][name] for name in ("mean", "p50", "p95")},
        lost=main if lost[main] else "",
        lost_share=lost[main] / tokens["prompt"],
    )


def best_of(rules: Sequence[RuleResult]) -> dict[str, RuleResult]:
    """Return the rule with the highest hit rate by family; families in the order of their first
    rules."""
    families = dict.fromkeys(rule.family for rule in rules)
    rules_by_family = {
        family: [rule for rule in rules if rule.family == family] for family in families
    }
    return {
        family: max(members, key=lambda rule: rule.hit_rate.mean)
        for family, members in rules_by_family.items()
    }


def lead(rule: RuleResult, other: RuleResult) -> Interval:
    """Return the lead of a rule over another in percentage points of hit rate, paired by seed;
    Student's t."""
    return t_interval(lead_by_seed(rule, other))


def lead_by_seed(rule: RuleResult, other: RuleResult) -> Floats:
    """Return the lead of a rule over another in percentage points of hit rate, shape (seeds,)."""
    points: Floats = 100 * (np.array(rule.hit_rates) - np.array(other.hit_rates))
    return points


def held_out_lead_by_seed(rules: Sequence[RuleResult], others: Sequence[RuleResult]) -> Floats:
    """Return the lead of the best of `rules` over the best of `others`, both chosen on all other
    seeds; shape (seeds,).

    So no seed judges a rule that it has chosen. Needs two seeds.
    """
    rates, other_rates = (np.array([rule.hit_rates for rule in group]) for group in (rules, others))
    other_seeds = ~np.eye(rates.shape[1], dtype=bool)
    leads = [
        rates[rates[:, seeds].mean(axis=1).argmax(), seed]
        - other_rates[other_rates[:, seeds].mean(axis=1).argmax(), seed]
        for seed, seeds in enumerate(other_seeds)
    ]
    return 100 * np.array(leads)


# ------------------------------------------------------------------------------
# The points of a sweep for the analysis `policies`: rules by workload and budget.
# ------------------------------------------------------------------------------

BUDGET = "store.total_gib"


@dataclass(frozen=True)
class PolicyPoint:
    """All rules at one point.

    `panel`  the values of all swept settings except the budget, or the workload if there are none
    `gib`    the budget; None without a limit
    """

    panel: str
    gib: float | None
    rules: tuple[RuleResult, ...]

    @property
    def name(self) -> str:
        """Panel and budget as text."""
        return self.panel if self.gib is None else f"{self.panel}, {self.gib:g} GiB"


def policy_points(points: Sequence[SweepPoint]) -> list[PolicyPoint]:
    """Return the results of the analysis at the points that ran."""
    ran = []
    for point in points:
        if point.summary is not None:
            values = [value for key, value in point.settings.items() if key != BUDGET]
            panel = " ".join(values) or point.summary["workload"]["kind"]
            findings = point.summary["policies"]
            ran.append(
                PolicyPoint(panel, findings["budget_gib"], tuple(map(rule_of, findings["rules"])))
            )
    return ran


def rule_of(stored: Mapping[str, Any]) -> RuleResult:
    """Return a rule at a point from its entry in `summary.json`."""
    values = {field.name: stored[field.name] for field in fields(RuleResult)}
    return RuleResult(**values | {"hit_rates": tuple(stored["hit_rates"])})


def panels_of(points: Sequence[PolicyPoint]) -> dict[str, list[PolicyPoint]]:
    """Group points by panel, in the given order."""
    panels: dict[str, list[PolicyPoint]] = {}
    for point in points:
        panels.setdefault(point.panel, []).append(point)
    return panels


# ------------------------------------------------------------------------------
# The figure of the analysis `policies`: the best rule of each family over resident bytes, by
# workload.
# ------------------------------------------------------------------------------

GIB = 2.0**30
_COLS = 3
_STROKES = (
    ("#56b4e9", "o"),
    ("#0072b2", "s"),
    ("#d55e00", "D"),
    ("#009e73", "^"),
    ("#cc79a7", "v"),
)
_BOUNDS = {
    "offline": ("offline bound", (0, (4, 2))),
    "infinite": ("cache without limit", (0, (1, 1.5))),
}
_TITLES = {
    "token_hit_rate": "Prompt tokens reused over resident bytes: the best rule of each family",
    "ttft_mean_s": "Mean TTFT over resident bytes: the best rule of each family",
}


def draw_policies(points: Sequence[PolicyPoint], footer: str, measure: str) -> Figure:
    """Draw a panel per workload: a line per family through its best rules by `measure`, a dot per
    rule.

    `measure`  token_hit_rate, with its bounds, or ttft_mean_s
    """
    from matplotlib.lines import Line2D

    panels = panels_of(sorted(points, key=lambda point: point.gib or 0.0))
    panels = {name: panels[name] for name in dict.fromkeys(point.panel for point in points)}
    margins = style.Margins(top=0.65, bottom=0.95)
    figure, [*axes, legend] = style.panels(
        footer,
        _TITLES[measure],
        len(panels) + 1,
        _COLS,
        (1.4, 2.55),
        margins=margins,
        hspace=0.42,
        wspace=0.3,
    )
    families = list(dict.fromkeys(rule.family for point in points for rule in point.rules))
    for ax, (name, panel_points) in zip(axes, panels.items(), strict=True):
        _draw_panel(ax, panel_points, families, measure)
        ax.set_title(name.replace("_", " "), fontsize=style.LABEL_PT, color=style.INK, loc="left")
    for ax in axes[::_COLS]:
        ax.set_ylabel(_LABELS[measure], fontsize=style.LABEL_PT)
    legend.set_axis_off()
    lines = [
        Line2D(
            [],
            [],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.5,
            label=f"best of {family}",
        )
        for family, (colour, marker) in zip(families, _STROKES, strict=False)
    ]
    lines.append(
        Line2D(
            [],
            [],
            color="#bbbbbb",
            marker="o",
            markersize=3,
            linewidth=0,
            label="every rule and budget",
        )
    )
    if measure == "token_hit_rate":
        lines += [
            Line2D([], [], color=style.INK, linestyle=dash, label=name)
            for name, dash in _BOUNDS.values()
        ]
    legend.legend(handles=lines, loc="center left", fontsize=8.5, frameon=False)
    return figure


_LABELS = {"token_hit_rate": "reused (% of prompt tokens)", "ttft_mean_s": "mean TTFT (s)"}


def _draw_panel(
    ax: Axes, points: Sequence[PolicyPoint], families: Sequence[str], measure: str
) -> None:
    all_rules = [
        rule for point in points for rule in point.rules if _value(rule, measure) is not None
    ]
    resident = np.array([rule.resident for rule in all_rules]) / GIB
    values = np.array([_value(rule, measure) for rule in all_rules], dtype=np.float64)
    ax.scatter(resident, values, s=7, color="#bbbbbb", linewidths=0)
    sign = 1.0 if measure == "token_hit_rate" else -1.0
    for family, (colour, marker) in zip(families, _STROKES, strict=False):
        shown = []  # the best rule of each point, of those in a steady state
        for point in points:
            rules = [rule for rule in point.rules if rule.family == family]
            measured = [rule for rule in rules if _value(rule, measure) is not None]
            if measured:
                shown.append(max(measured, key=lambda rule: sign * (_value(rule, measure) or 0.0)))
        x = [rule.resident / GIB for rule in shown]
        y = np.array([_value(rule, measure) for rule in shown], dtype=np.float64)
        ax.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.5, zorder=3)
        if measure == "token_hit_rate":
            rates = [rule.hit_rate for rule in shown]
            halves = [0.0 if rate.high is None else 100 * (rate.high - rate.mean) for rate in rates]
            ax.errorbar(x, y, halves, fmt="none", ecolor=colour, elinewidth=1, capsize=2, zorder=3)
    budgets = sorted(point.gib for point in points if point.gib is not None)
    if measure == "token_hit_rate":
        for bound, (_, dash) in _BOUNDS.items():
            options: dict[str, Any] = {"color": style.INK, "linewidth": 1.1, "linestyle": dash}
            # the largest bound of any rule, because units differ; points are left of their budget
            bounds = [[getattr(rule, bound) for rule in point.rules] for point in points]
            levels = [
                100 * max(value for value in values if value is not None) for values in bounds
            ]
            if len(budgets) < len(points):
                ax.axhline(max(levels), zorder=2, **options)
            else:
                begin = budgets[0] / 2.5
                ax.step([begin, *budgets], [levels[0], *levels], where="pre", zorder=2, **options)
        ax.set_ylim(0, 100)
    else:
        style.log_scale(
            ax.yaxis, *style.positive_range(np.array([_value(rule, measure) for rule in all_rules]))
        )
    if budgets:
        ax.set_xscale("log")
        ax.set_xticks(budgets, [f"{gib:g}" for gib in budgets])
        ax.minorticks_off()
        ax.set_xlim(budgets[0] / 2.5, budgets[-1] * 1.15)
    else:
        style.log_scale(ax.xaxis, resident.min(), resident.max())
    ax.set_xlabel("resident (GiB)", fontsize=style.TICK_PT)


def _value(rule: RuleResult, measure: str) -> float | None:
    return 100 * rule.hit_rate.mean if measure == "token_hit_rate" else rule.ttft_s["mean"]


# ------------------------------------------------------------------------------
# Tables of the analysis `policies`: a ranking of all rules, the best rule of each family, and
# every number.
# ------------------------------------------------------------------------------

_BOUND_NOTE = (
    "offline bound = reuse that no cache of the arm's memory and unit can exceed in this order of requests; "
    "of bound = token hit rate ÷ offline bound"
)
_TTFT_NOTE = (
    "mean TTFT − bound = how far the mean TTFT lies above that of requests which never queue and reuse all that the "
    "memory allows"
)
_LOST_NOTE = (
    "lost to = the largest cause of tokens that are not reused, as a share of the prompt tokens; causes that no rule "
    "avoids are left out: never seen, out of reach and last token"
)

_RULE_FIELDS = (
    Field("token_hit_rate", "token\nhit rate", percent_interval, "rule.hit_rate"),
    Field("of_bound", "of offline\nbound", percent, "rule.of_bound"),
    Field("regret_points", "regret,\npoints", one_decimal, "rule.regret_points", 2),
    Field("ttft_regret_s", "mean TTFT\n− bound", seconds, "rule.ttft_regret_s", 4),
    Field("ttft_p50_s", "TTFT\np50", seconds, "rule.ttft_s.p50"),
    Field("ttft_p95_s", "TTFT\np95", seconds, "rule.ttft_s.p95"),
    Field("resident_bytes", "resident", byte_size, "rule.resident", 3),
    Field(
        "lost_to",
        "lost to",
        lambda rule: (
            Cell(rule.lost, f"{rule.lost.replace('_', ' ')}, {100 * rule.lost_share:.1f} %")
            if rule.lost
            else MISSING
        ),
        "rule",
        1,
        left=True,
    ),
)


def ranking_table(points: Sequence[PolicyPoint]) -> Table:
    """Return a row per rule, best first: the share of the offline bound by workload, mean over
    budgets."""
    panels = panels_of(points)
    # each rule's mean share of the bound; None where a point has no bound
    reached = {}
    for panel, panel_points in panels.items():
        shares: dict[str, list[float | None]] = {}
        for rule in (rule for point in panel_points for rule in point.rules):
            shares.setdefault(rule.arm, []).append(rule.of_bound)
        reached[panel] = {arm: _mean(values) for arm, values in shares.items()}
    families = {rule.arm: rule.family for point in points for rule in point.rules}
    means = {arm: _mean([reached[panel].get(arm) for panel in panels]) for arm in families}
    order = sorted(families, key=lambda arm: means[arm] or 0.0, reverse=True)
    names = {panel: f"of_bound_{panel.replace(' ', '_')}" for panel in panels}
    rows = [
        {"arm": arm, "family": families[arm], "of_bound_mean": means[arm]}
        | {name: reached[panel].get(arm) for panel, name in names.items()}
        for arm in order
    ]
    fields = (
        Field("arm", "rule", word, left=True),
        Field("family", "family", word, left=True),
        *(Field(name, panel.replace("_", " "), percent) for panel, name in names.items()),
        Field("of_bound_mean", "mean", percent),
    )
    budgets = ", ".join(
        f"{gib:g}" for gib in dict.fromkeys(point.gib for point in points) if gib is not None
    )
    note = f"each number is a mean over budgets{f' of {budgets} GiB' if budgets else ''} and seeds"
    return tabulate(
        "policies", "Token hit rate ÷ offline bound, by rule", fields, rows, (_BOUND_NOTE, note)
    )


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if len(present) == len(values) else None


def best_table(points: Sequence[PolicyPoint]) -> Table:
    """A row per point and family: its best rule, and its lead over the best rule of the first
    family."""
    lead_points = estimate(
        lambda points, ends: (
            f"{points:+.1f}" if ends is None else f"{points:+.1f} [{ends[0]:+.1f}, {ends[1]:+.1f}]"
        )
    )
    fields = (
        Field("point", "point", word, left=True),
        Field("family", "family", word, "rule.family", left=True),
        Field("arm", "best rule", word, "rule.arm", left=True),
        _RULE_FIELDS[0],
        Field("lead_points", "lead over\nthe first, points", lead_points, "lead"),
        *_RULE_FIELDS[1:],
    )
    rows = []
    for point in points:
        first, *others = best_of(point.rules).values()
        rows.append({"point": point.name, "rule": first, "lead": None})
        rows += [{"point": point.name, "rule": rule, "lead": lead(rule, first)} for rule in others]
    notes = (
        "best rule = the one of the family that reuses most here; lead = points of prompt tokens that it reuses more "
        "than the best rule of the first family, same arrivals; [a, b] = 95 % interval over seeds, Student's t",
        _BOUND_NOTE,
        _TTFT_NOTE,
        _LOST_NOTE,
    )
    return tabulate("policies_best", "The best rule of each family", fields, rows, notes)


def rules_table(points: Sequence[PolicyPoint]) -> Table:
    """Every rule at every point, for the page, CSV and the tracker."""
    fields = (
        Field("point", "point", word, left=True),
        Field("arm", "rule", word, "rule.arm", left=True),
        *_RULE_FIELDS,
    )
    rows = [{"point": point.name, "rule": rule} for point in points for rule in point.rules]
    notes = (_BOUND_NOTE, _TTFT_NOTE, _LOST_NOTE)
    return tabulate("policies_rules", "Every rule at every point", fields, rows, notes)


# ------------------------------------------------------------------------------
# The analysis `policies`: caching rules by family, at one point and over all points of a sweep.
# ------------------------------------------------------------------------------

FIGURES = {"policies_tokens": "token_hit_rate", "policies_ttft": "ttft_mean_s"}


def policies_of_study(finished: Finished) -> Findings:
    """Return the rules of one study; arms outside all families, such as a baseline, are left
    out."""
    families = {
        arm: family
        for family, arms in finished.study.analyses.families.arms.items()
        for arm in arms
    }
    order = list(finished.study.analyses.families.arms)
    arms = [result.data for result in finished.results if result.data.name in families]
    rules = []
    for arm in arms:
        seeds = [arm.columns["seed"] == seed for seed in np.unique(arm.columns["seed"])]
        reused, prompt = (
            np.array([arm.columns[f"{name}_tokens"][of_seed].sum() for of_seed in seeds])
            for name in ("reused", "prompt")
        )
        rates = (reused / prompt).tolist()
        rules.append(rule_result(arm.name, families[arm.name], arm.summary, rates))
    rules.sort(key=lambda rule: order.index(rule.family))
    gib = finished.study.store.total_gib
    points = [PolicyPoint(finished.study.workload.kind, gib, tuple(rules))]
    entry = {"budget_gib": gib, "rules": [rule.plain() for rule in rules]}
    return Findings({"policies": entry}, (best_table(points),), (rules_table(points),))


def policies_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return all points: each rule's share of the offline bound, and two figures over resident
    bytes."""
    rule_points, drawing = policy_points(points), draw_policies
    return Findings(
        summary={"policies": point_entries(points, "policies")},
        tables=(ranking_table(rule_points), best_table(rule_points)),
        further=(rules_table(rule_points),),
        figures={
            name: partial(drawing, rule_points, footer_of(points), measure)
            for name, measure in FIGURES.items()
        },
    )


ANALYSES.add(
    Analysis(
        "policies",
        policies_of_study,
        needs=(ARMS,),
        check=check_families,
        of_points=policies_of_points,
    )
)
