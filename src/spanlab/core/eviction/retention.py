"""Retention of tokens by priority and duration, as in TensorRT-LLM's retention configuration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.checks import not_negative, positive
from spanlab.core.moment import Moment

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 1, 35, 100


@dataclass(frozen=True)
class Retention:
    """Retention of tokens `[start, stop)`; `stop` None is the end of the prompt.

    `priority`  from 1, which is evicted first, to 100
    `seconds`   how long the priority holds; None: without an end
    """

    start: int = 0
    stop: int | None = None
    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None

    def check(self, path: str) -> None:
        """Raise ValueError for invalid values; `path` is the key of these settings."""
        not_negative(f"{path}.start", self.start)
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"{path}.stop={self.stop}: expected a position behind start={self.start}, or null")
        if not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            expected = f"expected a number from {MIN_PRIORITY} to {MAX_PRIORITY}"
            raise ValueError(f"{path}.priority={self.priority}: {expected}")
        positive(f"{path}.seconds", self.seconds)

    @property
    def duration_ns(self) -> int | None:
        """Duration in nanoseconds; None: without an end, as always for the default priority."""
        return None if self.seconds is None or self.priority == DEFAULT_PRIORITY else round(self.seconds * 1e9)


def parse_ranges(path: str, settings: Sequence[dict[str, Any]]) -> list[Retention]:
    """Parse ranges: objects of start, stop, priority and seconds, in order and without overlap."""
    ranges: list[Retention] = []
    for index, setting in enumerate(settings):
        key = f"{path}[{index}]"
        try:
            ranges.append(Retention(**setting))
        except TypeError as error:
            raise ValueError(f"{key}={setting}: expected an object of start, stop, priority and seconds") from error
        ranges[-1].check(key)
        if index and (ranges[-2].stop or ranges[-1].start + 1) > ranges[-1].start:
            raise ValueError(f"{key}.start={ranges[-1].start}: expected the end of the range before, or more")
    return ranges


class RetentionRules:
    """Retention that the current request sets for the blocks of its path: that of each block's first token."""

    def __init__(self, ranges: Sequence[Retention], output: Retention, block_size: int, moment: Moment) -> None:
        self._ranges, self._output, self._block_size, self._moment = ranges, output, block_size, moment
        self._starts = [retention.start for retention in ranges]
        bounds = {bound for retention in ranges for bound in (retention.start, retention.stop) if bound}
        self._changes = {self._block_from(bound) for bound in bounds}

    def at_block(self, start: int) -> Retention | None:
        """The retention of the block that starts at a position; None where the request sets none."""
        if start >= self._output_start:
            return self._output
        index = bisect_right(self._starts, start) - 1
        if index < 0:
            return None
        stop = self._ranges[index].stop
        return self._ranges[index] if stop is None or start < stop else None

    def split_depths(self, start: int, stop: int) -> list[int]:
        """Depths within a new edge `[start, stop)` at which the retention changes, increasing."""
        return sorted(depth for depth in self._changes | {self._output_start} if start < depth < stop)

    @property
    def _output_start(self) -> int:
        """The start of the first block of output tokens."""
        assert self._moment.request is not None, "entries are stored and used for a request"
        return self._block_from(self._moment.request.num_tokens)

    def _block_from(self, position: int) -> int:
        """The start of the first block that has no token before a position."""
        return -(-position // self._block_size) * self._block_size
