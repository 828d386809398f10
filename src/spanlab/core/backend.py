"""The contract between a serving loop and a backend, simulated or real, that runs its steps."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.scheduled import ScheduledStep, Sequence

Ends = Ordered[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    `duration_ns`  from the end of the previous step, or from `resume`, to the end of this one
    `finished`     sequences whose output is complete
    `repeats`      equal decode steps that ran in a row
    `ends`         time of the end of each of them, from the start of the first; empty where only the last is known
    `accepted`     number of accepted drafts for each of the step's `decodes`; empty without drafts
    `phases`       seconds of each phase by name; empty where nothing is measured
    """

    duration_ns: int
    finished: list[Sequence]
    repeats: int = 1
    phases: Mapping[str, float] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    ends: Ends = ()

    def end_of(self, repeat: int) -> int:
        """Return the end of a repeat, counted from 0; all take equally long where only the last end is known."""
        end = self.ends[repeat] if len(self.ends) else self.duration_ns * (repeat + 1) // self.repeats
        return min(int(end), self.duration_ns)


class Backend(Protocol):
    """Runs the steps of one serving loop; it never calls the scheduler."""

    def resume(self) -> None:
        """Note the end of an idle time, which belongs to no step."""
        ...

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step without interruption.

        A decode-only step may repeat up to `step.max_repeats` times. It repeats until a sequence finishes, or until
        the first end at or after `deadline_ns` from now, when the next request arrives. None: no request will
        arrive.
        """
        ...

    def completed(self, step: ScheduledStep) -> None:
        """Update the backend to what the policy stored for a step and freed after it."""
        ...

    def close(self) -> None:
        """End the run, and free what finished requests still hold."""
        ...


def finished_after(step: ScheduledStep, repeats: int = 1) -> list[Sequence]:
    """Return the sequences whose output is complete after a step."""
    return finished_prompts(step) + [s for s in step.decodes if s.generated + repeats >= s.request.output_len]


def finished_prompts(step: ScheduledStep) -> list[Sequence]:
    """Return the sequences whose output is complete with the token that their last chunk yields."""
    lasts = [chunk.sequence for chunk in step.chunks if chunk.last]
    return [sequence for sequence in lasts if sequence.generated + 1 >= sequence.request.output_len]
