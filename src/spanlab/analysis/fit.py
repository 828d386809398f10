"""From measured steps to coefficients: non-negative least squares of relative errors, judged at shapes left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from spanlab.analysis.points import Point
from spanlab.core.step_features import StepFeatures
from spanlab_sim.calibrated import TERMS

Floats = NDArray[np.float64]


def fit(points: Sequence[Point]) -> dict[str, float]:
    """Nanoseconds per unit of every term, none below zero.

    They have the least sum of squared relative errors to the medians of steps, and then are stretched, all alike, until
    the time of all repeats together is met: medians say how steps compare whatever else the machine did, but what
    queues feel is the mean, and its bursts with it (a smearing factor: Duan, JASA 1983).
    """
    coefficients = _coefficients(_counts(points), _medians(points), _means(points))
    return dict(zip(TERMS, coefficients.tolist(), strict=True))


def cross_validation_errors(points: Sequence[Point]) -> Floats:
    """Relative error of every point, predicted / measured - 1, by coefficients fitted to all shapes but its own."""
    counts, medians, means = _counts(points), _medians(points), _means(points)
    shape = np.array([point.place.shape for point in points])
    errors = np.empty(len(points))
    for own in np.unique(shape):
        here, others = shape == own, shape != own
        errors[here] = counts[here] @ _coefficients(counts[others], medians[others], means[others]) / means[here] - 1
    return errors


def hull(points: Sequence[Point]) -> dict[str, tuple[int, int]]:
    """Least and greatest value of every feature."""
    columns = zip(*(point.features for point in points), strict=True)
    return {name: (min(values), max(values)) for name, values in zip(StepFeatures._fields, columns, strict=True)}


def _counts(points: Sequence[Point]) -> Floats:
    return np.array([[term(point.features) for term in TERMS.values()] for point in points], np.float64)


def _medians(points: Sequence[Point]) -> Floats:
    return np.array([point.median_ns for point in points])


def _means(points: Sequence[Point]) -> Floats:
    return np.array([point.mean_ns for point in points])


def _coefficients(counts: Floats, medians: Floats, means: Floats) -> Floats:
    """Rows are divided by what was measured, so errors are relative; columns by their greatest, for sound numerics."""
    rows = counts / medians[:, None]
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(rows / scale, np.ones(len(rows)))
    found: Floats = coefficients / scale
    stretched: Floats = found * (means.sum() / (counts @ found).sum())
    return stretched
