"""Drift test and warm-up length against series and queues with known answers."""

import numpy as np
import pytest

from spanlab.stats import ALPHA, SATURATED, STEADY, TOO_SHORT, UNSETTLED, Run, assess, changes, drift_test, mser5

QUEUES = 300


def queue(load: float, requests: int, rng: np.random.Generator, start: float = 0.0) -> Run:
    """M/D/1 with service 1 s by Lindley's recursion, its server busy with `start` seconds of work."""
    gaps = rng.exponential(1 / load, requests)
    arrived, waits, wait = np.cumsum(gaps), [], start
    for gap in np.append(gaps[1:], 0.0):
        waits.append(wait)
        wait = max(0.0, wait + 1 - gap)
    return Run(arrived, arrived + np.array(waits) + 1)


def rejections(load: float, requests: int, seeds: int) -> float:
    """Share of cells whose drift test says that the queue grows."""
    rng = np.random.default_rng([int(100 * load), requests, seeds])
    cells = [[queue(load, requests, rng) for _ in range(seeds)] for _ in range(QUEUES)]
    return sum(drift_test(cell).p < ALPHA for cell in cells) / QUEUES


def most(level: float) -> float:
    """Share of rejections that a test of this level exceeds once in a thousand times."""
    return level + 3.09 * np.sqrt(level * (1 - level) / QUEUES)


@pytest.mark.parametrize("load", [0.5, 0.9])
@pytest.mark.parametrize("seeds", [1, 3])
def test_stable_queues_are_rarely_called_growing(load: float, seeds: int):
    assert rejections(load, 800, seeds) <= most(ALPHA)


def test_a_critical_queue_at_most_doubles_the_level():
    """At load 1 the reflected walk of one seed ends at |N(0, 1)| standard errors."""
    assert rejections(1.0, 800, 1) <= most(2 * ALPHA)


def test_overloaded_queues_are_found():
    # drift of 0.1 requests per service time: 800 arrivals end at 0.1 · 800 / 1.1 = 73 waiting,
    # sqrt(2 · 800) = 40 is twice a standard error even if services were random too
    assert rejections(1.1, 800, 3) >= 0.9
    assert rejections(1.3, 800, 1) >= 0.99


@pytest.mark.parametrize(
    ("load", "seed", "p", "grows"), [(1.1, 35, 0.0064, True), (1.1, 38, 0.0118, False), (1.0, 10, 0.0332, False)]
)
def test_growth_is_shown_at_one_percent(load: float, seed: int, p: float, grows: bool):
    assessment = assess([queue(load, 200, np.random.default_rng(seed))])
    assert assessment.drift_p == pytest.approx(p, abs=5e-5)
    assert (assessment.verdict == SATURATED) == grows


def test_a_queue_that_drains_is_not_growing():
    run = queue(0.5, 400, np.random.default_rng(1), start=100.0)
    drift = drift_test([run])
    assert drift.rate_rps <= 0
    assert drift.p >= 0.5


def test_changes_are_arrivals_minus_first_tokens_by_block():
    # first tokens at 1, 3, 5, 7 while arrivals come each second from 0 to 4: blocks [0, 2], (2, 4]
    run = Run(np.arange(5.0), np.array([1.0, 3.0, 5.0, 7.0, 9.0]))
    # waiting: at 0 one; at 2, three came and one was served; at 4, five came and two were served
    assert changes(run).tolist() == [1.0, 1.0]
    assert drift_test([run]).rate_rps == pytest.approx(2 / 4)


def test_a_constant_growth_leaves_no_doubt():
    steps = np.arange(40.0)
    assert drift_test([Run(steps, 2 * steps + 1)]).p < 1e-12
    assert drift_test([Run(steps, steps + 0.5)]).p >= 0.5


@pytest.mark.parametrize("first", [0, 5, 20, 45])
def test_mser5_truncates_exactly_a_shifted_beginning(first: int):
    series = np.concatenate([np.full(first, 10.0), np.tile([0.9, 1.1, 1.0, 0.95, 1.05], 20)])
    assert mser5(series) == first


def test_mser5_is_its_definition():
    series = np.random.default_rng(5).normal(size=103) + 8 * np.exp(-np.arange(103) / 9)
    means = [series[start : start + 5].mean() for start in range(0, 100, 5)]
    scores = [np.var(means[left:]) / (20 - left) for left in range(11)]
    assert mser5(series) == 5 * int(np.argmin(scores))


def test_a_trend_without_end_is_unsettled():
    steps = np.arange(200.0)
    # served immediately, more slowly each time, but never so slowly that a request waits
    run = Run(10 * steps, 10 * steps + 0.1 + 0.01 * steps)
    assert assess([run]).verdict == UNSETTLED


def test_verdicts():
    rng = np.random.default_rng(2)
    calm = queue(0.5, 800, rng)
    assert assess([calm]).verdict == STEADY
    assert assess([calm], utilisation=0.5).verdict == STEADY
    assert assess([calm], utilisation=1.0).verdict == SATURATED
    assert assess([queue(1.5, 800, rng)]).verdict == SATURATED
    assert assess([queue(0.5, 60, rng)]).verdict == TOO_SHORT
    assert assess([queue(1.5, 90, rng)]).verdict == SATURATED


def test_requests_that_come_together_have_no_steady_state():
    together = Run(np.zeros(4), np.arange(1.0, 5.0))
    assessment = assess([together])
    assert (assessment.verdict, assessment.drift_p, assessment.warmup_requests) == (SATURATED, None, None)
    assert assess([Run(np.zeros(1), np.ones(1))]).verdict == TOO_SHORT
