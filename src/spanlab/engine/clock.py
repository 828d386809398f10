"""Clocks of a run on the engine: the machine's own, the same without idle time, or modelled step times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from spanlab.core.scheduler import StepPlan


class Clock(Protocol):
    """Nanoseconds since the run began."""

    def now(self) -> int: ...

    def wait_until(self, moment: int) -> int:
        """Let time pass up to `moment`; returns the time then."""
        ...

    def after(self, step: StepPlan) -> int:
        """The time when a step that has just been run is over."""
        ...


class WallClock:
    """The machine's monotonic clock.

    It waits awake, as servers that poll their queue do: a processor that has slept is slow for its next step, the more
    often the lighter the load, and steps would cost what no step explains.
    """

    def __init__(self) -> None:
        self._began = time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() - self._began

    def wait_until(self, moment: int) -> int:
        while (now := self.now()) < moment:
            pass  # even a sleep of nothing halts the processor
        return now

    def after(self, step: StepPlan) -> int:
        return self.now()


class SkipIdleClock:
    """The machine's monotonic clock without its idle time: a wait moves the clock to the awaited moment at once.

    Steps take the time that they take. A request that arrives while the engine is idle is scheduled at its arrival
    time under both clocks, so schedules agree, and every delay is measured work and queueing.
    """

    def __init__(self, counter: Callable[[], int] = time.monotonic_ns) -> None:
        self._counter = counter
        self._origin = counter()  # the counter's value at time 0, moved back by all skipped time

    def now(self) -> int:
        return self._counter() - self._origin

    def wait_until(self, moment: int) -> int:
        self._origin -= max(0, moment - self.now())
        return self.now()

    def after(self, step: StepPlan) -> int:
        return self.now()


class ToldClock:
    """Steps last what `duration` says, in nanoseconds: for replaying a schedule that a model of time made."""

    def __init__(self, duration: Callable[[StepPlan], int]) -> None:
        self._duration, self._now = duration, 0

    def now(self) -> int:
        return self._now

    def wait_until(self, moment: int) -> int:
        self._now = max(self._now, moment)
        return self._now

    def after(self, step: StepPlan) -> int:
        self._now += self._duration(step)
        return self._now


CLOCKS: dict[str, Callable[[], Clock]] = {"skip_idle": SkipIdleClock, "wall": WallClock}
