"""Scheduling of a step while the previous step runs, as vLLM 0.32.0 does by default."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from spanlab.core.admission import BatchRules
from spanlab.core.plan import ReusePlan
from spanlab.core.protocol import Allocation, BeforeChange, Policy, unnoticed
from spanlab.core.request import Request
from spanlab.core.scheduler import Scheduler, rank_of
from spanlab.core.step import ScheduledSequence, ScheduledStep

# ------------------------------------------------------------------------------
# Decoding with drafts: each decoding sequence takes its next token and verifies drafts in the
# same step.
# ------------------------------------------------------------------------------


class SpeculativeScheduler(Scheduler):
    """A scheduler whose decodes verify drafts, as many as the token budget allows (vLLM's order).

    Drafts take memory like the token before them, and are not published until they are accepted. A drafter with
    separate keys and values also takes memory for the drafts that follow a step, behind chunks of prompts too. A
    sequence that runs alone drafts as many tokens as fit.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._most, self._lookahead = rules.speculation.draft_tokens, rules.speculation.lookahead

    def _decode_together(self, step: ScheduledStep, sequences: list[ScheduledSequence], budget: int) -> int:
        """Return 0: the progress of each sequence is known only after the step."""
        return 0

    def _decode(self, step: ScheduledStep, sequence: ScheduledSequence, budget: int, now: int) -> int:
        """Decode one token and verify drafts; returns the rows used, 0 where the sequence was preempted."""
        start = sequence.held_tokens
        most = min(self._most, self._sizes.share(budget) - 1)
        drafts = self._append_with_drafts(sequence, start, start + 1, now, most)
        if drafts is None:
            return 0
        step.decodes.append(sequence)
        step.drafts.append(drafts)
        return 1 + drafts

    def _make_room(self, sequence: ScheduledSequence, start: int, stop: int, now: int) -> bool:
        """Reserve memory as without drafts, and for the drafts that follow a chunk."""
        return self._append_with_drafts(sequence, start, stop, now, 0) is not None

    def _append_with_drafts(
        self, sequence: ScheduledSequence, start: int, stop: int, now: int, drafts: int
    ) -> int | None:
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

    def _append_alone(self, sequence: ScheduledSequence, start: int, stop: int, drafts: int) -> int:
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


class FinishedSequence(NamedTuple):
    """A sequence that finished in the previous step, with its allocation, which is neither stored nor freed yet."""

    sequence: ScheduledSequence
    allocation: Allocation


class AsyncScheduler(Scheduler):
    """A scheduler that plans the next step before the current one ends.

    A request that arrives during a step joins the step after the next. The output of a step is processed after the
    next step was planned. Until then, a finished sequence keeps its memory, counts as running, and has not stored the
    end of its output; one that is preempted before never stores it. Without work in flight, a step is planned at once.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._added: list[Request] = []
        self._finished: list[FinishedSequence] = []  # in order of start
        self._in_flight = False  # whether a step runs while the next one is planned

    def add(self, request: Request) -> None:
        """Queue a request for the step after the next one."""
        self._added.append(request)

    def enqueue_added(self) -> None:
        """Move the added requests to the queue."""
        for request in self._added:
            super().add(request)
        self._added.clear()

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._added and super().idle

    def schedule(self, now: int) -> ScheduledStep | None:
        """Plan a step without the requests that arrived during the previous one, unless no others exist."""
        if super().idle:
            self._end_finished(now)
            self.enqueue_added()
        step, has_finished = super().schedule(now), bool(self._finished)
        self._end_finished(now)
        in_flight, self._in_flight = self._in_flight, step is not None
        if (in_flight or has_finished) and (step is None or not (step.chunks or step.decodes)):
            self._in_flight = False  # the engine waits for the work in flight
            return self.schedule(now)
        if has_finished and self.waiting and step is not None:
            step.max_repeats = 1
        if self._added and step is not None:
            self.enqueue_added()
            step.max_repeats = 1
        return step

    @property
    def _num_running(self) -> int:
        return len(self.running) + len(self._finished)

    def _finish(self, sequence: ScheduledSequence, now: int) -> None:
        """Keep the allocation of a finished sequence, without its last tokens, until the next step is planned."""
        self._finished.append(FinishedSequence(sequence, self._stop_running(sequence)))

    def _preempt_lowest(self, now: int) -> None:
        """Preempt the sequence that started last of the lowest priority.

        If it has finished already, free its allocation and count a preemption.
        """
        lowest = max(self.running, key=rank_of)
        finished = max(self._finished, key=lambda finished: rank_of(finished.sequence), default=None)
        if finished is not None and rank_of(finished.sequence) > rank_of(lowest):
            self._finished.remove(finished)
            self.policy.free(finished.allocation, now)
            finished.sequence.preemptions += 1
            self._preempted_this_step = True
        elif self._finished:
            self._preempt(lowest, now)
        else:
            super()._preempt_lowest(now)

    def abort(self, request: Request, now: int) -> ScheduledSequence | None:
        """Remove a request; one whose output is complete, but not processed yet, does not store its end."""
        for finished in [finished for finished in self._finished if finished.sequence.request is request]:
            self._finished.remove(finished)
            self.policy.free(finished.allocation, now)
            self._refused = False
        return super().abort(request, now)

    def _end_finished(self, now: int) -> None:
        """Store the outputs of sequences that finished in the previous step, and free their allocations."""
        for finished in self._finished:
            self._store_output(finished.sequence, finished.allocation, now)
            self.policy.free(finished.allocation, now)
            self._refused = False
        self._finished.clear()


def make_scheduler(policy: Policy, rules: BatchRules) -> Scheduler:
    """Return a scheduler of the kind that the rules select."""
    if rules.speculation.draft_tokens:
        return SpeculativeScheduler(policy, rules)
    return AsyncScheduler(policy, rules) if rules.async_scheduling else Scheduler(policy, rules)


# ------------------------------------------------------------------------------
# Ranks of one engine that run every step together: data parallel attention before shared
# experts.
# ------------------------------------------------------------------------------

#: Running requests that a waiting one counts as in vLLM's balancer.
WAITING_WEIGHT = 4


class LockstepScheduler(Scheduler):
    """One scheduler per rank; a step joins the steps of all ranks and ends for all of them at once.

    A request goes to the rank with the lowest load, in which a waiting request counts `WAITING_WEIGHT` times (vLLM's
    balancer). A rank without work still takes part, since expert layers exchange the tokens of all ranks.
    """

    def __init__(self, ranks: Ordered[Scheduler]) -> None:
        super().__init__(ranks[0].policy, ranks[0].rules)
        self.ranks = tuple(ranks)
        self.rank_steps: list[ScheduledStep] = []
        self._sent: list[list[Request]] = [[] for _ in ranks]  # since the last step was planned: not counted by it

    def add(self, request: Request) -> None:
        """Queue a request at the rank with the lowest load."""
        ranks = zip(self.ranks, self._sent, strict=True)
        loads = [WAITING_WEIGHT * (len(rank.waiting) + len(sent)) + len(rank.running) for rank, sent in ranks]
        least = loads.index(min(loads))
        self._sent[least].append(request)
        self.ranks[least].add(request)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs at any rank."""
        return all(rank.idle for rank in self.ranks)

    def schedule(self, now: int) -> ScheduledStep | None:
        """Plan a step of all ranks; `rank_steps` has the step of each, empty for ranks without work."""
        planned = [rank.schedule(now) for rank in self.ranks]
        for sent in self._sent:
            sent.clear()
        working = [step for step in planned if step is not None]
        if not working:
            return None
        self.rank_steps = [ScheduledStep([], [], []) if step is None else step for step in planned]
        return ScheduledStep(
            chunks=[chunk for step in working for chunk in step.chunks],
            decodes=[sequence for step in working for sequence in step.decodes],
            loads=[sequence for step in working for sequence in step.loads],
            max_repeats=min(step.max_repeats for step in working),
        )

    def repeat(self, step: ScheduledStep, times: int, before: BeforeChange = unnoticed) -> None:
        """Repeat the decode-only step of every rank that decodes, `times` times in all; `before` is for the first."""
        step.repeats = times
        for rank, rank_step in zip(self.ranks, self.rank_steps, strict=True):
            if rank_step.decodes:
                rank.repeat(rank_step, times, before if rank is self.ranks[0] else unnoticed)

    def complete(
        self,
        step: ScheduledStep,
        finished_at: int,
        ended: Collection[ScheduledSequence],
        accepted: Collection[int] = (),
    ) -> None:
        """Advance the sequences of every rank."""
        for rank, rank_step in zip(self.ranks, self.rank_steps, strict=True):
            rank.complete(rank_step, finished_at, ended)
