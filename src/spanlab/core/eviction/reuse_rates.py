"""Rates of reuse of entries, by class and age.

An entry is at risk of being reused from one use to the next. At age a its rate of reuse is the number of reuses at
that age over the time that entries have spent at that age (a piecewise constant hazard). An entry that is evicted, or
still stored, counts with the time that it has spent: it is censored, which does not bias a hazard. Ages are cut into
two intervals per octave. The prior rate at age a is 1 / (2 · a), as for reuse distances with a heavy tail, so that the
least recently used entry has the lowest value. The prior weighs as one reuse in the estimate of all entries together;
that estimate weighs as one reuse in the estimate of each class.

The value of an entry is its reuses per time that it is stored, over the best time to continue storing it:

    index(a) = max over T > a of  P(reused before T) / E[time until it is reused or T is reached],

the Gittins index of one entry, and the greatest price per time at which storing it still pays.
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
    """The index of the interval that contains an age."""
    return 0 if age < 1 else min(_INTERVALS - 1, 1 + int(2 * math.log2(age)))


def index_of(rates: Floats) -> Floats:
    """Return the Gittins index at the start of each interval of `WIDTHS`; same shape as `rates`."""
    hazard = rates * WIDTHS
    survival = np.exp(-np.concatenate([[0.0], np.cumsum(hazard)]))
    reused = survival[:-1] - survival[1:]
    time = reused / rates
    total_reused, total_time = np.cumsum(reused), np.cumsum(time)
    before = np.arange(len(rates))
    gains = total_reused[None, :] - (total_reused - reused)[before, None]
    times = total_time[None, :] - (total_time - time)[before, None]
    is_later = np.triu(np.ones((len(rates), len(rates)), dtype=bool))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(is_later & (times > 0), gains / times, 0.0)
    index: Floats = np.maximum(ratio.max(axis=1), rates)
    return index


class ReuseClass(NamedTuple):
    """Entries with a common rate of reuse.

    `kind`   "state" or "leaf"
    `uses`   number of uses
    `inner`  whether anything is stored behind the entry
    """

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

    def has_kind(self, kind: str) -> bool:
        """Whether time of an entry of a kind was counted."""
        return any(reuse_class.kind == kind for reuse_class in self._time)

    def add_time(self, reuse_class: ReuseClass, start: int, stop: int) -> None:
        """Count the time from age `start` to age `stop`, in which an entry of a class was not reused."""
        reuse_class = reuse_class.coarse
        if reuse_class not in self._time:
            self._reuses[reuse_class], self._time[reuse_class] = np.zeros(_INTERVALS), np.zeros(_INTERVALS)
        ages = np.clip(stop - _STARTS, 0.0, WIDTHS)
        self._time[reuse_class] += ages - np.clip(start - _STARTS, 0.0, WIDTHS) if start else ages
        self._observed += 1
        if self._observed % _REFRESH == 0:
            self._index.clear()

    def add_reuse(self, reuse_class: ReuseClass, start: int, age: int) -> None:
        """Count the reuse of an entry of a class at an age, and its time since age `start`."""
        self.add_time(reuse_class, start, age)
        self._reuses[reuse_class.coarse][interval_of(age)] += 1.0

    def index(self, reuse_class: ReuseClass, age: int) -> float:
        """The Gittins index of an entry of a class and age, in reuses per time."""
        index = self._index.get(reuse_class.coarse)
        if index is None:
            index = self._index[reuse_class.coarse] = index_of(self._rates(reuse_class.coarse)).tolist()
        return index[interval_of(age)]

    def _rates(self, reuse_class: ReuseClass) -> Floats:
        none = np.zeros(_INTERVALS)
        reuses, time = sum(self._reuses.values(), none), sum(self._time.values(), none)
        common = (reuses + 1.0) / (time + 1.0 / _PRIOR)
        rates: Floats = (self._reuses.get(reuse_class, none) + 1.0) / (self._time.get(reuse_class, none) + 1.0 / common)
        return rates
