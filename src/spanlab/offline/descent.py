"""Prices of memory found step by step: quick at any size, and not always the best ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spanlab.offline.packing import Packing
from spanlab.offline.reuses import Floats

_SCALES = 24  # uniform prices that are tried, each half of the one before
_ROUNDS = 120
_HOPED = 0.03  # share of the bound that one step hopes to save; halved when steps stop helping
_PATIENCE = 5  # steps that may fail before it is
_MOMENTUM = 0.7


@dataclass(frozen=True)
class _Point:
    """Prices, the bound there, its slope by price, and the direction that led there."""

    prices: Floats
    value: float
    slope: Floats
    direction: Floats


def descend(packing: Packing) -> float:
    """The least bound found, by subgradient steps of Polyak's length with momentum."""
    at = best = _start(packing)
    hoped, stalled = _HOPED, 0
    for _ in range(_ROUNDS):
        at = _step(packing, at, best.value * (1 - hoped))
        if at.value < best.value:
            best, stalled = at, 0
            continue
        stalled += 1
        if stalled == _PATIENCE:
            at, hoped, stalled = replace(best, direction=0 * best.direction), hoped / 2, 0
    return best.value


def _step(packing: Packing, at: _Point, target: float) -> _Point:
    """Where a bound of this slope would meet the target; prices never fall below zero."""
    direction = at.slope + _MOMENTUM * at.direction
    moving = np.where((at.prices <= 0) & (direction > 0), 0.0, direction)
    length = (at.value - target) / max(float((moving**2).sum()), 1e-300)
    return _point(packing, np.maximum(at.prices - length * moving, 0.0), direction)


def _start(packing: Packing) -> _Point:
    """The best of some uniform prices, where each resource alone would cost the same."""
    total = np.maximum(packing.capacity.sum(axis=1, keepdims=True), 1.0)
    scale = packing.everything() / total / len(total)
    none = np.zeros_like(packing.capacity)
    tried = [_point(packing, none + scale * 0.5**i, none) for i in range(_SCALES)]
    return min(tried, key=lambda point: point.value)


def _point(packing: Packing, prices: Floats, direction: Floats) -> _Point:
    choice = packing.choose(prices)
    return _Point(prices, choice.value, packing.capacity - choice.usage, direction)
