"""Speculative decoding on a modelled backend: the cost of drafting, and the accepted drafts."""

from __future__ import annotations

from dataclasses import replace

from spanlab.core.backend import StepResult, finished_prompts
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.speculation import Speculation
from spanlab.core.step_features import StepFeatures
from spanlab_sim.timing import TimingModel


def with_drafts(result: StepResult, step: ScheduledStep, speculation: Speculation, timing: TimingModel) -> StepResult:
    """Return the result of a step that drafts first; a sequence ends its step after the first rejected draft.

    Positions are drafted one after another, each for all sequences at once, in `draft_cost` of the time that they
    would decode in without drafts.
    """
    accepted, finished = [], finished_prompts(step)
    for sequence, drafts in zip(step.decodes, step.drafts, strict=True):
        remaining = sequence.request.output_len - sequence.generated - 1
        num_accepted = speculation.accepted(sequence.request.id, sequence.generated, drafts)
        accepted.append(min(num_accepted, remaining))
        if num_accepted >= remaining:
            finished.append(sequence)
    context = sum([sequence.prompt + sequence.generated for sequence in step.decodes])
    plain = StepFeatures(num_decodes=len(step.decodes), decode_context=context, num_forwards=1)
    drafting_ns = int(speculation.draft_cost * max(step.drafts) * timing.step(plain))
    return replace(result, duration_ns=result.duration_ns + drafting_ns, finished=finished, accepted=accepted)
