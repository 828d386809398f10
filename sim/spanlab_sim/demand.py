"""Offered work of a run, in seconds of fully batched steps: the numerator of its utilisation."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from spanlab.core.batch_rules import BatchRules
from spanlab.core.step_features import StepFeatures
from spanlab.records import Record
from spanlab_sim.timing import Nanoseconds, TimingModel

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
