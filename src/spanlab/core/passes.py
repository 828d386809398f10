"""A step as forwards of the model: what may run packed together, and what must wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from spanlab.core.scheduled import ScheduledChunk, ScheduledStep, Sequence
from spanlab.core.work import RepairPass


def stages(chunks: Iterable[ScheduledChunk], copies: bool) -> list[list[ScheduledChunk]]:
    """One sequence's chunks of a step, cut where rows read copies of what the chunks before them compute.

    Rows of one forward may read each other's keys, for every layer writes all of them before it reads any. A copy is
    made between forwards. So where spans are copied or repaired, what reads across them waits until they are there.
    """
    cut: list[list[ScheduledChunk]] = []
    spans_so_far = False
    for chunk in chunks:
        crosses = not of_span(chunk)
        behind_repair = cut and cut[-1] and is_repair(cut[-1][-1])
        if not cut or (copies and crosses and spans_so_far) or behind_repair:
            cut.append([])
            spans_so_far = False
        cut[-1].append(chunk)
        spans_so_far = spans_so_far or not crosses
    return cut


def of_span(chunk: ScheduledChunk) -> bool:
    """Whether its rows are those of an independent span."""
    allocation, work = chunk.sequence.allocation, chunk.work
    assert allocation is not None
    return not isinstance(work, RepairPass) and allocation.plan.cache_spans[work.cache_span].cache_span.independent


def is_repair(chunk: ScheduledChunk) -> bool:
    """Whether its rows are those of a repair."""
    return isinstance(chunk.work, RepairPass)


def passes(step: ScheduledStep, copies: bool, measured: bool) -> list[list[ScheduledChunk]]:
    """Chunks of a step by forward, in order; decodes go with the first, which may have no chunks for them.

    A measured repair drops rows on its way, so it runs alone.
    """
    own: dict[Sequence, list[ScheduledChunk]] = {}
    for chunk in step.chunks:
        own.setdefault(chunk.sequence, []).append(chunk)
    found: list[list[ScheduledChunk]] = []
    for level in zip_longest(*(stages(chunks, copies) for chunks in own.values()), fillvalue=()):
        packed = [chunk for stage in level for chunk in stage]
        together = [chunk for chunk in packed if not (measured and is_repair(chunk))]
        alone = [[chunk] for chunk in packed if measured and is_repair(chunk)]
        found += [together] * bool(together) + alone
    if step.decodes and (not found or (measured and is_repair(found[0][0]))):
        found.insert(0, [])
    return found
