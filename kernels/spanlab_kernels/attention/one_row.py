"""Attention of groups of one row on a CPU, as in decoding: one call per run of keys, for all rows that read it.

With many short spans, the calls dominate the time. So keys that are adjacent in the pool are read in place, in one call
for all rows that share them, and the outputs of all calls are merged at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention import torch_cpu
from spanlab_kernels.attention.batch import Scores, SpanBatch
from spanlab_kernels.attention.groups import Numbers
from spanlab_kernels.attention.torch_cpu import Angles, angles_at, folded, rotated_keys

READ_IN_PLACE = 64  # keys of a run: copying fewer next to the row's other keys is faster than a separate call


class Run(NamedTuple):
    """Keys [start, start + length) of the pool or of copies, and the number of rows that read them."""

    start: int
    length: int
    rows: int


class Copies(NamedTuple):
    """Keys of one row that are copied together: slots and positions, int64 [K], and the runs of the copy."""

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
    `joined`   int64 [G, M], entries of each target; the last one is repeated for a target with fewer than M
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
    """Out [G, Hq, D] and log-sum-exps [G, Hq] of the plan's targets, float32; pools are [slots, Hkv, D]."""
    heads = query.shape[1] // key_pool.shape[1]
    queries = folded(query.index_select(0, plan.rows), key_pool.shape[1], plan.angles, scores.interleaved)
    queries_by_call, results = iter(queries.split([count * heads for count in plan.counts], dim=2)), []
    for keys, values, runs in _sources(key_pool, value_pool, plan, scores):
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        for start, length, _ in runs:
            key, value = keys.narrow(2, start, length), values.narrow(2, start, length)
            results.append(torch_cpu.flash(next(queries_by_call), key, value, scale=scores.scale))
    merged = (torch.cat([tensor.transpose(1, 2) for tensor in tensors], 1)[0] for tensors in zip(*results, strict=True))
    out, lse = _merge_outputs(*(tensor.unflatten(0, (-1, heads)) for tensor in merged), plan)
    return out.transpose(1, 2).flatten(1, 2), lse.transpose(1, 2).flatten(1, 2)


def _sources(
    key_pool: Tensor, value_pool: Tensor, plan: RowPlan, scores: Scores
) -> Iterator[tuple[Tensor, Tensor, list[Run]]]:
    """Keys and values [slots, Hkv, D] of the pool and of each copy, with the runs that calls read."""
    yield key_pool, value_pool, plan.in_pool
    for slot, position, runs in plan.copies:
        if scores.form == "KR":
            keys = rotated_keys(key_pool, slot, position, scores.table, scores.interleaved)
        else:
            keys = key_pool.index_select(0, slot)
        yield keys, value_pool.index_select(0, slot), runs


def _merge_outputs(out: Tensor, lse: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
    """Merge outputs [E, heads, kv_heads, D] and log-sum-exps of calls into those of targets."""
    each = lse[plan.joined]
    if plan.missing is not None:
        each = each.masked_fill(plan.missing, -torch.inf)
    weights = torch.softmax(each, 1)[..., None]
    return (out[plan.joined] * weights).sum(1), each.logsumexp(1)


# -- the plan ---------------------------------------------------------------------------------------------------------


class _Reads(NamedTuple):
    """Pairs of a row and a span, with the number of leading keys that the row sees; int64 [R], by row."""

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
    reads = _reads(batch)
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
    return RowPlan(targets, rows, angles, in_pool, copies, counts, *_join_indices(row))


def _reads(batch: SpanBatch) -> _Reads:
    spans, single = np.diff(batch.starts.spans), np.diff(batch.starts.rows) == 1
    span = np.flatnonzero(np.repeat(single, spans))
    row = np.repeat(batch.starts.rows[:-1][single], spans[single])
    query_index, index, length = (
        x.numpy().astype(np.int64) for x in (batch.query_index, batch.span_index, batch.span_length)
    )
    visible = np.clip(query_index[row] - index[span] + 1, 0, length[span])
    return _Reads(*(values[visible > 0] for values in (row, span, visible)))


def _runs(batch: SpanBatch, reads: _Reads, form: str) -> _Runs:
    """Runs of adjacent pages of each read, and of consecutive reads."""
    page, row = batch.page_size, reads.row
    first_page, offset, position = (
        x.numpy().astype(np.int64)[reads.span] for x in (batch.span_pages, batch.span_offset, batch.span_position)
    )
    key_shift = position if form == "QR" else np.zeros_like(position)
    ends = np.cumsum(-(-(offset + reads.visible) // page))  # of the pages of each read
    begins = np.concatenate([[0], ends[:-1]])
    ids = batch.pages.numpy()[np.repeat(first_page - begins, ends - begins) + np.arange(ends[-1])]
    begins_run = np.append(True, np.diff(ids) != 1)
    begins_run[begins] = True
    start = np.flatnonzero(begins_run)
    read_index = np.searchsorted(ends, start, side="right")
    key = (start - begins[read_index]) * page - offset[
        read_index
    ]  # of the read; negative if its first page has other keys before
    stop = np.minimum(key + np.diff(start, append=len(ids)) * page, reads.visible[read_index])
    first = np.maximum(key, 0)
    slot = ids[start].astype(np.int64) * page + first - key
    runs = _Runs(row[read_index], key_shift[read_index], slot, position[read_index] + first, stop - first)
    return runs if form == "KR" else _merge_adjacent(runs)  # only KR uses the position of each key


def _merge_adjacent(runs: _Runs) -> _Runs:
    """Merge runs that are consecutive in the pool and that a row reads at one angle."""
    again = (runs.row[1:] == runs.row[:-1]) & (runs.key_shift[1:] == runs.key_shift[:-1])
    first = np.flatnonzero(np.append(True, ~again | (runs.slot[1:] != (runs.slot + runs.length)[:-1])))
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
    row, call = np.flatnonzero(other), np.flatnonzero(other | np.append(True, np.diff(runs.key_shift) != 0))
    key = np.cumsum(runs.length) - runs.length  # the first of each run, of the keys of all rows
    within = np.arange(runs.length.sum()) - np.repeat(key, runs.length)
    of_row, keys = np.searchsorted(row, call, side="right") - 1, np.add.reduceat(runs.length, row).tolist()
    calls: list[list[Run]] = [[] for _ in row]
    for index, start, length in zip(
        of_row, key[call] - key[row][of_row], np.add.reduceat(runs.length, call), strict=True
    ):
        calls[index].append(Run(int(start), int(length), 1))
    slot, position = (
        torch.from_numpy(np.repeat(first, runs.length) + within).split(keys) for first in (runs.slot, runs.position)
    )
    return (runs.row[call], runs.key_shift[call]), [Copies(*each) for each in zip(slot, position, calls, strict=True)]


def _join_indices(row: Numbers) -> tuple[Tensor, Tensor | None]:
    """`joined` and `missing` of a plan, from the row of every entry."""
    _, count = np.unique(row, return_counts=True)
    order, most = np.argsort(row, kind="stable"), np.arange(count.max())
    first, missing = np.cumsum(count) - count, most >= count[:, None]
    joined = torch.from_numpy(order[first[:, None] + np.minimum(most, count[:, None] - 1)])
    return joined, torch.from_numpy(missing)[..., None, None] if missing.any() else None
