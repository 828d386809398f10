"""What requests say about how long their tokens are kept: TensorRT-LLM's retention configuration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.checks import not_negative, positive

LEAST, USUAL, MOST = 1, 35, 100


@dataclass(frozen=True)
class Retention:
    """How tokens `[start, stop)` are kept; `stop` None is the end of the prompt.

    `priority`  from 1, which leaves first, to 100
    `seconds`   how long it lasts; None: without an end
    """

    start: int = 0
    stop: int | None = None
    priority: int = USUAL
    seconds: float | None = None

    def check(self, path: str) -> None:
        """Refuse what makes no sense; `path` is the key of these settings."""
        not_negative(f"{path}.start", self.start)
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"{path}.stop={self.stop}: expected a position behind start={self.start}, or null")
        if not LEAST <= self.priority <= MOST:
            raise ValueError(f"{path}.priority={self.priority}: expected a number from {LEAST} to {MOST}")
        positive(f"{path}.seconds", self.seconds)

    @property
    def lasts_ns(self) -> int | None:
        """Nanoseconds until it ends; the usual priority has no end."""
        return None if self.seconds is None or self.priority == USUAL else round(self.seconds * 1e9)


def parsed(path: str, given: Sequence[dict[str, Any]]) -> list[Retention]:
    """Ranges from settings: objects of start, stop, priority and seconds, in order, none of which overlap."""
    found: list[Retention] = []
    for at, one in enumerate(given):
        key = f"{path}[{at}]"
        try:
            found.append(Retention(**one))
        except TypeError as error:
            raise ValueError(f"{key}={one}: expected an object of start, stop, priority and seconds") from error
        found[-1].check(key)
        if at and (found[-2].stop or found[-1].start + 1) > found[-1].start:
            raise ValueError(f"{key}.start={found[-1].start}: expected the end of the range before, or more")
    return found


class Retentions:
    """What is said about the blocks of a path: a block is kept as its first token is."""

    def __init__(self, ranges: Sequence[Retention], output: Retention, block_size: int) -> None:
        self._ranges, self._output, self._block_size = ranges, output, block_size
        self._starts = [one.start for one in ranges]
        self._ends = {self._block_from(end) for one in ranges for end in (one.start, one.stop) if end}

    def of(self, start: int, prompt: int) -> Retention | None:
        """What is said about the block that starts at a position; None: nothing.

        `prompt`  tokens of the path that are the prompt; the rest is output
        """
        if start >= self._block_from(prompt):
            return self._output
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        stop = self._ranges[at].stop
        return self._ranges[at] if stop is None or start < stop else None

    def cuts(self, start: int, stop: int, prompt: int) -> list[int]:
        """Depths within a new edge at which something else is said, increasing."""
        return sorted(cut for cut in self._ends | {self._block_from(prompt)} if start < cut < stop)

    def _block_from(self, position: int) -> int:
        """Where the first block starts that has no token before a position."""
        return -(-position // self._block_size) * self._block_size
