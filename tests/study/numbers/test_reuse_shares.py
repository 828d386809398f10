"""Shares of reused tokens, by hand."""

import numpy as np
import pytest

from spanlab.study.numbers import reuse_shares


def columns(rows: list[tuple[int, float, int, int]]) -> dict[str, np.ndarray]:
    """Rows of seed, arrival, prompt and reused tokens."""
    names = ("seed", "arrived_s", "prompt_tokens", "reused_tokens")
    return {name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def test_ratio_of_sums_and_mean_of_ratios_differ():
    shares = reuse_shares(columns([(0, 0.0, 1000, 0), (0, 1.0, 100, 90)]))
    assert shares["token_hit_rate"] == 90 / 1100
    assert shares["token_hit_rate_mean"] == pytest.approx(0.45)


def test_halves_show_the_start_on_an_empty_cache():
    rows = [(0, float(index), 100, 0 if index < 2 else 80) for index in range(4)]
    shares = reuse_shares(columns(rows))
    assert shares["token_hit_rate"] == 0.4
    assert shares["token_hit_rate_halves"] == [0.0, 0.8]


def test_halves_follow_arrivals_within_each_seed():
    rows = [(1, 5.0, 100, 90), (0, 0.0, 100, 10), (1, 4.0, 100, 30), (0, 9.0, 100, 70)]
    assert reuse_shares(columns(rows))["token_hit_rate_halves"] == [0.2, 0.8]


def test_a_single_request_lies_in_the_second_half():
    assert reuse_shares(columns([(0, 0.0, 100, 25)]))["token_hit_rate_halves"] == [0.0, 0.25]
