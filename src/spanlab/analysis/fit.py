"""Coefficients of step times by non-negative least squares of relative errors, cross-validated by shape."""

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
    """Return nanoseconds per unit of every term, none below zero.

    The coefficients minimise the sum of squared relative errors to the medians of steps. Then one common factor scales
    them to the total time of all repeats: medians compare steps whatever else the machine did, but queues depend on
    the mean, bursts included (a smearing factor: Duan, JASA 1983).
    """
    coefficients = _coefficients(_counts(points), _medians(points), _means(points))
    return dict(zip(TERMS, coefficients.tolist(), strict=True))


def cross_validation_errors(points: Sequence[Point]) -> Floats:
    """Return the relative error of every point, predicted / measured - 1, by a fit to all shapes but its own."""
    counts, medians, means = _counts(points), _medians(points), _means(points)
    shape = np.array([point.step_id.shape for point in points])
    errors = np.empty(len(points))
    for test_shape in np.unique(shape):
        test, train = shape == test_shape, shape != test_shape
        errors[test] = counts[test] @ _coefficients(counts[train], medians[train], means[train]) / means[test] - 1
    return errors


def hull(points: Sequence[Point]) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest value of every feature."""
    columns = zip(*(point.features for point in points), strict=True)
    return {name: (min(values), max(values)) for name, values in zip(StepFeatures._fields, columns, strict=True)}


def _counts(points: Sequence[Point]) -> Floats:
    return np.array([[term(point.features) for term in TERMS.values()] for point in points], np.float64)


def _medians(points: Sequence[Point]) -> Floats:
    return np.array([point.median_ns for point in points])


def _means(points: Sequence[Point]) -> Floats:
    return np.array([point.mean_ns for point in points])


def _coefficients(counts: Floats, medians: Floats, means: Floats) -> Floats:
    """Fit with rows divided by measured times, for relative errors, and columns by their maximum, for conditioning."""
    rows = counts / medians[:, None]
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(rows / scale, np.ones(len(rows)))
    fitted: Floats = coefficients / scale
    scaled: Floats = fitted * (means.sum() / (counts @ fitted).sum())
    return scaled
