"""Search for the first value that meets targets, where more of it should never be worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spanlab.study.plan.outcome import Outcome

#: Outcomes of values; `True` asks for every run of each, not only for those that leave doubt.
Try = Callable[[Sequence[float], bool], Sequence[Outcome]]


def geometric(low: float, high: float, resolution: float) -> list[float]:
    """Values from `low` to at least `high`, each a share `resolution` above the one before, to five digits."""
    steps = max(1, math.ceil(math.log(high / low) / math.log1p(resolution) - 1e-9)) if high > low else 0
    values = [rounded_up(low * (high / low) ** (step / steps)) for step in range(steps)] if steps else []
    return sorted({*values, rounded_up(high if steps else low)})


def rounded_up(value: float, digits: int = 5) -> float:
    """The least number of so many digits that is no smaller, but for an error of rounding."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.{digits}g}")


@dataclass(frozen=True)
class Border:
    """Where a grid that goes from worst to best begins to meet the targets.

    `outcomes`  what was tried, by place on the grid
    `first`     the first place from which on all that was tried meets; None: the best does not
    """

    outcomes: dict[int, Outcome]
    first: int | None

    @property
    def reversals(self) -> list[tuple[int, int]]:
        """Places that are shown not to meet the targets, each with the nearest worse place that meets them."""
        failing = [at for at, outcome in self.outcomes.items() if outcome.fails]
        meeting = {b: [a for a, outcome in self.outcomes.items() if a < b and outcome.meets] for b in failing}
        return [(max(worse), b) for b, worse in meeting.items() if worse]


def find_border(grid: Sequence[float], points: int, try_: Try) -> Border:
    """Bisection between the values of a first round; `grid` goes from worst to best.

    Both sides of the border rest on every run, so that the search goes on where further runs move it.
    """
    last = len(grid) - 1
    places = sorted({round(at * last / (points - 1)) for at in range(points)})
    outcomes, sure = dict[int, Outcome](), set[int]()
    while places:
        every = sure.issuperset(places)
        outcomes |= zip(places, try_([grid[at] for at in places], every), strict=True)
        below, first = _border(outcomes, len(grid))
        if first - below > 1 and below >= 0:
            places = [(below + first) // 2]
        else:
            places = [at for at in (below, first) if at in outcomes and at not in sure]
            sure |= set(places)
    return Border(dict(sorted(outcomes.items())), first if first in outcomes else None)


def _border(outcomes: dict[int, Outcome], end: int) -> tuple[int, int]:
    """The last place that misses, -1 where none does, and the least from which on all meet, `end` where none does."""
    below = max((at for at, outcome in outcomes.items() if not outcome.meets), default=-1)
    return below, min((at for at in outcomes if at > below), default=end)
