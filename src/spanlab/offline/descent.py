"""Prices of memory by subgradient descent: fast at any size, and approximate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spanlab.offline.packing import Packing
from spanlab.offline.reuses import Floats

_SCALES = 24  # number of uniform start prices, each half of the previous one
_ROUNDS = 120
_TARGET = 0.03  # share by which one step aims to lower the bound; halved after steps without success
_PATIENCE = 5  # steps without success before it is halved
_MOMENTUM = 0.7


@dataclass(frozen=True)
class _Point:
    """Prices, the bound at these prices, its slope by price, and the direction of the last step."""

    prices: Floats
    value: float
    slope: Floats
    direction: Floats


def descend(packing: Packing) -> float:
    """Return the least bound found, by subgradient steps of Polyak's length with momentum."""
    point = best = _start(packing)
    target, stalled = _TARGET, 0
    for _ in range(_ROUNDS):
        point = _step(packing, point, best.value * (1 - target))
        if point.value < best.value:
            best, stalled = point, 0
            continue
        stalled += 1
        if stalled == _PATIENCE:
            point, target, stalled = replace(best, direction=0 * best.direction), target / 2, 0
    return best.value


def _step(packing: Packing, point: _Point, target: float) -> _Point:
    """Return the point where a bound of this slope would reach the target; prices stay non-negative."""
    direction = point.slope + _MOMENTUM * point.direction
    moving = np.where((point.prices <= 0) & (direction > 0), 0.0, direction)
    length = (point.value - target) / max(float((moving**2).sum()), 1e-300)
    return _point(packing, np.maximum(point.prices - length * moving, 0.0), direction)


def _start(packing: Packing) -> _Point:
    """Return the best of several prices, uniform over slots, at which all resources cost the same in total."""
    total = np.maximum(packing.capacity.sum(axis=1, keepdims=True), 1.0)
    scale = packing.unlimited_gain() / total / len(total)
    none = np.zeros_like(packing.capacity)
    points = [_point(packing, none + scale * 0.5**i, none) for i in range(_SCALES)]
    return min(points, key=lambda point: point.value)


def _point(packing: Packing, prices: Floats, direction: Floats) -> _Point:
    choice = packing.choose(prices)
    return _Point(prices, choice.value, packing.capacity - choice.usage, direction)
