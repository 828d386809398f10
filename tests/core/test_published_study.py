"""The published study's placement: its rounding, first minima and restarts, against the recurrence in plain loops."""

import numpy as np
import pytest

from spanlab.core.placement.dynamic_program import place, published_bins, solve_as_published
from spanlab.model_spec import tokens


def plain_recurrence(histogram, count) -> list[int]:
    """Solve with Python float operations in the published order, with the first minimum in s."""
    last_bin = len(histogram) - 1
    share = histogram / histogram.sum()
    mass, moment = np.cumsum(share).tolist(), np.cumsum(share * np.arange(len(share))).tolist()
    cost, layers = moment, []
    for _ in range(min(count, last_bin)):
        best, split = [0.0], [0]
        for j in range(1, last_bin + 1):
            options = [cost[s - 1] + moment[j] - (moment[s - 1]) - s * (mass[j] - mass[s - 1]) for s in range(1, j + 1)]
            best.append(min(options))
            split.append(1 + options.index(min(options)))
        cost = best
        layers.append(split)
    chosen, j = set(), last_bin
    for split in reversed(layers):
        chosen.add(split[j])
        j = split[j] - 1  # -1 is the last bin again
    return sorted(chosen - {0})


def decayed_histogram(rng, bins, observations) -> np.ndarray:
    """Return a decayed histogram of depths; two thirds are on every third bin, so that bins without mass remain."""
    histogram = np.zeros(bins + 1)
    for _ in range(observations):
        histogram *= 0.99
        depth = int(rng.integers(0, bins + 1))
        histogram[depth if rng.random() < 0.3 else depth // 3 * 3] += 1
    return histogram


@pytest.mark.parametrize("seed", range(60))
def test_published_bins_equal_the_plain_recurrence(seed):
    rng = np.random.default_rng(seed)
    bins = int(rng.integers(1, 40))
    histogram = decayed_histogram(rng, bins, int(rng.integers(1, 80)))
    for count in (1, 2, 3, 8, bins // 2 + 1, bins, bins + 5):
        assert published_bins(histogram, count) == plain_recurrence(histogram, count)


def test_rounding_decides_between_placements_without_loss():
    """With a state for every depth all exact costs are zero; the published sums place states where no match ended."""
    histogram = decayed_histogram(np.random.default_rng(4), 30, 40)
    depths = np.flatnonzero(histogram[1:]) + 1
    published = published_bins(histogram, 30)
    exact = place(np.arange(1, 31), histogram[1:], 30).positions()
    assert exact == depths.tolist()
    assert set(published) - {1, *exact}
    assert published == plain_recurrence(histogram, 30)


def test_first_of_equal_splits_wins():
    assert published_bins(np.array([0.0, 1.0, 1.0]), 1) == [1]
    assert published_bins(np.array([4.0, 0.0, 0.0, 0.0]), 2) == [1]


def test_hand_worked_histogram_of_exact_sums():
    histogram = np.array([0.0, 0, 0, 4, 0, 3, 0, 0, 1])
    # one state at 3 loses 2 · 3 + 5, one at 5 loses 12 + 3
    assert published_bins(histogram, 1) == [3]
    assert published_bins(histogram, 2) == [3, 5]
    assert solve_as_published(histogram, 64, 2, tokens()).positions() == [192, 320]
    assert solve_as_published(histogram, 64, 2, tokens()).positions_within(200) == [192]
