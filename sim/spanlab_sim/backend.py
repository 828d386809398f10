"""The modelled backend: steps last what a timing model says."""

from __future__ import annotations

from spanlab.core.backend import StepResult, finished_after, finished_prompts
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.step_features import PREFIXES, SpanReads, StepFeatures, features
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
        self._decodes: list[Sequence] = []
        self._left = 0  # steps until the first of those who decode ends, while the scheduler names the same list

    def resume(self) -> None:
        """Modelled steps last as long whenever they begin."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Say how long a step takes, and how often it repeats before a sequence ends, memory runs short or a request
        arrives."""
        what = features(step, self._state_bytes, self._rules, self._reads)
        left = self._steps_left(step.decodes)
        times = 1 if step.chunks or not self._jump else min(left, step.max_repeats)
        if times == 1:
            duration_ns = self._timing.step(what)
        else:
            times, duration_ns = self._span(what, times, deadline_ns)
        self._left -= times
        return StepResult(duration_ns, finished_after(step, times) if left == times else finished_prompts(step), times)

    def _span(self, what: StepFeatures, most: int, deadline_ns: int | None) -> tuple[int, int]:
        """How many equal decode steps pass until the deadline, at most `most`, and their time."""
        ends = self._timing.span(what, most).cumsum()
        times = most if deadline_ns is None else min(most, 1 + int(ends.searchsorted(deadline_ns, side="right")))
        return times, int(ends[times - 1])

    def _steps_left(self, decodes: list[Sequence]) -> int:
        """Steps until the first of those who decode ends; 1 where nobody does."""
        if decodes is not self._decodes:
            self._decodes = decodes
            self._left = min([one.request.output_len - one.generated for one in decodes], default=1)
        return self._left

    def completed(self, step: ScheduledStep) -> None:
        """Nothing is stored here."""

    def close(self) -> None:
        """Nothing is held here."""
