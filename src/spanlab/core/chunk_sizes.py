"""The size of the chunk that one step computes of a sequence's work, under a budget of tokens."""

from __future__ import annotations

from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Policy
from spanlab.core.reuse import ReusePlan
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.work import RepairPass, Work


class ChunkSizes:
    """Chunk sizes within the batch rules, cut where the policy ends a chunk."""

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        self._policy, self._most, self._chunked = policy, rules.max_num_batched_tokens, rules.enable_chunked_prefill

    def rows(self, sequence: Sequence, work: Work, computed: int, budget: int) -> int:
        """Return the rows of a work that one step computes after the first `computed` rows."""
        take = work.tokens - computed
        if not self._chunked:
            return take
        assert sequence.allocation is not None, "only admitted sequences have work"
        plan = sequence.allocation.plan
        if isinstance(work, RepairPass):
            return min(take, budget) if plan.repair.cuts else take
        start = work.start + computed
        stop = start + min(take, budget)
        return self._policy.chunk_end(plan, start, stop, self._most, sequence.generated) - start

    def may_start(self, step: ScheduledStep, plan: ReusePlan, generated: int, budget: int) -> bool:
        """Whether the budget has a token for the first chunk, or enough for a prompt that runs in one step."""
        start, length = plan.resume, plan.prompt + generated
        if not self._chunked:
            return not step.chunks or plan.rows + generated <= budget
        if start >= length:
            return True
        return self._policy.chunk_end(plan, start, min(length, start + budget), self._most, generated) > start
