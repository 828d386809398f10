"""Steps that are planned while the one before runs, with and without drafts; and the choice of a
scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from spanlab.core.admission import BatchRules
from spanlab.core.plan import Allocation
from spanlab.core.protocol import Policy
from spanlab.core.request import Request
from spanlab.core.scheduler import Scheduler, SpeculativeScheduler, rank_of
from spanlab.core.step import ScheduledSequence, ScheduledStep

# ------------------------------------------------------------------------------
# Planning ahead without drafts: each sequence has one token more, whatever its id will be.
# ------------------------------------------------------------------------------


class Ahead:
    """What arrived during a step, to join the one after the next, and whether a step runs while one
    is planned."""

    def __init__(self) -> None:
        self.added: list[Request] = []
        self.in_flight = False

    def waits(self, planned: ScheduledStep | None, has_finished: bool) -> bool:
        """Whether a planned step has nothing to do but to wait for the one in flight, so that it is
        planned again.

        `has_finished`  whether sequences ended in the step in flight, which was processed meanwhile
        """
        has_work = planned is not None and bool(planned.chunks or planned.decodes)
        waits = (self.in_flight or has_finished) and not has_work
        self.in_flight = planned is not None and not waits
        return waits


class FinishedSequence(NamedTuple):
    """A sequence that finished in the previous step, with its allocation, which is neither stored
    nor freed yet."""

    sequence: ScheduledSequence
    allocation: Allocation


class AsyncScheduler(Scheduler):
    """A scheduler that plans the next step before the current one ends.

    A request that arrives during a step joins the step after the next. The output of a step is
    processed after the next step was planned. Until then, a finished sequence keeps its memory,
    counts as running, and has not stored the end of its output; one that is preempted before never
    stores it. Without work in flight, a step is planned at once.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._ahead = Ahead()
        self._finished: list[FinishedSequence] = []  # in order of start

    def add(self, request: Request) -> None:
        """Queue a request for the step after the next one."""
        self._ahead.added.append(request)

    def enqueue_added(self) -> None:
        """Move the added requests to the queue."""
        for request in self._ahead.added:
            super().add(request)
        self._ahead.added.clear()

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._ahead.added and super().idle

    def schedule(self, now: int) -> ScheduledStep | None:
        """Plan a step without the requests that arrived during the previous one, unless no others
        exist."""
        if super().idle:
            self._end_finished(now)
            self.enqueue_added()
        step, has_finished = super().schedule(now), bool(self._finished)
        self._end_finished(now)
        if self._ahead.waits(step, has_finished):
            return self.schedule(now)
        if has_finished and self.waiting and step is not None:
            step.max_repeats = 1
        if self._ahead.added and step is not None:
            self.enqueue_added()
            step.max_repeats = 1
        return step

    @property
    def _num_running(self) -> int:
        return len(self.running) + len(self._finished)

    def _finish(self, sequence: ScheduledSequence, now: int) -> None:
        """Keep the allocation of a finished sequence, without its last tokens, until the next step
        is planned."""
        self._finished.append(FinishedSequence(sequence, self._stop_running(sequence)))

    def _preempt_lowest(self, now: int) -> None:
        """Preempt the sequence that started last of the lowest priority.

        If it has finished already, free its allocation and count a preemption.
        """
        lowest = max(self.running, key=rank_of)
        finished = max(
            self._finished, key=lambda finished: rank_of(finished.sequence), default=None
        )
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
        """Remove a request; one whose output is complete, but not processed yet, does not store its
        end."""
        for finished in [
            finished for finished in self._finished if finished.sequence.request is request
        ]:
            self._finished.remove(finished)
            self.policy.free(finished.allocation, now)
            self._refused = False
        return super().abort(request, now)

    def _end_finished(self, now: int) -> None:
        """Store the outputs of sequences that finished in the previous step, and free their
        allocations."""
        for finished in self._finished:
            self._store_output(finished.sequence, finished.allocation, now)
            self.policy.free(finished.allocation, now)
            self._refused = False
        self._finished.clear()


