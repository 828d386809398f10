"""Tables of the probe."""

from probe_report import Score, answers_table

from spanlab.report.table import csv_text
from spanlab.stats import Interval


def score(low: float | None, high: float | None) -> Score:
    share = Interval(0.25, low, high)
    return Score("arm", share, None, None, Interval(1.5, None, None), share, share, None)


def test_a_difference_without_an_interval_has_no_ends():
    table = answers_table("4x31", [score(None, None)], "title")
    assert [cell.text for cell in table.rows[0] if cell.text] == [
        "arm",
        "25.0 %",
        "–",
        "–",
        "1.500",
        "+25.0",
        "+25.0",
        "–",
    ]
    assert csv_text(table).splitlines()[1] == "arm,0.25,,,,,1.5,25.0,,,25.0,,,"


def test_a_difference_is_in_points_with_its_interval():
    table = answers_table("4x31", [score(0.125, 0.5)], "title")
    assert [table.rows[0][number].text for number in (1, 7)] == ["25.0 % [12.5, 50.0]", "+25.0 [12.5, 50.0]"]
    assert csv_text(table).splitlines()[1] == "arm,0.25,0.125,0.5,,,1.5,25.0,12.5,50.0,25.0,12.5,50.0,"
