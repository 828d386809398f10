"""Gauss-Newton least squares for simulations: residuals jump between schedules, so the caller supplies the slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SOFT = 3.0  #: standard deviations from which the loss of a residual is linear instead of quadratic
LONGEST = 0.5  #: largest change of a parameter in one iteration
FULL, AVERAGED = 8, 6  #: iterations with full steps, and then with decreasing steps, which average out the jumps


@dataclass(frozen=True)
class Prior:
    """Normal priors of the parameters: means and standard deviations, each of shape (parameters,)."""

    mean: Floats
    sd: Floats


@dataclass(frozen=True)
class Linearised:
    """Residuals in standard deviations and their slopes at a point; shapes (d,), (n,) and (n, d).

    `block_size`  residuals that count as one against the prior, since errors of neighbours have a common cause
    """

    point: Floats
    residuals: Floats
    slopes: Floats
    block_size: float

    @property
    def _weights(self) -> Floats:
        """Weights of the residuals under a pseudo-Huber loss."""
        weights: Floats = 1 / np.sqrt(1 + (self.residuals / SOFT) ** 2)
        return weights / self.block_size

    def cost(self, prior: Prior) -> float:
        """Return the pseudo-Huber loss of the residuals plus the penalty of the prior."""
        loss = 2 * SOFT**2 * (np.sqrt(1 + (self.residuals / SOFT) ** 2) - 1)
        return float(loss.sum() / self.block_size + (((self.point - prior.mean) / prior.sd) ** 2).sum())

    def _curvature(self, prior: Prior, scatter: float = 1.0) -> Floats:
        weighted = self.slopes * self._weights[:, None] / scatter
        curvature: Floats = weighted.T @ self.slopes + np.diag(prior.sd**-2)
        return curvature

    def step(self, prior: Prior) -> Floats:
        """Return the Gauss-Newton step, each component clipped to ± `LONGEST`."""
        gradient = self.slopes.T @ (self._weights * self.residuals) + (self.point - prior.mean) / prior.sd**2
        step = -np.linalg.solve(self._curvature(prior), gradient)
        return np.asarray(np.clip(step, -LONGEST, LONGEST), dtype=np.float64)

    def deviations(self, prior: Prior) -> Floats:
        """Return standard deviations of the parameters, shape (d,), widened by excess scatter of residuals."""
        scatter = float((self._weights * self.residuals**2).sum() / self._weights.sum())
        deviations: Floats = np.sqrt(np.diag(np.linalg.inv(self._curvature(prior, max(1.0, scatter)))))
        return deviations


def descend(evaluate: Callable[[Floats], Linearised], start: Floats, prior: Prior) -> Linearised:
    """Return the evaluated point of least cost; Gauss-Newton steps, full at first, then ever shorter."""
    tried = [evaluate(start)]
    for iteration in range(FULL + AVERAGED):
        gain = 1.0 if iteration < FULL else 1 / (2 + iteration - FULL)
        tried.append(evaluate(tried[-1].point + gain * tried[-1].step(prior)))
    return min(tried, key=lambda candidate: candidate.cost(prior))
