"""Ranks of one engine that take every step together: data parallel attention before shared experts."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ordered

from spanlab.core.request import Request
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler

#: What vLLM's balancer counts a waiting request as, in running ones.
WAITING_WEIGHT = 4


class LockstepScheduler(Scheduler):
    """One scheduler per rank; a step is the union of theirs, and ends for all of them at once.

    A request goes to the rank with the fewest others, waiting ones counted `WAITING_WEIGHT` times (vLLM's balancer).
    A rank without work still takes part: expert layers exchange the tokens of all.
    """

    def __init__(self, ranks: Ordered[Scheduler]) -> None:
        super().__init__(ranks[0].policy, ranks[0].rules)
        self.ranks = tuple(ranks)
        self.parts: list[ScheduledStep] = []
        self._sent: list[list[Request]] = [[] for _ in ranks]  # since the last step was planned: not counted by it

    def add(self, request: Request) -> None:
        """Queue a request at the rank with the least to do."""
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
        """The next step of all ranks; `parts` are their own, empty ones for ranks without work."""
        planned = [rank.schedule(now) for rank in self.ranks]
        for sent in self._sent:
            sent.clear()
        working = [step for step in planned if step is not None]
        if not working:
            return None
        self.parts = [ScheduledStep([], [], []) if step is None else step for step in planned]
        return ScheduledStep(
            chunks=[chunk for step in working for chunk in step.chunks],
            decodes=[sequence for step in working for sequence in step.decodes],
            loads=[sequence for step in working for sequence in step.loads],
            max_repeats=min(step.max_repeats for step in working),
        )

    def repeat(self, step: ScheduledStep, times: int) -> None:
        """Let the decode-only step of every rank that decodes stand for `times` equal ones."""
        step.repeats = times
        for rank, part in zip(self.ranks, self.parts, strict=True):
            if part.decodes:
                rank.repeat(part, times)

    def complete(
        self, step: ScheduledStep, finished_at: int, ended: Collection[Sequence], accepted: Collection[int] = ()
    ) -> None:
        """Move the sequences of every rank forward."""
        for rank, part in zip(self.ranks, self.parts, strict=True):
            rank.complete(part, finished_at, ended)
