"""Measured repairs at both ends of their budget: all tokens of spans are full recompute, none are plain reuse."""

from itertools import product

import pytest

from .factories import arm, make_small, permutations, questions, run
from .oracles import error
from .test_cache_blend import FORMS as DEVIATIONS
from .test_query_aware import FORMS as COPIES

LENGTHS, LAYERS = (20, 9, 33), 6
CASES = {
    **{name: ("cache_blend_15", {"kind": "deviation"} | form, {}) for name, form in DEVIATIONS.items()},
    **{f"query-aware, {name}": ("query_aware_16", {"kind": "attention"}, form) for name, form in COPIES.items()},
    "neighbour-aware": ("neighbour_aware_16", {"kind": "neighbours"}, {}),
}


#: A deviation writes the keys and values of its check layer, however few tokens it chooses.
BUDGETS = [*product(CASES, [1.0]), *((case, 0.0) for case in CASES if case not in DEVIATIONS)]


@pytest.mark.parametrize(("case", "ratio"), BUDGETS)
def test_everything_repaired_is_full_recompute_and_nothing_plain_reuse(case, ratio):
    name, repair, spans = CASES[case]
    requests = questions(permutations(3), LENGTHS, output=2)
    strategy = arm(name, 16, repair | {"ratio": ratio}, **spans)
    result = run(make_small(layers=LAYERS), strategy, requests)
    assert error(result, *requests, blocks=not ratio) < 1e-4
