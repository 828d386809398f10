"""One step of the engine: the contract of a backend, the scheduled sequences, and the passes over
them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.plan import Allocation, RepairPass, ReusePlan, Work
from spanlab.core.repair import MapRules
from spanlab.core.request import Request
from spanlab.core.rules import Replay, ReuseRules, StateFormat

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

    @property
    def has_ended(self) -> bool:
        """Whether its output is complete; with drafts and a plan ahead, it may be in one step
        more."""
        return self.finished_at >= 0

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
        """Detach and return the allocation, which is not freed yet, and count its captured
        states."""
        allocation = self.allocation
        assert allocation is not None, "a running sequence is admitted"
        self.captured += allocation.captured
        self.captured_maps += allocation.captured_maps
        self.allocation, self.work = None, ()
        return allocation


class ScheduledChunk(NamedTuple):
    """Rows `[start, stop)` of one work of one sequence, computed in one step.

    `tokens`    rows that pass through every layer: stop - start, except in a repair, which selects
                its rows
    `captures`  positions in (start, stop] whose recurrent state, or the map of the span that ends
                there, is stored
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
        return (
            self.sequence.request.id,
            self.start,
            self.stop,
            self.captures,
            *self.work.key(),
            self.tokens,
        )


@dataclass(slots=True)
class ScheduledStep:
    """The work of one step; with `repeats` > 1, that many equal decode steps in a row.

    `loads`        sequences whose stored state is read at the start of the step
    `drafts`       number of draft tokens of each of `decodes`, which the step verifies; empty
                   without drafts
    `max_repeats`  how often it could run in a row before memory or the queue would change its
                   content
    `context`      KV tokens that `decodes` read, their new ones included; None: not counted yet
    """

    chunks: list[ScheduledChunk]
    decodes: list[ScheduledSequence]
    loads: list[ScheduledSequence]
    repeats: int = 1
    max_repeats: int = 1
    drafts: list[int] = field(default_factory=list)
    context: int | None = None

    def key(self) -> tuple[object, ...]:
        """The step as plain numbers, equal for equal steps of any backend; drafts come last, where
        there are any."""
        chunks = tuple([chunk.key() for chunk in self.chunks])
        return (
            chunks,
            tuple(sequence.request.id for sequence in self.decodes),
            self.repeats,
            *self.drafts,
        )


def chunk_of(sequence: ScheduledSequence, index: int, computed: int, take: int) -> ScheduledChunk:
    """Return the chunk of the next `take` rows of work number `index`, after the first `computed`
    rows."""
    work, allocation = sequence.work[index], sequence.allocation
    assert allocation is not None
    start, stop = work.token_range(allocation.plan, computed, take)
    reached = [position for position in allocation.captures if start < position <= stop]
    captures = tuple(
        [position for position in reached if work.captures_at(allocation.plan, position)]
    )
    last = index == len(sequence.work) - 1 and computed + take == work.tokens
    return ScheduledChunk(sequence, start, stop, captures, work, take, last)


# ------------------------------------------------------------------------------
# The contract between a serving loop and a backend, simulated or real, that runs its steps.
# ------------------------------------------------------------------------------

Ends = Ordered[int] | NDArray[np.int64]


