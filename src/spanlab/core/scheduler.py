"""Continuous batching: which request computes which tokens in the next step.

The scheduler works on ranges, bytes and `now`; it never reads the length of an output. A backend
runs the step and returns its duration and the finished sequences; then `complete` advances every
sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Ordered

from spanlab.core.admission import BatchRules
from spanlab.core.plan import Allocation, DecodeBatch, RepairPass, ReusePlan, Work
from spanlab.core.protocol import BeforeChange, Policy, unnoticed
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.step import ScheduledChunk, ScheduledSequence, ScheduledStep, chunk_of

# ------------------------------------------------------------------------------
# The size of the chunk that one step computes of a sequence's work, under a budget of tokens.
# ------------------------------------------------------------------------------


class ChunkSizes:
    """Chunk sizes within the batch rules, cut where the policy ends a chunk."""

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        self._policy, self._rules, self._chunked = policy, rules, rules.enable_chunked_prefill
        self._most_rows, self._reach = rules.max_num_batched_tokens, rules.speculation.reach
        self._longest_chunk = rules.longest_chunk

    def start_step(self, num_requests: int) -> None:
        """Begin a step of `num_requests` that run or wait, of which each gets a limited number of
        rows."""
        if self._rules.long_prefill_token_threshold:
            self._most_rows = self._rules.most_rows(num_requests)

    def share(self, budget: int) -> int:
        """Return the part of a step's remaining budget that one sequence may use."""
        return min(budget, self._most_rows)

    def rows(self, sequence: ScheduledSequence, work: Work, computed: int, budget: int) -> int:
        """Return the rows of a work that one step computes after the first `computed` rows.

        `budget` is the rest of the sequence's share.
        """
        take = work.tokens - computed
        if not self._chunked:
            return take
        assert sequence.allocation is not None, "only admitted sequences have work"
        plan = sequence.allocation.plan
        if isinstance(work, RepairPass):
            return min(take, budget) if plan.repair.cuts else take
        start = work.start + computed
        return self._end(plan, start, start + min(take, budget), sequence.generated) - start

    def _end(self, plan: ReusePlan, start: int, stop: int, generated: int) -> int:
        """Return where a chunk that may reach `stop` ends: not among the last tokens that a drafter
        reads ahead."""
        end = self._policy.chunk_end(plan, start, stop, self._longest_chunk, generated)
        last = plan.prompt + generated
        return max(start, min(end, last - self._reach)) if end < last else end

    def may_start(self, step: ScheduledStep, plan: ReusePlan, generated: int, budget: int) -> bool:
        """Whether the budget has a token for the first chunk, or enough for a prompt that runs in
        one step.

        A prompt with more rows than the budget of a whole step runs beside no other one.
        """
        if not self._chunked:
            rows = plan.rows + generated
            return rows <= budget or (rows > self._rules.max_num_batched_tokens and not step.chunks)
        return (
            plan.resume >= plan.prompt + generated
            or self.first_end(plan, generated, budget) > plan.resume
        )

    def leaves_too_few(self, plan: ReusePlan, generated: int, budget: int) -> bool:
        """Whether the first chunk has tokens, but would leave fewer of a prompt than a drafter
        reads ahead."""
        start, stop = plan.resume, min(plan.prompt + generated, plan.resume + self.share(budget))
        longest = self._longest_chunk
        return (
            self._chunked and self._policy.chunk_end(plan, start, stop, longest, generated) > start
        )

    def first_end(self, plan: ReusePlan, generated: int, budget: int) -> int:
        """Return where the first chunk behind the reused tokens ends."""
        start, length = plan.resume, plan.prompt + generated
        if not self._chunked:
            return length
        return self._end(plan, start, min(length, start + self.share(budget)), generated)


