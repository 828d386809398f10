"""Curves, table and figure of the analysis state_ratio."""

from matplotlib.backends.backend_agg import FigureCanvasAgg

from spanlab.analyses.state_ratio import RATIO, draw_ratios, ratio_curves, ratios_table
from spanlab.report.sweep import SweepPoint


def point(traffic: str, ratio: float | None, rate: float) -> SweepPoint:
    ratios = {"ratio": ratio, "default": 0.9, "formula": 2.4}
    arms = {"boundary": {"token_hit_rate": rate, "token_hit_rate_interval": [rate - 0.05, rate + 0.05]}}
    settings = {"traffic": traffic, RATIO: "null" if ratio is None else f"{ratio:g}"}
    return SweepPoint("", "", "", {"state_ratio": ratios, "arms": arms}, settings=settings)


POINTS = [
    point("quality", None, 0.7),
    point("quality", 2.0, 0.4),
    point("quality", 0.2, 0.3),
    point("quality", 0.9, 0.6),
    point("agents", 0.5, 0.2),
    point("agents", 1.0, 0.1),
]


def test_curves_are_sorted_by_ratio_and_exclude_one_budget():
    first, second = ratio_curves(POINTS)
    assert list(first.curves["boundary"]) == [0.2, 0.9, 2.0]
    assert first.common["boundary"].mean == 0.7
    assert (second.panel, second.common) == ("agents", {})


def test_the_table_names_the_best_ratio_and_those_of_sglang():
    rows = [[cell.text for cell in row] for row in ratios_table(ratio_curves(POINTS)).rows]
    assert rows[0] == [
        *("quality", "boundary", "70.0 [65.0, 75.0] %", "0.9"),
        *("60.0 [55.0, 65.0] %", "60.0 [55.0, 65.0] %", "2.4", "40.0 [35.0, 45.0] %"),
    ]
    assert rows[1][2:4] == ["–", "0.5"]


def test_the_figure_has_a_panel_per_workload():
    figure = draw_ratios(ratio_curves(POINTS), "footer")
    FigureCanvasAgg(figure).draw()
    assert [ax.get_title("left") for ax in figure.axes if ax.axison] == ["quality", "agents"]
