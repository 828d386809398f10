"""Sequences, chunks of their work, and whole steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from spanlab.core.protocol import Allocation
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.work import RepairPass, Work


class Sequence:
    """One request during the work that its allocation lists, and then during its output.

    `work_index`, `rows_done`  the work in progress, and the number of its rows computed so far
    `reached`     by cache span: end of the prompt and output tokens that were ever computed
    `repaired`    number of the rows of its repair that were ever computed
    `start_rank`  number of sequences that had started before it, at its last start
    """

    __slots__ = (
        "admitted_at",
        "allocation",
        "captured",
        "captured_maps",
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
        "rows_done",
        "start_rank",
        "work",
        "work_index",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt = request.num_tokens
        self.work_index = self.rows_done = self.start_rank = 0
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
        """Tokens whose KV is in memory: all but the newest output token."""
        return self.prompt + self.generated - 1

    @property
    def prefilled(self) -> bool:
        """Whether all work before the next output token is computed."""
        return self.allocation is not None and self.work_index == len(self.work)

    def admit(self, allocation: Allocation, now: int) -> None:
        """Take an allocation; plan, work and time of the first admission are kept."""
        self.allocation, self.work = allocation, allocation.work
        if self.first_plan is None:
            self.first_plan, self.first_work, self.admitted_at = allocation.plan, self.work, now

    def advance(self, chunk: ScheduledChunk, now: int) -> None:
        """Advance past a computed chunk, and count its rows that were computed before."""
        assert self.allocation is not None, "only admitted sequences compute"
        work, plan = chunk.work, self.allocation.plan
        for cache_span, start, stop in work.cache_span_rows(plan, chunk.start, chunk.stop):
            reached = self.reached.get(cache_span, 0)
            self.recomputed += max(0, min(stop, reached) - start)
            self.reached[cache_span] = max(stop, reached)
        if isinstance(work, RepairPass):
            start, stop = work.repaired_rows(plan, chunk.start, chunk.stop)
            self.recomputed += max(0, min(stop, self.repaired) - start)
            self.repaired = max(stop, self.repaired)
        self.rows_done += chunk.tokens
        if self.rows_done == work.tokens:
            self.work_index, self.rows_done = self.work_index + 1, 0
        if chunk.last:
            self.generated += 1
            if self.first_token_at < 0:
                self.first_token_at = now

    def reset_progress(self) -> None:
        """Return to the start of its work after a preemption."""
        if self.prefilled:
            self.reached[self.work[-1].cache_spans[-1]] = self.held_tokens
        self.work_index = self.rows_done = 0
        self.preemptions += 1

    def detach_allocation(self) -> Allocation:
        """Detach and return the allocation, which is not freed yet, and count its captured states."""
        allocation = self.allocation
        assert allocation is not None, "a running sequence is admitted"
        self.captured += allocation.captured
        self.captured_maps += allocation.captured_maps
        self.allocation, self.work = None, ()
        return allocation


class ScheduledChunk(NamedTuple):
    """Rows `[start, stop)` of one work of one sequence, computed in one step.

    `tokens`    rows that pass through every layer: stop - start, except in a repair, which selects its rows
    `captures`  positions in (start, stop] whose recurrent state, or the map of the span that ends there, is stored
    `last`      no work follows it, so it yields an output token
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
    """The work of one step; with `repeats` > 1, that many equal decode steps in a row.

    `loads`        sequences whose stored state is read at the start of the step
    `drafts`       number of draft tokens of each of `decodes`, which the step verifies; empty without drafts
    `max_repeats`  how often it could run in a row before memory or the queue would change its content
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


class DecodeBatch:
    """Sequences that decode, and their allocations, in order; one object for as long as they are the same."""

    __slots__ = ("allocations", "sequences")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.allocations = [sequence.allocation for sequence in sequences if sequence.allocation is not None]

    def starts(self, ahead: int) -> list[int]:
        """Return the position of each sequence's next token, plus `ahead`."""
        return [sequence.prompt + sequence.generated - 1 + ahead for sequence in self.sequences]


def chunk_of(sequence: Sequence, index: int, computed: int, take: int) -> ScheduledChunk:
    """Return the chunk of the next `take` rows of work number `index`, after the first `computed` rows."""
    work, allocation = sequence.work[index], sequence.allocation
    assert allocation is not None
    start, stop = work.token_range(allocation.plan, computed, take)
    reached = [position for position in allocation.captures if start < position <= stop]
    captures = tuple([position for position in reached if work.captures_at(allocation.plan, position)])
    last = index == len(sequence.work) - 1 and computed + take == work.tokens
    return ScheduledChunk(sequence, start, stop, captures, work, take, last)
