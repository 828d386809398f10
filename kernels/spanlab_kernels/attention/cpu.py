"""Attention over spans on the CPU: separate calls of torch's flash attention, merged by
log-sum-exp.

Attention over two sets of keys is the mean of both, weighted by exp of their log-sum-exps (arXiv
2205.14135, §3.1).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanlab_kernels import AngleTable
from spanlab_kernels.attention.batch import Keys, Numbers, Scores, SpanBatch
from spanlab_kernels.attention.reference import Angles, angles_at, flash, folded, rotated_keys

# ------------------------------------------------------------------------------
# Planning of the CPU path: groups of several rows become calls of dense attention.
# ------------------------------------------------------------------------------

# scattered rows per mask, which bounds its size; keys before all of them need no mask
MASKED_ROWS = 256
SHORT_RUN = 16  # rows: for shorter runs, one mask is faster than one call per run
COPIED_KEYS = 512  # of a run: up to this length, copying it next to its neighbour is faster than a separate call
ROTATED_KEYS = 4  # per row of a call: up to this number, rotating the keys costs no more than rotating the rows


@dataclass(frozen=True)
class Call:
    """One call: rows [first, last) of the plan attend to keys [first, last) of the batch, by
    default to all."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    key_shift: int  # positions by which keys still have to be rotated; applied to the query instead
    causal: bool = False  # row i sees keys up to i, both counted from the first
    masked: bool = False  # rows see the keys up to their index in the prompt
    # keys are copied and rotated, so that spans of different shifts share the call
    rotates_keys: bool = False


@dataclass(frozen=True)
class Plan:
    """Calls of dense attention for a batch.

    `groups` has, for each group of several rows, its range [first, last) of the batch's keys and
    its calls, each with the slots of its keys in the pool: a slice where they are consecutive.
    """

    # rows of the batch in the order of the plan; None if the order is the same
    order: Tensor | None
    query_index: Tensor  # of each row, in the order of the plan
    query_shift: Tensor  # of each row, in the order of the plan
    keys: Keys
    # shift of each key in calls that rotate keys, int64 [K]; None without such calls
    key_shifts: Tensor | None
    groups: list[tuple[tuple[int, int], list[tuple[Call, slice | Tensor]]]]


@lru_cache(maxsize=4)
def plan(batch: SpanBatch, *, per_span: bool) -> Plan:
    """Divide `batch` into calls; `per_span` if each span needs the query at a different angle.

    Cached for the last few batches, since all layers of a model use the same plan.
    """
    rows = batch.query_starts.tolist()
    spans = batch.span_starts.tolist()
    starts = batch.key_starts.tolist()
    group_of = torch.repeat_interleave(torch.arange(batch.groups), batch.query_starts.diff().long())
    # by group, then by index; an index is int32, so both fit into one sort key
    order = torch.argsort(group_of * (1 << 32) + batch.query_index, stable=True)
    query_index = batch.query_index[order]
    keys = batch.keys()
    slots = _Slots(keys.slot)
    index = batch.span_index.tolist()
    position = batch.span_position.tolist()
    indices = query_index.tolist()
    groups: list[tuple[tuple[int, int], list[tuple[Call, slice | Tensor]]]] = []
    for group in range(batch.groups):
        if rows[group + 1] - rows[group] < 2:
            continue
        runs = _Rows(indices, rows[group], rows[group + 1])
        calls = [
            _choose_rotation(call)
            for s in range(spans[group], spans[group + 1])
            for call in _calls(
                runs, index[s], (starts[s], starts[s + 1]), position[s] if per_span else 0
            )
        ]
        merged = [(call, slots.of(call.keys)) for call in _merge_calls(calls, slots)]
        groups.append(((starts[spans[group]], starts[spans[group + 1]]), merged))
    rotates_keys = any(call.rotates_keys for _, calls in groups for call, _ in calls)
    key_shifts = (
        torch.repeat_interleave(batch.span_position, batch.span_length).long()
        if rotates_keys
        else None
    )
    in_order = torch.equal(order, torch.arange(len(order)))
    return Plan(
        None if in_order else order, query_index, batch.query_shift[order], keys, key_shifts, groups
    )


