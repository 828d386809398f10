"""How long the phases of a step last on the device that computes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Protocol

import torch

from spanlab.core.passes import is_repair, of_span
from spanlab.core.scheduled import ScheduledChunk

#: Seconds of one step by what they went to, each forward as a whole to the first below `copy_s` that it serves.
PHASES = (
    "plan_s",  # since the step before: storing, records, scheduling
    "copy_s",  # no forward: copies of spans, rotated or not, copy-on-write, states loaded, stored maps composed
    "repair_s",
    "prefill_s",  # ordered text
    "fill_s",  # spans
    "decode_s",
)


class PhaseClock(Protocol):
    """Runs the work of one step, and adds up what each phase took."""

    def run(self, phase: str, work: Callable[..., None], *given: object) -> None:
        """Do some work of a phase."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase; waits until all of them are over."""
        ...


class HostClock:
    """For work that is done when its call returns."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, work: Callable[..., None], *given: object) -> None:
        """Do some work of a phase."""
        began = perf_counter()
        work(*given)
        self._seconds[phase] += perf_counter() - began

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""
        return self._seconds


class StreamClock:
    """For work that a CUDA stream does later: events stand between the phases, and time in which it has none counts.

    Nothing waits before `seconds` is asked for, and mostly nothing then, as the tokens were read by that time.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, phase: str, work: Callable[..., None], *given: object) -> None:
        """Launch some work of a phase."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(*given)
        end.record()
        self._spans.append((phase, begin, end))

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase; waits until all of them are over."""
        found: defaultdict[str, float] = defaultdict(float)
        if self._spans and not self._spans[-1][2].query():
            self._spans[-1][2].synchronize()
        for phase, begin, end in self._spans:
            found[phase] += begin.elapsed_time(end) * 1e-3
        return found


def clock_of(device: torch.device) -> PhaseClock:
    """A clock for one step on a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


def phase_of(chunks: list[ScheduledChunk]) -> str:
    """The phase that a forward of some chunks, and of what decodes with them, counts as."""
    if not chunks:
        return "decode_s"
    if any(is_repair(chunk) for chunk in chunks):
        return "repair_s"
    return "fill_s" if all(of_span(chunk) for chunk in chunks) else "prefill_s"
