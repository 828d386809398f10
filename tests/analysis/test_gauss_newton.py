"""Least squares with given slopes: exact lines, jumps, outliers, and parameters that only the prior determines."""

import numpy as np
import pytest

from spanlab.analyses.twin_fit import Linearised, Prior, descend

RANDOM = np.random.default_rng(3)
SLOPES = RANDOM.normal(size=(200, 2))
TRUE = np.array([0.7, -0.4])
WIDE = Prior(np.zeros(2), np.full(2, 100.0))


def line(noise=0.0, jumps=0.0):
    def evaluate(point):
        level = SLOPES @ (point - TRUE) + noise * RANDOM.normal(size=200)
        return Linearised(point, level + jumps * np.sin(1e4 * level), SLOPES, block_size=1.0)

    return evaluate


def test_a_line_is_met_at_once():
    assert descend(line(), np.zeros(2), WIDE).point == pytest.approx(TRUE, abs=1e-3)


def test_jumps_are_averaged_out():
    best = descend(line(jumps=0.3), np.zeros(2), WIDE)
    assert best.point == pytest.approx(TRUE, abs=0.1)


def test_outliers_count_little():
    def evaluate(point):
        level = SLOPES @ (point - TRUE)
        level[:10] += 1000 * SLOPES[:10, 0]
        return Linearised(point, level, SLOPES, block_size=1.0)

    assert descend(evaluate, np.zeros(2), WIDE).point == pytest.approx(TRUE, abs=0.4)


def test_a_parameter_without_slope_keeps_its_prior():
    prior = Prior(np.array([0.0, 0.3]), np.array([100.0, 0.5]))
    flat = SLOPES * [1, 0]
    best = descend(lambda point: Linearised(point, flat @ (point - TRUE), flat, 1.0), prior.mean, prior)
    assert best.point == pytest.approx([TRUE[0], 0.3], abs=1e-3)
    assert best.deviations(prior)[1] == pytest.approx(0.5)


def test_deviations_are_those_of_linear_regression():
    best = line(noise=2.0)(TRUE)
    residuals = best.residuals
    weights = 1 / np.sqrt(1 + (residuals / 3) ** 2)
    scatter = (weights * residuals**2).sum() / weights.sum()
    covariance = np.linalg.inv((SLOPES * weights[:, None]).T @ SLOPES) * scatter
    assert best.deviations(WIDE) == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-3)


def test_blocks_of_residuals_widen_intervals():
    single = line(noise=1.0)(TRUE)
    blocked = Linearised(single.point, single.residuals, single.slopes, block_size=25.0)
    assert blocked.deviations(WIDE) == pytest.approx(5 * single.deviations(WIDE), rel=1e-3)
