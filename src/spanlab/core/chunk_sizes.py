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
        self._policy, self._rules, self._chunked = policy, rules, rules.enable_chunked_prefill
        self._most_rows = rules.max_num_batched_tokens

    def start_step(self, num_requests: int) -> None:
        """Begin a step of `num_requests` that run or wait, of which each gets a limited number of rows."""
        self._most_rows = self._rules.most_rows(num_requests)

    def share(self, budget: int) -> int:
        """Return the part of a step's remaining budget that one sequence may use."""
        return min(budget, self._most_rows)

    def rows(self, sequence: Sequence, work: Work, computed: int, budget: int) -> int:
        """Return the rows of a work that one step computes after the first `computed` rows.

        `budget` is the rest of the sequence's share.
        """
        take = work.tokens - computed
        if not self._chunked:
            return take
        assert sequence.allocation is not None, "only admitted sequences have work"
        plan = sequence.allocation.plan
        if isinstance(work, RepairPass):
            return min(take, budget) if plan.repair.cuts else take
        start = work.start + computed
        stop = start + min(take, budget)
        return self._policy.chunk_end(plan, start, stop, self._rules.longest_chunk, sequence.generated) - start

    def may_start(self, step: ScheduledStep, plan: ReusePlan, generated: int, budget: int) -> bool:
        """Whether the budget has a token for the first chunk, or enough for a prompt that runs in one step.

        A prompt with more rows than the budget of a whole step runs beside no other one.
        """
        start, length = plan.resume, plan.prompt + generated
        if not self._chunked:
            rows = plan.rows + generated
            return rows <= budget or (rows > self._rules.max_num_batched_tokens and not step.chunks)
        if start >= length:
            return True
        stop = min(length, start + self.share(budget))
        return self._policy.chunk_end(plan, start, stop, self._rules.longest_chunk, generated) > start