@dataclass(slots=True)  # not frozen: a frozen one takes longer to construct
class StepResult:
    """The result of a step.

    `duration_ns`  from the end of the previous step, or from `resume`, to the end of this one
    `finished`     sequences whose output is complete
    `repeats`      equal decode steps that ran in a row
    `ends`         time of the end of each of them, from the start of the first; empty where only
                   the last is known
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
        """Return the end of a repeat, counted from 0; all take equally long where only the last end
        is known."""
        end = (
            self.ends[repeat] if len(self.ends) else self.duration_ns * (repeat + 1) // self.repeats
        )
        return min(int(end), self.duration_ns)


class Backend(Protocol):
    """Runs the steps of one serving loop; it never calls the scheduler."""

    def resume(self) -> None:
        """Note the end of an idle time, which belongs to no step."""
        ...

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Run a step without interruption.

        A decode-only step may repeat up to `step.max_repeats` times. It repeats until a sequence
        finishes, or until the first end at or after `deadline_ns` from now, when the next request
        arrives. None: no request will arrive.
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
    return finished_prompts(step) + [
        s for s in step.decodes if s.generated + repeats >= s.request.output_len
    ]


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

    Rows of one forward may read each other's keys, since every layer writes all keys before it
    reads any. Copies are made between forwards. So where spans are copied or repaired, chunks that
    read across them wait for the next forward.
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
    return (
        not isinstance(work, RepairPass)
        and allocation.plan.cache_spans[work.cache_span].cache_span.independent
    )


def is_repair(chunk: ScheduledChunk) -> bool:
    """Whether a chunk belongs to a repair."""
    return isinstance(chunk.work, RepairPass)


def passes(step: ScheduledStep, copies: bool, measured: bool) -> list[list[ScheduledChunk]]:
    """Return the chunks of each forward of a step, in order; decodes run in the first, which may
    have no chunks.

    A measured repair drops rows between layers, so it runs alone.
    """
    by_sequence: dict[ScheduledSequence, list[ScheduledChunk]] = {}
    for chunk in step.chunks:
        by_sequence.setdefault(chunk.sequence, []).append(chunk)
    forwards: list[list[ScheduledChunk]] = []
    for level in zip_longest(
        *(stages(chunks, copies) for chunks in by_sequence.values()), fillvalue=()
    ):
        packed = [chunk for stage in level for chunk in stage]
        together = [chunk for chunk in packed if not (measured and is_repair(chunk))]
        alone = [[chunk] for chunk in packed if measured and is_repair(chunk)]
        forwards += [together] * bool(together) + alone
    if step.decodes and (not forwards or (measured and is_repair(forwards[0][0]))):
        forwards.insert(0, [])
    return forwards


# ------------------------------------------------------------------------------
# The work of one step in integers: the input of every timing model.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpanReads:
    """Extra work of an attention kernel, beyond reading keys in place, where spans are read at
    other positions.

    `restarts`  every further span is read separately, by queries rotated for it
    `rotates`   keys are rotated as they are read
    """

    restarts: bool = False
    rotates: bool = False


# for policies that reuse no spans: other fields do not affect the cost of a step
PREFIXES = ReuseRules()


class StepFeatures(NamedTuple):
    """Counts of one step, in tokens, pairs, sequences and bytes."""

    prefill_tokens: int = 0  #: prompt tokens computed in this step, and drafts that it verifies
    prefill_pairs: int = (
        0  #: their causal query-key pairs: over chunks, the sum of t + 1 for t in [start, stop)
    )
    num_prefills: int = 0  #: prefill chunks
    num_decodes: int = 0  #: sequences that decode one token
    decode_context: int = (
        0  #: KV tokens that those read, their new token included, summed over sequences
    )
    num_first_tokens: int = (
        0  #: chunks that finish a prompt, and drafts; each needs a row of logits
    )
    loaded_state_bytes: int = 0  #: checkpoints and maps read from the cache
    captured_state_bytes: int = 0  #: checkpoints and maps written to the cache
    prefill_context: int = (
        0  #: KV tokens that the chunks' queries read and that are not computed with them
    )
    shallow_token_layers: int = (
        0  #: dropped rows of a measured repair, times the layers that they pass in full
    )
    shallow_pair_layers: int = (
        0  #: their query-key pairs times those layers, and pairs that scores are made of
    )
    copied_tokens: int = (
        0  #: tokens of spans that a request copies privately, rotated to their positions
    )
    num_forwards: int = (
        0  #: consecutive forwards of the model: more than one where spans are copied or repaired
    )
    span_reads: int = (
        0  #: runs of keys that must be read one by one, each by queries rotated for it
    )
    turned_keys: int = 0  #: keys that are rotated as they are read
    scan_runs: int = 0  #: consecutive runs of recurrent layers: one per piece between captures, one for all single rows
    scan_chunks: int = (
        0  #: chunks of the grid's length that those pieces are cut into, the last ones padded
    )
    projected_tokens: int = 0  #: tokens for which one more layer computes query, key and value only
    composed_maps: int = 0  #: maps of spans that are applied to states: S becomes A · S + B
    map_tokens: int = 0  #: rows of spans whose A is computed along; once more each row that follows a repair's tokens
    added_flops: int = 0  #: FLOPs beyond the counts above; below zero where replays skip some
    added_bytes: int = 0  #: bytes read and written beyond the counts above, likewise

    @property
    def reads_spans(self) -> bool:
        """Whether the step does anything that only reused spans need."""
        needs = (
            self.span_reads,
            self.turned_keys,
            self.shallow_token_layers,
            self.copied_tokens,
            self.projected_tokens,
        )
        return self.num_forwards > 1 or any(needs) or self.composed_maps > 0 or self.map_tokens > 0


def features(
    step: ScheduledStep,
    state_bytes: int,
    rules: ReuseRules = PREFIXES,
    reads: SpanReads | None = None,
) -> StepFeatures:
    """Count the work of a step, in the integers that a timing model reads.

    `rules` are the policy's; `reads` is None where it reuses prefixes only. A measured repair is
    described by what is known beforehand: its chosen rows at full depth, all others through the
    layers before the choice, spread evenly over the spans. A probe is one more forward.
    """
    if step.drafts:
        return _with_drafts(
            features(replace(step, drafts=[]), state_bytes, rules, reads), step, state_bytes, rules
        )
    if not step.chunks and reads is None:
        counts = _with_bounded(_decode_features(step, state_bytes, rules), step, rules)
        return (
            counts
            if rules.state_format is None
            else _with_conversion(counts, state_bytes, rules.state_format)
        )
    tokens = pairs = context = captures = firsts = copied = shallow = shallow_pairs = projected = 0
    for _, start, stop, captured, work, size, last in step.chunks:
        tokens += size
        context += stop - size - work.unseen
        pairs += size * (start + stop + 1) // 2 - size * work.unseen
        captures += len(captured)
        firsts += last
        if isinstance(work, RepairPass):
            shallow += work.shallow * rules.repair.shallow_layers
            shallow_pairs += work.shallow_pair_layers
            projected += work.shallow * rules.repair.projects
        copied += work.copied if start == work.start else 0
    counts = StepFeatures(
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        num_prefills=len(step.chunks),
        num_decodes=len(step.decodes),
        decode_context=_decode_context(step),
        num_first_tokens=firsts,
        loaded_state_bytes=len(step.loads) * state_bytes,
        captured_state_bytes=(captures + _decode_captures(step, rules)) * state_bytes,
        prefill_context=context,
        shallow_token_layers=shallow,
        shallow_pair_layers=shallow_pairs,
        copied_tokens=copied,
        projected_tokens=projected,
        **(_span_counts(step, rules, reads) if reads else {"num_forwards": 1}),
        **(_scan_counts(step, rules) if rules.needs_states else {}),
    )
    counts = _with_bounded(counts, step, rules)
    if rules.replay is not None:
        counts = counts._replace(**_replay_counts(step, rules.replay))
    if rules.state_format is not None:
        counts = _with_conversion(counts, state_bytes, rules.state_format)
    return (
        counts
        if rules.maps is None
        else counts._replace(**_map_counts(step, state_bytes, rules, rules.maps))
    )


def _decode_features(step: ScheduledStep, state_bytes: int, rules: ReuseRules) -> StepFeatures:
    """Count the work of a step that only decodes and rotates no keys: most steps of a
    simulation."""
    return StepFeatures(
        num_decodes=len(step.decodes),
        decode_context=_decode_context(step),
        loaded_state_bytes=len(step.loads) * state_bytes,
        captured_state_bytes=_decode_captures(step, rules) * state_bytes,
        num_forwards=1,
        scan_runs=int(rules.needs_states and bool(step.decodes)),
    )


def _with_bounded(counts: StepFeatures, step: ScheduledStep, rules: ReuseRules) -> StepFeatures:
    """Add the work of layers that read a bounded number of tokens per query."""
    if not rules.bounded:
        return counts
    flops, moved = counts.added_flops, counts.added_bytes
    for reads in rules.bounded:
        work = [reads.work(chunk.start, chunk.stop) for chunk in step.chunks]
        for more_flops, more_bytes in (*work, reads.of_rows(len(step.decodes))):
            flops, moved = flops + more_flops, moved + more_bytes
    return counts._replace(added_flops=flops, added_bytes=moved)


def _with_drafts(
    counts: StepFeatures, step: ScheduledStep, state_bytes: int, rules: ReuseRules
) -> StepFeatures:
    """Add the rows that verify drafts.

    Each reads the context of its sequence, which is read once, and the drafts before it; each needs
    logits. In a hybrid, each writes the state behind it, because the next step continues from one
    of them.
    """
    drafting = zip(step.decodes, step.drafts, strict=True)
    pairs = sum(
        [
            drafts * (sequence.prompt + sequence.generated) + drafts * (drafts + 1) // 2
            for sequence, drafts in drafting
        ]
    )
    rows = sum(step.drafts)
    bounded = [reads.of_rows(rows) for reads in rules.bounded]
    return counts._replace(
        prefill_tokens=counts.prefill_tokens + rows,
        prefill_pairs=counts.prefill_pairs + pairs,
        num_first_tokens=counts.num_first_tokens + rows,
        added_flops=counts.added_flops + sum([flops for flops, _ in bounded]),
        added_bytes=counts.added_bytes
        + rows * state_bytes * rules.needs_states
        + sum([read for _, read in bounded]),
    )


def _decode_context(step: ScheduledStep) -> int:
    if step.context is not None:
        return step.context
    return sum([sequence.prompt + sequence.generated for sequence in step.decodes])


def _decode_captures(step: ScheduledStep, rules: ReuseRules) -> int:
    """Return the number of states that decodes capture; a step that captures any is not
    repeated."""
    if rules.progress is None:
        return 0
    reached = [
        (sequence.allocation, sequence.prompt + sequence.generated) for sequence in step.decodes
    ]
    return sum(
        [
            allocation is not None and position in allocation.captures
            for allocation, position in reached
        ]
    )


def _scan_counts(step: ScheduledStep, rules: ReuseRules) -> dict[str, int]:
    """Count the work of recurrent layers: a scan runs in whole chunks, the last one padded.

    A single row, such as a decode, needs no scan; all single rows run together.
    """
    runs = chunks = 0
    single, repairs = bool(step.decodes), rules.repair.kind != "none"
    for chunk in step.chunks:
        pieces = (
            _repaired_pieces(chunk, rules)
            if repairs
            else _pieces(chunk.start, chunk.stop, chunk.captures)
        )
        for start, stop in pieces:
            if stop - start == 1 and stop not in chunk.captures:
                single = True
            else:
                runs, chunks = runs + 1, chunks - (start - stop) // rules.grid
    return {"scan_runs": runs + single, "scan_chunks": chunks}


def _pieces(start: int, stop: int, captures: Collection[int]) -> Iterable[tuple[int, int]]:
    """Split rows `[start, stop)` at each capture."""
    return pairwise((start, *captures, stop) if stop not in captures else (start, *captures))


def _repaired_pieces(chunk: ScheduledChunk, rules: ReuseRules) -> list[tuple[int, int]]:
    """Return the pieces of each run; a span computed alone is also cut behind its repaired
    tokens."""
    plan = _plan(chunk.sequence)
    pieces: list[tuple[int, int]] = []
    for index, start, stop in chunk.work.runs(plan, chunk.start, chunk.stop):
        span = plan.cache_spans[index]
        behind = span.cache_span.start + span.repaired_prefix(rules.repair)
        ends = {*chunk.captures, behind} if start < behind < stop else set(chunk.captures)
        pieces += _pieces(start, stop, sorted(end for end in ends if start < end <= stop))
    return pieces


def _map_counts(
    step: ScheduledStep, state_bytes: int, rules: ReuseRules, maps: MapRules
) -> dict[str, int]:
    """Count the work on maps: a request applies stored maps in its first step, others once
    computed."""
    rows = composed = captured = 0
    for chunk in step.chunks:
        spans = of_span(chunk)
        captured += len(chunk.captures) * (rules.map_bytes if spans else state_bytes)
        rows += chunk.tokens * spans * maps.transitions
        if spans and rules.repair.kind != "none":
            # B of the whole span is computed along its rows behind the repaired ones: d_v columns,
            # counted as d_k
            span = next(
                each.cache_span
                for each in _plan(chunk.sequence).cache_spans
                if chunk.start < each.cache_span.stop
            )
            behind = max(chunk.start, span.start + rules.repair.tokens)
            rows += max(0, chunk.stop - behind) * spans
        composed += spans and chunk.stop == _plan(chunk.sequence).cache_span_at(chunk.stop).stop
    plans = [_plan(sequence) for sequence in step.loads]
    return {
        "loaded_state_bytes": sum([state.num_bytes for plan in plans for state in plan.states]),
        "captured_state_bytes": captured,
        "composed_maps": composed + sum([plan.composed for plan in plans]),
        "map_tokens": rows,
    }


def _with_conversion(counts: StepFeatures, state_bytes: int, form: StateFormat) -> StepFeatures:
    """Add the conversion of the states that a step loads and captures."""
    loads = counts.loaded_state_bytes // state_bytes
    captures = counts.captured_state_bytes // state_bytes
    return counts._replace(
        added_flops=counts.added_flops + loads * form.load_flops + captures * form.store_flops
    )


def _replay_counts(step: ScheduledStep, replay: Replay) -> dict[str, int]:
    """Return FLOPs and bytes that rows of gaps skip, since their KV is stored."""
    flops = moved = 0
    for chunk in step.chunks:
        plan = _plan(chunk.sequence)
        gap = plan.cache_spans[0].stored
        if chunk.start < gap:
            skipped = replay.left_out(chunk.start, min(chunk.stop, gap), chunk.stop <= gap)
            flops, moved = flops - skipped[0], moved - skipped[1]
    return {"added_flops": flops, "added_bytes": moved}


def _plan(sequence: ScheduledSequence) -> ReusePlan:
    assert sequence.allocation is not None, "a computing sequence is admitted"
    return sequence.allocation.plan


def _span_counts(step: ScheduledStep, rules: ReuseRules, reads: SpanReads) -> dict[str, int]:
    """Count the work that only reused spans need."""
    forwards = passes(step, rules.copies or rules.repair.kind != "none", rules.repair.measured)
    runs = keys = probes = 0
    for chunk in step.chunks:
        # the cache spans that its rows read, their own included
        cache_spans = [span.cache_span for span in _plan(chunk.sequence).cache_spans]
        if isinstance(chunk.work, RepairPass):
            probes += rules.repair.probes
            runs += sum(cache_span.start < chunk.stop for cache_span in cache_spans)
        else:
            row_span = cache_spans[chunk.work.cache_span]
            runs += 1 + sum(cache_span.stop <= row_span.context for cache_span in cache_spans)
        keys += chunk.stop - chunk.work.unseen
    for sequence in step.decodes:
        runs += len(_plan(sequence).cache_spans)
        keys += sequence.prompt + sequence.generated
    groups = len(step.chunks) + len(step.decodes)
    return {
        "num_forwards": len(forwards) + probes,
        "span_reads": runs - groups if reads.restarts else 0,
        "turned_keys": keys if reads.rotates else 0,
    }
