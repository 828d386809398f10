"""The modelled backend: a timing model gives the duration of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add

import numpy as np
from numpy.typing import NDArray

from spanlab.core.admission import BatchRules, Speculation
from spanlab.core.rules import ReuseRules
from spanlab.core.step import ScheduledSequence, ScheduledStep, StepResult, finished_after, finished_prompts
from spanlab.core.step_features import PREFIXES, SpanReads, StepFeatures, features
from spanlab.records import Record
from spanlab_sim.timing import Nanoseconds, TimingModel

# ------------------------------------------------------------------------------
# Offered work of a run, in seconds of fully batched steps: the numerator of its utilisation.
# ------------------------------------------------------------------------------

# What prefills add to a step; decodes are counted from the records, as those of equal steps pass
# at once. A step has its forwards and its runs of recurrent layers whatever is in it.
_ADDED = (
    "prefill_tokens",
    "prefill_pairs",
    "num_first_tokens",
    "loaded_state_bytes",
    "captured_state_bytes",
    "prefill_context",
    "shallow_token_layers",
    "shallow_pair_layers",
    "copied_tokens",
    "span_reads",
    "turned_keys",
    "scan_chunks",
    "composed_maps",
    "map_tokens",
    "added_flops",
    "added_bytes",
)
_PER_STEP = ("num_forwards", "scan_runs")


@dataclass
class DemandMeter:
    """A timing model that adds up the work of the steps that it times.

    Utilisation is demand ÷ the time in which the requests arrive. Unlike busy time, it does not count small steps
    while few requests decode: a server that is always busy with small steps has spare capacity.
    """

    timing: TimingModel
    _work: tuple[int, ...] = tuple(StepFeatures())  # sums over the steps that compute prompts
    _prefill_steps: int = 0
    _requests: int = 0
    _decodes: int = 0
    _decode_context: int = 0

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of one step."""
        if features.num_prefills:
            self._work = tuple(map(add, self._work, features))
            self._prefill_steps += 1
        return self.timing.step(features)

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations of k decode steps."""
        return self.timing.span(features, k)

    def finished(self, record: Record) -> None:
        """Count a finished request's decodes: all tokens of its output but the first."""
        decodes = record.output_tokens - 1
        self._requests += 1
        self._decodes += decodes
        self._decode_context += decodes * record.prompt_tokens + decodes * (decodes + 1) // 2

    def demand_s(self, rules: BatchRules) -> float | None:
        """Return the seconds of the work in the fewest steps that the batch limits allow, all equal.

        As many steps as prompt tokens computed and decodes fill with `max_num_batched_tokens` each, or prefills and
        decodes with `max_num_seqs` each, whichever is more. None with speculation, where the number of accepted
        drafts determines the number of steps.
        """
        if rules.speculation.draft_tokens:
            return None
        tokens = (StepFeatures(*self._work).prefill_tokens + self._decodes) / rules.max_num_batched_tokens
        steps = max(tokens, (self._requests + self._decodes) / rules.max_num_seqs)
        return steps * self.timing.step(self._average(steps)) * 1e-9 if steps else 0.0

    def _average(self, steps: float) -> StepFeatures:
        work, prefills = StepFeatures(*self._work)._asdict(), max(1, self._prefill_steps)
        return StepFeatures(
            **{name: round(work[name] / steps) for name in _ADDED},
            **{name: round(work[name] / prefills) for name in _PER_STEP},
            num_prefills=round(self._requests / steps),
            num_decodes=round(self._decodes / steps),
            decode_context=round(self._decode_context / steps),
        )


# ------------------------------------------------------------------------------
# Speculative decoding on a modelled backend: the cost of drafting, and the accepted drafts.
# ------------------------------------------------------------------------------


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
        self._decodes: list[ScheduledSequence] = []
        self._remaining = 0  # steps until the first of them finishes

    def resume(self) -> None:
        """Do nothing: the duration of a modelled step does not depend on when it begins."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Return the duration of a step, and how often it repeats.

        It repeats until a sequence finishes, memory runs short or a request arrives.
        """
        counts = features(step, self._state_bytes, self._rules, self._reads)
        if step.decodes is not self._decodes:
            self._decodes = step.decodes
            self._remaining = min(
                [sequence.request.output_len - sequence.generated for sequence in step.decodes], default=1
            )
        remaining = self._remaining
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

    def completed(self, step: ScheduledStep) -> None:
        """Do nothing: this backend stores no KV."""

    def close(self) -> None:
        """Do nothing: this backend holds no memory."""
