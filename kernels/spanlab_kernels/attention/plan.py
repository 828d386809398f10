"""Planning of the CPU path: groups of several rows become calls of dense attention."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from spanlab_kernels.attention.batch import Keys, SpanBatch

MASKED_ROWS = 256  # scattered rows per mask, which bounds its size; keys before all of them need no mask
SHORT_RUN = 16  # rows: for shorter runs, one mask is faster than one call per run
COPIED_KEYS = 512  # of a run: up to this length, copying it next to its neighbour is faster than a separate call
ROTATED_KEYS = 4  # per row of a call: up to this number, rotating the keys costs no more than rotating the rows


@dataclass(frozen=True)
class Call:
    """One call: rows [first, last) of the plan attend to keys [first, last) of the batch, by default to all."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    key_shift: int  # positions by which keys still have to be rotated; applied to the query instead
    causal: bool = False  # row i sees keys up to i, both counted from the first
    masked: bool = False  # rows see the keys up to their index in the prompt
    rotates_keys: bool = False  # keys are copied and rotated, so that spans of different shifts share the call


@dataclass(frozen=True)
class Plan:
    """Calls of dense attention for a batch.

    `groups` has, for each group of several rows, its range [first, last) of the batch's keys and its calls, each with
    the slots of its keys in the pool: a slice where they are consecutive.
    """

    order: Tensor | None  # rows of the batch in the order of the plan; None if the order is the same
    query_index: Tensor  # of each row, in the order of the plan
    query_shift: Tensor  # of each row, in the order of the plan
    keys: Keys
    key_shifts: Tensor | None  # shift of each key in calls that rotate keys, int64 [K]; None without such calls
    groups: list[tuple[tuple[int, int], list[tuple[Call, slice | Tensor]]]]


@lru_cache(maxsize=4)
def plan(batch: SpanBatch, *, per_span: bool) -> Plan:
    """Divide `batch` into calls; `per_span` if each span needs the query at a different angle.

    Cached for the last few batches, since all layers of a model use the same plan.
    """
    rows, spans, starts = batch.query_starts.tolist(), batch.span_starts.tolist(), batch.key_starts.tolist()
    group_of = torch.repeat_interleave(torch.arange(batch.groups), batch.query_starts.diff().long())
    # by group, then by index; an index is int32, so both fit into one sort key
    order = torch.argsort(group_of * (1 << 32) + batch.query_index, stable=True)
    query_index = batch.query_index[order]
    keys = batch.keys()
    slots = _Slots(keys.slot)
    index, position, indices = batch.span_index.tolist(), batch.span_position.tolist(), query_index.tolist()
    groups: list[tuple[tuple[int, int], list[tuple[Call, slice | Tensor]]]] = []
    for group in range(batch.groups):
        if rows[group + 1] - rows[group] < 2:
            continue
        runs = _Rows(indices, rows[group], rows[group + 1])
        calls = [
            _choose_rotation(call)
            for s in range(spans[group], spans[group + 1])
            for call in _calls(runs, index[s], (starts[s], starts[s + 1]), position[s] if per_span else 0)
        ]
        merged = [(call, slots.of(call.keys)) for call in _merge_calls(calls, slots)]
        groups.append(((starts[spans[group]], starts[spans[group + 1]]), merged))
    rotates_keys = any(call.rotates_keys for _, calls in groups for call, _ in calls)
    key_shifts = torch.repeat_interleave(batch.span_position, batch.span_length).long() if rotates_keys else None
    in_order = torch.equal(order, torch.arange(len(order)))
    return Plan(None if in_order else order, query_index, batch.query_shift[order], keys, key_shifts, groups)


class _Rows:
    """Rows [first, last) of one group, sorted by index in the prompt; in a run, indices are consecutive."""

    def __init__(self, indices: list[int], first: int, last: int) -> None:
        self.indices, self.first, self.last = indices, first, last
        self._ends = [row for row in range(first + 1, last) if indices[row] != indices[row - 1] + 1] + [last]

    def from_index(self, index: int) -> int:
        """The first row whose index in the prompt is `index` or more."""
        return bisect_left(self.indices, index, self.first, self.last)

    def run_end(self, row: int) -> int:
        """The end of the run of rows that contains `row`, exclusive."""
        return self._ends[bisect_right(self._ends, row)]


