"""What one step does, in integers: all that a timing model may know of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from spanlab.core.maps import MapRules
from spanlab.core.passes import of_span, passes
from spanlab.core.recovery import Replay
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.scheduled import ScheduledChunk, ScheduledStep, Sequence
from spanlab.core.state_formats import StateFormat
from spanlab.core.work import RepairPass


@dataclass(frozen=True, slots=True)
class SpanReads:
    """What an attention kernel does beyond reading keys in place, where a request reads spans at other positions.

    `restarts`  every further span is read by itself, by queries rotated for it
    `rotates`   keys are rotated as they are read
    """

    restarts: bool = False
    rotates: bool = False


PREFIXES = ReuseRules()  # of policies that reuse no spans: what the others are does not matter to the cost of a step


class StepFeatures(NamedTuple):
    """Counts of one step, in tokens, pairs, sequences and bytes."""

    prefill_tokens: int = 0  #: prompt tokens computed in this step, and drafts that it verifies
    prefill_pairs: int = 0  #: their causal query-key pairs: over chunks, the sum of t + 1 for t in [start, stop)
    num_prefills: int = 0  #: prefill chunks
    num_decodes: int = 0  #: sequences that decode one token
    decode_context: int = 0  #: KV tokens that those read, their own new token included, summed over sequences
    num_first_tokens: int = 0  #: chunks that finish a prompt, and drafts; each needs a row of logits
    loaded_state_bytes: int = 0  #: checkpoints and maps read from the cache
    captured_state_bytes: int = 0  #: checkpoints and maps written to the cache
    prefill_context: int = 0  #: KV tokens that the chunks' queries read and that are not computed with them
    shallow_token_layers: int = (
        0  #: rows of a measured repair that leave on their way, times the layers they pass whole
    )
    shallow_pair_layers: int = 0  #: their query-key pairs times those layers, and pairs that scores are made of
    copied_tokens: int = 0  #: tokens of spans that a request copies for itself, rotated to their place
    num_forwards: int = 0  #: runs through the model in turn: more than one where spans are copied or repaired
    span_reads: int = 0  #: runs of keys that must be read one by one, each by queries rotated for it
    turned_keys: int = 0  #: keys that are rotated as they are read
    scan_runs: int = 0  #: runs of recurrent layers in turn: one per piece between captures, one for all single rows
    scan_chunks: int = 0  #: chunks of the grid's length that those pieces are cut into, the last ones padded
    projected_tokens: int = 0  #: tokens of which one layer further computes query, key and value, and nothing else
    composed_maps: int = 0  #: maps of spans that states are taken through: S becomes A · S + B
    map_tokens: int = 0  #: rows of spans whose A is computed along; once more each row that follows a repair's tokens
    added_flops: int = 0  #: FLOPs beyond what the counts above tell; below zero where replays leave some out
    added_bytes: int = 0  #: the same of bytes read and written

    @property
    def reads_spans(self) -> bool:
        """Whether the step does anything that only reused spans need."""
        needs = self.span_reads, self.turned_keys, self.shallow_token_layers, self.copied_tokens, self.projected_tokens
        return self.num_forwards > 1 or any(needs) or self.composed_maps > 0 or self.map_tokens > 0


def features(
    step: ScheduledStep, state_bytes: int, rules: ReuseRules = PREFIXES, reads: SpanReads | None = None
) -> StepFeatures:
    """What a step does, in the integers that a timing model reads.

    `rules` are the policy's; `reads` is None where it reuses prefixes only. A measured repair is described by what is
    known beforehand: its chosen rows at full depth, all others through the layers before the choice, spread evenly
    over the spans. A probe is one forward more.
    """
    if step.drafts:
        return _with_drafts(features(replace(step, drafts=[]), state_bytes, rules, reads), step)
    if not step.chunks and reads is None:
        found = _of_decodes(step, state_bytes, rules)
        return found if rules.state_format is None else _converted(found, state_bytes, rules.state_format)
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
    found = StepFeatures(
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        num_prefills=len(step.chunks),
        num_decodes=len(step.decodes),
        decode_context=_decode_context(step),
        num_first_tokens=firsts,
        loaded_state_bytes=len(step.loads) * state_bytes,
        captured_state_bytes=(captures + _taken_by_decodes(step, rules)) * state_bytes,
        prefill_context=context,
        shallow_token_layers=shallow,
        shallow_pair_layers=shallow_pairs,
        copied_tokens=copied,
        projected_tokens=projected,
        **(_of_spans(step, rules, reads) if reads else {"num_forwards": 1}),
        **(_of_scans(step, rules) if rules.needs_states else {}),
    )
    if rules.replay is not None:
        found = found._replace(**_of_replays(step, rules.replay))
    if rules.state_format is not None:
        found = _converted(found, state_bytes, rules.state_format)
    return found if rules.maps is None else found._replace(**_of_maps(step, state_bytes, rules, rules.maps))


def _of_decodes(step: ScheduledStep, state_bytes: int, rules: ReuseRules) -> StepFeatures:
    """What a step does that only decodes, and rotates no keys: most steps of a simulation."""
    return StepFeatures(
        num_decodes=len(step.decodes),
        decode_context=_decode_context(step),
        loaded_state_bytes=len(step.loads) * state_bytes,
        captured_state_bytes=_taken_by_decodes(step, rules) * state_bytes,
        num_forwards=1,
        scan_runs=int(rules.needs_states and bool(step.decodes)),
    )


def _with_drafts(found: StepFeatures, step: ScheduledStep) -> StepFeatures:
    """The same step with the rows that verify drafts: each reads the context of its sequence, which is read once, and
    the drafts before it; each needs logits."""
    owners = zip(step.decodes, step.drafts, strict=True)
    pairs = sum([drafts * (one.prompt + one.generated) + drafts * (drafts + 1) // 2 for one, drafts in owners])
    rows = sum(step.drafts)
    return found._replace(
        prefill_tokens=found.prefill_tokens + rows,
        prefill_pairs=found.prefill_pairs + pairs,
        num_first_tokens=found.num_first_tokens + rows,
    )


def _decode_context(step: ScheduledStep) -> int:
    return sum([sequence.prompt + sequence.generated for sequence in step.decodes])


def _taken_by_decodes(step: ScheduledStep, rules: ReuseRules) -> int:
    """States that sequences leave which decode; a step that takes any is not repeated."""
    if rules.progress is None:
        return 0
    reached = [(sequence.allocation, sequence.prompt + sequence.generated) for sequence in step.decodes]
    return sum([allocation is not None and position in allocation.captures for allocation, position in reached])


def _of_scans(step: ScheduledStep, rules: ReuseRules) -> dict[str, int]:
    """What only recurrent layers cost: a scan goes chunk by chunk, whatever part of the last one is there.

    A single row, as a decode is, takes no scan; all of them go together.
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
    """Rows `[start, stop)` up to each capture, and the rest."""
    return pairwise((start, *captures, stop) if stop not in captures else (start, *captures))


