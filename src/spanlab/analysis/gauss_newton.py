"""Least squares for simulations: residuals jump between schedules, so slopes come with the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SOFT = 3.0  #: standard deviations from which a residual counts linearly, no more by its square
LONGEST = 0.5  #: the most that a parameter moves in one iteration
FULL, AVERAGED = 8, 6  #: iterations with whole steps, and then with ever shorter ones, which averages jumps out


@dataclass(frozen=True)
class Prior:
    """Normal priors of the parameters: means and standard deviations, each of shape (parameters,)."""

    mean: Floats
    sd: Floats


@dataclass(frozen=True)
class Linear:
    """Residuals in standard deviations and their slopes at a point; shapes (d,), (n,) and (n, d).

    `alike`  residuals that count as one against the prior, since errors of neighbours have a common cause
    """

    point: Floats
    residuals: Floats
    slopes: Floats
    alike: float

    @property
    def _weights(self) -> Floats:
        """How much each residual counts: those of a pseudo-Huber loss."""
        weights: Floats = 1 / np.sqrt(1 + (self.residuals / SOFT) ** 2)
        return weights / self.alike

    def cost(self, prior: Prior) -> float:
        """Pseudo-Huber loss of the residuals, and the surprise at the parameters."""
        loss = 2 * SOFT**2 * (np.sqrt(1 + (self.residuals / SOFT) ** 2) - 1)
        return float(loss.sum() / self.alike + (((self.point - prior.mean) / prior.sd) ** 2).sum())

    def _curvature(self, prior: Prior, scatter: float = 1.0) -> Floats:
        weighted = self.slopes * self._weights[:, None] / scatter
        curvature: Floats = weighted.T @ self.slopes + np.diag(prior.sd**-2)
        return curvature

    def step(self, prior: Prior) -> Floats:
        """The way to the least cost, as far as slopes tell."""
        gradient = self.slopes.T @ (self._weights * self.residuals) + (self.point - prior.mean) / prior.sd**2
        step = -np.linalg.solve(self._curvature(prior), gradient)
        return np.asarray(np.clip(step, -LONGEST, LONGEST), dtype=np.float64)

    def deviations(self, prior: Prior) -> Floats:
        """Standard deviations of the parameters, shape (d,); residuals that scatter more than expected say less."""
        scatter = float((self._weights * self.residuals**2).sum() / self._weights.sum())
        deviations: Floats = np.sqrt(np.diag(np.linalg.inv(self._curvature(prior, max(1.0, scatter)))))
        return deviations


def descend(evaluate: Callable[[Floats], Linear], start: Floats, prior: Prior) -> Linear:
    """The best point found; Gauss-Newton steps, whole ones first, then shorter ones around their mean."""
    tried = [evaluate(start)]
    for iteration in range(FULL + AVERAGED):
        gain = 1.0 if iteration < FULL else 1 / (2 + iteration - FULL)
        tried.append(evaluate(tried[-1].point + gain * tried[-1].step(prior)))
    return min(tried, key=lambda one: one.cost(prior))
