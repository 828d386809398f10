"""Speculative decoding on a modelled backend: what drafting costs, and which drafts hold."""

from __future__ import annotations

from dataclasses import replace

from spanlab.core.backend import Backend, StepResult, finished_prompts
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.speculation import Speculation
from spanlab.core.step_features import StepFeatures
from spanlab_sim.timing import TimingModel


class SpeculativeBackend:
    """A backend whose steps draft first, and end for a sequence after its first draft that does not hold.

    Positions are drafted in turn, each for all sequences at once, in `draft_cost` of the time that they would decode in
    without drafts.
    """

    def __init__(self, backend: Backend, timing: TimingModel, speculation: Speculation) -> None:
        self._backend, self._timing, self._speculation = backend, timing, speculation

    def resume(self) -> None:
        """As the backend."""
        self._backend.resume()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step as the backend does, with the time of drafting; say which drafts hold."""
        result = self._backend.execute(step, deadline_ns)
        if not step.drafts:
            return result
        accepted, finished = [], finished_prompts(step)
        for sequence, drafts in zip(step.decodes, step.drafts, strict=True):
            left = sequence.request.output_len - sequence.generated - 1
            holds = self._speculation.accepted(sequence.request.id, sequence.generated, drafts)
            accepted.append(min(holds, left))
            if holds >= left:
                finished.append(sequence)
        duration_ns = result.duration_ns + self._drafting_ns(step)
        return replace(result, duration_ns=duration_ns, finished=finished, accepted=accepted)

    def _drafting_ns(self, step: ScheduledStep) -> int:
        context = sum([sequence.prompt + sequence.generated for sequence in step.decodes])
        plain = StepFeatures(num_decodes=len(step.decodes), decode_context=context, num_forwards=1)
        return int(self._speculation.draft_cost * max(step.drafts) * self._timing.step(plain))

    def completed(self, step: ScheduledStep) -> None:
        """As the backend."""
        self._backend.completed(step)

    def close(self) -> None:
        """As the backend."""
        self._backend.close()
