"""How soon entries are reused: rates of reuse by class and age.

An entry is at risk of being reused from one use to the next. At age a its rate of reuse is the number of reuses at
that age over the time that entries have spent at that age (a piecewise constant hazard). An entry that is evicted, or
still stored, counts with the time that it has spent: it is censored, which does not bias a hazard. Ages are cut into
two intervals per octave. Before anything is known, the rate at age a is 1 / (2 · a), as for reuse distances with a
heavy tail: then whatever was used longest ago is worth least. That prior counts as one reuse for all entries
together; what all of them show counts as one reuse for each class.

What an entry is worth is its reuses per time that it occupies, over the best time to go on storing it:

    index(a) = max over T > a of  P(reused before T) / E[time until it is reused or T comes],

the index of Gittins for one entry, and the greatest price per time at which storing it still pays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_INTERVALS = 64
_EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(_INTERVALS) / 2)])
WIDTHS = np.diff(_EDGES)
_STARTS = _EDGES[:-1]
_PRIOR = 1.0 / (_EDGES[:-1] + _EDGES[1:])  # 1 / (2 · a) in the middle of an interval
_REFRESH = 16  # observations between two estimates


def interval_of(age: int) -> int:
    """The number of the interval that an age lies in."""
    return 0 if age < 1 else min(_INTERVALS - 1, 1 + int(2 * math.log2(age)))


def index_of(rates: Floats) -> Floats:
    """The index at the beginning of each interval of `WIDTHS`, for the rates of reuse in them; both of one shape."""
    hazard = rates * WIDTHS
    survival = np.exp(-np.concatenate([[0.0], np.cumsum(hazard)]))
    reused = survival[:-1] - survival[1:]
    spent = reused / rates
    gained, waited = np.cumsum(reused), np.cumsum(spent)
    before = np.arange(len(rates))
    gains = gained[None, :] - (gained - reused)[before, None]
    times = waited[None, :] - (waited - spent)[before, None]
    behind = np.triu(np.ones((len(rates), len(rates)), dtype=bool))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(behind & (times > 0), gains / times, 0.0)
    return np.maximum(ratio.max(axis=1), rates)


class ReuseClass(NamedTuple):
    """Entries that are reused alike: of one kind, with as many uses, with or without something stored behind them."""

    kind: str
    uses: int
    inner: bool

    @property
    def coarse(self) -> ReuseClass:
        """The class by uses 0, 1, 2, 3, 4 to 7, 8 to 15 and so on."""
        return self if self.uses < 4 else self._replace(uses=1 << self.uses.bit_length() - 1)


class ReuseRates:
    """Reuses and time at risk by class and age."""

    def __init__(self) -> None:
        self._reuses: dict[ReuseClass, Floats] = {}
        self._time: dict[ReuseClass, Floats] = {}
        self._index: dict[ReuseClass, list[float]] = {}
        self._observed = 0

    def knows(self, kind: str) -> bool:
        """Whether an entry of a kind was reused or evicted."""
        return any(known.kind == kind for known in self._time)

    def spent(self, found: ReuseClass, start: int, stop: int) -> None:
        """An entry of a class was stored, and not reused, from one age to another."""
        found = found.coarse
        if found not in self._time:
            self._reuses[found], self._time[found] = np.zeros(_INTERVALS), np.zeros(_INTERVALS)
        ages = np.clip(stop - _STARTS, 0.0, WIDTHS)
        self._time[found] += ages - np.clip(start - _STARTS, 0.0, WIDTHS) if start else ages
        self._observed += 1
        if self._observed % _REFRESH == 0:
            self._index.clear()

    def reused(self, found: ReuseClass, start: int, age: int) -> None:
        """An entry of a class was reused at an age; its time from `start` on has not been counted."""
        self.spent(found, start, age)
        self._reuses[found.coarse][interval_of(age)] += 1.0

    def index(self, found: ReuseClass, age: int) -> float:
        """Reuses per time that an entry of a class and age is worth."""
        index = self._index.get(found.coarse)
        if index is None:
            index = self._index[found.coarse] = index_of(self._rates(found.coarse)).tolist()
        return index[interval_of(age)]

    def _rates(self, found: ReuseClass) -> Floats:
        none = np.zeros(_INTERVALS)
        reuses, time = sum(self._reuses.values(), none), sum(self._time.values(), none)
        common = (reuses + 1.0) / (time + 1.0 / _PRIOR)
        return (self._reuses.get(found, none) + 1.0) / (self._time.get(found, none) + 1.0 / common)
