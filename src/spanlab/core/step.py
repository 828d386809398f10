"""One step of the engine: the contract of a backend, the scheduled sequences, and the passes over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.plan import RepairPass, ReusePlan, Work
from spanlab.core.protocol import Allocation
from spanlab.core.request import Request

# ------------------------------------------------------------------------------
# Sequences, chunks of their work, and whole steps.
# ------------------------------------------------------------------------------


class ScheduledSequence:
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

    sequence: ScheduledSequence
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
    decodes: list[ScheduledSequence]
    loads: list[ScheduledSequence]
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

    def __init__(self, sequences: list[ScheduledSequence]) -> None:
        self.sequences = sequences
        self.allocations = [sequence.allocation for sequence in sequences if sequence.allocation is not None]

    def starts(self, ahead: int) -> list[int]:
        """Return the position of each sequence's next token, plus `ahead`."""
        return [sequence.prompt + sequence.generated - 1 + ahead for sequence in self.sequences]


def chunk_of(sequence: ScheduledSequence, index: int, computed: int, take: int) -> ScheduledChunk:
    """Return the chunk of the next `take` rows of work number `index`, after the first `computed` rows."""
    work, allocation = sequence.work[index], sequence.allocation
    assert allocation is not None
    start, stop = work.token_range(allocation.plan, computed, take)
    reached = [position for position in allocation.captures if start < position <= stop]
    captures = tuple([position for position in reached if work.captures_at(allocation.plan, position)])
    last = index == len(sequence.work) - 1 and computed + take == work.tokens
    return ScheduledChunk(sequence, start, stop, captures, work, take, last)


# ------------------------------------------------------------------------------
# The contract between a serving loop and a backend, simulated or real, that runs its steps.
# ------------------------------------------------------------------------------

Ends = Ordered[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    `duration_ns`  from the end of the previous step, or from `resume`, to the end of this one
    `finished`     sequences whose output is complete
    `repeats`      equal decode steps that ran in a row
    `ends`         time of the end of each of them, from the start of the first; empty where only the last is known
    `accepted`     number of accepted drafts for each of the step's `decodes`; empty without drafts
    `phases`       seconds of each phase by name; empty where nothing is measured
    """

    duration_ns: int
    finished: list[ScheduledSequence]
    repeats: int = 1
    phases: Mapping[str, float] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    ends: Ends = ()

    def end_of(self, repeat: int) -> int:
        """Return the end of a repeat, counted from 0; all take equally long where only the last end is known."""
        end = self.ends[repeat] if len(self.ends) else self.duration_ns * (repeat + 1) // self.repeats
        return min(int(end), self.duration_ns)


class Backend(Protocol):
    """Runs the steps of one serving loop; it never calls the scheduler."""

    def resume(self) -> None:
        """Note the end of an idle time, which belongs to no step."""
        ...

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step without interruption.

        A decode-only step may repeat up to `step.max_repeats` times. It repeats until a sequence finishes, or until
        the first end at or after `deadline_ns` from now, when the next request arrives. None: no request will
        arrive.
        """
        ...

    def completed(self, step: ScheduledStep) -> None:
        """Update the backend to what the policy stored for a step and freed after it."""
        ...

    def close(self) -> None:
        """End the run, and free what finished requests still hold."""
        ...


def finished_after(step: ScheduledStep, repeats: int = 1) -> list[ScheduledSequence]:
    """Return the sequences whose output is complete after a step."""
    return finished_prompts(step) + [s for s in step.decodes if s.generated + repeats >= s.request.output_len]


def finished_prompts(step: ScheduledStep) -> list[ScheduledSequence]:
    """Return the sequences whose output is complete with the token that their last chunk yields."""
    lasts = [chunk.sequence for chunk in step.chunks if chunk.last]
    return [sequence for sequence in lasts if sequence.generated + 1 >= sequence.request.output_len]


# ------------------------------------------------------------------------------
# The forward passes of a step: chunks that may run packed together, and chunks that must wait
# for them.
# ------------------------------------------------------------------------------


def stages(chunks: Iterable[ScheduledChunk], copies: bool) -> list[list[ScheduledChunk]]:
    """Split one sequence's chunks of a step where rows read copies of what earlier chunks compute.

    Rows of one forward may read each other's keys, since every layer writes all keys before it reads any. Copies
    are made between forwards. So where spans are copied or repaired, chunks that read across them wait for the next
    forward.
    """
    groups: list[list[ScheduledChunk]] = []
    has_spans = False
    for chunk in chunks:
        crosses = not of_span(chunk)
        behind_repair = groups and groups[-1] and is_repair(groups[-1][-1])
        if not groups or (copies and crosses and has_spans) or behind_repair:
            groups.append([])
            has_spans = False
        groups[-1].append(chunk)
        has_spans = has_spans or not crosses
    return groups


def of_span(chunk: ScheduledChunk) -> bool:
    """Whether the rows of a chunk belong to an independent span."""
    allocation, work = chunk.sequence.allocation, chunk.work
    assert allocation is not None
    return not isinstance(work, RepairPass) and allocation.plan.cache_spans[work.cache_span].cache_span.independent


def is_repair(chunk: ScheduledChunk) -> bool:
    """Whether a chunk belongs to a repair."""
    return isinstance(chunk.work, RepairPass)


def passes(step: ScheduledStep, copies: bool, measured: bool) -> list[list[ScheduledChunk]]:
    """Return the chunks of each forward of a step, in order; decodes run in the first, which may have no chunks.

    A measured repair drops rows between layers, so it runs alone.
    """
    by_sequence: dict[ScheduledSequence, list[ScheduledChunk]] = {}
    for chunk in step.chunks:
        by_sequence.setdefault(chunk.sequence, []).append(chunk)
    forwards: list[list[ScheduledChunk]] = []
    for level in zip_longest(*(stages(chunks, copies) for chunks in by_sequence.values()), fillvalue=()):
        packed = [chunk for stage in level for chunk in stage]
        together = [chunk for chunk in packed if not (measured and is_repair(chunk))]
        alone = [[chunk] for chunk in packed if measured and is_repair(chunk)]
        forwards += [together] * bool(together) + alone
    if step.decodes and (not forwards or (measured and is_repair(forwards[0][0]))):
        forwards.insert(0, [])
    return forwards