class Scheduler:
    """Serves requests by priority, then first come, first served, under limits of tokens, requests
    and memory.

    A step serves the running sequences in order of admission, with a decode or the next chunk of a
    prompt each, and then admits from the queue. A sequence that finds no memory preempts the one
    admitted last of the lowest priority; a step that has preempted admits none (vLLM's order). A
    request whose KV is being loaded from a lower tier holds memory but is not running; it starts
    before the queue once its load has ended.
    """

    def __init__(self, policy: Policy, rules: BatchRules) -> None:
        self.policy, self.rules, self._sizes = policy, rules, ChunkSizes(policy, rules)
        self.waiting: deque[ScheduledSequence] = deque()  # by priority, then arrival
        self.running: list[ScheduledSequence] = []  # in order of admission
        self.loading: list[ScheduledSequence] = []  # admitted, and not yet able to run
        self._num_started = 0  # sequences started so far, restarts included
        # at the head of `running`; None after separate decodes
        self._decode_batch: DecodeBatch | None = None
        self._preempted_this_step = False  # whether the last planned step preempted a sequence
        # the head of the queue did not fit, and only decoding has happened since
        self._refused = False
        # the last one, and its tokens that were not lost
        self._preempted_alone: dict[Request, int] = {}

    def add(self, request: Request) -> None:
        """Queue a request behind those of its priority."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].request.priority > request.priority:
            at -= 1
        self.waiting.insert(at, ScheduledSequence(request))
        self._refused = self._refused and at > 0

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not (self.waiting or self.running or self.loading)

    def enqueue_added(self) -> None:
        """Queue the added requests, which `add` has done already."""

    @property
    def _num_running(self) -> int:
        return len(self.running)

    @property
    def _spare_sequences(self) -> int:
        return self.rules.max_num_seqs - self._num_running

    # -- planning ----------------------------------------------------------------------------------

    def schedule(self, now: int) -> ScheduledStep | None:
        """Fill the next step and reserve the memory that it writes; None where there is nothing to
        do.

        A step may be empty: every sequence that could run was preempted, and the next step admits
        it again.
        """
        step, self._preempted_this_step = ScheduledStep([], [], []), False
        self.policy.start_step(now)
        self._sizes.start_step(self._num_running + len(self.waiting) + len(self.loading))
        budget = self.rules.max_num_batched_tokens
        first = (
            [s for s in self.running if not s.prefilled]
            if self.rules.prefill_first
            else self.running
        )
        budget = self._serve_running(step, first, budget, now)
        # As in vLLM, nothing is admitted in a step that preempted: the freed memory belongs to the
        # running ones.
        if not self._preempted_this_step:
            self._admit(step, budget, now)
        if self.rules.prefill_first and not step.chunks:
            self._serve_running(step, [s for s in self.running if s.prefilled], budget, now)
        batch = self._decode_batch
        if batch is not None and batch.sequences is step.decodes:
            step.context = batch.context()
        step.max_repeats = self._horizon(step)
        return step if step.chunks or step.decodes or self._preempted_this_step else None

    def _serve_running(
        self, step: ScheduledStep, sequences: list[ScheduledSequence], budget: int, now: int
    ) -> int:
        """Serve running sequences in order; returns the remaining token budget."""
        num_decoded = self._decode_together(step, sequences, budget)
        budget -= num_decoded
        for sequence in sequences[num_decoded:]:
            if budget <= 0:
                break
            if sequence.allocation is None:  # preempted by a sequence before it
                continue
            running = len(self.running)
            if sequence.prefilled:
                budget -= self._decode(step, sequence, budget, now)
            else:
                budget -= self._schedule_chunks(step, sequence, budget, now)
            if len(self.running) < running:
                budget += self._withdraw_preempted(step)
            if sequence.allocation is None and not self.policy.rules.serves_behind:
                break
        return budget

    def _withdraw_preempted(self, step: ScheduledStep) -> int:
        """Remove sequences from a step that were preempted after they had been served; returns
        their rows."""
        drafts = step.drafts or [0] * len(step.decodes)
        decodes = [
            pair
            for pair in zip(step.decodes, drafts, strict=True)
            if pair[0].allocation is not None
        ]
        chunks = [chunk for chunk in step.chunks if chunk.sequence.allocation is not None]
        rows = _rows(step.chunks) - _rows(chunks) + len(step.decodes) - len(decodes) + sum(drafts)
        rows -= sum([drafted for _, drafted in decodes])
        step.chunks, step.decodes = chunks, [sequence for sequence, _ in decodes]
        step.drafts = [drafted for _, drafted in decodes] if step.drafts else []
        return rows

    def _decode_together(
        self, step: ScheduledStep, sequences: list[ScheduledSequence], budget: int
    ) -> int:
        """Decode one token of all leading decoding sequences; 0 where memory does not suffice for
        all."""
        if not sequences or not sequences[0].prefilled:
            return 0
        batch = self._decode_batch = self._decode_batch or DecodeBatch()
        decoding = leading = len(batch.sequences)
        while leading < len(self.running) and self.running[leading].prefilled:
            leading += 1
        if leading > decoding:
            batch.join(self.running[decoding:leading])
        if not 0 < leading <= budget or self.policy.spare_steps(batch) < 1:
            return 0
        self.policy.repeat(batch, 1, unnoticed)
        batch.steps += 1
        step.decodes = batch.sequences
        return leading

    def _decode(
        self, step: ScheduledStep, sequence: ScheduledSequence, budget: int, now: int
    ) -> int:
        """Decode one token of a sequence; returns the rows used, 0 where the sequence was
        preempted."""
        if self._decode_batch is not None:
            # that of the batch stays as it was
            self._decode_batch, step.decodes = None, list(step.decodes)
        if not self._make_room(sequence, sequence.held_tokens, sequence.held_tokens + 1, now):
            return 0
        step.decodes.append(sequence)
        return 1

    def _make_room(self, sequence: ScheduledSequence, start: int, stop: int, now: int) -> bool:
        """Reserve memory for tokens `[start, stop)`, preempting others; False where preempted
        itself."""
        while sequence.allocation is not None:
            if self.policy.append(sequence.allocation, start, stop):
                return True
            self._preempt_lowest(now)
        return False

    def _preempt_lowest(self, now: int) -> None:
        """Preempt the sequence that was admitted last of the lowest priority.

        One that runs alone is preempted too, as in vLLM: while a step is in flight it holds states
        that it no longer reads. It has to resume further on each time.
        """
        lowest = max(self.running, key=rank_of)
        if len(self.running) == 1 and not self.loading:
            assert lowest.allocation is not None, "a running sequence is admitted"
            reached = lowest.allocation.plan.resume + lowest.generated
            tried = self._preempted_alone.get(lowest.request, -1)
            assert reached > tried, (
                "one request exceeds the memory; sizes are checked before a run starts"
            )
            self._preempted_alone = {lowest.request: reached}
        self._preempt(lowest, now)

    def _preempt(self, sequence: ScheduledSequence, now: int) -> None:
        """Free a sequence and move it to the head of the queue of its priority; it recomputes its
        tokens."""
        sequence.reset_progress()
        self._release(sequence, now)
        at = 0
        while (
            at < len(self.waiting) and self.waiting[at].request.priority < sequence.request.priority
        ):
            at += 1
        self.waiting.insert(at, sequence)
        self._preempted_this_step = True

    def _release(self, sequence: ScheduledSequence, now: int) -> None:
        allocation = self._stop_running(sequence)
        self._refused = False
        self.policy.free(allocation, now)

    def _stop_running(self, sequence: ScheduledSequence) -> Allocation:
        """Remove a sequence from the running ones; returns its allocation, which is not freed
        yet."""
        at = self.running.index(sequence)
        del self.running[at]
        if self._decode_batch is not None and at < len(self._decode_batch.sequences):
            self._decode_batch.leave(at)
        return sequence.detach_allocation()

    def _schedule_chunks(
        self, step: ScheduledStep, sequence: ScheduledSequence, budget: int, now: int
    ) -> int:
        """Schedule as much of a sequence's work as the budget allows; returns the rows used.

        A limit of one sequence's rows counts as its budget. Without chunked prefill, all of its
        work is scheduled at once. A repair that is not cut runs whatever the remaining budget,
        unless other work of the sequence precedes it in this call. The rows that it drops on the
        way count too.
        """
        used, computed, allocation = 0, sequence.rows_done, sequence.allocation
        assert allocation is not None, "only admitted sequences have work"
        budget = self._sizes.share(budget)
        for index in range(sequence.work_index, len(sequence.work)):
            work = sequence.work[index]
            take = self._sizes.rows(sequence, work, computed, budget - used)
            cost = take + work.shallow
            # A chunk is cut to the budget; a pass that cannot be cut waits for a step in which it
            # comes first.
            if (take <= 0 and work.tokens) or (
                used and self.rules.enable_chunked_prefill and cost > budget - used
            ):
                break
            if not self._make_room(
                sequence, work.start + computed, work.start + computed + take, now
            ):
                break
            step.chunks.append(chunk_of(sequence, index, computed, take))
            used += cost
            if self.policy.stores_when_scheduled:
                self._store(allocation, step.chunks[-1], now)
            if computed + take < work.tokens:
                break
            computed = 0
        return used

    def _admit(self, step: ScheduledStep, budget: int, now: int) -> None:
        if self.loading:
            # start sequences whose loads have ended, within the limits
            for sequence in list(self.loading):
                allocation = sequence.allocation
                assert allocation is not None, "a loading sequence holds memory"
                if budget <= 0 or self._spare_sequences <= 0:
                    break
                if allocation.loading or not self._sizes.may_start(
                    step, allocation.plan, sequence.generated, budget
                ):
                    continue
                self.loading.remove(sequence)
                budget -= self._start(step, sequence, budget, now)
        at = 0
        while (
            at < len(self.waiting)
            and not self._refused
            and self._spare_sequences > 0
            and budget > 0
        ):
            sequence = self.waiting[at]
            plan = self.policy.match(sequence.request, now, sequence.generated)
            if not self._sizes.may_start(step, plan, sequence.generated, budget):
                if self.policy.rules.admits_behind and self._sizes.leaves_too_few(
                    plan, sequence.generated, budget
                ):
                    at += 1
                    continue
                return
            drafts = self._drafts_behind(plan, sequence.generated, budget)
            allocation = self.policy.allocate(plan, now, sequence.generated, drafts)
            # The plan locks what it reuses, so that it may fit only without reuse; nothing that
            # runs will free memory.
            # its own locks may take the space that it needs
            if allocation is None and not self._num_running:
                allocation = self.policy.allocate(plan.without_reuse(), now, sequence.generated)
            if allocation is None:
                # The queue is served in order: a later request does not overtake one that does not
                # fit, as in vLLM. A step of decodes alone may have room for the first chunk of one
                # that was passed.
                self._refused = (
                    not at
                    and self.policy.futile_steps(sequence.request, DecodeBatch()) >= UNLIMITED
                )
                return
            del self.waiting[at]
            sequence.admit(allocation, now)
            if allocation.loading:
                self.loading.append(sequence)
            else:
                budget -= self._start(step, sequence, budget, now)

    def _drafts_behind(self, plan: ReusePlan, generated: int, budget: int) -> int:
        """Return the tokens from a prompt's end to the end of the memory that its first step needs.

        Below 0 where it ends before, and 0 where the policy does not check the first step by
        itself.
        """
        if not self.policy.rules.checks_first_chunk:
            return 0
        return self._sizes.first_end(plan, generated, budget) - (plan.prompt + generated)

    def _start(
        self, step: ScheduledStep, sequence: ScheduledSequence, budget: int, now: int
    ) -> int:
        """Start an admitted sequence; returns the rows that it uses in this step."""
        allocation = sequence.allocation
        assert allocation is not None, "only admitted sequences run"
        self.running.append(sequence)
        sequence.start_rank, self._num_started = self._num_started, self._num_started + 1
        used = self._schedule_chunks(step, sequence, budget, now)
        if allocation.loads_state:
            step.loads.append(sequence)
        return used

    def _horizon(self, step: ScheduledStep) -> int:
        if step.chunks or not step.decodes or self._preempted_this_step:
            return 1
        batch, policy = self._batch_of(step), self.policy
        most = 1 + policy.spare_steps(batch)
        if most > 1 and self.waiting and self._spare_sequences > 0 and not self._refused:
            # Decoding may evict what a prompt would reuse. Without chunks it may then exceed a
            # whole step, and starts.
            chunked = self.rules.enable_chunked_prefill
            most = (
                min(most, 1 + policy.futile_steps(self.waiting[0].request, batch)) if chunked else 1
            )
        progress = policy.rules.progress
        if progress is None:
            return most
        return min(
            most,
            progress.equal_steps(
                [sequence.prompt + sequence.generated for sequence in step.decodes]
            ),
        )

    def _batch_of(self, step: ScheduledStep) -> DecodeBatch:
        batch = self._decode_batch
        return (
            batch
            if batch is not None and batch.sequences is step.decodes
            else DecodeBatch(step.decodes, 1)
        )

    def repeat(self, step: ScheduledStep, times: int, before: BeforeChange = unnoticed) -> None:
        """Repeat a decode-only step `times` times, at most `max_repeats`, and reserve the memory it
        writes.

        `before`  called before each repeat, counted from 0, that changes what is stored
        """
        batch = self._batch_of(step)
        self.policy.repeat(batch, times - 1, before)
        batch.steps += times - 1
        step.repeats = times

    # -- committing --------------------------------------------------------------------------------

    def complete(
        self,
        step: ScheduledStep,
        finished_at: int,
        ended: Collection[ScheduledSequence],
        accepted: Collection[int] = (),
    ) -> None:
        """Advance every sequence; `ended` are those whose output is complete after this step.

        `accepted` holds the number of accepted drafts per sequence, in order of `decodes`; empty
        without drafts.
        """
        for chunk in step.chunks:
            self._advance(chunk, finished_at)
        for sequence in step.decodes:
            sequence.generated += step.repeats
        for sequence, drafts in zip(step.decodes, accepted, strict=False):
            sequence.generated += drafts
        self._accept(step)
        finished = set(ended)
        for sequence in [s for s in self.running if s in finished] if finished else ():
            sequence.finished_at = finished_at
            self._finish(sequence, finished_at)

    def _accept(self, step: ScheduledStep) -> None:
        """Do nothing: without drafts, the tokens of a step are known when it is planned."""

    def _finish(self, sequence: ScheduledSequence, now: int) -> None:
        """Store the output of a sequence whose output is complete, and free it."""
        allocation = sequence.allocation
        assert allocation is not None, "a running sequence is admitted"
        self._store_output(sequence, allocation, now)
        self._release(sequence, now)

    def _store_output(self, sequence: ScheduledSequence, allocation: Allocation, now: int) -> None:
        self.policy.finish(allocation, sequence.held_tokens - sequence.prompt, now)

    def abort(self, request: Request, now: int) -> ScheduledSequence | None:
        """Remove a request that waits or runs, and free its memory; None where it does neither.

        Its computed tokens stay stored as after a preemption. Requests that load from a lower tier
        are not aborted.
        """
        sequence = next((s for s in (*self.waiting, *self.running) if s.request is request), None)
        if sequence is None:
            return None
        if sequence.allocation is None:
            self.waiting.remove(sequence)
            self._refused = False
        else:
            self._release(sequence, now)
        return sequence

    def _advance(self, chunk: ScheduledChunk, now: int) -> None:
        allocation = chunk.sequence.allocation
        assert allocation is not None
        chunk.sequence.advance(chunk, now)
        self._refused = False
        if not self.policy.stores_when_scheduled:
            self._store(allocation, chunk, now)

    def _store(self, allocation: Allocation, chunk: ScheduledChunk, now: int) -> None:
        for cache_span, _, stop in chunk.work.cache_span_rows(
            allocation.plan, chunk.start, chunk.stop
        ):
            self.policy.insert(allocation, stop, now, cache_span)


def rank_of(sequence: ScheduledSequence) -> tuple[int, int]:
    """Return a running sequence's place in the order of service: its priority, then its start."""
    return sequence.request.priority, sequence.start_rank


