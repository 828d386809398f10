"""Decoding with drafts: each decoding sequence takes its next token and verifies drafts in the same step."""

from __future__ import annotations

from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Policy
from spanlab.core.reuse import ReusePlan
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler


class SpeculativeScheduler(Scheduler):
    """A scheduler whose decodes verify drafts, as many as the token budget allows (vLLM's order).

    Drafts take memory like the token before them, and are not published until they are accepted. A drafter with
    separate keys and values also takes memory for the drafts that follow a step, behind chunks of prompts too. A
    sequence that runs alone drafts as many tokens as fit.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._most, self._lookahead = rules.speculation.draft_tokens, rules.speculation.lookahead

    def _decode_together(self, step: ScheduledStep, sequences: list[Sequence], budget: int) -> int:
        """Return 0: the progress of each sequence is known only after the step."""
        return 0

    def _decode(self, step: ScheduledStep, sequence: Sequence, budget: int, now: int) -> int:
        """Decode one token and verify drafts; returns the rows used, 0 where the sequence was preempted."""
        start = sequence.held_tokens
        most = min(self._most, self._sizes.share(budget) - 1)
        drafts = self._append_with_drafts(sequence, start, start + 1, now, most)
        if drafts is None:
            return 0
        step.decodes.append(sequence)
        step.drafts.append(drafts)
        return 1 + drafts

    def _make_room(self, sequence: Sequence, start: int, stop: int, now: int) -> bool:
        """Reserve memory as without drafts, and for the drafts that follow a chunk."""
        return self._append_with_drafts(sequence, start, stop, now, 0) is not None

    def _append_with_drafts(self, sequence: Sequence, start: int, stop: int, now: int, drafts: int) -> int | None:
        """Reserve memory for tokens `[start, stop)` and drafts, preempting others.

        Returns `drafts`, fewer for a sequence that runs alone, None for a sequence that was preempted itself.
        """
        while sequence.allocation is not None:
            if len(self.running) == 1 and not self.loading:
                return self._append_alone(sequence, start, stop, drafts)
            if self.policy.append(sequence.allocation, start, stop, drafts + self._lookahead):
                return drafts
            self._preempt_lowest(now)
        return None

    def _append_alone(self, sequence: Sequence, start: int, stop: int, drafts: int) -> int:
        """Reserve memory for tokens `[start, stop)` and as many drafts as fit; returns the drafts."""
        behind = drafts + self._lookahead
        assert sequence.allocation is not None, "a decoding sequence is admitted"
        while not self.policy.append(sequence.allocation, start, stop, behind):
            assert behind, "one request exceeds the memory; sizes are checked before a run starts"
            behind -= 1
        return max(0, behind - self._lookahead)

    def _drafts_behind(self, plan: ReusePlan, generated: int, budget: int) -> int:
        """Return how many of the drafts that follow the first chunk lie behind the prompt."""
        remaining = plan.prompt + generated - plan.resume
        chunk = min(remaining, self._sizes.share(budget)) if self.rules.enable_chunked_prefill else remaining
        return max(0, chunk + self._lookahead - remaining)

    def _horizon(self, step: ScheduledStep) -> int:
        """Return 1: the next step depends on the drafts that this one accepts."""
        return 1
