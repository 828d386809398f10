"""The table and figures of methods: visible columns, hidden columns, and figures without data."""

import numpy as np
import pytest

from spanlab.analyses.method_data import ArmAnswers, MethodData, References, floor_entry, method_entry
from spanlab.analyses.method_data import budgets as budgets_of
from spanlab.analyses.methods import budgets_tables, draw_benefit, draw_budgets, methods_table, pairs_table
from spanlab.report.table import markdown

QUESTIONS = 40
FULL = 3 + np.sin(np.arange(QUESTIONS))
NOISE = np.cos(7 * np.arange(QUESTIONS))
#: Loss above full recompute, mean TTFT in seconds, computed tokens.
ARMS = {
    "none": (0.0, 0.9, 450),
    "none_view": (2.0, 0.2, 60),
    "gold_view": (-0.6, 0.35, 160),
    "radix": (0.0, 0.7, 350),
    "pic": (0.9, 0.2, 60),
    "lego_link_4": (0.6, 0.24, 76),
    "lego_link_16": (0.4, 0.3, 124),
    "lego_link_64": (0.1, 0.5, 300),
    "cache_blend_15": (0.5, 0.4, 120),
    "cache_blend_50": (0.2, 0.6, 250),
}


def answers(name: str, added_loss: float, ttft: float, computed: int) -> ArmAnswers:
    nll = FULL + added_loss + (0.4 * NOISE if added_loss else 0)
    scores = {"nll": nll, "kl": np.abs(added_loss * (1 + 0.3 * NOISE)), "top1": np.full(QUESTIONS, 1 - added_loss / 4)}
    tokens = np.full(QUESTIONS, computed)
    family = name.rstrip("0123456789_")
    return ArmAnswers(name, family, ttft * (1 + 0.1 * NOISE), np.full(QUESTIONS, 450), tokens, 1 << 20, scores)


@pytest.fixture
def data() -> MethodData:
    arms = {name: answers(name, *numbers) for name, numbers in ARMS.items()}
    compared = References(arms["none"], arms["none_view"], answers("none", 0.0, 1.0, 450), np.arange(QUESTIONS) // 2)
    entries = {name: method_entry(arm, compared) for name, arm in arms.items()}
    return MethodData(entries, floor_entry(compared), "none", "none_view", "gold_view", "pic_answers · a test")


def test_the_table_shows_what_was_measured(data):
    table = methods_table(data)
    shown = {column.name: column.heading for column in table.columns}
    assert shown["benefit_kept"]
    assert (shown["exact"], shown["f1"], shown["choice"]) == ("", "", "")  # no arm wrote an answer
    rows = {row[0].value: dict(zip(shown, row, strict=True)) for row in table.rows}
    assert set(rows) == {*ARMS, "floor"}
    assert rows["pic"]["benefit_kept"].value == pytest.approx(0.55, abs=0.02)
    assert rows["radix"]["gold_loss_change"].text.endswith("·")  # not shown
    assert not rows["pic"]["gold_loss_change"].text.endswith("·")
    assert rows["floor"]["ttft_s"].value is None
    assert "| `pic` |" in markdown(table)


def test_pairs_show_whether_they_differ():
    pair = {"first": "pic", "second": "ape", "mean": 0.1, "low": -0.1, "high": 0.3, "shown": False}
    (row,) = pairs_table([pair]).rows
    assert row[-1].text == "not shown"


def test_every_method_is_a_point_between_levels(data):
    figure = draw_benefit(data)
    (ax,) = figure.axes
    assert "benefit" in ax.get_ylabel()
    labels = {text.get_text() for text in ax.texts}
    assert {"full recompute", "no passages", "gold alone", "pic", "lego_link_16"} <= labels
    assert "none_view" not in labels


def test_loss_is_drawn_without_benefits(data):
    for entry in data.entries.values():
        entry["benefit_kept"] = None
    assert "gold loss" in draw_benefit(data).axes[0].get_ylabel()


def test_budgets_of_one_method_are_one_line(data):
    lines = budgets_of(data.methods)
    assert {name: [budget for budget, _ in line] for name, line in lines.items()} == {
        "lego_link": ["4", "16", "64"],
        "cache_blend": ["15", "50"],
    }
    assert draw_budgets(data) is not None


def test_the_table_of_budgets_has_the_figures_points(data):
    (table,) = budgets_tables(data)
    assert table.name == "methods_budgets"
    named = [(method.value, budget.value) for method, budget, *_ in table.rows]
    assert named == [
        ("pic", ""),
        *(("cache_blend", ratio) for ratio in ("15", "50")),
        *(("lego_link", k) for k in ("4", "16", "64")),
    ]
    columns = [column.name for column in table.columns]
    assert "ttft_s" not in columns
    tokens = [row[columns.index("computed_tokens")].value for row in table.rows]
    assert tokens == [ARMS[f"{method}_{budget}".rstrip("_")][2] for method, budget in named]


def test_single_budgets_have_no_figure_and_no_table(data):
    single = MethodData({"pic": data.entries["pic"]}, data.floor, "none", None, None, "")
    assert draw_budgets(single) is None
    assert budgets_tables(single) == ()
