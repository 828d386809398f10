"""Thinned products keep all cases, and the quick ones have every value or every pair of values."""

from itertools import combinations, product

import pytest

from .products import every_pair, in_turn

AXES = [("a", "b", "c"), (1, 16), ({}, {"keys": "raw"})]  # values need not be hashable


@pytest.mark.parametrize(("thin", "together", "quick"), [(in_turn, 1, 3), (every_pair, 2, 6)])
def test_quick_cases_have_all_values_that_stand_together(thin, together, quick):
    cases = thin(*AXES)
    assert [case.values for case in cases] == [*product(*AXES)]
    chosen = [case.values for case in cases if not case.marks]
    assert len(chosen) == quick
    for columns in combinations(range(len(AXES)), together):
        for values in product(*(AXES[column] for column in columns)):
            assert any(tuple(case[column] for column in columns) == values for case in chosen)