class _Rows:
    """Rows [first, last) of one group, sorted by index in the prompt; in a run, indices are
    consecutive."""

    def __init__(self, indices: list[int], first: int, last: int) -> None:
        self.indices, self.first, self.last = indices, first, last
        self._ends = [
            row for row in range(first + 1, last) if indices[row] != indices[row - 1] + 1
        ] + [last]

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
        # all rows see the keys before that of the first row
        visible_end = first_key + rows.indices[row] - index
        stop = min(full, rows.run_end(row))
        masked = stop < full and stop - row < SHORT_RUN
        if masked:
            stop = min(full, row + MASKED_ROWS)
        if visible_end > first_key:
            yield Call((row, stop), (first_key, visible_end), key_shift)
        last_visible = first_key + rows.indices[stop - 1] - index
        yield Call(
            (row, stop),
            (visible_end, last_visible + 1),
            key_shift,
            causal=not masked,
            masked=masked,
        )
        row = stop
    if full < rows.last:
        yield Call((full, rows.last), keys, key_shift)


def _choose_rotation(call: Call) -> Call:
    """The call, changed to rotate its keys instead of its rows where that is cheaper."""
    plain, rows = not (call.causal or call.masked), call.rows[1] - call.rows[0]
    rotates = (
        plain and call.key_shift > 0 and _length(call) <= min(COPIED_KEYS, ROTATED_KEYS * rows)
    )
    return replace(call, key_shift=0, rotates_keys=True) if rotates else call


def _merge_calls(calls: list[Call], slots: _Slots) -> Iterator[Call]:
    """Merge consecutive calls of the same rows and angle where copying their keys together is
    faster."""
    waiting: Call | None = None
    for call in calls:
        if (
            waiting is not None
            and _can_merge(waiting, call)
            and _merging_is_faster(waiting, call, slots)
        ):
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


# ------------------------------------------------------------------------------
# Attention of groups of one row on a CPU, as in decoding: one call per run of keys, for all
# rows that read it.
#
# With many short spans, the calls dominate the time. So keys that are adjacent in the pool are
# read in place, in one call for all rows that share them, and the outputs of all calls are
# merged at once.
# ------------------------------------------------------------------------------

# keys of a run: copying fewer next to the row's other keys is faster than a separate call
READ_IN_PLACE = 64


class Run(NamedTuple):
    """Keys [start, start + length) of the pool or of copies, and the number of rows that read
    them."""

    start: int
    length: int
    rows: int


class Copies(NamedTuple):
    """Keys of one row that are copied together: slots and positions, int64 [K], and the runs of the
    copy."""

    slot: Tensor
    position: Tensor
    runs: list[Run]


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Calls for the groups of one row of a batch; a row occurs in one or more calls.

    `targets`  int64 [G], rows of the batch that see a key
    `rows`     int64 [E], row of the batch of every entry, call by call
    `angles`   angles by which the entries are rotated; None if none is rotated
    `in_pool`  runs that are read in the pool
    `copies`   copied keys, of each row that has any
    `counts`   number of rows of each call
    `joined`   int64 [G, M], entries of each target; the last one is repeated for a target with
               fewer than M
    `missing`  bool [G, M, 1, 1], true for the repeated entries; None if there are none
    """

    targets: Tensor
    rows: Tensor
    angles: Angles | None
    in_pool: list[Run]
    copies: list[Copies]
    counts: list[int]
    joined: Tensor
    missing: Tensor | None


def attend_rows(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: RowPlan, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Out [G, Hq, D] and log-sum-exps [G, Hq] of the plan's targets, float32; pools are [slots,
    Hkv, D]."""
    heads = query.shape[1] // key_pool.shape[1]
    queries = folded(
        query.index_select(0, plan.rows), key_pool.shape[1], plan.angles, scores.interleaved
    )
    queries_by_call = iter(queries.split([count * heads for count in plan.counts], dim=2))
    results = []
    for keys, values, runs in _sources(key_pool, value_pool, plan, scores):
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        for start, length, _ in runs:
            key, value = keys.narrow(2, start, length), values.narrow(2, start, length)
            results.append(flash(next(queries_by_call), key, value, scale=scores.scale))
    merged = (
        torch.cat([tensor.transpose(1, 2) for tensor in tensors], 1)[0]
        for tensors in zip(*results, strict=True)
    )
    out, lse = (tensor.unflatten(0, (-1, heads)) for tensor in merged)
    # of several calls into those of each target
    each = lse[plan.joined]
    if plan.missing is not None:
        each = each.masked_fill(plan.missing, -torch.inf)
    weights = torch.softmax(each, 1)[..., None]
    out, lse = (out[plan.joined] * weights).sum(1), each.logsumexp(1)
    return out.transpose(1, 2).flatten(1, 2), lse.transpose(1, 2).flatten(1, 2)


