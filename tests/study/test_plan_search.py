"""The search of a plan by itself: borders on a grid, reversals, shaken arrivals, errors of one long run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from spanlab.analyses.plan_points import Border, Outcome, find_border, geometric, shake
from spanlab.settings.analyses import SloSettings
from spanlab.stats import block_estimates, drawn_counts


@dataclass(frozen=True)
class Tried:
    meets: bool
    fails: bool


def border(meets: Callable[[float, bool], bool], size: int, points: int = 5) -> tuple[Border, list[float]]:
    grid, tried = [float(value) for value in range(size)], []

    def try_(values: Sequence[float], every: bool) -> list[Tried]:
        tried.extend(values)
        return [Tried(is_met, not is_met) for is_met in (meets(value, every) for value in values)]

    return find_border(grid, points, try_), tried


@pytest.mark.parametrize("size", [2, 3, 7, 64, 500])
def test_border_is_found_wherever_it_lies(size: int):
    for least in range(size + 1):
        result, tried = border(lambda value, every, least=least: value >= least, size)
        assert result.first == (least if least < size else None)
        assert len(set(tried)) <= 6 + np.log2(size)
        assert result.reversals == []


def test_reversal_is_reported_and_not_trusted():
    result, _ = border(lambda value, every: value in (0, 25) or value >= 90, 101)
    assert result.first == 90
    assert {(25, 50), (25, 75), (25, 89)} <= set(result.reversals)


def test_border_that_further_runs_move_is_followed():
    result, _ = border(lambda value, every: value >= (40 if every else 30), 101)
    assert result.first == 40


def test_grid_spans_its_range_at_its_resolution():
    grid = geometric(0.3, 70, 0.05)
    assert grid[0] >= 0.3
    assert 70 <= grid[-1] <= 70.01
    assert max(b / a for a, b in pairwise(grid)) <= 1.0501
    assert geometric(2.0, 2.0, 0.05) == [2.0]


def test_shaken_arrivals_stay_near_and_groups_in_order():
    rng = np.random.default_rng(5)
    times, groups = np.sort(rng.integers(0, 10**9, 400)), rng.integers(0, 20, 400)
    reach = (times[-1] - times[0]) / 399 / 2
    moved = shake(times, groups, 1)
    assert moved.min() >= 0
    assert len(set(moved - times)) > 100
    assert abs(moved - times).max() <= reach + np.abs(np.diff(times)).max()
    assert np.array_equal(moved, shake(times, groups, 1))
    assert not np.array_equal(moved, shake(times, groups, 2))
    for group in range(20):
        assert (np.diff(moved[groups == group]) >= 0).all()


def test_block_errors_equal_explicit_resampling():
    values = np.random.default_rng(3).exponential(1.0, 200)
    estimates, blocks = block_estimates(values), 20
    assert estimates is not None
    by_block = values.reshape(blocks, -1)
    draws = [np.repeat(by_block, counts.astype(int), axis=0).ravel() for counts in drawn_counts(blocks)]
    for name, statistic in (
        ("mean", np.mean),
        ("p50", lambda drawn: np.percentile(drawn, 50, method="inverted_cdf")),
        ("p95", lambda drawn: np.percentile(drawn, 95, method="inverted_cdf")),
    ):
        error = np.std([statistic(drawn) for drawn in draws]) * np.sqrt(blocks / (blocks - 1))
        assert estimates[name].error == pytest.approx(error, rel=1e-9), name
    assert estimates["mean"].value == values.mean()
    assert estimates["p95"].value == np.percentile(values, 95)


def test_correlated_delays_have_wider_errors():
    alone = np.random.default_rng(4).exponential(1.0, 3000)
    together = np.repeat(alone[:30], 100)
    assert block_estimates(together)["mean"].error > 5 * block_estimates(alone)["mean"].error
    assert block_estimates(np.full(3000, np.nan)) is None


def outcome(*runs: tuple[float, float], limit: float, drawn: bool, grows: Sequence[bool] = ()) -> Outcome:
    estimates = [{"ttft": {"mean": list(run)}} for run in runs]
    all_grow = [*grows, *[False] * (len(runs) - len(grows))]
    results = [
        {"estimates": by_delay, "blocks": 30, "grows": grow} for by_delay, grow in zip(estimates, all_grow, strict=True)
    ]
    return Outcome(None, SloSettings(ttft_mean_s=limit).targets, results, drawn)


def test_targets_are_met_by_upper_end_of_interval():
    runs = [(1.0, 0.1), (1.2, 0.1), (1.1, 0.1)]
    mean, spread = 1.1, 0.1
    by_draws = 4.302652729911275 * spread / 3**0.5
    high = outcome(*runs, limit=9, drawn=True).intervals["ttft_mean_s"].high
    assert high == pytest.approx(mean + by_draws)
    path = outcome(*runs, limit=9, drawn=False).intervals["ttft_mean_s"].high
    assert path > mean + 2.045 * (0.1**2 + spread**2 / 3) ** 0.5 * 0.99
    assert not outcome(*runs, limit=high - 1e-9, drawn=True).meets
    assert outcome(*runs, limit=high + 1e-9, drawn=True).meets
    assert not outcome(*runs, limit=9, drawn=True, grows=[True, True]).meets
    assert outcome(*runs, limit=9, drawn=True, grows=[True]).meets


@pytest.mark.parametrize("drawn", [True, False])
def test_interval_of_few_runs_is_not_cut(drawn: bool):
    interval = outcome((0.1, 1.0), (5.0, 1.0), limit=9, drawn=drawn).intervals["ttft_mean_s"]
    assert interval.low < 0
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)