def _repaired_pieces(chunk: ScheduledChunk, rules: ReuseRules) -> list[tuple[int, int]]:
    """The pieces of each run of rows; a span that is computed alone is cut behind the tokens that a repair computes."""
    plan = _plan(chunk.sequence)
    found: list[tuple[int, int]] = []
    for at, start, stop in chunk.work.runs(plan, chunk.start, chunk.stop):
        part = plan.cache_spans[at]
        behind = part.cache_span.start + part.first(rules.repair)
        ends = {*chunk.captures, behind} if start < behind < stop else set(chunk.captures)
        found += _pieces(start, stop, sorted(end for end in ends if start < end <= stop))
    return found


def _of_maps(step: ScheduledStep, state_bytes: int, rules: ReuseRules, maps: MapRules) -> dict[str, int]:
    """What spans do to recurrent states: a request composes stored maps in its first step, others once computed."""
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
    """Rows of a span behind the tokens that a repair computes again.

    What becomes of the state there is computed along: d_v columns, taken for d_k.
    """
    if rules.repair.kind == "none":
        return 0
    part = next(part for part in _plan(chunk.sequence).cache_spans if chunk.start < part.cache_span.stop)
    return max(0, chunk.stop - max(chunk.start, part.cache_span.start + rules.repair.tokens))


def _converted(found: StepFeatures, state_bytes: int, form: StateFormat) -> StepFeatures:
    """The same step with the conversion of the states that it loads and captures."""
    loads, captures = found.loaded_state_bytes // state_bytes, found.captured_state_bytes // state_bytes
    return found._replace(added_flops=found.added_flops + loads * form.load_flops + captures * form.store_flops)


def _of_replays(step: ScheduledStep, replay: Replay) -> dict[str, int]:
    """What rows of gaps do not compute and read, for their KV is there."""
    flops = moved = 0
    for chunk in step.chunks:
        plan = _plan(chunk.sequence)
        gap = plan.cache_spans[0].stored
        if chunk.start < gap:
            left_out = replay.left_out(chunk.start, min(chunk.stop, gap), chunk.stop <= gap)
            flops, moved = flops - left_out[0], moved - left_out[1]
    return {"added_flops": flops, "added_bytes": moved}


def _plan(sequence: Sequence) -> ReusePlan:
    assert sequence.allocation is not None, "who computes is admitted"
    return sequence.allocation.plan


def _of_spans(step: ScheduledStep, rules: ReuseRules, reads: SpanReads) -> dict[str, int]:
    """What only reused spans cost."""
    forwards = passes(step, rules.copies or rules.repair.kind != "none", rules.repair.measured)
    runs = keys = probes = 0
    for chunk in step.chunks:
        probes += rules.repair.probes and isinstance(chunk.work, RepairPass)
        runs += _runs(chunk)
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


def _runs(chunk: ScheduledChunk) -> int:
    """Cache spans that a chunk's rows read, their own among them."""
    cache_spans = [part.cache_span for part in _plan(chunk.sequence).cache_spans]
    if isinstance(chunk.work, RepairPass):
        return sum(cache_span.start < chunk.stop for cache_span in cache_spans)
    own = cache_spans[chunk.work.cache_span]
    return 1 + sum(cache_span.stop <= own.context for cache_span in cache_spans)