# ------------------------------------------------------------------------------
# Planning ahead with drafts: how many of them the step in flight accepts is not known.
# ------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What the step in flight does for a sequence: it verifies `drafts`, and accepts as many; both
    0 for a prompt.

    `decodes`  whether it computes the sequence's newest token, else the end of its prompt
    """

    drafts: int
    accepted: int
    decodes: bool


class AsyncSpeculativeScheduler(SpeculativeScheduler):
    """A scheduler with drafts that plans the next step before the current one ends (vLLM's order).

    A step is planned as if the one in flight accepted all of its drafts, and takes memory for them;
    what is rejected is taken back once the step was planned. Blocks are published as far as tokens
    are known. A sequence may end in the step in flight: if it ends there whatever is accepted, the
    next step leaves it out; else it takes part once more, for nothing. Until then it runs, keeps
    its memory, and may be preempted.
    """

    def __init__(
        self,
        policy: Policy,
        rules: BatchRules,
        proposed: Callable[[ScheduledSequence], int] | None = None,
    ) -> None:
        super().__init__(policy, rules, proposed)
        self._ahead = Ahead()
        self._outcomes: dict[ScheduledSequence, Outcome] = {}  # of the step in flight

    def add(self, request: Request) -> None:
        """Queue a request for the step after the next one."""
        self._ahead.added.append(request)

    def enqueue_added(self) -> None:
        """Move the added requests to the queue."""
        for request in self._ahead.added:
            super().add(request)
        self._ahead.added.clear()

    @property
    def idle(self) -> bool:
        """Whether no request waits, and all that run end in the step in flight, whatever it
        accepts."""
        ends = all(self._ends_certainly(sequence) for sequence in self.running)
        return ends and not (self._ahead.added or self.waiting or self.loading)

    def schedule(self, now: int) -> ScheduledStep | None:
        """Plan a step without the requests that arrived during the previous one, unless no others
        exist."""
        if super().idle:
            self.enqueue_added()
        step = super().schedule(now)
        has_finished = any(sequence.has_ended for sequence in self._outcomes)
        self._process_outcomes(now)
        if self._ahead.waits(step, has_finished):
            return self.schedule(now)
        if step is not None:
            self.enqueue_added()
        return step

    @property
    def _is_alone(self) -> bool:
        """Whether no memory will become free; while a step is in flight, that of its drafts may."""
        return super()._is_alone and not self._ahead.in_flight

    def _ends_certainly(self, sequence: ScheduledSequence) -> bool:
        """Whether the output is complete with the step in flight even if that accepts no draft."""
        outcome = self._outcomes.get(sequence)
        return outcome is not None and sequence.has_ended and not outcome.accepted

    def _reach(self, sequence: ScheduledSequence) -> tuple[int, int]:
        outcome = self._outcomes.get(sequence)
        if outcome is None or not outcome.decodes:
            return sequence.held_tokens, 0
        return sequence.held_tokens - 1 - outcome.accepted, 1 + outcome.drafts

    def _decode(
        self, step: ScheduledStep, sequence: ScheduledSequence, budget: int, now: int
    ) -> int:
        """Decode as without a step in flight; 0 for a sequence that ends there certainly."""
        return 0 if self._ends_certainly(sequence) else super()._decode(step, sequence, budget, now)

    def complete(
        self,
        step: ScheduledStep,
        finished_at: int,
        ended: Collection[ScheduledSequence],
        accepted: Collection[int] = (),
    ) -> None:
        """Advance every sequence that had not ended before; the plan of the next step does not know
        it yet."""
        for chunk in step.chunks:
            self._advance(chunk, finished_at)
        self._outcomes = {
            chunk.sequence: Outcome(0, 0, False) for chunk in step.chunks if chunk.last
        }
        counts = accepted or [0] * len(step.decodes)
        for sequence, drafts, count in zip(step.decodes, step.drafts, counts, strict=True):
            if not sequence.has_ended:
                sequence.generated += 1 + count
                self._outcomes[sequence] = Outcome(drafts, count, True)
        for sequence in ended:
            sequence.finished_at = finished_at

    def _process_outcomes(self, now: int) -> None:
        """Report the tokens that the step in flight made; store and free the sequences that ended
        in it."""
        outcomes, self._outcomes = self._outcomes, {}
        for sequence in [sequence for sequence in self.running if sequence in outcomes]:
            granted = self.policy.append(
                sequence.allocation, sequence.held_tokens, sequence.held_tokens
            )
            assert granted, "no token needs memory"
            if sequence.has_ended:
                self._finish(sequence, now)
        # the plan preempted it
        for sequence in [sequence for sequence in self.waiting if sequence.has_ended]:
            self.waiting.remove(sequence)

    def abort(self, request: Request, now: int) -> ScheduledSequence | None:
        """Remove a request; one whose output is complete, but not processed yet, does not store its
        end."""
        sequence = super().abort(request, now)
        if sequence is not None:
            self._outcomes.pop(sequence, None)
        return None if sequence is None or sequence.has_ended else sequence


def make_scheduler(
    policy: Policy, rules: BatchRules, proposed: Callable[[ScheduledSequence], int] | None = None
) -> Scheduler:
    """Return a scheduler of the kind that the rules select; `proposed` is for one with drafts."""
    if rules.speculation.draft_tokens:
        kind = AsyncSpeculativeScheduler if rules.async_scheduling else SpeculativeScheduler
        return kind(policy, rules, proposed)
    return AsyncScheduler(policy, rules) if rules.async_scheduling else Scheduler(policy, rules)
