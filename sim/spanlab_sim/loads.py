"""Loads from lower tiers in the serving loop: when they end, and steps that follow them layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from spanlab.core.backend import Backend, StepResult
from spanlab.core.scheduled import ScheduledStep


class Loads(Protocol):
    """What lower tiers load for the requests of one scheduler."""

    def next_arrival(self) -> int | None:
        """When the next load that a request waits for ends, if no further transfer begins; None where there is none."""
        ...

    def step_duration(self, duration_ns: int) -> int:
        """Nanoseconds of the scheduled step, which computes for `duration_ns`, with the loads that it follows."""
        ...


class LoadingBackend:
    """A backend whose steps also follow the loads that they began."""

    def __init__(self, backend: Backend, loads: Loads) -> None:
        self._backend, self._loads = backend, loads

    def resume(self) -> None:
        """As the backend."""
        self._backend.resume()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step as the backend does, and as much longer as its loads need; a step that loads is not repeated."""
        result = self._backend.execute(step, deadline_ns)
        return replace(result, duration_ns=self._loads.step_duration(result.duration_ns))

    def completed(self, step: ScheduledStep) -> None:
        """As the backend."""
        self._backend.completed(step)

    def close(self) -> None:
        """As the backend."""
        self._backend.close()
