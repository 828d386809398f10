"""Scheduling of a step while the previous step runs, as vLLM 0.32.0 does by default."""

from __future__ import annotations

from typing import NamedTuple

from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Allocation, Policy
from spanlab.core.request import Request
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler, rank
from spanlab.core.speculative_scheduler import SpeculativeScheduler


class FinishedSequence(NamedTuple):
    """A sequence that finished in the previous step, with its allocation, which is neither stored nor freed yet."""

    sequence: Sequence
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

    def _finish(self, sequence: Sequence, now: int) -> None:
        """Keep the allocation of a finished sequence, without its last tokens, until the next step is planned."""
        self._finished.append(FinishedSequence(sequence, self._stop_running(sequence)))

    def _preempt_lowest(self, now: int) -> None:
        """Preempt the sequence that started last of the lowest priority.

        If it has finished already, free its allocation and count a preemption.
        """
        lowest = max(self.running, key=rank)
        finished = max(self._finished, key=lambda finished: rank(finished.sequence), default=None)
        if finished is not None and rank(finished.sequence) > rank(lowest):
            self._finished.remove(finished)
            self.policy.free(finished.allocation, now)
            finished.sequence.preemptions += 1
            self._preempted_this_step = True
        elif self._finished:
            self._preempt(lowest, now)
        else:
            super()._preempt_lowest(now)

    def abort(self, request: Request, now: int) -> Sequence | None:
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
