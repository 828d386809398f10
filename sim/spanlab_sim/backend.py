"""The modelled backend: turns a StepPlan into nanoseconds and says whose output is complete."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from spanlab.core.scheduler import Scheduler, Sequence, StepPlan
from spanlab_sim.timing import StepFeatures, TimingModel


def features(step: StepPlan, state_bytes: int) -> StepFeatures:
    """What a step does, in the integers that a timing model reads."""
    tokens = pairs = context = captures = firsts = 0
    for sequence, start, stop, captured in step.chunks:
        size = stop - start
        tokens += size
        context += start
        pairs += size * (start + stop + 1) // 2  # sum of t + 1 for t in [start, stop)
        captures += len(captured)
        firsts += stop == sequence.target
    decode_context = sum([sequence.prompt + sequence.generated for sequence in step.decodes])
    return StepFeatures(
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        num_prefills=len(step.chunks),
        num_decodes=len(step.decodes),
        decode_context=decode_context,
        num_first_tokens=firsts,
        loaded_state_bytes=len(step.loads) * state_bytes,
        captured_state_bytes=captures * state_bytes,
        prefill_context=context,
    )


class ModelledBackend:
    """Runs steps by a timing model. `jump` lets equal decode steps pass as one."""

    def __init__(self, timing: TimingModel, state_bytes: int, jump: bool = True) -> None:
        self._timing, self._state_bytes, self._jump = timing, state_bytes, jump

    def run(self, step: StepPlan, scheduler: Scheduler, now: int, next_arrival: int | None) -> int:
        """Decide how often a decode-only step repeats before something changes; returns the nanoseconds it all takes.

        It repeats until a sequence ends, memory runs short, or the first step boundary after `next_arrival`.
        """
        what = features(step, self._state_bytes)
        if step.chunks or not self._jump:
            return self._timing.step(what)
        times = min(_remaining(step.decodes), scheduler.horizon(step))
        if times == 1:
            return self._timing.step(what)
        ends = self._timing.span(what, times).cumsum()
        if next_arrival is not None:
            times = min(times, 1 + int(ends.searchsorted(next_arrival - now, side="right")))
        scheduler.repeat(step, times)
        return int(ends[times - 1])

    def ended(self, step: StepPlan) -> list[Sequence]:
        """Sequences that have their whole output once this step is over; the only place that reads `output_len`."""
        done = [
            chunk.sequence
            for chunk in step.chunks
            if chunk.stop == chunk.sequence.target and chunk.sequence.generated + 1 >= chunk.sequence.request.output_len
        ]
        done += [s for s in step.decodes if s.generated + step.repeats >= s.request.output_len]
        return done


def _remaining(decodes: Ordered[Sequence]) -> int:
    return min([sequence.request.output_len - sequence.generated for sequence in decodes])
