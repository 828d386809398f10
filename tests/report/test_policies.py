"""Tables and figure of the analysis policies."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from spanlab.analyses.policies import (
    BUDGET,
    PolicyPoint,
    RuleResult,
    best_table,
    draw_policies,
    policy_points,
    ranking_table,
    rules_table,
)
from spanlab.report.sweep import SweepPoint

GIB = 2.0**30
TTFT = {"mean": 0.5, "p50": 0.4, "p95": 1.5}


def rule(arm: str, family: str, rates: tuple[float, ...], offline: float | None = 0.8) -> RuleResult:
    return RuleResult(arm, family, rates, offline, 0.9, 7 * GIB, TTFT, 0.4, "kv_evicted", 0.1)


def points(gib: tuple[float, ...] = (8.0, 16.0)) -> list[PolicyPoint]:
    """Two workloads; `mine` leads `lru` by ten points at each."""
    ours = (rule("mine", "ours", (0.4, 0.5)), rule("odd", "ours", (0.1, 0.1), None))
    rules = (rule("lru", "engines", (0.3, 0.4)), *ours)
    return [PolicyPoint(panel, size, rules) for panel in ("quality", "agents") for size in gib]


def column(table, name: str) -> list[str]:
    index = [column.name for column in table.columns].index(name)
    return [row[index].text for row in table.rows]


def test_the_ranking_sorts_by_the_share_of_the_bound():
    table = ranking_table(points())
    assert column(table, "arm") == ["mine", "lru", "odd"]
    assert column(table, "of_bound_agents") == ["56.2 %", "43.7 %", "–"]
    assert column(table, "of_bound_mean") == ["56.2 %", "43.7 %", "–"]
    assert "8, 16 GiB" in table.notes[1]


def test_the_best_rule_leads_over_the_first_family():
    table = best_table(points((8.0,)))
    assert column(table, "point") == ["quality, 8 GiB"] * 2 + ["agents, 8 GiB"] * 2
    assert column(table, "arm") == ["lru", "mine"] * 2
    assert column(table, "lead_points")[:2] == ["–", "+10.0 [+10.0, +10.0]"]
    assert column(table, "regret_points")[:2] == ["45.0", "35.0"]
    assert column(table, "lost_to")[0] == "kv evicted, 10.0 %"


def test_every_rule_at_every_point_is_listed():
    assert len(rules_table(points()).rows) == 12


def test_points_of_a_sweep_are_read_from_summaries():
    stored = [result.plain() for result in points()[0].rules]
    settings = {"traffic": "quality", BUDGET: "8"}
    swept = SweepPoint(
        "",
        "",
        "",
        {"policies": {"budget_gib": 8.0, "rules": stored}, "workload": {"kind": "quality"}},
        settings=settings,
    )
    failed = SweepPoint("", "", "", None, "failed", settings)
    assert policy_points([swept, failed]) == points()[:1]


@pytest.mark.parametrize(("measure", "bounds"), [("token_hit_rate", [80.0, 90.0]), ("ttft_mean_s", [])])
def test_the_figure_has_panels_by_workload_lines_by_family(measure: str, bounds: list[float]):
    figure = draw_policies(points(), "footer", measure)
    FigureCanvasAgg(figure).draw()
    shown = [ax for ax in figure.axes if ax.axison]
    assert [ax.get_title("left") for ax in shown] == ["quality", "agents"]
    lines = [line for line in shown[0].lines if len(line.get_xdata()) > 1]
    steps = [line for line in lines if line.get_drawstyle() == "steps-pre"]
    assert [max(map(float, line.get_ydata())) for line in steps] == pytest.approx(bounds)
    assert len([line for line in lines if line.get_marker() in ("o", "s")]) == 2
