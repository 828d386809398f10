"""What steps compute: sequences on their way, chunks of their work, and whole steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from spanlab.core.protocol import Allocation
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.work import RepairPass, Work


class Sequence:
    """One request on its way through the work that its allocation lists, and then through its output.

    `at`, `done`  the work in progress, and how many of its rows have been computed
    `reached`     by cache span: how far into prompt and output its rows were ever computed
    `repaired`    how many of the rows of its repair were ever computed
    `seat`        how many sequences began to run before it did, the last time that it did
    """

    __slots__ = (
        "admitted_at",
        "allocation",
        "at",
        "captured",
        "captured_maps",
        "done",
        "finished_at",
        "first_plan",
        "first_token_at",
        "first_work",
        "generated",
        "preemptions",
        "prompt",
        "reached",
        "recomputed",
        "repaired",
        "request",
        "seat",
        "work",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt = request.num_tokens
        self.at = self.done = self.seat = 0
        self.generated = self.preemptions = self.recomputed = self.repaired = 0
        self.captured = self.captured_maps = 0
        self.reached: dict[int, int] = {}
        self.admitted_at = self.first_token_at = self.finished_at = -1
        self.allocation: Allocation | None = None
        self.work: tuple[Work, ...] = ()  # the allocation's
        self.first_plan: ReusePlan | None = None
        self.first_work: tuple[Work, ...] = ()

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV is in memory: everything but the newest output token."""
        return self.prompt + self.generated - 1

    @property
    def prefilled(self) -> bool:
        """Whether all work before the next output token is done."""
        return self.allocation is not None and self.at == len(self.work)

    def admit(self, allocation: Allocation, now: int) -> None:
        """Take what the policy has given; its first admission is remembered."""
        self.allocation, self.work = allocation, allocation.work
        if self.first_plan is None:
            self.first_plan, self.first_work, self.admitted_at = allocation.plan, self.work, now

    def advance(self, chunk: ScheduledChunk, now: int) -> None:
        """Move past a chunk that has been computed, and count its rows that were computed before."""
        assert self.allocation is not None, "only who is admitted computes"
        work, plan = chunk.work, self.allocation.plan
        for cache_span, start, stop in work.cache_span_rows(plan, chunk.start, chunk.stop):
            reached = self.reached.get(cache_span, 0)
            self.recomputed += max(0, min(stop, reached) - start)
            self.reached[cache_span] = max(stop, reached)
        if isinstance(work, RepairPass):
            start, stop = work.repaired_rows(plan, chunk.start, chunk.stop)
            self.recomputed += max(0, min(stop, self.repaired) - start)
            self.repaired = max(stop, self.repaired)
        self.done += chunk.tokens
        if self.done == work.tokens:
            self.at, self.done = self.at + 1, 0
        if chunk.last:
            self.generated += 1
            if self.first_token_at < 0:
                self.first_token_at = now

    def start_over(self) -> None:
        """Go back to the start of its work: it has been preempted."""
        if self.prefilled:
            self.reached[self.work[-1].cache_spans[-1]] = self.held_tokens
        self.at = self.done = 0
        self.preemptions += 1

    def hand_back(self) -> Allocation:
        """Give up what it holds, which is not freed yet, and count what was captured for it."""
        allocation = self.allocation
        assert allocation is not None, "who runs is admitted"
        self.captured += allocation.captured
        self.captured_maps += allocation.captured_maps
        self.allocation, self.work = None, ()
        return allocation


class ScheduledChunk(NamedTuple):
    """Rows `[start, stop)` of one work of one sequence, computed in one step.

    `tokens`    rows that pass every layer: stop - start, but for a repair, which chooses its rows
    `captures`  positions in (start, stop] whose recurrent state is kept, or the map of the span that ends there
    `last`      nothing is left after it, so it yields an output token
    """

    sequence: Sequence
    start: int
    stop: int
    captures: tuple[int, ...]
    work: Work
    tokens: int
    last: bool

    def key(self) -> tuple[object, ...]:
        """The chunk as plain numbers."""
        return self.sequence.request.id, self.start, self.stop, self.captures, *self.work.key(), self.tokens


@dataclass(slots=True)
class ScheduledStep:
    """What one step computes; with `repeats` > 1, that many equal decode steps in a row.

    `loads`        sequences whose stored state is read at the start of the step
    `drafts`       tokens that each of `decodes` has drafted and that the step verifies; empty: none do
    `max_repeats`  how often it could run in a row before memory or the queue would change what is computed
    """

    chunks: list[ScheduledChunk]
    decodes: list[Sequence]
    loads: list[Sequence]
    repeats: int = 1
    max_repeats: int = 1
    drafts: list[int] = field(default_factory=list)

    def key(self) -> tuple[object, ...]:
        """The step as plain numbers, equal for equal steps of any backend; drafts come last, where there are any."""
        chunks = tuple([chunk.key() for chunk in self.chunks])
        return chunks, tuple(sequence.request.id for sequence in self.decodes), self.repeats, *self.drafts


class Decoding:
    """Sequences that decode, and what they hold, in order; one object for as long as they are the same."""

    __slots__ = ("allocations", "sequences")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.allocations = [sequence.allocation for sequence in sequences if sequence.allocation is not None]

    def starts(self, ahead: int) -> list[int]:
        """Where the next token of each but `ahead` goes."""
        return [sequence.prompt + sequence.generated - 1 + ahead for sequence in self.sequences]


def chunk_of(sequence: Sequence, at: int, done: int, take: int) -> ScheduledChunk:
    """`take` rows of a sequence's work number `at`, of which `done` are computed."""
    work, allocation = sequence.work[at], sequence.allocation
    assert allocation is not None
    start, stop = work.stretch(allocation.plan, done, take)
    reached = [position for position in allocation.captures if start < position <= stop]
    captures = tuple([position for position in reached if work.captured(allocation.plan, position)])
    last = at == len(sequence.work) - 1 and done + take == work.tokens
    return ScheduledChunk(sequence, start, stop, captures, work, take, last)
