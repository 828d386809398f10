"""States that are taken as tokens are computed, at positions that nobody knows when a request is admitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Progress:
    """Units of positions in tokens of prompt and output together; 0: no such state.

    `chunk`     a state at the last multiple of it in every chunk of a prompt
    `interval`  a state at every multiple of it in the output
    `newest`    the state at the last multiple of it in the output; it takes the place of the one before
    """

    chunk: int = 0
    interval: int = 0
    newest: int = 0

    @property
    def every(self) -> int:
        """States in the output stand at multiples of it alone; 0 where there are none."""
        return gcd(self.interval, self.newest)

    def positions(self, prompt: int, start: int, stop: int) -> Sequence[int]:
        """Positions in (start, stop] of which computing tokens `[start, stop)` takes a state, increasing."""
        found = []
        if self.chunk and start < prompt:
            end = min(stop, prompt) // self.chunk * self.chunk
            found += [end] if end > start else []
        every = self.every
        if every and stop > prompt:
            first = max(start, prompt) // every * every + every
            found += [position for position in range(first, stop + 1, every) if self._in_output(position)]
        return found

    def _in_output(self, position: int) -> bool:
        return self.stays(position) or bool(self.newest and position % self.newest == 0)

    def stays(self, position: int) -> bool:
        """Whether a state in the output is kept beside later ones."""
        return bool(self.interval and position % self.interval == 0)

    def equal_steps(self, reached: Iterable[int]) -> int:
        """How many decode steps in a row do the same, where the first one reaches these positions.

        One where it takes a state, else those before the next step that may take one.
        """
        every = self.every
        if not every:
            return 1 << 62
        return min([every - position % every if position % every else 1 for position in reached], default=1)

    def most_held(self, output: int) -> int:
        """Most states of an output of so many tokens that a running request holds."""
        return bool(self.newest) + (output // self.interval + 1 if self.interval else 0)


def together(parts: Sequence[Progress]) -> Progress | None:
    """What several placements take; None where there are none."""
    if not parts:
        return None
    return Progress(*(max(units) for units in zip(*map(astuple, parts), strict=True)))
