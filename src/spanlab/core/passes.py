"""The forward passes of a step: chunks that may run packed together, and chunks that must wait for them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from spanlab.core.scheduled import ScheduledChunk, ScheduledStep, Sequence
from spanlab.core.work import RepairPass


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
    by_sequence: dict[Sequence, list[ScheduledChunk]] = {}
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
