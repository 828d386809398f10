"""Durations of the phases of a step on the device that computes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from spanlab.core.passes import is_repair, of_span
from spanlab.core.scheduled import ScheduledChunk

#: Seconds of one step by phase. Each forward counts as the first phase below `copy_s` that applies to it.
PHASES = (
    "plan_s",  # since the previous step: storing, records, scheduling
    "copy_s",  # outside forwards: span copies, rotation, copy-on-write, loads of states, application of maps
    "repair_s",
    "prefill_s",  # ordered text
    "fill_s",  # spans
    "decode_s",
)


class HostClock:
    """Clock for synchronous work: runs the work of one step and sums the time of each phase."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, work: Callable[..., None], *args: object) -> None:
        """Run work of a phase."""
        began = perf_counter()
        work(*args)
        self._seconds[phase] += perf_counter() - began

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""
        return self._seconds


class StreamClock:
    """Clock for asynchronous work of a CUDA stream, by events around each phase; idle time of the stream counts.

    Only `seconds` synchronizes, and usually without waiting, because the tokens have been read by then.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, phase: str, work: Callable[..., None], *args: object) -> None:
        """Launch work of a phase."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(*args)
        end.record()
        self._spans.append((phase, begin, end))

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase; waits for the end of all phases."""
        totals: defaultdict[str, float] = defaultdict(float)
        if self._spans and not self._spans[-1][2].query():
            self._spans[-1][2].synchronize()
        for phase, begin, end in self._spans:
            totals[phase] += begin.elapsed_time(end) * 1e-3
        return totals


def clock_of(device: torch.device) -> HostClock | StreamClock:
    """Create a clock for one step on a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


def phase_of(chunks: list[ScheduledChunk]) -> str:
    """The phase of a forward with these chunks and any decodes."""
    if not chunks:
        return "decode_s"
    if any(is_repair(chunk) for chunk in chunks):
        return "repair_s"
    return "fill_s" if all(of_span(chunk) for chunk in chunks) else "prefill_s"
