"""States captured while tokens are computed, at positions that are unknown when a request is admitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Progress:
    """Intervals of captured states, in tokens of prompt and output together; 0: no such state.

    `chunk`     a state at its last multiple in every chunk of a prompt
    `interval`  a state at every multiple of it in the output
    `newest`    a state at its last multiple in the output, which replaces the previous one
    """

    chunk: int = 0
    interval: int = 0
    newest: int = 0

    @property
    def every(self) -> int:
        """Greatest common divisor of the intervals in the output; 0 where it has no states."""
        return gcd(self.interval, self.newest)

    def positions(self, prompt: int, start: int, stop: int) -> Sequence[int]:
        """Return the positions in (start, stop] at which computing `[start, stop)` captures a state, increasing."""
        positions = []
        if self.chunk and start < prompt:
            end = min(stop, prompt) // self.chunk * self.chunk
            positions += [end] if end > start else []
        every = self.every
        if every and stop > prompt:
            first = max(start, prompt) // every * every + every
            positions += [position for position in range(first, stop + 1, every) if self._in_output(position)]
        return positions

    def _in_output(self, position: int) -> bool:
        return self.stays(position) or bool(self.newest and position % self.newest == 0)

    def stays(self, position: int) -> bool:
        """Whether a state in the output stays stored when later ones are captured."""
        return bool(self.interval and position % self.interval == 0)

    def equal_steps(self, reached: Iterable[int]) -> int:
        """Return how many decode steps in a row are equal; the first one reaches the positions `reached`.

        One if the first step captures a state, else the steps before the next one that may capture a state.
        """
        every = self.every
        if not every:
            return 1 << 62
        return min([every - position % every if position % every else 1 for position in reached], default=1)

    def max_states(self, output: int) -> int:
        """Return the most states that a running request holds for an output of `output` tokens."""
        return bool(self.newest) + (output // self.interval + 1 if self.interval else 0)


def merge_progress(intervals: Sequence[Progress]) -> Progress | None:
    """Merge the intervals of several placements; None where there are none."""
    if not intervals:
        return None
    return Progress(*(max(units) for units in zip(*map(astuple, intervals), strict=True)))
