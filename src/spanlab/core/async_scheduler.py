"""Planning a step while the one before it runs, as vLLM does by default since its releases of 2026."""

from __future__ import annotations

from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Policy
from spanlab.core.request import Request
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.scheduler import Scheduler
from spanlab.core.speculative_scheduler import SpeculativeScheduler


class AsyncScheduler(Scheduler):
    """A scheduler whose next step is already planned when a request arrives: it joins the one after that.

    An engine without work plans at once. Memory and seats of requests that end are free for the next step, where an
    engine frees them for the one after; their count decides, and differs by one step of one request.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        super().__init__(policy, rules)
        self._late: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request for the step after the next one."""
        self._late.append(request)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._late and super().idle

    def schedule(self, now: int) -> ScheduledStep | None:
        """Plan without the requests that have arrived during the step before, unless there are no others."""
        if super().idle:
            self._let_join()
        step = super().schedule(now)
        if self._late and step is not None:
            self._let_join()
            step.max_repeats = 1
        return step

    def _let_join(self) -> None:
        for request in self._late:
            super().add(request)
        self._late.clear()


def make_scheduler(policy: Policy, rules: BatchRules) -> Scheduler:
    """The scheduler that the rules ask for."""
    if rules.speculation.draft_tokens:
        return SpeculativeScheduler(policy, rules)
    return AsyncScheduler(policy, rules) if rules.async_scheduling else Scheduler(policy, rules)
