"""Ranks of one engine that run every step together: data parallel attention before shared experts."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ordered

from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.request import Request
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler

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
        self, step: ScheduledStep, finished_at: int, ended: Collection[Sequence], accepted: Collection[int] = ()
    ) -> None:
        """Advance the sequences of every rank."""
        for rank, rank_step in zip(self.ranks, self.rank_steps, strict=True):
            rank.complete(rank_step, finished_at, ended)