def _rows(chunks: list[ScheduledChunk]) -> int:
    return sum([chunk.tokens + chunk.work.shallow for chunk in chunks])


# ------------------------------------------------------------------------------
# Decoding with drafts: each decoding sequence takes its next token and verifies drafts in the
# same step.
# ------------------------------------------------------------------------------


class SpeculativeScheduler(Scheduler):
    """A scheduler whose decodes verify drafts, as many as the token budget allows (vLLM's order).

    Drafts take memory like the token before them, and are not published until they are accepted. A
    drafter with separate keys and values also takes memory for the drafts that follow a step,
    behind chunks of prompts too. A sequence that runs alone drafts as many tokens as fit.

    `proposed`  number of drafts for the next decode of a sequence; None: always those of the rules
    """

    def __init__(
        self,
        policy: Policy,
        rules: BatchRules,
        proposed: Callable[[ScheduledSequence], int] | None = None,
    ) -> None:
        super().__init__(policy, rules)
        most, self._lookahead = rules.speculation.draft_tokens, rules.speculation.lookahead
        self._proposed = proposed or (lambda sequence: most)

    def _decode_together(
        self, step: ScheduledStep, sequences: list[ScheduledSequence], budget: int
    ) -> int:
        """Return 0: the progress of each sequence is known only after the step."""
        return 0

    def _decode(
        self, step: ScheduledStep, sequence: ScheduledSequence, budget: int, now: int
    ) -> int:
        """Decode one token and verify drafts; returns the rows used, 0 where the sequence was
        preempted."""
        start, uncertain = self._reach(sequence)
        most = min(self._proposed(sequence), self._sizes.share(budget) - 1)
        drafts = self._append_with_drafts(sequence, start, start + 1, now, most, uncertain)
        if drafts is None:
            return 0
        step.decodes.append(sequence)
        step.drafts.append(drafts)
        return 1 + drafts

    def _reach(self, sequence: ScheduledSequence) -> tuple[int, int]:
        """Return the position of a sequence's next token that is certain, and how many uncertain
        ones precede it."""
        return sequence.held_tokens, 0

    @property
    def _is_alone(self) -> bool:
        """Whether no memory will become free but that of the only running sequence."""
        return len(self.running) == 1 and not self.loading

    def _make_room(self, sequence: ScheduledSequence, start: int, stop: int, now: int) -> bool:
        """Reserve memory as without drafts, and for the drafts that follow a chunk."""
        return self._append_with_drafts(sequence, start, stop, now, 0) is not None

    def _append_with_drafts(
        self,
        sequence: ScheduledSequence,
        start: int,
        stop: int,
        now: int,
        drafts: int,
        uncertain: int = 0,
    ) -> int | None:
        """Reserve memory for tokens `[start, stop)`, uncertain ones and drafts, preempting others.

        Returns `drafts`, fewer for a sequence that runs alone, None for a sequence that was
        preempted itself.
        """
        while sequence.allocation is not None:
            if self._is_alone:
                return self._append_alone(sequence, start, stop, drafts)
            if self.policy.append(
                sequence.allocation, start, stop, uncertain + drafts + self._lookahead
            ):
                return drafts
            self._preempt_lowest(now)
        return None

    def _append_alone(self, sequence: ScheduledSequence, start: int, stop: int, drafts: int) -> int:
        """Reserve memory for tokens `[start, stop)` and as many drafts as fit; returns the
        drafts."""
        behind = drafts + self._lookahead
        assert sequence.allocation is not None, "a decoding sequence is admitted"
        while not self.policy.append(sequence.allocation, start, stop, behind):
            assert behind, "one request exceeds the memory; sizes are checked before a run starts"
            behind -= 1
        return max(0, behind - self._lookahead)

    def _drafts_behind(self, plan: ReusePlan, generated: int, budget: int) -> int:
        """Return the tokens from a prompt's end to the end of the drafts that follow its first
        chunk."""
        behind = (
            self._sizes.first_end(plan, generated, budget)
            + self._lookahead
            - (plan.prompt + generated)
        )
        return behind if self.policy.rules.checks_first_chunk else max(0, behind)

    def _accept(self, step: ScheduledStep) -> None:
        """Report the tokens that every sequence with an output token of this step holds now."""
        served = {chunk.sequence for chunk in step.chunks if chunk.sequence.prefilled} | set(
            step.decodes
        )
        for sequence in [sequence for sequence in self.running if sequence in served]:
            granted = self.policy.append(
                sequence.allocation, sequence.held_tokens, sequence.held_tokens
            )
            assert granted, "no token needs memory"

    def _horizon(self, step: ScheduledStep) -> int:
        """Return 1: the next step depends on the drafts that this one accepts."""
        return 1


