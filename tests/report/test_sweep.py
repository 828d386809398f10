"""The figure and table of a sweep show the numbers of the rows; labels do not overlap."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from spanlab.analyses.families import draw_winners, winners_table
from spanlab.report.sweep import SweepPoint, draw_sweep, rate_tables, spread, sweep_rows, ttft_tables
from spanlab.report.table import markdown

from ..support.figures import PROVENANCE, check_fits

ARMS = {"none": ("none", "prefixes"), "radix": ("radix", "prefixes"), "pic": ("pic", "spans anywhere")}
BUDGET, ORDER, QUESTIONS = "store.total_gib", "arrivals.order", "workload.questions_per_document"


def make_point(axis, value, rates=(0.0, 0.1, 0.7), ttft=(0.05, 0.04, 0.01), half=0.02) -> SweepPoint:
    """A point of three arms with 1,000 prompt tokens each."""
    arms = {
        name: {
            "family": family,
            "finds": finds,
            "tokens": {"prompt": 1000},
            "own_bound_tokens": 300 if finds == "prefixes" else 800,
            "token_hit_rate": rate,
            "token_hit_rate_interval": [rate - half, rate + half] if half else None,
            "ttft_s": {"mean": mean},
            "ttft_s_interval": {"mean": [mean - 0.001, mean + 0.001] if half else None},
        }
        for (name, (family, finds)), rate, mean in zip(ARMS.items(), rates, ttft, strict=True)
    }
    summary = PROVENANCE | {"seeds": [0, 1, 2] if half else [0], "arms": arms}
    return SweepPoint(axis, value, f"toy,{axis}={value}", summary)


BUDGETS = [make_point(BUDGET, 64.0, (0.0, 0.2, 0.8)), make_point(BUDGET, 4.0, (0.0, 0.1, 0.5), (0.9, 0.5, 0.02))]
ORDERS = [make_point(ORDER, "shuffled"), make_point(ORDER, "as_given", (0.0, 0.25, 0.75))]
QUESTION_POINTS = [make_point(QUESTIONS, 2.0), make_point(QUESTIONS, 5.0)]
FAILED = SweepPoint(BUDGET, -1.0, "", None, "store.total_gib=-1: expected a number above zero")


def drawn(points, field: str = "token_hit_rate") -> Figure:
    figure = draw_sweep(points, field)
    assert figure is not None
    return figure


def marks(ax) -> dict[str, list[tuple[float, float]]]:
    """Return the positions of the marks by category."""
    dots = [dots for dots in ax.collections if isinstance(dots, PathCollection)]
    return {str(dot.get_label()): [tuple(position) for position in dot.get_offsets().tolist()] for dot in dots}


def test_numbers_are_lines_over_sorted_values():
    (ax,) = drawn(BUDGETS).axes
    lines = {line.get_label(): line for line in ax.lines}
    assert lines["pic"].get_xdata().tolist() == [4, 64]
    assert lines["pic"].get_ydata().tolist() == [50, 80]
    assert lines["infinite cache:\nspans anywhere"].get_ydata().tolist() == [80, 80]
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "memory budget (GiB)", "token hit rate (%)")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["4", "64"]


def test_categories_are_dots_with_the_best_arm_on_top():
    (ax,) = drawn(ORDERS).axes
    placed = {category: [(x, round(y)) for x, y in positions] for category, positions in marks(ax).items()}
    assert placed == {"shuffled": [(0, 0), (10, 1), (70, 2)], "as_given": [(0, 0), (25, 1), (75, 2)]}
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["none", "radix", "pic"]


def test_equal_categories_do_not_overlap():
    (ax,) = drawn([make_point(ORDER, "shuffled"), make_point(ORDER, "as_given")]).axes
    first, second = marks(ax).values()
    assert [x for x, _ in first] == [x for x, _ in second]
    assert all(above[1] > below[1] for above, below in zip(first, second, strict=True))


def test_error_bars_are_the_intervals_even_if_uneven():
    point = make_point(BUDGET, 4.0)
    point.summary["arms"]["pic"]["token_hit_rate_interval"] = [0.69, 0.74]
    (ax,) = drawn([point]).axes
    reached = [segment[:, 1].tolist() for bars in ax.collections for segment in bars.get_segments()]
    assert any(ends == pytest.approx([69, 74]) for ends in reached)


def test_times_have_their_unit_and_no_bound():
    (ax,) = drawn(BUDGETS, "ttft_mean_s").axes
    lines = {line.get_label(): line for line in ax.lines}
    assert lines["none"].get_ydata().tolist() == [900, 50]
    assert ax.get_ylabel() == "mean TTFT (ms)"
    assert not any("infinite" in str(label) for label in lines)


def test_every_setting_has_a_panel_and_every_arm_a_name():
    panels = drawn([*BUDGETS, *QUESTION_POINTS, *ORDERS]).axes
    assert [ax.get_title(loc="left") for ax in panels] == [
        "by memory budget",
        "by questions per document",
        "by arrival order",
    ]
    for ax in panels[:2]:
        assert set(ARMS) <= {text.get_text() for text in ax.texts}


@pytest.mark.parametrize("field", ["token_hit_rate", "ttft_mean_s"])
@pytest.mark.parametrize(
    "points",
    [
        BUDGETS,
        ORDERS,
        [*BUDGETS, *ORDERS],
        [*BUDGETS, *QUESTION_POINTS, *ORDERS, FAILED],
        [make_point(BUDGET, 1.0, half=0)],
    ],
)
def test_the_figure_has_no_warnings_and_fits_its_frame(points, field):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fits(drawn(points, field))


def test_nothing_is_drawn_where_no_point_ran():
    assert draw_sweep([FAILED], "token_hit_rate") is None


@pytest.mark.parametrize("points", [[*BUDGETS, *ORDERS], [*ORDERS, *BUDGETS]])
def test_the_footer_has_the_settings_that_points_share(points):
    for point in BUDGETS:
        point.summary["store"] = f"{point.value} GiB for KV"
    (footer,) = (text.get_text() for text in drawn(points).texts if "toy" in text.get_text())
    assert "toy · rag (modelled) · llama" in footer
    assert "store 16 GiB for KV where not varied · 3 seeds · commit 1a2b3c4" in " ".join(footer.split())


def test_a_table_has_rates_with_intervals_and_failures():
    (table,) = rate_tables([*BUDGETS, FAILED])
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["none", "0.0 [-2.0, 2.0] %", "0.0 [-2.0, 2.0] %", "failed"],
        ["radix", "20.0 [18.0, 22.0] %", "10.0 [8.0, 12.0] %", "failed"],
        ["pic", "80.0 [78.0, 82.0] %", "50.0 [48.0, 52.0] %", "failed"],
    ]
    assert [cell.value for cell in table.rows[2]] == ["pic", 0.8, 0.5, None]
    without = [make_point(ORDER, "shuffled", half=0), make_point(ORDER, "as_given", (0.0, 0.25, 0.75), half=0)]
    assert markdown(*rate_tables(without)).splitlines()[-1] == "| `pic` | 70.0 % | 75.0 % |"
    assert ttft_tables(BUDGETS)[0].rows[2][1].text == "10.0 [9.0, 11.0] ms"


def test_rows_omit_points_that_failed():
    assert {row.value for row in sweep_rows([*BUDGETS, FAILED])} == {4.0, 64.0}


def family(name: str, speedup: float | None) -> dict:
    estimate = None if speedup is None else {"mean": speedup, "low": speedup - 0.1, "high": speedup + 0.1}
    shares = {"token_hit_rate": 0.5, "any_position_share": 0.9}
    return {"family": name, "arm": f"{name}_1", "speedup": estimate, **shares}


def winner(workload: str, gib: str, speedup: float, shown: bool = True) -> SweepPoint:
    """A point of two settings at which pic is ahead of prefixes by a factor."""
    point = make_point("workload store.total_gib", f"{workload}, {gib}")
    ratio = {"mean": speedup, "low": speedup - 0.1, "high": speedup + 0.1}
    lead = {"family": "pic", "next": "prefix_caching", "ratio": ratio, "p": 0.02, "shown": shown}
    entries = [family("prefix_caching", None), family("pic", speedup)]
    summary = point.summary | {"families": {"entries": entries, "lead": lead}}
    return replace(point, summary=summary, settings={"workload": workload, "store.total_gib": gib})


WINNERS = [winner("quality", "4", 3.0), winner("quality", "64", 2.0), winner("rag", "4", 1.05, shown=False)]


def test_winners_are_cells_of_the_grid_of_settings():
    figure = draw_winners(WINNERS)
    ax = figure.axes[0]
    assert [text.get_text() for text in ax.texts] == ["3.00 × · 50 %", "2.00 × · 50 %", "1.05 × · 50 %"]
    assert [text.get_position() for text in ax.texts] == [(0.5, 0.5), (1.5, 0.5), (0.5, 1.5)]
    assert [patch.get_alpha() for patch in ax.patches] == [1.0, 1.0, pytest.approx(0.35)]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["quality", "rag"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["4", "64"]


def test_a_withheld_speedup_is_not_shown():
    point = winner("quality", "4", 3.0, shown=False)
    point.summary["families"]["entries"][1]["speedup"] = None
    (text,) = draw_winners([point]).axes[0].texts
    assert text.get_text() == "– · 50 %"


def test_winners_fit_into_their_frame_and_table():
    names = ("prefix_caching", "checkpoints", "position_independent")
    point = winner("quality", "4", 3.0)
    point.summary["families"]["entries"] = [family(name, 3.0) for name in names]
    point.summary["families"]["lead"]["family"] = names[-1]
    check_fits(draw_winners([point]))
    table = winners_table("winners_1", WINNERS)
    assert table.rows[0][0].text == "workload=quality store.total_gib=4"
    assert [cell.text for cell in table.rows[0]][1:4] == ["pic", "pic_1", "3.00 [2.90, 3.10] ×"]


def test_combined_settings_have_a_row_per_point():
    (table,) = rate_tables(WINNERS)
    assert [row[0].text for row in table.rows] == ["quality, 4", "quality, 64", "rag, 4"]
    assert [column.name for column in table.columns] == ["point", *ARMS]
    assert draw_sweep(WINNERS, "token_hit_rate") is None


def test_spread_keeps_order_distance_and_single_centres():
    centres = np.array([0.5, 0.52, 0.9, 0.5])
    spread_centres = spread(centres, np.full(4, 0.1))
    assert spread_centres[2] == pytest.approx(0.9)
    assert np.diff(np.sort(spread_centres)).min() >= 0.1 - 1e-9
    assert spread_centres[0] < spread_centres[3] < spread_centres[1] < spread_centres[2]
    assert spread_centres[[0, 1, 3]].mean() == pytest.approx(centres[[0, 1, 3]].mean())
