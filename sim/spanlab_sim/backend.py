"""The modelled backend: steps last what a timing model says."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from spanlab.core.backend import StepResult, finished_after
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.scheduler import ScheduledStep, Sequence
from spanlab.core.step_features import PREFIXES, SpanReads, features
from spanlab_sim.timing import TimingModel


class ModelledBackend:
    """Runs steps by a timing model. `jump` lets equal decode steps pass as one.

    `rules` are the policy's; `reads` is what reading reused spans costs, None where the policy reuses prefixes only.
    """

    def __init__(
        self,
        timing: TimingModel,
        state_bytes: int,
        jump: bool = True,
        rules: ReuseRules = PREFIXES,
        reads: SpanReads | None = None,
    ) -> None:
        self._timing, self._state_bytes, self._jump = timing, state_bytes, jump
        self._rules, self._reads = rules, reads

    def resume(self) -> None:
        """Modelled steps last as long whenever they begin."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Say how long a step takes, and how often it repeats before a sequence ends, memory runs short or a request
        arrives."""
        what = features(step, self._state_bytes, self._rules, self._reads)
        times = 1 if step.chunks or not self._jump else min(_remaining(step.decodes), step.max_repeats)
        if times == 1:
            return StepResult(self._timing.step(what), finished_after(step))
        ends = self._timing.span(what, times).cumsum()
        if deadline_ns is not None:
            times = min(times, 1 + int(ends.searchsorted(deadline_ns, side="right")))
        return StepResult(int(ends[times - 1]), finished_after(step, times), times)

    def completed(self, step: ScheduledStep) -> None:
        """Nothing is stored here."""

    def close(self) -> None:
        """Nothing is held here."""


def _remaining(decodes: Ordered[Sequence]) -> int:
    return min([sequence.request.output_len - sequence.generated for sequence in decodes], default=1)
