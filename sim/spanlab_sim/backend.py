"""The modelled backend: turns a StepPlan into nanoseconds and says whose output is complete."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import pairwise

from spanlab.core.passes import passes
from spanlab.core.policy import ReuseRules
from spanlab.core.scheduler import Chunk, Scheduler, Sequence, StepPlan
from spanlab_sim.timing import StepFeatures, TimingModel

PREFIXES = ReuseRules()  # of policies that reuse no spans: what the others are does not matter to the cost of a step


def features(step: StepPlan, state_bytes: int, rules: ReuseRules = PREFIXES) -> StepFeatures:
    """What a step of a policy with such rules does, in the integers that a timing model reads.

    A repair that chooses its rows by measuring is told by what is known beforehand: so many rows at full depth, the
    others through the layers that it computes before it chooses, all of them spread evenly over the spans.
    """
    if not step.chunks and not rules.kernel:
        return _of_decodes(step, state_bytes, rules)
    tokens = pairs = context = captures = firsts = copied = shallow = shallow_pairs = projected = 0
    for _, start, stop, captured, work, size, last in step.chunks:
        tokens += size
        context += stop - size - work.unseen
        pairs += size * (start + stop + 1) // 2 - size * work.unseen
        captures += len(captured)
        firsts += last
        if work.section < 0:
            reach = (start + stop + 1) // 2 - work.unseen  # of a row in the middle: the mean of p + 1 - unseen
            shallow += work.shallow * rules.repair.shallow_layers
            shallow_pairs += work.shallow * rules.repair.shallow_layers * reach
            projected += work.shallow * rules.repair.filters_queries
        copied += work.copied if start == work.start else 0
    return StepFeatures(
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        num_prefills=len(step.chunks),
        num_decodes=len(step.decodes),
        decode_context=_decode_context(step),
        num_first_tokens=firsts,
        loaded_state_bytes=len(step.loads) * state_bytes,
        captured_state_bytes=captures * state_bytes,
        prefill_context=context,
        shallow_token_layers=shallow,
        shallow_pair_layers=shallow_pairs,
        copied_tokens=copied,
        projected_tokens=projected,
        **(_of_spans(step, rules) if rules.kernel else {"num_forwards": 1}),
        **(_of_scans(step, rules.grid) if rules.needs_states else {}),
    )


def _of_decodes(step: StepPlan, state_bytes: int, rules: ReuseRules) -> StepFeatures:
    """What a step does that only decodes, and rotates no keys: most steps of a simulation."""
    return StepFeatures(
        num_decodes=len(step.decodes),
        decode_context=_decode_context(step),
        loaded_state_bytes=len(step.loads) * state_bytes,
        num_forwards=1,
        scan_runs=int(rules.needs_states and bool(step.decodes)),
    )


def _decode_context(step: StepPlan) -> int:
    return sum([sequence.prompt + sequence.generated for sequence in step.decodes])


def _of_scans(step: StepPlan, grid: int) -> dict[str, int]:
    """What only recurrent layers cost: a scan goes chunk by chunk, whatever part of the last one is there.

    A single row, as a decode is, takes no scan; all of them go together.
    """
    runs = chunks = 0
    single = bool(step.decodes)
    for chunk in step.chunks:
        ends = [*chunk.captures, chunk.stop] if chunk.stop not in chunk.captures else chunk.captures
        for start, stop in pairwise((chunk.start, *ends)):
            if stop - start == 1 and stop not in chunk.captures:
                single = True
            else:
                runs, chunks = runs + 1, chunks - (start - stop) // grid
    return {"scan_runs": runs + single, "scan_chunks": chunks}


def _of_spans(step: StepPlan, rules: ReuseRules) -> dict[str, int]:
    """What only reused spans cost."""
    forwards = passes(step, rules.copies or rules.repair.kind != "none", rules.repair.measured)
    runs = keys = 0
    for chunk in step.chunks:
        runs += _runs(chunk)
        keys += chunk.stop - chunk.work.unseen
    for sequence in step.decodes:
        assert sequence.lease is not None, "who decodes is admitted"
        runs += len(sequence.lease.plan.sections)
        keys += sequence.prompt + sequence.generated
    groups = len(step.chunks) + len(step.decodes)
    return {
        "num_forwards": len(forwards),
        "span_reads": runs - groups if rules.kernel == "QR" else 0,
        "turned_keys": keys if rules.kernel == "KR" else 0,
    }


def _runs(chunk: Chunk) -> int:
    """Sections that a chunk's rows read, their own among them."""
    assert chunk.sequence.lease is not None, "who computes is admitted"
    sections = [part.section for part in chunk.sequence.lease.plan.sections]
    if chunk.work.section < 0:
        return sum(section.start < chunk.stop for section in sections)
    own = sections[chunk.work.section]
    return 1 + sum(section.stop <= own.context for section in sections)


class ModelledBackend:
    """Runs steps by a timing model. `jump` lets equal decode steps pass as one."""

    def __init__(self, timing: TimingModel, state_bytes: int, jump: bool = True, rules: ReuseRules = PREFIXES) -> None:
        self._timing, self._state_bytes, self._jump, self._rules = timing, state_bytes, jump, rules

    def run(self, step: StepPlan, scheduler: Scheduler, now: int, next_arrival: int | None) -> int:
        """Decide how often a decode-only step repeats before something changes; returns the nanoseconds it all takes.

        It repeats until a sequence ends, memory runs short, or the first step boundary after `next_arrival`.
        """
        what = features(step, self._state_bytes, self._rules)
        if step.chunks or not self._jump:
            return self._timing.step(what)
        times = min(_remaining(step.decodes), scheduler.horizon(step))
        if times == 1:
            return self._timing.step(what)
        ends = self._timing.span(what, times).cumsum()
        if next_arrival is not None:
            times = min(times, 1 + int(ends.searchsorted(next_arrival - now, side="right")))
        scheduler.repeat(step, times)
        return int(ends[times - 1])

    def ended(self, step: StepPlan) -> list[Sequence]:
        """Sequences that have their whole output once this step is over; the only place that reads `output_len`."""
        done = [
            chunk.sequence
            for chunk in step.chunks
            if chunk.last and chunk.sequence.generated + 1 >= chunk.sequence.request.output_len
        ]
        done += [s for s in step.decodes if s.generated + step.repeats >= s.request.output_len]
        return done


def _remaining(decodes: Ordered[Sequence]) -> int:
    return min([sequence.request.output_len - sequence.generated for sequence in decodes])
