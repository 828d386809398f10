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
from spanlab.core.reuse import Lease, ReusePlan


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
    """One request on its way: `target` tokens are to be computed before its next output token appears."""

    __slots__ = (
        "admitted_at",
        "captured",
        "computed",
        "finished_at",
        "first_plan",
        "first_token_at",
        "generated",
        "lease",
        "preemptions",
        "prompt",
        "recomputed",
        "request",
        "target",
        "was_at",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt = self.target = request.num_tokens
        self.computed = self.generated = self.preemptions = self.recomputed = self.captured = self.was_at = 0
        self.admitted_at = self.first_token_at = self.finished_at = -1
        self.lease: Lease | None = None
        self.first_plan: ReusePlan | None = None

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV is in memory: everything but the newest output token."""
        return self.prompt + self.generated - 1


class Chunk(NamedTuple):
    """Tokens `[start, stop)` of one sequence, computed in one step; the last chunk yields an output token."""

    sequence: Sequence
    start: int
    stop: int
    captures: tuple[int, ...]  # positions in (start, stop] whose recurrent state is kept


@dataclass(slots=True)
class StepPlan:
    """What one step computes; with `repeats` > 1, that many equal decode steps in a row."""

    chunks: list[Chunk]
    decodes: list[Sequence]
    loads: list[Sequence]  # sequences whose stored state is read at the start of this step
    repeats: int = 1

    def key(self) -> tuple[object, ...]:
        """The plan as plain numbers, equal for equal plans whoever made them."""
        chunks = tuple((chunk.sequence.request.id, *chunk[1:]) for chunk in self.chunks)
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
            budget -= self._chunk(step, sequence, budget)
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
        self._leave(sequence)
        sequence.preemptions += 1
        done = sequence.held_tokens if sequence.computed == sequence.target else sequence.computed
        sequence.was_at = max(sequence.was_at, done)
        sequence.computed, sequence.target = 0, sequence.prompt + sequence.generated
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._refused = False
        assert sequence.lease is not None
        sequence.captured += sequence.lease.captured
        self.policy.release(sequence.lease)
        sequence.lease = None
        self._running.remove(sequence)
        (self.decoding if sequence in self.decoding else self.prefilling).remove(sequence)

    def _chunk(self, step: StepPlan, sequence: Sequence, budget: int) -> int:
        """Give a sequence what the budget allows, at least something; returns the tokens taken."""
        remaining = sequence.target - sequence.computed
        take = min(remaining, budget) if self.rules.chunked else remaining
        assert take > 0 or remaining == 0, "a sequence was chosen without tokens to spend on it"
        start, stop = sequence.computed, sequence.computed + take
        captures = tuple(position for position in _captures(sequence) if start < position <= stop)
        step.chunks.append(Chunk(sequence, start, stop, captures))
        return take

    def _admit(self, step: StepPlan, budget: int, now: int) -> None:
        while self.waiting and not self._refused and len(self._running) < self.rules.max_num_seqs and budget > 0:
            sequence = self.waiting[0]
            plan = self.policy.plan(sequence.request, now)
            if not self.rules.chunked and step.chunks and sequence.target - plan.resume > budget:
                return
            lease = self.policy.admit(plan, now, sequence.generated)
            if lease is None and not self._running:  # what it would reuse may be in its own way
                lease = self.policy.admit(plan.without_reuse(), now, sequence.generated)
            if lease is None:
                self._refused = True
                return
            self._seat(sequence, lease, now)
            budget -= self._chunk(step, sequence, budget)
            if lease.plan.resume_state is not None:
                step.loads.append(sequence)

    def _seat(self, sequence: Sequence, lease: Lease, now: int) -> None:
        self.waiting.popleft()
        sequence.lease, sequence.computed = lease, lease.plan.resume
        if sequence.first_plan is None:
            sequence.first_plan, sequence.admitted_at = lease.plan, now
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
        sequence, lease = chunk.sequence, chunk.sequence.lease
        assert lease is not None
        sequence.recomputed += max(0, min(chunk.stop, sequence.was_at) - chunk.start)
        sequence.computed = chunk.stop
        self._refused = False
        self.policy.store(lease, chunk.stop, now)
        if chunk.stop == sequence.target:
            sequence.generated += 1
            if sequence.first_token_at < 0:
                sequence.first_token_at = now
            self.prefilling.remove(sequence)
            self.decoding.append(sequence)


def _captures(sequence: Sequence) -> list[int]:
    return sequence.lease.captures if sequence.lease is not None else []
