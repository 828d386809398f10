"""Results as JSON: what fits in a line takes one, and nothing is lost."""

import json

import pytest
from measurements import WIDTH, json_lines


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({}, 1),
        ([1, 2, 3], 1),
        ({"words": [1.5, None, True], "name": "é"}, 1),
        ([["x" * 40] * 2] * 3, 5),
        (["x" * 120], 3),
    ],
)
def test_results_take_few_lines(value, lines):
    text = json_lines(value)
    assert json.loads(text) == value
    assert text.count("\n") + 1 == lines


def test_lines_are_short_where_texts_are():
    value = {f"key {number}": {"seconds": [number / 7] * number, "unit": "s"} for number in range(12)}
    text = json_lines(value)
    assert json.loads(text) == value
    assert list(json.loads(text)) == list(value)
    assert max(map(len, text.splitlines())) <= WIDTH
