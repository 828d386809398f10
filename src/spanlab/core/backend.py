"""What a serving loop asks of whatever runs its steps: the contract of the simulated and of the real backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from spanlab.core.scheduled import ScheduledStep, Sequence


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step.

    `duration_ns`  from the end of the step before it, or from `resume`, to its own end
    `finished`     sequences whose output is complete
    `repeats`      equal decode steps that ran in a row
    `accepted`     how many drafts each of the step's `decodes` keeps; empty where none were drafted
    `phases`       seconds of its parts by name; empty where nothing is measured
    """

    duration_ns: int
    finished: list[Sequence]
    repeats: int = 1
    phases: Mapping[str, float] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)


class Backend(Protocol):
    """Runs the steps of one serving loop; it never calls the scheduler."""

    def resume(self) -> None:
        """Note that a request has arrived while nothing ran: the time before belongs to no step."""
        ...

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step that nothing interrupts.

        A step that only decodes may run up to `step.max_repeats` times, until a sequence ends or until the first end
        at or after `deadline_ns` from now, when the next request arrives; None: no request will.
        """
        ...

    def completed(self, step: ScheduledStep) -> None:
        """Follow what the policy stored of a step, and freed after it."""
        ...

    def close(self) -> None:
        """End the run: give back what requests that have ended still hold."""
        ...


def finished_after(step: ScheduledStep, repeats: int = 1) -> list[Sequence]:
    """Sequences that have their whole output once a step is over."""
    return finished_prompts(step) + [s for s in step.decodes if s.generated + repeats >= s.request.output_len]


def finished_prompts(step: ScheduledStep) -> list[Sequence]:
    """Sequences whose whole output is the token that the end of their prompt yields."""
    lasts = [chunk.sequence for chunk in step.chunks if chunk.last]
    return [sequence for sequence in lasts if sequence.generated + 1 >= sequence.request.output_len]
