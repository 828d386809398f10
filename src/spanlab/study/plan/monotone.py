"""Search for the first value that meets the targets, along an axis on which outcomes should be monotone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from spanlab.report.units import rounded_up
from spanlab.study.plan.outcome import Outcome

#: Returns outcomes of values; with `True` after all runs of each, otherwise further runs only where unclear.
Try = Callable[[Sequence[float], bool], Sequence[Outcome]]


def geometric(low: float, high: float, resolution: float) -> list[float]:
    """Return values from `low` to at least `high` in steps of at most the share `resolution`, to five digits."""
    steps = max(1, math.ceil(math.log(high / low) / math.log1p(resolution) - 1e-9)) if high > low else 0
    values = [rounded_up(low * (high / low) ** (step / steps)) for step in range(steps)] if steps else []
    return sorted({*values, rounded_up(high if steps else low)})


@dataclass(frozen=True)
class Border:
    """The border at which a grid, ordered from worst to best, begins to meet the targets.

    `grid`      the values
    `outcomes`  outcomes of the tried values, by index on the grid
    `first`     the first index from which all tried values meet the targets; None: the best value does not
    """

    grid: Sequence[float]
    outcomes: dict[int, Outcome]
    first: int | None

    @property
    def value(self) -> float | None:
        """The value at the border; None where the best value does not meet the targets."""
        return None if self.first is None else self.grid[self.first]

    @property
    def curve(self) -> list[tuple[float, Outcome]]:
        """Every tried value with its outcome, in increasing order."""
        return sorted([(self.grid[index], outcome) for index, outcome in self.outcomes.items()], key=itemgetter(0))

    @property
    def reversals(self) -> list[tuple[int, int]]:
        """Pairs of indices: the nearest worse value that meets the targets, and a value that is shown to fail them."""
        failing = [index for index, outcome in self.outcomes.items() if outcome.fails]
        meeting = {b: [a for a, outcome in self.outcomes.items() if a < b and outcome.meets] for b in failing}
        return [(max(worse), b) for b, worse in meeting.items() if worse]

    def continued(self, better: Border) -> Border:
        """Return this border with a better grid behind it, whose first value is the last one of this grid."""
        offset = len(self.grid) - 1
        assert self.grid[offset] == better.grid[0], "both grids have the value at which they meet"
        outcomes = self.outcomes | {index + offset: outcome for index, outcome in better.outcomes.items()}
        first = None if better.first is None else better.first + offset
        return Border([*self.grid, *better.grid[1:]], outcomes, first)

    def caveats(self, search: str, values: str) -> list[str]:
        """Caveats about reversals; `values` is a format for a value that meets the targets and one that does not."""
        pairs = [(self.grid[a], self.grid[b]) for a, b in self.reversals]
        return [f"{search}: not monotone beyond the intervals: {values.format(*pair)}" for pair in pairs]


def find_border(grid: Sequence[float], points: int, try_: Try) -> Border:
    """Return the border, by bisection between the `points` values of a first round; `grid` goes from worst to best.

    Both sides of the border are confirmed with all runs. The search continues where these move the border.
    """
    last = len(grid) - 1
    indices = sorted({round(point * last / (points - 1)) for point in range(points)})
    outcomes, sure = dict[int, Outcome](), set[int]()
    while indices:
        every = sure.issuperset(indices)
        outcomes |= zip(indices, try_([grid[index] for index in indices], every), strict=True)
        last_miss, first = _border(outcomes, len(grid))
        if first - last_miss > 1 and last_miss >= 0:
            indices = [(last_miss + first) // 2]
        else:
            indices = [index for index in (last_miss, first) if index in outcomes and index not in sure]
            sure |= set(indices)
    return Border(grid, dict(sorted(outcomes.items())), first if first in outcomes else None)


def _border(outcomes: dict[int, Outcome], end: int) -> tuple[int, int]:
    """Return the last index that misses, or -1, and the least index from which all meet, or `end`."""
    last_miss = max((index for index, outcome in outcomes.items() if not outcome.meets), default=-1)
    return last_miss, min((index for index in outcomes if index > last_miss), default=end)
