"""Planning a step while the one before it runs, as vLLM 0.32.0 does by default."""

from __future__ import annotations

from typing import NamedTuple

from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Allocation, Policy
from spanlab.core.request import Request
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler
from spanlab.core.speculative_scheduler import SpeculativeScheduler


class Ended(NamedTuple):
    """A sequence that has ended in the step before, and what it holds."""

    sequence: Sequence
    allocation: Allocation


class AsyncScheduler(Scheduler):
    """A scheduler whose next step is already planned when a step ends.

    So a request that arrives during a step joins the one after the next, and a request that ends holds its seat and its
    memory while the next step is planned, unless it is the one to give way. An engine without work plans at once.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._late: list[Request] = []
        self._ended: list[Ended] = []  # by seat

    def add(self, request: Request) -> None:
        """Queue a request for the step after the next one."""
        self._late.append(request)

    def join(self) -> None:
        """Let the requests that were added be planned from here on."""
        for request in self._late:
            super().add(request)
        self._late.clear()

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._late and super().idle

    def schedule(self, now: int) -> ScheduledStep | None:
        """Plan without the requests that have arrived during the step before, unless there are no others."""
        if super().idle:
            self._free_ended(now)
            self.join()
        step = super().schedule(now)
        if self._ended:
            self._free_ended(now)
            if step is None or not (step.chunks or step.decodes):  # the engine waits for what is under way
                return self.schedule(now)
            if self.waiting:
                step.max_repeats = 1
        if self._late and step is not None:
            self.join()
            step.max_repeats = 1
        return step

    @property
    def _taken_seats(self) -> int:
        return len(self.running) + len(self._ended)

    def _end(self, sequence: Sequence, now: int) -> None:
        """Let a sequence hold what it has until the next step is planned."""
        self._ended.append(Ended(sequence, self._stand_up(sequence)))

    def _give_way(self, now: int) -> None:
        """Preempt the sequence that was admitted last; of one that has ended, free what it holds."""
        last = self.running[-1]
        if self._ended and self._ended[-1].sequence.seat > last.seat:
            ended = self._ended.pop()
            self.policy.free(ended.allocation, now)
            ended.sequence.preemptions += 1
            self._preempted_this_step = True
        elif self._ended:
            self._preempt(last, now)
        else:
            super()._give_way(now)

    def _free_ended(self, now: int) -> None:
        """Free what sequences hold that ended in the step before."""
        for one in self._ended:
            self.policy.free(one.allocation, now)
            self._refused = False
        self._ended.clear()


def make_scheduler(policy: Policy, rules: BatchRules) -> Scheduler:
    """The scheduler that the rules ask for."""
    if rules.speculation.draft_tokens:
        return SpeculativeScheduler(policy, rules)
    return AsyncScheduler(policy, rules) if rules.async_scheduling else Scheduler(policy, rules)