# ------------------------------------------------------------------------------
# Ranks of one engine that run every step together: data parallel attention before shared
# experts.
# ------------------------------------------------------------------------------

#: Running requests that a waiting one counts as in vLLM's balancer.
WAITING_WEIGHT = 4


class LockstepScheduler(Scheduler):
    """One scheduler per rank; a step joins the steps of all ranks and ends for all of them at once.

    A request goes to the rank with the lowest load, in which a waiting request counts
    `WAITING_WEIGHT` times (vLLM's balancer). A rank without work still takes part, since expert
    layers exchange the tokens of all ranks.
    """

    def __init__(self, ranks: Ordered[Scheduler]) -> None:
        super().__init__(ranks[0].policy, ranks[0].rules)
        self.ranks = tuple(ranks)
        self.rank_steps: list[ScheduledStep] = []
        # since the last step was planned: not counted by it
        self._sent: list[list[Request]] = [[] for _ in ranks]

    def add(self, request: Request) -> None:
        """Queue a request at the rank with the lowest load."""
        ranks = zip(self.ranks, self._sent, strict=True)
        loads = [
            WAITING_WEIGHT * (len(rank.waiting) + len(sent)) + len(rank.running)
            for rank, sent in ranks
        ]
        least = loads.index(min(loads))
        self._sent[least].append(request)
        self.ranks[least].add(request)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs at any rank."""
        return all(rank.idle for rank in self.ranks)

    def schedule(self, now: int) -> ScheduledStep | None:
        """Plan a step of all ranks; `rank_steps` has the step of each, empty for ranks without
        work."""
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
        """Repeat the decode-only step of every rank that decodes, `times` times in all; `before` is
        for the first."""
        step.repeats = times
        for rank, rank_step in zip(self.ranks, self.rank_steps, strict=True):
            if rank_step.decodes:
                rank.repeat(rank_step, times, before if rank is self.ranks[0] else unnoticed)

    def complete(
        self,
        step: ScheduledStep,
        finished_at: int,
        ended: Collection[ScheduledSequence],
        accepted: Collection[int] = (),
    ) -> None:
        """Advance the sequences of every rank."""
        for rank, rank_step in zip(self.ranks, self.rank_steps, strict=True):
            rank.complete(rank_step, finished_at, ended)
