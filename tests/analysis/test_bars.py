"""Verdicts, and the expected prefix of random orders."""

from itertools import permutations, product

import pytest

from spanlab.stats import Verdict, expected_prefix, verdict_of


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next((index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


@pytest.mark.parametrize(("parts", "earlier"), [(1, 1), (2, 3), (3, 1), (3, 2), (4, 1)])
def test_the_expected_prefix_equals_the_mean_over_all_orders(parts: int, earlier: int):
    """By symmetry the prompt's own order may be fixed."""
    orders = list(permutations(range(parts)))
    matches = [
        max(common(orders[0], second) for second in earlier_orders)
        for earlier_orders in product(orders, repeat=earlier)
    ]
    assert expected_prefix(parts, 7, earlier) == pytest.approx(7 * sum(matches) / len(matches))


@pytest.mark.parametrize(
    ("least", "most", "holds", "limits"),
    [
        (2.0, None, True, "≥ 2"),
        (2.1, None, False, "≥ 2.1"),
        (None, 1.9, False, "≤ 1.9"),
        (1.0, 2.0, True, "1 to 2"),
        (2.0, 2.0, True, "2"),
        (None, None, True, "reported"),
    ],
)
def test_a_verdict_compares_with_both_ends(least, most, holds, limits):
    verdict = Verdict("b", "arm", "speedup, ×", 2.0, least, most)
    assert (verdict.holds, verdict.limits, verdict.judged) == (holds, limits, limits != "reported")
    assert verdict_of(verdict.plain()) == verdict


def test_a_missed_bar_names_its_numbers():
    verdict = Verdict("near_infinite", "lru", "token hit rate", 0.5, least=0.7)
    assert verdict.sentence() == "bars.near_infinite: token hit rate of lru is 0.5, expected ≥ 0.7"
