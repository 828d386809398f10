"""Least squares for simulations: residuals jump between schedules, so slopes are fitted and not differenced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import qmc

Floats = NDArray[np.float64]
Residuals = Callable[[Floats], Floats]

SOFT = 3.0  #: standard deviations from which a residual counts linearly, no more by its square
Z95 = 1.96


@dataclass(frozen=True)
class Prior:
    """Normal priors of the parameters: means and standard deviations, each of shape (parameters,)."""

    mean: Floats
    sd: Floats

    def of(self, kept: NDArray[np.bool_]) -> Prior:
        """The priors of some of the parameters."""
        return Prior(self.mean[kept], self.sd[kept])


@dataclass(frozen=True)
class Surface:
    """Residuals as planes around a point: `level` + `slope` · (x - `centre`); shapes (n,), (n, d) and (d,)."""

    centre: Floats
    level: Floats
    slope: Floats

    def best(self, prior: Prior, reach: float) -> Floats:
        """The parameters of least cost within `reach` of the centre."""

        def terms(step: Floats) -> Floats:
            surprise = (self.centre + step - prior.mean) / prior.sd
            return np.concatenate([_softened(self.level + self.slope @ step), surprise])

        found = least_squares(terms, np.zeros(len(self.centre)), bounds=(-reach, reach))
        best: Floats = self.centre + found.x
        return best

    def deviations(self, prior: Prior, blocks: NDArray[np.int64]) -> Floats:
        """Standard deviations of the parameters, shape (d,), where residuals of one block depend on each other.

        A sandwich: curvature of the cost, and the scatter of its gradient between blocks (Liang and Zeger, 1986).
        """
        weights = 1 / np.sqrt(1 + (self.level / SOFT) ** 2)
        certain = np.diag(prior.sd**-2)
        curvature = (self.slope * weights[:, None]).T @ self.slope + certain
        gradients = self.slope * (weights * self.level)[:, None]
        sums = np.zeros((int(blocks.max()) + 1, len(self.centre)))
        np.add.at(sums, blocks, gradients)
        scatter = (sums - sums.mean(axis=0)).T @ (sums - sums.mean(axis=0)) + certain
        inverse = np.linalg.inv(curvature)
        deviations: Floats = np.sqrt(np.diag(inverse @ scatter @ inverse))
        return deviations

    def of(self, kept: NDArray[np.bool_]) -> Surface:
        """The surface over some of the parameters, the others fixed."""
        return Surface(self.centre[kept], self.level, self.slope[:, kept])


def cost(residuals: Floats, x: Floats, prior: Prior) -> float:
    """Soft L1 loss of the residuals, and the surprise at the parameters."""
    return float((_softened(residuals) ** 2).sum() + (((x - prior.mean) / prior.sd) ** 2).sum())


def _softened(residuals: Floats) -> Floats:
    """Signed roots of the soft L1 loss."""
    softened: Floats = np.sign(residuals) * SOFT * np.sqrt(2 * (np.sqrt(1 + (residuals / SOFT) ** 2) - 1))
    return softened


def surface(residuals: Residuals, centre: Floats, reach: float, seed: int) -> tuple[Surface, Floats, Floats]:
    """Planes through simulations within `reach` of a point; with the points, and the residuals at each."""
    count = 1 << int(np.ceil(np.log2(4 * len(centre))))
    offsets = reach * (2 * qmc.Sobol(len(centre), rng=seed).random(count) - 1)
    points = np.vstack([centre, centre + offsets])
    found = np.array([residuals(point) for point in points])
    design = np.column_stack([np.ones(len(points)), points - centre])
    planes = np.linalg.lstsq(design, found, rcond=None)[0]
    return Surface(centre, planes[0], planes[1:].T), points, found


def descend(
    residuals: Residuals, start: Floats, prior: Prior, reaches: tuple[float, ...]
) -> tuple[Floats, Surface, float]:
    """The parameters of least cost; with the last surface, and the median cost near them.

    `residuals`  in standard deviations, of shape (n,), for parameters of shape (d,)
    `reaches`    how far around the best point so far simulations look, round by round
    """
    best, found, usual = start, None, np.inf
    for seed, reach in enumerate(reaches):
        found, points, values = surface(residuals, best, reach, seed)
        costs = [cost(value, point, prior) for value, point in zip(values, points, strict=True)]
        usual = float(np.median(costs))
        proposed = found.best(prior, 2 * reach)
        good = cost(residuals(proposed), proposed, prior) <= usual
        best = proposed if good else points[int(np.argmin(costs))]
    assert found is not None, "called with one reach or more"
    return best, found, usual
