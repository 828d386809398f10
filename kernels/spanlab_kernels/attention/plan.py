"""How the CPU path cuts groups of several rows into calls of dense attention."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from spanlab_kernels.attention.batch import Keys, SpanBatch

MASKED_ROWS = 256  # of scattered rows share a mask, which bounds it, and keys before them all need none
SHORT_RUN = 16  # rows: below that a mask for many beats a call for each run
COPIED_KEYS = 512  # of a run: up to there copying it next to its neighbour beats a call of its own
TURNED_KEYS = 4  # for each row of a call: up to there rotating its keys costs no more than rotating its rows


@dataclass(frozen=True)
class Call:
    """Rows [first, last) of the plan attending to the batch's keys [first, last), all of them unless said otherwise."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    behind: int  # positions by which keys still have to be rotated, done to the query instead
    causal: bool = False  # row i sees keys up to i, both counted from the first
    masked: bool = False  # rows see the keys up to their places
    turned: bool = False  # keys are copied and rotated, and so some that are behind stand beside some that are not


@dataclass(frozen=True)
class Plan:
    """What to compute for a batch.

    For each group of several rows it has the group's keys, [first, last) of the batch's, and its calls, each with the
    slots of its keys in the pool: a slice where they follow each other.
    """

    order: Tensor | None  # rows of the batch in the order of the plan; None where they stand so already
    place: Tensor  # of each row, in that order
    shift: Tensor  # of each row, in that order
    keys: Keys
    turns: Tensor | None  # what each key of turned calls is rotated by, int64 [K]; None without such calls
    groups: list[tuple[tuple[int, int], list[tuple[Call, slice | Tensor]]]]


@lru_cache(maxsize=4)
def plan(batch: SpanBatch, *, per_span: bool) -> Plan:
    """Cut `batch` into calls; `per_span` where each span needs the query at an angle of its own.

    Kept for the last few batches, since all layers of a model ask for the same.
    """
    rows, spans, starts = batch.query_starts.tolist(), batch.span_starts.tolist(), batch.key_starts.tolist()
    group_of = torch.repeat_interleave(torch.arange(batch.groups), batch.query_starts.diff().long())
    # by group, then by place; places are int32, so both fit into one key
    order = torch.argsort(group_of * (1 << 32) + batch.query_index, stable=True)
    place = batch.query_index[order]
    keys = batch.keys()
    slots = _Slots(keys.slot)
    index, position, places = batch.span_index.tolist(), batch.span_position.tolist(), place.tolist()
    groups: list[tuple[tuple[int, int], list[tuple[Call, slice | Tensor]]]] = []
    for group in range(batch.groups):
        if rows[group + 1] - rows[group] < 2:
            continue
        runs = _Rows(places, rows[group], rows[group + 1])
        calls = [
            _cheaper(call)
            for s in range(spans[group], spans[group + 1])
            for call in _calls(runs, index[s], (starts[s], starts[s + 1]), position[s] if per_span else 0)
        ]
        joined = [(call, slots.of(call.keys)) for call in _joined(calls, slots)]
        groups.append(((starts[spans[group]], starts[spans[group + 1]]), joined))
    turned = any(call.turned for _, calls in groups for call, _ in calls)
    turns = torch.repeat_interleave(batch.span_position, batch.span_length).long() if turned else None
    in_order = torch.equal(order, torch.arange(len(order)))
    return Plan(None if in_order else order, place, batch.query_shift[order], keys, turns, groups)


class _Rows:
    """Rows [first, last) of one group, sorted by place; in a run each is one place after the row before."""

    def __init__(self, places: list[int], first: int, last: int) -> None:
        self.places, self.first, self.last = places, first, last
        self._ends = [row for row in range(first + 1, last) if places[row] != places[row - 1] + 1] + [last]

    def from_place(self, place: int) -> int:
        """The first row at `place` or behind it."""
        return bisect_left(self.places, place, self.first, self.last)

    def run_end(self, row: int) -> int:
        """One past the last row of the run that has `row`."""
        return self._ends[bisect_right(self._ends, row)]


class _Slots:
    """Slots of the batch's keys, and which of them follow each other."""

    def __init__(self, slot: Tensor) -> None:
        self._slot = slot
        self._breaks = np.flatnonzero(np.diff(slot.numpy()) != 1).tolist()  # keys that the next does not follow

    def in_line(self, keys: tuple[int, int]) -> bool:
        """Whether keys [first, last) follow each other."""
        return bisect_left(self._breaks, keys[0]) == bisect_left(self._breaks, keys[1] - 1)

    def of(self, keys: tuple[int, int]) -> slice | Tensor:
        """Slots of keys [first, last): a slice where they follow each other."""
        slot = self._slot[slice(*keys)]
        return slice(int(slot[0]), int(slot[0]) + len(slot)) if self.in_line(keys) else slot


def _calls(rows: _Rows, index: int, keys: tuple[int, int], behind: int) -> Iterator[Call]:
    """Calls for `rows` and one span of `keys`, whose first key is at place `index`."""
    first_key, end = keys[0], index + keys[1] - keys[0]
    row, full = rows.from_place(index), rows.from_place(end - 1)
    if row < full < rows.last and full < rows.run_end(full - 1):
        full += 1  # the row of the last key ends the run before it
    while row < full:
        seen = first_key + rows.places[row] - index  # keys before the first row's own are plain to all rows
        stop = min(full, rows.run_end(row))
        masked = stop < full and stop - row < SHORT_RUN
        if masked:
            stop = min(full, row + MASKED_ROWS)
        if seen > first_key:
            yield Call((row, stop), (first_key, seen), behind)
        last_seen = first_key + rows.places[stop - 1] - index
        yield Call((row, stop), (seen, last_seen + 1), behind, causal=not masked, masked=masked)
        row = stop
    if full < rows.last:
        yield Call((full, rows.last), keys, behind)


def _cheaper(call: Call) -> Call:
    """The call itself, or with its keys rotated in place of its rows."""
    plain, rows = not (call.causal or call.masked), call.rows[1] - call.rows[0]
    turns = plain and call.behind > 0 and _length(call) <= min(COPIED_KEYS, TURNED_KEYS * rows)
    return replace(call, behind=0, turned=True) if turns else call


def _joined(calls: list[Call], slots: _Slots) -> Iterator[Call]:
    """Neighbours made one call where rows and angle are the same and copying their keys together pays."""
    waiting: Call | None = None
    for call in calls:
        if waiting is not None and _may_join(waiting, call) and _pays(waiting, call, slots):
            turned = waiting.turned or call.turned
            waiting = replace(waiting, keys=(waiting.keys[0], call.keys[1]), turned=turned)
            continue
        if waiting is not None:
            yield waiting
        waiting = call
    if waiting is not None:
        yield waiting


def _may_join(a: Call, b: Call) -> bool:
    plain = not (a.causal or a.masked or b.causal or b.masked)
    return plain and a.rows == b.rows and a.behind == b.behind and a.keys[1] == b.keys[0]


def _pays(a: Call, b: Call, slots: _Slots) -> bool:
    if a.turned != b.turned:  # the other's keys are copied with them
        return _length(b if a.turned else a) <= COPIED_KEYS
    if min(_length(a), _length(b)) <= COPIED_KEYS or slots.in_line((a.keys[1] - 1, b.keys[0] + 1)):
        return True
    return not (slots.in_line(a.keys) and slots.in_line(b.keys))


def _length(call: Call) -> int:
    return call.keys[1] - call.keys[0]