def _sources(
    key_pool: Tensor, value_pool: Tensor, plan: RowPlan, scores: Scores
) -> Iterator[tuple[Tensor, Tensor, list[Run]]]:
    """Keys and values [slots, Hkv, D] of the pool and of each copy, with the runs that calls
    read."""
    yield key_pool, value_pool, plan.in_pool
    for slot, position, runs in plan.copies:
        if scores.form == "KR":
            keys = rotated_keys(key_pool, slot, position, scores.table, scores.interleaved)
        else:
            keys = key_pool.index_select(0, slot)
        yield keys, value_pool.index_select(0, slot), runs


# -- the plan --------------------------------------------------------------------------------------


class _Reads(NamedTuple):
    """Pairs of a row and a span, with the number of leading keys that the row sees; int64 [R], by
    row."""

    row: Numbers
    span: Numbers
    visible: Numbers


class _Runs(NamedTuple):
    """Runs of adjacent keys in the pool that a row reads at one angle; int64, by row.

    `key_shift`  positions by which the keys still have to be rotated, applied to the query instead
    `position`   of the first key
    """

    row: Numbers
    key_shift: Numbers
    slot: Numbers
    position: Numbers
    length: Numbers

    def where(self, chosen: Numbers) -> _Runs:
        """The runs of the indices `chosen`, in that order."""
        return _Runs(*(values[chosen] for values in self))


@lru_cache(maxsize=4)
def row_plan(batch: SpanBatch, form: str, table: AngleTable, interleaved: bool) -> RowPlan | None:
    """Plan the groups of one row of a batch on the CPU; None if they see no key.

    Cached for the last few batches, since all layers of a model use the same plan.
    """
    spans, single = np.diff(batch.starts.spans), np.diff(batch.starts.rows) == 1
    span = np.flatnonzero(np.repeat(single, spans))
    row = np.repeat(batch.starts.rows[:-1][single], spans[single])
    query_index, index, length = (
        x.numpy().astype(np.int64) for x in (batch.query_index, batch.span_index, batch.span_length)
    )
    visible = np.clip(query_index[row] - index[span] + 1, 0, length[span])
    reads = _Reads(*(values[visible > 0] for values in (row, span, visible)))
    if not len(reads.row):
        return None
    runs = _runs(batch, reads, form)
    in_place = (runs.length >= READ_IN_PLACE) & (form != "KR")
    shared, in_pool = _shared(runs.where(np.flatnonzero(in_place)))
    copied, copies = _copies(runs.where(np.flatnonzero(~in_place)))
    row, key_shift = (np.concatenate(parts) for parts in zip(shared, copied, strict=True))
    shift = batch.query_shift.numpy()[row] - key_shift
    angles = angles_at(torch.from_numpy(shift), table, interleaved) if shift.any() else None
    counts = [run.rows for calls in (in_pool, *(each.runs for each in copies)) for run in calls]
    targets, rows = torch.from_numpy(np.unique(row)), torch.from_numpy(row)
    # of each target: its entries, and which of them are missing
    _, count = np.unique(row, return_counts=True)
    order, most = np.argsort(row, kind="stable"), np.arange(count.max())
    first, missing = np.cumsum(count) - count, most >= count[:, None]
    entries = order[first[:, None] + np.minimum(most, count[:, None] - 1)]
    return RowPlan(
        targets,
        rows,
        angles,
        in_pool,
        copies,
        counts,
        torch.from_numpy(entries),
        torch.from_numpy(missing)[..., None, None] if missing.any() else None,
    )


