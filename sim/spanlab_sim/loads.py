"""Loads from lower tiers in the serving loop: their ends, and steps that follow them layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from spanlab.core.backend import Backend, StepResult
from spanlab.core.scheduled import ScheduledStep


class Loads(Protocol):
    """Loads from lower tiers for the requests of one scheduler."""

    def next_arrival(self) -> int | None:
        """Return when the next awaited load ends, if no further transfer begins; None where there is none."""
        ...

    def step_duration(self, duration_ns: int) -> int:
        """Nanoseconds of the scheduled step, which computes for `duration_ns`, with the loads that it follows."""
        ...


class LoadingBackend:
    """A backend whose steps also wait for the loads that they began."""

    def __init__(self, backend: Backend, loads: Loads) -> None:
        self._backend, self._loads = backend, loads

    def resume(self) -> None:
        """Call the backend's `resume`."""
        self._backend.resume()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step and extend it by the wait for its loads; a step that loads is not repeated."""
        result = self._backend.execute(step, deadline_ns)
        return replace(result, duration_ns=self._loads.step_duration(result.duration_ns))

    def completed(self, step: ScheduledStep) -> None:
        """Call the backend's `completed`."""
        self._backend.completed(step)

    def close(self) -> None:
        """Call the backend's `close`."""
        self._backend.close()