class _Slots:
    """Slots of the batch's keys, and where they are consecutive."""

    def __init__(self, slot: Tensor) -> None:
        self._slot = slot
        # keys whose successor is not in the next slot
        self._breaks = np.flatnonzero(np.diff(slot.numpy()) != 1).tolist()

    def in_line(self, keys: tuple[int, int]) -> bool:
        """Whether keys [first, last) are in consecutive slots."""
        return bisect_left(self._breaks, keys[0]) == bisect_left(self._breaks, keys[1] - 1)

    def of(self, keys: tuple[int, int]) -> slice | Tensor:
        """Slots of keys [first, last): a slice where they are consecutive."""
        slot = self._slot[slice(*keys)]
        return slice(int(slot[0]), int(slot[0]) + len(slot)) if self.in_line(keys) else slot


def _calls(rows: _Rows, index: int, keys: tuple[int, int], key_shift: int) -> Iterator[Call]:
    """Calls for `rows` and one span of `keys`, whose first key has index `index` in the prompt."""
    first_key, end = keys[0], index + keys[1] - keys[0]
    row, full = rows.from_index(index), rows.from_index(end - 1)
    if row < full < rows.last and full < rows.run_end(full - 1):
        full += 1  # the row of the last key belongs to the run before it
    while row < full:
        visible_end = first_key + rows.indices[row] - index  # all rows see the keys before that of the first row
        stop = min(full, rows.run_end(row))
        masked = stop < full and stop - row < SHORT_RUN
        if masked:
            stop = min(full, row + MASKED_ROWS)
        if visible_end > first_key:
            yield Call((row, stop), (first_key, visible_end), key_shift)
        last_visible = first_key + rows.indices[stop - 1] - index
        yield Call((row, stop), (visible_end, last_visible + 1), key_shift, causal=not masked, masked=masked)
        row = stop
    if full < rows.last:
        yield Call((full, rows.last), keys, key_shift)


def _choose_rotation(call: Call) -> Call:
    """The call, changed to rotate its keys instead of its rows where that is cheaper."""
    plain, rows = not (call.causal or call.masked), call.rows[1] - call.rows[0]
    rotates = plain and call.key_shift > 0 and _length(call) <= min(COPIED_KEYS, ROTATED_KEYS * rows)
    return replace(call, key_shift=0, rotates_keys=True) if rotates else call


def _merge_calls(calls: list[Call], slots: _Slots) -> Iterator[Call]:
    """Merge consecutive calls of the same rows and angle where copying their keys together is faster."""
    waiting: Call | None = None
    for call in calls:
        if waiting is not None and _can_merge(waiting, call) and _merging_is_faster(waiting, call, slots):
            rotates = waiting.rotates_keys or call.rotates_keys
            waiting = replace(waiting, keys=(waiting.keys[0], call.keys[1]), rotates_keys=rotates)
            continue
        if waiting is not None:
            yield waiting
        waiting = call
    if waiting is not None:
        yield waiting


def _can_merge(a: Call, b: Call) -> bool:
    plain = not (a.causal or a.masked or b.causal or b.masked)
    return plain and a.rows == b.rows and a.key_shift == b.key_shift and a.keys[1] == b.keys[0]


def _merging_is_faster(a: Call, b: Call, slots: _Slots) -> bool:
    if a.rotates_keys != b.rotates_keys:  # the keys of the other call are copied too
        return _length(b if a.rotates_keys else a) <= COPIED_KEYS
    if min(_length(a), _length(b)) <= COPIED_KEYS or slots.in_line((a.keys[1] - 1, b.keys[0] + 1)):
        return True
    return not (slots.in_line(a.keys) and slots.in_line(b.keys))


def _length(call: Call) -> int:
    return call.keys[1] - call.keys[0]