def _runs(batch: SpanBatch, reads: _Reads, form: str) -> _Runs:
    """Runs of adjacent pages of each read, and of consecutive reads."""
    page, row = batch.page_size, reads.row
    first_page, offset, position = (
        x.numpy().astype(np.int64)[reads.span]
        for x in (batch.span_pages, batch.span_offset, batch.span_position)
    )
    key_shift = position if form == "QR" else np.zeros_like(position)
    ends = np.cumsum(-(-(offset + reads.visible) // page))  # of the pages of each read
    begins = np.concatenate([[0], ends[:-1]])
    ids = batch.pages.numpy()[np.repeat(first_page - begins, ends - begins) + np.arange(ends[-1])]
    begins_run = np.append(True, np.diff(ids) != 1)
    begins_run[begins] = True
    start = np.flatnonzero(begins_run)
    read_index = np.searchsorted(ends, start, side="right")
    # of the read; negative if its first page has other keys before
    key = (start - begins[read_index]) * page - offset[read_index]
    stop = np.minimum(key + np.diff(start, append=len(ids)) * page, reads.visible[read_index])
    first = np.maximum(key, 0)
    slot = ids[start].astype(np.int64) * page + first - key
    runs = _Runs(
        row[read_index], key_shift[read_index], slot, position[read_index] + first, stop - first
    )
    if form == "KR":  # only KR uses the position of each key
        return runs
    # merge runs that are consecutive in the pool and that a row reads at one angle
    again = (runs.row[1:] == runs.row[:-1]) & (runs.key_shift[1:] == runs.key_shift[:-1])
    again &= runs.slot[1:] == (runs.slot + runs.length)[:-1]
    first = np.flatnonzero(np.append(True, ~again))
    return runs.where(first)._replace(length=np.add.reduceat(runs.length, first))


def _shared(runs: _Runs) -> tuple[tuple[Numbers, Numbers], list[Run]]:
    """Rows and key shifts of calls, and the calls: one for all rows that read the same keys."""
    runs = runs.where(np.lexsort((runs.length, runs.slot)))
    other = (np.diff(runs.slot) != 0) | (np.diff(runs.length) != 0)
    first = np.flatnonzero(np.append(True, other)[: len(runs.row)])
    rows = np.diff(first, append=len(runs.row))
    calls = zip(runs.slot[first].tolist(), runs.length[first].tolist(), rows.tolist(), strict=True)
    return (runs.row, runs.key_shift), [Run(*call) for call in calls]


def _copies(runs: _Runs) -> tuple[tuple[Numbers, Numbers], list[Copies]]:
    """Rows and key shifts of calls over copied keys, and the copies, row by row."""
    if not len(runs.row):
        return (runs.row, runs.key_shift), []
    other = np.append(True, np.diff(runs.row) != 0)
    row = np.flatnonzero(other)
    call = np.flatnonzero(other | np.append(True, np.diff(runs.key_shift) != 0))
    key = np.cumsum(runs.length) - runs.length  # the first of each run, of the keys of all rows
    within = np.arange(runs.length.sum()) - np.repeat(key, runs.length)
    of_row = np.searchsorted(row, call, side="right") - 1
    keys = np.add.reduceat(runs.length, row).tolist()
    calls: list[list[Run]] = [[] for _ in row]
    for index, start, length in zip(
        of_row, key[call] - key[row][of_row], np.add.reduceat(runs.length, call), strict=True
    ):
        calls[index].append(Run(int(start), int(length), 1))
    slot, position = (
        torch.from_numpy(np.repeat(first, runs.length) + within).split(keys)
        for first in (runs.slot, runs.position)
    )
    return (runs.row[call], runs.key_shift[call]), [
        Copies(*each) for each in zip(slot, position, calls, strict=True)
    ]


ROTATED_ROWS = 1024  # rotated at once, in form QR
MERGED_ROWS = 4096  # rows of outputs that are merged at once

Slotted = tuple[Call, slice | Tensor]
"""A call and the slots of its keys."""


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The contract of `spanlab_kernels.attention.attend`, whose checks come first, for tensors on
    the CPU.

    Consecutive keys of the pool are read in place; others are copied together first.
    """
    pools = key_pages.flatten(0, 1), value_pages.flatten(0, 1)
    if batch.max_rows > 1:
        out, lse = _attend_runs(query, *pools, batch, scores)
    else:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        lse = torch.full(out.shape[:2], -torch.inf)
    singles = (
        row_plan(batch, scores.form, scores.table, scores.interleaved)
        if len(batch.one_row_groups)
        else None
    )
    if singles is not None:
        of_singles, lse[singles.targets] = attend_rows(query, *pools, singles, scores)
        out[singles.targets] = of_singles.to(out.dtype)
    return out, lse


def _attend_runs(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Output, in the dtype of `query`, and float32 log-sum-exp of the groups of several rows; 0 and
    -inf elsewhere."""
    cuts, kv_heads = plan(batch, per_span=scores.form == "QR"), key_pool.shape[1]
    rows, heads = query if cuts.order is None else query[cuts.order], query.shape[1] // kv_heads
    queries, end = _queries(rows, batch, cuts, scores, kv_heads), 0
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    lse = torch.empty(out.shape[:2])
    for keys, calls in cuts.groups:
        blocks = list(_merged_calls(calls))
        if not blocks:
            continue
        results = _attend_blocks(queries, (key_pool, value_pool), keys, blocks, cuts, scores)
        start, stop, parts, sums = (
            next(results) if len(blocks) == 1 else _merge_blocks(results, blocks, heads)
        )
        out[end:start], lse[end:start], end = 0.0, -torch.inf, stop
        # one copy into place, which rounds too: results of a long prompt are as large as its
        # queries
        for target, source in ((out, parts), (lse, sums)):
            target[start:stop].unflatten(1, (kv_heads, heads)).copy_(
                source.unflatten(0, (-1, heads)).transpose(1, 2)
            )
    out[end:], lse[end:] = 0.0, -torch.inf
    if cuts.order is None:
        return out, lse
    back = cuts.order.argsort()
    return out[back], lse[back]


def _attend_blocks(
    queries: Iterator[Tensor],
    pools: tuple[Tensor, Tensor],
    keys: tuple[int, int],
    blocks: list[list[Slotted]],
    cuts: Plan,
    scores: Scores,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Rows [start, stop), out [rows · heads per kv head, kv_heads, D] and lse of each block of a
    group's calls."""
    (key_pool, value_pool), (first, last), rotated = pools, keys, None
    if scores.form == "KR":
        slot, position = cuts.keys.slot[first:last], cuts.keys.position[first:last]
        rotated = rotated_keys(key_pool, slot, position, scores.table, scores.interleaved)
    for block in blocks:
        parts = []
        for call, slots in block:
            here = slice(call.keys[0] - first, call.keys[1] - first)
            key = _keys(key_pool, (call, slots), cuts, scores) if rotated is None else rotated[here]
            parts.append(
                _attend_to(
                    next(queries), key, _select_rows(value_pool, slots), scores.scale, call, cuts
                )
            )
        yield *block[0][0].rows, *_merge_parts(parts)


def _merge_blocks(
    results: Iterator[tuple[int, int, Tensor, Tensor]], blocks: list[list[Slotted]], heads: int
) -> tuple[int, int, Tensor, Tensor]:
    """The results of several blocks as that of one, whose rows are those of all blocks; float32."""
    rows = [block[0][0].rows for block in blocks]
    first, last = min(start for start, _ in rows), max(stop for _, stop in rows)
    start, stop, more, more_lse = next(results)
    out = more.new_zeros(((last - first) * heads, *more.shape[1:]), dtype=torch.float32)
    lse = more_lse.new_full(out.shape[:2], -torch.inf)
    here = slice((start - first) * heads, (stop - first) * heads)
    out[here], lse[here] = more, more_lse
    for start, stop, more, more_lse in results:
        here = slice((start - first) * heads, (stop - first) * heads)
        # every row of `more` sees a key
        both = torch.logaddexp(lse[here], more_lse)
        out[here].mul_((lse[here] - both).exp_()[..., None]).addcmul_(
            more.float(), (more_lse - both).exp_()[..., None]
        )
        lse[here].copy_(both)
    return first, last, out, lse


def _queries(
    rows: Tensor, batch: SpanBatch, cuts: Plan, scores: Scores, kv_heads: int
) -> Iterator[Tensor]:
    """The queries of each call, [1, kv_heads, rows · heads per kv head, D]; heads of one row are
    adjacent."""
    form, table, _, interleaved = scores
    heads = rows.shape[1] // kv_heads
    if form == "QR":
        for block in _rotated_blocks(batch, table, interleaved):
            rotated = folded(rows.index_select(0, block.rows), kv_heads, block.angles, interleaved)
            yield from rotated.split([count * heads for count in block.counts], dim=2)
        return
    angles = angles_at(cuts.query_shift, table, interleaved) if batch.shifted else None
    queries = folded(rows, kv_heads, angles, interleaved)
    for _, calls in cuts.groups:
        for call, _ in calls:
            start, stop = call.rows
            yield queries[:, :, start * heads : stop * heads]


def _keys(pool: Tensor, slotted: Slotted, cuts: Plan, scores: Scores) -> Tensor:
    """The keys of a call: a view of the pool, or a copy."""
    call, slots = slotted
    if cuts.key_shifts is None or not call.rotates_keys:
        return _select_rows(pool, slots)
    here = slice(*call.keys)
    return rotated_keys(
        pool, cuts.keys.slot[here], cuts.key_shifts[here], scores.table, scores.interleaved
    )


def _select_rows(pool: Tensor, slots: slice | Tensor) -> Tensor:
    """Rows of a pool; `index_select` copies whole rows, several times faster than indexing does."""
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


def _merged_calls(calls: Iterable[Slotted]) -> Iterator[list[Slotted]]:
    """Consecutive calls of the same rows, up to MERGED_ROWS in all, whose outputs are merged at
    once."""
    waiting: list[Slotted] = []
    for each in calls:
        rows = each[0].rows
        if waiting and (
            waiting[0][0].rows != rows or (len(waiting) + 1) * (rows[1] - rows[0]) > MERGED_ROWS
        ):
            yield waiting
            waiting = []
        waiting.append(each)
    if waiting:
        yield waiting


class RotatedRows(NamedTuple):
    """Concatenated rows of several calls, and the angles by which each is rotated."""

    rows: Tensor
    angles: Angles
    counts: list[int]  # of each call


@lru_cache(maxsize=4)
def _rotated_blocks(batch: SpanBatch, table: AngleTable, interleaved: bool) -> list[RotatedRows]:
    """Calls of form QR in blocks of rows that are rotated at once; cached for all layers, like
    plans."""
    cuts = plan(batch, per_span=True)
    blocks, waiting, total = [], [], 0
    for call in (call for _, calls in cuts.groups for call, _ in calls):
        count = call.rows[1] - call.rows[0]
        if total and total + count > ROTATED_ROWS:
            blocks.append(_rotated_block(waiting, cuts, table, interleaved))
            waiting, total = [], 0
        waiting.append(call)
        total += count
    return [*blocks, _rotated_block(waiting, cuts, table, interleaved)] if waiting else blocks


def _rotated_block(
    calls: list[Call], cuts: Plan, table: AngleTable, interleaved: bool
) -> RotatedRows:
    rows = torch.cat([torch.arange(*call.rows) for call in calls])
    shift = torch.cat([cuts.query_shift[slice(*call.rows)] - call.key_shift for call in calls])
    return RotatedRows(
        rows, angles_at(shift, table, interleaved), [call.rows[1] - call.rows[0] for call in calls]
    )


def _attend_to(
    q: Tensor, key: Tensor, value: Tensor, scale: float, call: Call, cuts: Plan
) -> tuple[Tensor, Tensor]:
    """Attention of one call: out [rows · heads per kv head, kv_heads, D] in the dtype of `q`, lse
    without D."""
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [kv_heads, keys, D]
    if not (call.causal or call.masked):
        out, lse = flash(q, key[None], value[None], scale=scale)
        return out[0].transpose(0, 1), lse[0].T
    if call.masked:
        key_index = cuts.keys.prompt_index[slice(*call.keys)]
        unseen = key_index > cuts.query_index[slice(*call.rows), None]
        mask = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, -torch.inf)[None, None]
    else:
        mask = None
    # kv heads are the batch dimension; a stride of 0 repeats keys for the heads that share them
    # [kv_heads, heads per kv head, rows, D]
    heads = q[0].unflatten(1, (call.rows[1] - call.rows[0], -1)).transpose(1, 2)
    key, value = (x[:, None].expand(-1, heads.shape[1], -1, -1) for x in (key, value))
    out, lse = flash(heads, key, value, is_causal=call.causal, attn_mask=mask, scale=scale)
    return out.permute(2, 1, 0, 3).flatten(0, 1), lse.permute(2, 1, 0).flatten(0, 1)


def _merge_parts(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge results of the same rows over the keys of all parts, in the shape of each part; float32
    if several."""
    out, lse = parts[0]
    if len(parts) > 1:
        sums = torch.stack([part_lse for _, part_lse in parts])
        lse = sums.logsumexp(0)
        weights = (sums - lse).exp_()[..., None]
        out = out.float() * weights[0]
        for (more, _), weight in zip(parts[1:], weights[1:], strict=True):
            out.addcmul_(more.float(), weight)
    return out, lse
