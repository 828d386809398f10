"""Continuous batching: which request computes which tokens in the next step.

The scheduler knows ranges, bytes and `now`; it never reads how long an output will be. A backend runs the step, says
how long it took and which sequences finished; then `complete` moves every sequence forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from spanlab.core.batch_rules import BatchRules
from spanlab.core.chunk_sizes import ChunkSizes
from spanlab.core.protocol import Allocation, Policy
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.scheduled import Decoding, ScheduledChunk, ScheduledStep, Sequence, chunk_of


class Scheduler:
    """Serves requests first come, first served, under a token budget, a request limit and the store's memory.

    A step serves those who run in the order of their admission, a decode or the next chunk of a prompt each, and then
    admits from the queue. A request that finds no memory preempts the one admitted last; a step that has
    preempted admits none (vLLM's order). A request whose KV is on its way from a lower tier holds memory and no seat,
    and goes before the queue once it is there.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        self.policy, self.rules, self._sizes = policy, rules, ChunkSizes(policy, rules)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.loading: list[Sequence] = []  # admitted, and not yet able to run
        self._seated = 0  # sequences that have begun to run
        self._decoding: Decoding | None = None  # who decodes at the head of `running`; None where that may have changed
        self._preempted_this_step = False  # something was, in the last step planned
        self._refused = False  # the head of the queue did not fit, and nothing but decoding has happened since

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(Sequence(request))

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not (self.waiting or self.running or self.loading)

    def join(self) -> None:
        """Let the requests that were added be planned from here on; here they are anyway."""

    @property
    def _taken_seats(self) -> int:
        return len(self.running)

    @property
    def _free_seats(self) -> int:
        return self.rules.max_num_seqs - self._taken_seats

    # -- planning -----------------------------------------------------------------------------------------------------

    def schedule(self, now: int) -> ScheduledStep | None:
        """Fill the next step and reserve what it writes; None where there is nothing to do.

        A step may be empty: all that could have run was preempted, and is admitted by the next one.
        """
        step, self._preempted_this_step = ScheduledStep([], [], []), False
        self.policy.start_step(now)
        budget = self.rules.max_num_batched_tokens
        first = [s for s in self.running if not s.prefilled] if self.rules.prefill_first else self.running
        budget = self._continue(step, first, budget, now)
        if not self._preempted_this_step:
            self._admit(step, budget, now)
        if self.rules.prefill_first and not step.chunks:
            self._continue(step, [s for s in self.running if s.prefilled], budget, now)
        step.max_repeats = self._horizon(step)
        return step if step.chunks or step.decodes or self._preempted_this_step else None

    def _continue(self, step: ScheduledStep, sequences: list[Sequence], budget: int, now: int) -> int:
        """Serve running sequences in order; returns the tokens that are left."""
        together = self._decode_together(step, sequences, budget)
        budget -= together
        for sequence in sequences[together:]:
            if budget <= 0 or sequence.allocation is None:  # an allocation is lost to those before it
                break
            if sequence.prefilled:
                taken = self._decode(step, sequence, budget, now)
                if not taken:
                    break
                budget -= taken
            else:
                budget -= self._schedule_chunks(step, sequence, budget, now)
        return budget

    def _decode_together(self, step: ScheduledStep, sequences: list[Sequence], budget: int) -> int:
        """Let those who decode at the head of `sequences` take one more token each; 0 where not all find room."""
        if not sequences or not sequences[0].prefilled:
            return 0
        decoding = self._leading()
        count = len(decoding.sequences)
        if not 0 < count <= budget or self.policy.spare_steps(decoding.allocations) < 1:
            return 0
        self.policy.repeat(decoding.allocations, decoding.starts(0), 1)
        step.decodes = decoding.sequences
        return count

    def _leading(self) -> Decoding:
        if self._decoding is None:
            running = self.running
            first = 0
            while first < len(running) and running[first].prefilled:
                first += 1
            self._decoding = Decoding(running[:first])
        return self._decoding

    def _decode(self, step: ScheduledStep, sequence: Sequence, budget: int, now: int) -> int:
        """Let a sequence take one more token; returns the rows taken, 0 where it had to give way itself."""
        self._decoding = None
        if not self._make_room(sequence, sequence.held_tokens, sequence.held_tokens + 1, now):
            return 0
        step.decodes = [*step.decodes, sequence]
        return 1

    def _make_room(self, sequence: Sequence, start: int, stop: int, now: int) -> bool:
        """Get memory for tokens `[start, stop)`, from the tail of those who run; False where it was the tail."""
        while sequence.allocation is not None:
            if self.policy.append(sequence.allocation, start, stop):
                return True
            self._give_way(now)
        return False

    def _give_way(self, now: int) -> None:
        """Preempt the sequence that was admitted last."""
        alone = len(self.running) == 1 and not self.loading
        assert not alone, "one request outgrew the memory; sizes are checked before a run starts"
        self._preempt(self.running[-1], now)

    def _preempt(self, sequence: Sequence, now: int) -> None:
        """Drop everything a sequence holds; it goes to the head of the queue and computes its tokens again."""
        sequence.start_over()
        self._leave(sequence, now)
        self.waiting.appendleft(sequence)
        self._preempted_this_step = True

    def _leave(self, sequence: Sequence, now: int) -> None:
        allocation = self._stand_up(sequence)
        self._refused = False
        self.policy.free(allocation, now)

    def _stand_up(self, sequence: Sequence) -> Allocation:
        """Let a sequence run no more; returns what it holds, which is not freed yet."""
        self._decoding = None
        self.running.remove(sequence)
        return sequence.hand_back()

    def _schedule_chunks(self, step: ScheduledStep, sequence: Sequence, budget: int, now: int) -> int:
        """Give a sequence what the budget allows; returns the rows taken.

        Without chunks it gets all its work at once. A repair that is not cut runs whatever is left, unless other work
        of its own went before; the rows that it leaves out on its way count, too.
        """
        taken, done, allocation = 0, sequence.done, sequence.allocation
        assert allocation is not None, "only who is admitted has work"
        for at in range(sequence.at, len(sequence.work)):
            work = sequence.work[at]
            take = self._sizes.rows(sequence, work, done, budget - taken)
            cost = take + work.shallow
            if (take <= 0 and work.tokens) or (taken and self.rules.enable_chunked_prefill and cost > budget - taken):
                break
            if not self._make_room(sequence, work.start + done, work.start + done + take, now):
                break
            step.chunks.append(chunk_of(sequence, at, done, take))
            taken += cost
            if self.policy.stores_when_scheduled:
                self._store(allocation, step.chunks[-1], now)
            if done + take < work.tokens:
                break
            done = 0
        return taken

    def _admit(self, step: ScheduledStep, budget: int, now: int) -> None:
        if self.loading:
            budget = self._start_loaded(step, budget, now)
        while self.waiting and not self._refused and self._free_seats > 0 and budget > 0:
            sequence = self.waiting[0]
            plan = self.policy.match(sequence.request, now, sequence.generated)
            if not self._sizes.may_start(step, plan, sequence.generated, budget):
                return
            drafts = self._drafts_behind(plan, sequence.generated, budget)
            allocation = self.policy.allocate(plan, now, sequence.generated, drafts)
            if allocation is None and not self._taken_seats:  # what it would reuse may be in its own way
                allocation = self.policy.allocate(plan.without_reuse(), now, sequence.generated)
            if allocation is None:
                self._refused = not self.policy.retries_each_step
                return
            self.waiting.popleft()
            sequence.admit(allocation, now)
            if allocation.loading:
                self.loading.append(sequence)
            else:
                budget -= self._start(step, sequence, budget, now)

    def _drafts_behind(self, plan: ReusePlan, generated: int, budget: int) -> int:
        """Tokens behind a prompt for which its first step needs memory."""
        return 0

    def _start(self, step: ScheduledStep, sequence: Sequence, budget: int, now: int) -> int:
        """Let an admitted sequence run; returns the rows that it takes of this step."""
        allocation = sequence.allocation
        assert allocation is not None, "only who is admitted runs"
        self.running.append(sequence)
        sequence.seat, self._seated = self._seated, self._seated + 1
        taken = self._schedule_chunks(step, sequence, budget, now)
        if allocation.loads_state:
            step.loads.append(sequence)
        return taken

    def _start_loaded(self, step: ScheduledStep, budget: int, now: int) -> int:
        """Let sequences run whose loads have ended, as far as seats and budget allow; returns the tokens left."""
        for sequence in list(self.loading):
            allocation = sequence.allocation
            assert allocation is not None, "who loads holds memory"
            if budget <= 0 or self._free_seats <= 0:
                break
            if allocation.loading or not self._sizes.may_start(step, allocation.plan, sequence.generated, budget):
                continue
            self.loading.remove(sequence)
            budget -= self._start(step, sequence, budget, now)
        return budget

    def _horizon(self, step: ScheduledStep) -> int:
        open_seat = self.waiting and self._free_seats > 0
        if (
            step.chunks
            or not step.decodes
            or self._preempted_this_step
            or (open_seat and self.policy.retries_each_step)
        ):
            return 1
        most = 1 + self.policy.spare_steps(self._decoding_of(step).allocations)
        progress = self.policy.rules.progress
        if progress is None:
            return most
        return min(most, progress.equal_steps([sequence.prompt + sequence.generated for sequence in step.decodes]))

    def _decoding_of(self, step: ScheduledStep) -> Decoding:
        known = self._decoding
        return known if known is not None and known.sequences is step.decodes else Decoding(step.decodes)

    def repeat(self, step: ScheduledStep, times: int) -> None:
        """Let a decode-only step stand for `times` equal ones, at most `max_repeats`, and reserve what they write."""
        decoding = self._decoding_of(step)
        self.policy.repeat(decoding.allocations, decoding.starts(1), times - 1)
        step.repeats = times

    # -- committing ---------------------------------------------------------------------------------------------------

    def complete(
        self, step: ScheduledStep, finished_at: int, ended: Collection[Sequence], accepted: Collection[int] = ()
    ) -> None:
        """Move every sequence forward; `ended` are those whose output is complete after this step.

        `accepted` says how many of its drafts each sequence keeps, in order of `decodes`; empty where none are drafted.
        """
        for chunk in step.chunks:
            self._advance(chunk, finished_at)
        for sequence in step.decodes:
            sequence.generated += step.repeats
        for sequence, drafts in zip(step.decodes, accepted, strict=False):
            sequence.generated += drafts
        over = set(ended)
        for sequence in [s for s in self.running if s in over] if over else ():
            sequence.finished_at = finished_at
            assert sequence.allocation is not None
            self.policy.finish(sequence.allocation, sequence.held_tokens - sequence.prompt, finished_at)
            self._end(sequence, finished_at)

    def _end(self, sequence: Sequence, now: int) -> None:
        """Free what a sequence holds whose output is complete."""
        self._leave(sequence, now)

    def _advance(self, chunk: ScheduledChunk, now: int) -> None:
        allocation = chunk.sequence.allocation
        assert allocation is not None
        chunk.sequence.advance(chunk, now)
        self._refused = False
        if not self.policy.stores_when_scheduled:
            self._store(allocation, chunk, now)
        if chunk.last:
            self._decoding = None

    def _store(self, allocation: Allocation, chunk: ScheduledChunk, now: int) -> None:
        for cache_span, _, stop in chunk.work.cache_span_rows(allocation.plan, chunk.start, chunk.stop):
            self.policy.insert(allocation, stop, now, cache_span)
