"""The modelled backend: a timing model gives the duration of steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spanlab.core.backend import StepResult, finished_after, finished_prompts
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.speculation import Speculation
from spanlab.core.step_features import PREFIXES, SpanReads, StepFeatures, features
from spanlab_sim.speculation import with_drafts
from spanlab_sim.timing import TimingModel


class ModelledBackend:
    """Runs steps by a timing model. With `jump`, equal decode steps pass as one.

    `rules` are the policy's; `reads` is the cost of reading reused spans, None where the policy reuses prefixes only.
    `speculation`  acceptance and cost of the drafts in steps that verify any.
    """

    def __init__(
        self,
        timing: TimingModel,
        state_bytes: int,
        jump: bool = True,
        rules: ReuseRules = PREFIXES,
        reads: SpanReads | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._timing, self._state_bytes, self._jump = timing, state_bytes, jump
        self._rules, self._reads, self._speculation = rules, reads, speculation or Speculation()
        self._decodes: list[Sequence] = []
        self._remaining = 0  # steps until the first of them finishes

    def resume(self) -> None:
        """Do nothing: the duration of a modelled step does not depend on when it begins."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Return the duration of a step, and how often it repeats.

        It repeats until a sequence finishes, memory runs short or a request arrives.
        """
        counts = features(step, self._state_bytes, self._rules, self._reads)
        remaining = self._remaining_steps(step.decodes)
        times = 1 if step.chunks or not self._jump else min(remaining, step.max_repeats)
        if times == 1:
            duration_ns, ends = self._timing.step(counts), None
        else:
            ends = self._ends(counts, times, deadline_ns)
            times, duration_ns = len(ends), int(ends[-1])
        self._remaining -= times
        finished = finished_after(step, times) if remaining == times else finished_prompts(step)
        result = StepResult(duration_ns, finished, times, ends=() if ends is None else ends)
        return with_drafts(result, step, self._speculation, self._timing) if step.drafts else result

    def _ends(self, counts: StepFeatures, most: int, deadline_ns: int | None) -> NDArray[np.int64]:
        """Return the ends of the equal decode steps, up to `most`, that pass until the deadline."""
        ends: NDArray[np.int64] = self._timing.span(counts, most).cumsum()
        times = most if deadline_ns is None else min(most, 1 + int(ends.searchsorted(deadline_ns, side="right")))
        return ends[:times]

    def _remaining_steps(self, decodes: list[Sequence]) -> int:
        """Return the steps until the first decoding sequence finishes; 1 where none decodes."""
        if decodes is not self._decodes:
            self._decodes = decodes
            self._remaining = min([sequence.request.output_len - sequence.generated for sequence in decodes], default=1)
        return self._remaining

    def completed(self, step: ScheduledStep) -> None:
        """Do nothing: this backend stores no KV."""

    def close(self) -> None:
        """Do nothing: this backend holds no memory."""
