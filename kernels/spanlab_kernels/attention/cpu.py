"""Attention over spans on the CPU: separate calls of torch's flash attention, merged by log-sum-exp.

Attention over two sets of keys is the mean of both, weighted by exp of their log-sum-exps (arXiv 2205.14135, §3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention import torch_cpu
from spanlab_kernels.attention.batch import Scores, SpanBatch
from spanlab_kernels.attention.one_row import attend_rows, row_plan
from spanlab_kernels.attention.plan import Call, Plan, plan
from spanlab_kernels.attention.torch_cpu import Angles, angles_at, folded, rotated_keys, unfolded

ROTATED_ROWS = 1024  # rotated at once, in form QR
MERGED_ROWS = 4096  # rows of outputs that are merged at once

Slotted = tuple[Call, slice | Tensor]
"""A call and the slots of its keys."""


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The contract of `spanlab_kernels.attention.attend`, whose checks come first, for tensors on the CPU.

    Consecutive keys of the pool are read in place; others are copied together first.
    """
    pools = key_pages.flatten(0, 1), value_pages.flatten(0, 1)
    if batch.max_rows > 1:
        out, lse = _attend_runs(query, *pools, batch, scores)
    else:
        out, lse = _empty_result(query)
    singles = row_plan(batch, scores.form, scores.table, scores.interleaved) if len(batch.one_row_groups) else None
    if singles is not None:
        out[singles.targets], lse[singles.targets] = attend_rows(query, *pools, singles, scores)
    return out.to(query.dtype), lse


def _empty_result(query: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of rows that see no key."""
    out = torch.zeros_like(query, dtype=torch.float32)
    return out, out.new_full(out.shape[:2], -torch.inf)


def _attend_runs(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Float32 output and log-sum-exp of the groups of several rows."""
    form, table, scale, interleaved = scores
    cuts, kv_heads = plan(batch, per_span=form == "QR"), key_pool.shape[1]
    rows, heads = query if cuts.order is None else query[cuts.order], query.shape[1] // kv_heads
    queries = _queries(rows, batch, cuts, scores, kv_heads)
    out = rows.new_zeros((len(rows) * heads, *key_pool.shape[1:]), dtype=torch.float32)
    lse = out.new_full(out.shape[:2], -torch.inf)
    for (first, last), calls in cuts.groups:
        slot, position = cuts.keys.slot[first:last], cuts.keys.position[first:last]
        rotated = rotated_keys(key_pool, slot, position, table, interleaved) if form == "KR" else None
        for block_index, block in enumerate(_merged_calls(calls)):
            parts = []
            for call, slots in block:
                here = slice(call.keys[0] - first, call.keys[1] - first)
                key = _keys(key_pool, (call, slots), cuts, scores) if rotated is None else rotated[here]
                parts.append(_attend_to(next(queries), key, _select_rows(value_pool, slots), scale, call, cuts))
            start, stop = block[0][0].rows
            _merge(
                out[start * heads : stop * heads],
                lse[start * heads : stop * heads],
                *_merge_parts(parts),
                fresh=block_index == 0,
            )
    out, lse = unfolded(out, heads), unfolded(lse, heads)
    if cuts.order is None:
        return out, lse
    back = cuts.order.argsort()
    return out[back], lse[back]


def _queries(rows: Tensor, batch: SpanBatch, cuts: Plan, scores: Scores, kv_heads: int) -> Iterator[Tensor]:
    """The queries of each call, [1, kv_heads, rows · heads per kv head, D]; heads of one row are adjacent."""
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
    return rotated_keys(pool, cuts.keys.slot[here], cuts.key_shifts[here], scores.table, scores.interleaved)


def _select_rows(pool: Tensor, slots: slice | Tensor) -> Tensor:
    """Rows of a pool; `index_select` copies whole rows, several times faster than indexing does."""
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


def _merged_calls(calls: Iterable[Slotted]) -> Iterator[list[Slotted]]:
    """Consecutive calls of the same rows, up to MERGED_ROWS in all, whose outputs are merged at once."""
    waiting: list[Slotted] = []
    for each in calls:
        rows = each[0].rows
        if waiting and (waiting[0][0].rows != rows or (len(waiting) + 1) * (rows[1] - rows[0]) > MERGED_ROWS):
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
    """Calls of form QR in blocks of rows that are rotated at once; cached for all layers, like plans."""
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


def _rotated_block(calls: list[Call], cuts: Plan, table: AngleTable, interleaved: bool) -> RotatedRows:
    rows = torch.cat([torch.arange(*call.rows) for call in calls])
    shift = torch.cat([cuts.query_shift[slice(*call.rows)] - call.key_shift for call in calls])
    return RotatedRows(rows, angles_at(shift, table, interleaved), [call.rows[1] - call.rows[0] for call in calls])


def _attend_to(q: Tensor, key: Tensor, value: Tensor, scale: float, call: Call, cuts: Plan) -> tuple[Tensor, Tensor]:
    """Attention of one call: out [rows · heads per kv head, kv_heads, D] in the dtype of `q`, lse without D."""
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [kv_heads, keys, D]
    if not (call.causal or call.masked):
        out, lse = torch_cpu.flash(q, key[None], value[None], scale=scale)
        return out[0].transpose(0, 1), lse[0].T
    mask = _mask(call, cuts, q.dtype) if call.masked else None
    # kv heads are the batch dimension; a stride of 0 repeats keys for the heads that share them
    heads = (
        q[0].unflatten(1, (call.rows[1] - call.rows[0], -1)).transpose(1, 2)
    )  # [kv_heads, heads per kv head, rows, D]
    key, value = (x[:, None].expand(-1, heads.shape[1], -1, -1) for x in (key, value))
    out, lse = torch_cpu.flash(heads, key, value, is_causal=call.causal, attn_mask=mask, scale=scale)
    return out.permute(2, 1, 0, 3).flatten(0, 1), lse.permute(2, 1, 0).flatten(0, 1)


def _merge_parts(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge results of the same rows over the keys of all parts; float32, in the shape of each part."""
    out, lse = parts[0]
    if len(parts) > 1:
        sums = torch.stack([part_lse for _, part_lse in parts])
        lse = sums.logsumexp(0)
        weights = (sums - lse).exp_()[..., None]
        out = out.float() * weights[0]
        for (more, _), weight in zip(parts[1:], weights[1:], strict=True):
            out.addcmul_(more.float(), weight)
    return out.float(), lse


def _mask(call: Call, cuts: Plan, dtype: torch.dtype) -> Tensor:
    """The additive mask of the scores of a masked call, [1, 1, rows, keys]."""
    unseen = cuts.keys.prompt_index[slice(*call.keys)] > cuts.query_index[slice(*call.rows), None]
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)[None, None]


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, *, fresh: bool) -> None:
    """Merge the result `more`, whose rows all see a key, into `out` and `lse` in place; overwrite them if `fresh`."""
    if fresh:
        out.copy_(more)
        lse.copy_(more_lse)
        return
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(more, (more_lse - both).exp_()[..., None])
    lse.copy_(both)
