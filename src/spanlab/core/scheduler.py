"""Continuous batching: which request computes which tokens in the next step.

The scheduler knows ranges, bytes and `now`; it never reads how long an output will be. A backend runs the step, says
how long it took and which sequences ended; then `commit` moves everybody forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from spanlab.core.policy import Policy
from spanlab.core.request import Request
from spanlab.core.reuse import Lease, ReusePlan, Work
from spanlab.core.work import extents


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How steps are filled.

    `token_budget`   prompt tokens and decodes of one step together
    `max_num_seqs`   requests running at once
    `chunked`        a prompt may be computed in several steps; without it, in one, however long
    `prefill_first`  a step that computes prompts decodes nothing; otherwise decodes come first and chunks fill up
    """

    token_budget: int = 8192
    max_num_seqs: int = 256
    chunked: bool = True
    prefill_first: bool = False


class Sequence:
    """One request on its way through the work that its lease lists, and then through its output.

    `at`, `done`  the work in progress, and how many of its rows have been computed
    `reached`     by section: how far into prompt and output its rows were ever computed; -1: rows ever repaired
    """

    __slots__ = (
        "admitted_at",
        "at",
        "captured",
        "done",
        "finished_at",
        "first_plan",
        "first_token_at",
        "first_work",
        "generated",
        "lease",
        "preemptions",
        "prompt",
        "reached",
        "recomputed",
        "request",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt = request.num_tokens
        self.at = self.done = 0
        self.generated = self.preemptions = self.recomputed = self.captured = 0
        self.reached: dict[int, int] = {}
        self.admitted_at = self.first_token_at = self.finished_at = -1
        self.lease: Lease | None = None
        self.first_plan: ReusePlan | None = None
        self.first_work: tuple[Work, ...] = ()

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV is in memory: everything but the newest output token."""
        return self.prompt + self.generated - 1

    @property
    def work(self) -> tuple[Work, ...]:
        """What it computes before its next output token."""
        assert self.lease is not None, "only who is admitted has work"
        return self.lease.work

    @property
    def prefilled(self) -> bool:
        """Whether all of that is done."""
        return self.lease is not None and self.at == len(self.lease.work)


class Chunk(NamedTuple):
    """Rows `[start, stop)` of one work of one sequence, computed in one step.

    `tokens`    rows that pass every layer: stop - start, but for a repair, which is one chunk and chooses its rows
    `captures`  positions in (start, stop] whose recurrent state is kept
    `last`      nothing is left after it, so it yields an output token
    """

    sequence: Sequence
    start: int
    stop: int
    captures: tuple[int, ...]
    work: Work
    tokens: int
    last: bool


@dataclass(slots=True)
class StepPlan:
    """What one step computes; with `repeats` > 1, that many equal decode steps in a row."""

    chunks: list[Chunk]
    decodes: list[Sequence]
    loads: list[Sequence]  # sequences whose stored state is read at the start of this step
    repeats: int = 1

    def key(self) -> tuple[object, ...]:
        """The plan as plain numbers, equal for equal plans whoever made them."""
        chunks = tuple((chunk.sequence.request.id, *chunk[1:4], *chunk.work, chunk.tokens) for chunk in self.chunks)
        return chunks, tuple(sequence.request.id for sequence in self.decodes), self.repeats


class Scheduler:
    """Serves requests first come, first served, under a token budget, a seat limit and the store's memory."""

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        self.policy, self.rules = policy, rules
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._running: list[Sequence] = []  # in order of admission
        self._calm = True  # nothing was preempted in the last step planned
        self._refused = False  # the head of the queue did not fit, and nothing but decoding has happened since

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(Sequence(request))

    @property
    def idle(self) -> bool:
        """Whether nobody waits and nobody runs."""
        return not (self.waiting or self._running)

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan_step(self, now: int) -> StepPlan | None:
        """Fill the next step and reserve what it writes; None where there is nothing to do."""
        step, self._calm = StepPlan([], [], []), True
        if not self.rules.prefill_first:
            self._decode(step)
        budget = self.rules.token_budget - len(step.decodes)
        for sequence in self.prefilling:
            if budget <= 0:  # a repair before it may have taken more than there was
                break
            budget -= self._fill(step, sequence, budget)
        if self._calm:
            self._admit(step, budget, now)
        if self.rules.prefill_first and not step.chunks:
            self._decode(step)
        return step if step.chunks or step.decodes else None

    def _decode(self, step: StepPlan) -> None:
        """Let everybody who decodes take one more token, preempting from the tail until there is memory for it."""
        if not self.decoding:
            return
        while self.policy.content.spare_tokens() < len(self.decoding):
            assert len(self._running) > 1, "one request outgrew the memory; sizes are checked before a run starts"
            self._preempt(self._running[-1])
            self._calm = False
        step.decodes = list(self.decoding)
        self._grow(step, 1)

    def _grow(self, step: StepPlan, tokens: int) -> None:
        leases = [sequence.lease for sequence in step.decodes if sequence.lease is not None]
        granted = self.policy.grow(leases, tokens)
        assert granted, "a step was given more tokens than there is memory for"

    def _preempt(self, sequence: Sequence) -> None:
        """Drop everything a sequence holds; it goes to the head of the queue and computes its tokens again."""
        if sequence.prefilled:
            sequence.reached[sequence.work[-1].section] = sequence.held_tokens
        sequence.at = sequence.done = 0
        self._leave(sequence)
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._refused = False
        assert sequence.lease is not None
        sequence.captured += sequence.lease.captured
        self.policy.release(sequence.lease)
        sequence.lease = None
        self._running.remove(sequence)
        (self.decoding if sequence in self.decoding else self.prefilling).remove(sequence)

    def _fill(self, step: StepPlan, sequence: Sequence, budget: int) -> int:
        """Give a sequence what the budget allows, at least something; returns the rows taken.

        Without chunks it gets all its work at once; a repair is never cut, whatever the budget.
        """
        taken, done = 0, sequence.done
        for at in range(sequence.at, len(sequence.work)):
            work = sequence.work[at]
            take = work.tokens - done
            if self.rules.chunked and work.section >= 0:
                take = min(take, budget - taken)
            if taken and self.rules.chunked and not 0 < take <= budget - taken:
                break
            step.chunks.append(_chunk(sequence, at, done, take))
            taken += take
            if done + take < work.tokens:
                break
            done = 0
        assert taken or not work.tokens, "a sequence was chosen without tokens to spend on it"
        return taken

    def _admit(self, step: StepPlan, budget: int, now: int) -> None:
        while self.waiting and not self._refused and len(self._running) < self.rules.max_num_seqs and budget > 0:
            sequence = self.waiting[0]
            plan = self.policy.plan(sequence.request, now)
            if not self.rules.chunked and step.chunks and plan.rows + sequence.generated > budget:
                return
            lease = self.policy.admit(plan, now, sequence.generated)
            if lease is None and not self._running:  # what it would reuse may be in its own way
                lease = self.policy.admit(plan.without_reuse(), now, sequence.generated)
            if lease is None:
                self._refused = True
                return
            self._seat(sequence, lease, now)
            budget -= self._fill(step, sequence, budget)
            if lease.plan.sections[-1].resume_state is not None:
                step.loads.append(sequence)

    def _seat(self, sequence: Sequence, lease: Lease, now: int) -> None:
        self.waiting.popleft()
        sequence.lease = lease
        if sequence.first_plan is None:
            sequence.first_plan, sequence.first_work, sequence.admitted_at = lease.plan, lease.work, now
        self._running.append(sequence)
        self.prefilling.append(sequence)

    def horizon(self, step: StepPlan) -> int:
        """How many times a decode-only step could run in a row before memory or the queue would change the plan."""
        if step.chunks or not self._calm:
            return 1
        return 1 + self.policy.content.spare_tokens() // len(step.decodes)

    def repeat(self, step: StepPlan, times: int) -> None:
        """Let a decode-only step stand for `times` equal ones, at most `horizon(step)`, and reserve what they write."""
        self._grow(step, times - 1)
        step.repeats = times

    # -- committing ---------------------------------------------------------------------------------------------------

    def commit(self, step: StepPlan, finished_at: int, ended: Collection[Sequence]) -> None:
        """Move everybody forward: `ended` are the sequences whose output is complete after this step."""
        for chunk in step.chunks:
            self._advance(chunk, finished_at)
        for sequence in step.decodes:
            sequence.generated += step.repeats
        for sequence in ended:
            sequence.finished_at = finished_at
            self._leave(sequence)

    def _advance(self, chunk: Chunk, now: int) -> None:
        sequence, work = chunk.sequence, chunk.work
        assert sequence.lease is not None
        for section, start, stop in extents(sequence.lease.plan, work, chunk.start, chunk.stop):
            reached = sequence.reached.get(section, 0)
            sequence.recomputed += max(0, min(stop, reached) - start)
            sequence.reached[section] = max(stop, reached)
        sequence.done += chunk.tokens
        if sequence.done == work.tokens:
            sequence.at, sequence.done = sequence.at + 1, 0
        self._refused = False
        self._store(sequence.lease, chunk, now)
        if chunk.last:
            sequence.generated += 1
            if sequence.first_token_at < 0:
                sequence.first_token_at = now
            self.prefilling.remove(sequence)
            self.decoding.append(sequence)

    def _store(self, lease: Lease, chunk: Chunk, now: int) -> None:
        if chunk.work.section >= 0:
            self.policy.store(lease, chunk.stop, now, chunk.work.section)
        for section in chunk.work.between:
            self.policy.store(lease, lease.plan.sections[section].section.stop, now, section)


def _chunk(sequence: Sequence, at: int, done: int, take: int) -> Chunk:
    work, lease = sequence.work[at], sequence.lease
    start, stop = (work.start + done, work.start + done + take) if work.section >= 0 else (work.start, work.stop)
    assert lease is not None
    captures = tuple([position for position in lease.captures if start < position <= stop])
    last = at == len(sequence.work) - 1 and done + take == work.tokens
    return Chunk(sequence, start, stop, captures, work, take, last)
