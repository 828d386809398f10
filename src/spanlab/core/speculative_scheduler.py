"""Decoding with drafts: each sequence that decodes takes its next token and verifies a few more in the same step."""

from __future__ import annotations

from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Policy
from spanlab.core.reuse import ReusePlan
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler


class SpeculativeScheduler(Scheduler):
    """A scheduler whose decodes verify drafts, as many as are asked for and the token budget allows (vLLM's order).

    Drafts take memory like the token before them, and are not published until they are known to hold. A drafter with
    keys and values of its own takes memory for the drafts that follow a step, too, behind chunks of prompts as well. A
    sequence that is alone drafts as many as find room.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._most, self._lookahead = rules.speculation.draft_tokens, rules.speculation.lookahead

    def _decode_together(self, step: ScheduledStep, sequences: list[Sequence], budget: int) -> int:
        """None: how far each gets is known after the step alone."""
        return 0

    def _decode(self, step: ScheduledStep, sequence: Sequence, budget: int, now: int) -> int:
        """Let a sequence take one more token and verify drafts; returns the rows taken, 0 where it had to give way."""
        start = sequence.held_tokens
        drafts = self._drafts_with_room(sequence, start, start + 1, now, min(self._most, budget - 1))
        if drafts is None:
            return 0
        step.decodes.append(sequence)
        step.drafts.append(drafts)
        return 1 + drafts

    def _make_room(self, sequence: Sequence, start: int, stop: int, now: int) -> bool:
        """As without drafts, and room for those that follow a chunk."""
        return self._drafts_with_room(sequence, start, stop, now, 0) is not None

    def _drafts_with_room(self, sequence: Sequence, start: int, stop: int, now: int, drafts: int) -> int | None:
        """Get memory for tokens `[start, stop)` and drafts, from the tail of those who run; None where it was the tail.

        Returns `drafts`, or fewer for a sequence that is alone.
        """
        while sequence.allocation is not None:
            if len(self.running) == 1 and not self.loading:
                return self._that_fit(sequence, start, stop, drafts)
            if self.policy.append(sequence.allocation, start, stop, drafts + self._lookahead):
                return drafts
            self._give_way(now)
        return None

    def _that_fit(self, sequence: Sequence, start: int, stop: int, drafts: int) -> int:
        """Give a sequence memory for tokens `[start, stop)`, and for as many drafts as there is room."""
        behind = drafts + self._lookahead
        assert sequence.allocation is not None, "who decodes is admitted"
        while not self.policy.append(sequence.allocation, start, stop, behind):
            assert behind, "one request outgrew the memory; sizes are checked before a run starts"
            behind -= 1
        return max(0, behind - self._lookahead)

    def _drafts_behind(self, plan: ReusePlan, generated: int, budget: int) -> int:
        """Of the drafts that follow a prompt's first chunk, those that lie behind the prompt."""
        left = plan.prompt + generated - plan.resume
        chunk = min(left, budget) if self.rules.enable_chunked_prefill else left
        return max(0, chunk + self._lookahead - left)

    def _horizon(self, step: ScheduledStep) -> int:
        """One: the next step depends on what this one accepts."""
        return 1
