"""Decoding with drafts: each sequence that decodes takes its next token and verifies a few more in the same step."""

from __future__ import annotations

from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Policy
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler


class SpeculativeScheduler(Scheduler):
    """A scheduler whose decodes verify drafts, as many as are asked for and the token budget allows (vLLM's order).

    Drafts take memory like the token before them, and are not published until they are known to hold. A sequence that
    is alone drafts as many as find room.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._most = rules.speculation.draft_tokens

    def _decode_together(self, step: ScheduledStep, sequences: list[Sequence], budget: int) -> int:
        """None: how far each gets is known after the step alone."""
        return 0

    def _decode(self, step: ScheduledStep, sequence: Sequence, budget: int, now: int) -> int:
        """Let a sequence take one more token and verify drafts; returns the rows taken, 0 where it had to give way."""
        drafts = min(self._most, budget - 1)
        if len(self.running) == 1 and not self.loading:
            drafts = self._that_fit(sequence, drafts)
        elif not self._make_room(sequence, sequence.held_tokens, sequence.held_tokens + 1, now, drafts):
            return 0
        step.decodes.append(sequence)
        step.drafts.append(drafts)
        return 1 + drafts

    def _that_fit(self, sequence: Sequence, drafts: int) -> int:
        """Give a sequence memory for its next token, and for as many drafts as there is room."""
        start = sequence.held_tokens
        assert sequence.allocation is not None, "who decodes is admitted"
        while not self.policy.append(sequence.allocation, start, start + 1, drafts):
            assert drafts, "one request outgrew the memory; sizes are checked before a run starts"
            drafts -= 1
        return drafts

    def _horizon(self, step: ScheduledStep) -> int:
        """One: the next step depends on what this one accepts."""
        return 1
