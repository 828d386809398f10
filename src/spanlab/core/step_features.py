"""The work of one step in integers: the input of every timing model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from spanlab.core.plan import RepairPass, ReusePlan
from spanlab.core.repair import MapRules
from spanlab.core.rules import Replay, ReuseRules, StateFormat
from spanlab.core.step import ScheduledChunk, ScheduledSequence, ScheduledStep, of_span, passes


@dataclass(frozen=True, slots=True)
class SpanReads:
    """Extra work of an attention kernel, beyond reading keys in place, where spans are read at other positions.

    `restarts`  every further span is read separately, by queries rotated for it
    `rotates`   keys are rotated as they are read
    """

    restarts: bool = False
    rotates: bool = False


PREFIXES = ReuseRules()  # for policies that reuse no spans: other fields do not affect the cost of a step


class StepFeatures(NamedTuple):
    """Counts of one step, in tokens, pairs, sequences and bytes."""

    prefill_tokens: int = 0  #: prompt tokens computed in this step, and drafts that it verifies
    prefill_pairs: int = 0  #: their causal query-key pairs: over chunks, the sum of t + 1 for t in [start, stop)
    num_prefills: int = 0  #: prefill chunks
    num_decodes: int = 0  #: sequences that decode one token
    decode_context: int = 0  #: KV tokens that those read, their new token included, summed over sequences
    num_first_tokens: int = 0  #: chunks that finish a prompt, and drafts; each needs a row of logits
    loaded_state_bytes: int = 0  #: checkpoints and maps read from the cache
    captured_state_bytes: int = 0  #: checkpoints and maps written to the cache
    prefill_context: int = 0  #: KV tokens that the chunks' queries read and that are not computed with them
    shallow_token_layers: int = 0  #: dropped rows of a measured repair, times the layers that they pass in full
    shallow_pair_layers: int = 0  #: their query-key pairs times those layers, and pairs that scores are made of
    copied_tokens: int = 0  #: tokens of spans that a request copies privately, rotated to their positions
    num_forwards: int = 0  #: consecutive forwards of the model: more than one where spans are copied or repaired
    span_reads: int = 0  #: runs of keys that must be read one by one, each by queries rotated for it
    turned_keys: int = 0  #: keys that are rotated as they are read
    scan_runs: int = 0  #: consecutive runs of recurrent layers: one per piece between captures, one for all single rows
    scan_chunks: int = 0  #: chunks of the grid's length that those pieces are cut into, the last ones padded
    projected_tokens: int = 0  #: tokens for which one more layer computes query, key and value only
    composed_maps: int = 0  #: maps of spans that are applied to states: S becomes A · S + B
    map_tokens: int = 0  #: rows of spans whose A is computed along; once more each row that follows a repair's tokens
    added_flops: int = 0  #: FLOPs beyond the counts above; below zero where replays skip some
    added_bytes: int = 0  #: bytes read and written beyond the counts above, likewise

    @property
    def reads_spans(self) -> bool:
        """Whether the step does anything that only reused spans need."""
        needs = self.span_reads, self.turned_keys, self.shallow_token_layers, self.copied_tokens, self.projected_tokens
        return self.num_forwards > 1 or any(needs) or self.composed_maps > 0 or self.map_tokens > 0


def features(
    step: ScheduledStep, state_bytes: int, rules: ReuseRules = PREFIXES, reads: SpanReads | None = None
) -> StepFeatures:
    """Count the work of a step, in the integers that a timing model reads.

    `rules` are the policy's; `reads` is None where it reuses prefixes only. A measured repair is described by what is
    known beforehand: its chosen rows at full depth, all others through the layers before the choice, spread evenly over
    the spans. A probe is one more forward.
    """
    if step.drafts:
        return _with_drafts(features(replace(step, drafts=[]), state_bytes, rules, reads), step)
    if not step.chunks and reads is None:
        counts = _decode_features(step, state_bytes, rules)
        return counts if rules.state_format is None else _with_conversion(counts, state_bytes, rules.state_format)
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
    if rules.replay is not None:
        counts = counts._replace(**_replay_counts(step, rules.replay))
    if rules.state_format is not None:
        counts = _with_conversion(counts, state_bytes, rules.state_format)
    return counts if rules.maps is None else counts._replace(**_map_counts(step, state_bytes, rules, rules.maps))


def _decode_features(step: ScheduledStep, state_bytes: int, rules: ReuseRules) -> StepFeatures:
    """Count the work of a step that only decodes and rotates no keys: most steps of a simulation."""
    return StepFeatures(
        num_decodes=len(step.decodes),
        decode_context=_decode_context(step),
        loaded_state_bytes=len(step.loads) * state_bytes,
        captured_state_bytes=_decode_captures(step, rules) * state_bytes,
        num_forwards=1,
        scan_runs=int(rules.needs_states and bool(step.decodes)),
    )


def _with_drafts(counts: StepFeatures, step: ScheduledStep) -> StepFeatures:
    """Add the rows that verify drafts.

    Each reads the context of its sequence, which is read once, and the drafts before it; each needs logits.
    """
    drafting = zip(step.decodes, step.drafts, strict=True)
    pairs = sum(
        [drafts * (sequence.prompt + sequence.generated) + drafts * (drafts + 1) // 2 for sequence, drafts in drafting]
    )
    rows = sum(step.drafts)
    return counts._replace(
        prefill_tokens=counts.prefill_tokens + rows,
        prefill_pairs=counts.prefill_pairs + pairs,
        num_first_tokens=counts.num_first_tokens + rows,
    )


def _decode_context(step: ScheduledStep) -> int:
    return sum([sequence.prompt + sequence.generated for sequence in step.decodes])


def _decode_captures(step: ScheduledStep, rules: ReuseRules) -> int:
    """Return the number of states that decodes capture; a step that captures any is not repeated."""
    if rules.progress is None:
        return 0
    reached = [(sequence.allocation, sequence.prompt + sequence.generated) for sequence in step.decodes]
    return sum([allocation is not None and position in allocation.captures for allocation, position in reached])


def _scan_counts(step: ScheduledStep, rules: ReuseRules) -> dict[str, int]:
    """Count the work of recurrent layers: a scan runs in whole chunks, the last one padded.

    A single row, such as a decode, needs no scan; all single rows run together.
    """
    runs = chunks = 0
    single, repairs = bool(step.decodes), rules.repair.kind != "none"
    for chunk in step.chunks:
        pieces = _repaired_pieces(chunk, rules) if repairs else _pieces(chunk.start, chunk.stop, chunk.captures)
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
    """Return the pieces of each run; a span computed alone is also cut behind its repaired tokens."""
    plan = _plan(chunk.sequence)
    pieces: list[tuple[int, int]] = []
    for index, start, stop in chunk.work.runs(plan, chunk.start, chunk.stop):
        span = plan.cache_spans[index]
        behind = span.cache_span.start + span.repaired_prefix(rules.repair)
        ends = {*chunk.captures, behind} if start < behind < stop else set(chunk.captures)
        pieces += _pieces(start, stop, sorted(end for end in ends if start < end <= stop))
    return pieces


def _map_counts(step: ScheduledStep, state_bytes: int, rules: ReuseRules, maps: MapRules) -> dict[str, int]:
    """Count the work on maps: a request applies stored maps in its first step, others once computed."""
    rows = composed = captured = 0
    for chunk in step.chunks:
        spans = of_span(chunk)
        captured += len(chunk.captures) * (rules.map_bytes if spans else state_bytes)
        rows += chunk.tokens * spans * maps.transitions + _behind_repair(chunk, rules) * spans
        composed += spans and chunk.stop == _plan(chunk.sequence).cache_span_at(chunk.stop).stop
    plans = [_plan(sequence) for sequence in step.loads]
    return {
        "loaded_state_bytes": sum([state.num_bytes for plan in plans for state in plan.states]),
        "captured_state_bytes": captured,
        "composed_maps": composed + sum([plan.composed for plan in plans]),
        "map_tokens": rows,
    }


def _behind_repair(chunk: ScheduledChunk, rules: ReuseRules) -> int:
    """Return the rows of a span behind the tokens that a repair recomputes.

    B of the whole span is computed along there: d_v columns, counted as d_k.
    """
    if rules.repair.kind == "none":
        return 0
    span = next(span for span in _plan(chunk.sequence).cache_spans if chunk.start < span.cache_span.stop)
    return max(0, chunk.stop - max(chunk.start, span.cache_span.start + rules.repair.tokens))


def _with_conversion(counts: StepFeatures, state_bytes: int, form: StateFormat) -> StepFeatures:
    """Add the conversion of the states that a step loads and captures."""
    loads, captures = counts.loaded_state_bytes // state_bytes, counts.captured_state_bytes // state_bytes
    return counts._replace(added_flops=counts.added_flops + loads * form.load_flops + captures * form.store_flops)


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
        probes += rules.repair.probes and isinstance(chunk.work, RepairPass)
        runs += _num_runs(chunk)
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


def _num_runs(chunk: ScheduledChunk) -> int:
    """Return the number of cache spans that a chunk's rows read, their own included."""
    cache_spans = [span.cache_span for span in _plan(chunk.sequence).cache_spans]
    if isinstance(chunk.work, RepairPass):
        return sum(cache_span.start < chunk.stop for cache_span in cache_spans)
    row_span = cache_spans[chunk.work.cache_span]
    return 1 + sum(cache_span.stop <= row_span.context for cache_span in cache_spans)
