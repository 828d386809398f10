"""Speculative decoding on a modelled backend: the cost of drafting, and the accepted drafts."""

from __future__ import annotations

from dataclasses import replace

from spanlab.core.backend import Backend, StepResult, finished_prompts
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.speculation import Speculation
from spanlab.core.step_features import StepFeatures
from spanlab_sim.timing import TimingModel


class SpeculativeBackend:
    """A backend whose steps draft first; a sequence ends its step after the first rejected draft.

    Positions are drafted one after another, each for all sequences at once, in `draft_cost` of the time that they
    would decode in without drafts.
    """

    def __init__(self, backend: Backend, timing: TimingModel, speculation: Speculation) -> None:
        self._backend, self._timing, self._speculation = backend, timing, speculation

    def resume(self) -> None:
        """Call the backend's `resume`."""
        self._backend.resume()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step as the backend does, with the time of drafting and the accepted drafts."""
        result = self._backend.execute(step, deadline_ns)
        if not step.drafts:
            return result
        accepted, finished = [], finished_prompts(step)
        for sequence, drafts in zip(step.decodes, step.drafts, strict=True):
            remaining = sequence.request.output_len - sequence.generated - 1
            num_accepted = self._speculation.accepted(sequence.request.id, sequence.generated, drafts)
            accepted.append(min(num_accepted, remaining))
            if num_accepted >= remaining:
                finished.append(sequence)
        duration_ns = result.duration_ns + self._drafting_ns(step)
        return replace(result, duration_ns=duration_ns, finished=finished, accepted=accepted)

    def _drafting_ns(self, step: ScheduledStep) -> int:
        context = sum([sequence.prompt + sequence.generated for sequence in step.decodes])
        plain = StepFeatures(num_decodes=len(step.decodes), decode_context=context, num_forwards=1)
        return int(self._speculation.draft_cost * max(step.drafts) * self._timing.step(plain))

    def completed(self, step: ScheduledStep) -> None:
        """Call the backend's `completed`."""
        self._backend.completed(step)

    def close(self) -> None:
        """Call the backend's `close`."""
        self._backend.close()
