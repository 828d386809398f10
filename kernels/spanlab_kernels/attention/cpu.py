"""Attention over spans on the CPU: torch's flash attention call by call, merged by log-sum-exp.

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
from spanlab_kernels.attention.batch import SpanBatch
from spanlab_kernels.attention.one_row import attend_rows, row_plan
from spanlab_kernels.attention.plan import Call, Plan, plan
from spanlab_kernels.attention.torch_cpu import Angles, Scores, angles_at, folded, rotated_keys, unfolded

TURNED = 1024  # rows at once, in form QR
JOINED = 4096  # rows of outputs that are joined at once

Slotted = tuple[Call, slice | Tensor]
"""A call and the slots of its keys."""


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    batch: SpanBatch,
    *,
    form: str,
    table: AngleTable,
    scale: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """The contract of `spanlab_kernels.attention.attend`, whose checks come first, for tensors on the CPU.

    Keys that follow each other in the pool are read where they lie; others are copied together first.
    """
    pools = key_pages.flatten(0, 1), value_pages.flatten(0, 1)
    scores = Scores(form, table, scale, interleaved)
    if batch.max_rows > 1:
        out, lse = _attend_runs(query, *pools, batch, scores)
    else:
        out, lse = _nothing(query)
    singles = row_plan(batch, form, table, interleaved) if len(batch.one_row_groups) else None
    if singles is not None:
        out[singles.targets], lse[singles.targets] = attend_rows(query, *pools, singles, scores)
    return out.to(query.dtype), lse


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """What rows get that see no key."""
    out = torch.zeros_like(query, dtype=torch.float32)
    return out, out.new_full(out.shape[:2], -torch.inf)


def _attend_runs(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Float32 results of the groups of several rows."""
    form, table, scale, interleaved = scores
    cuts, kv_heads = plan(batch, per_span=form == "QR"), key_pool.shape[1]
    rows, heads = query if cuts.order is None else query[cuts.order], query.shape[1] // kv_heads
    queries = _queries(rows, batch, cuts, scores, kv_heads)
    out = rows.new_zeros((len(rows) * heads, *key_pool.shape[1:]), dtype=torch.float32)
    lse = out.new_full(out.shape[:2], -torch.inf)
    for (first, last), calls in cuts.groups:
        slot, position = cuts.keys.slot[first:last], cuts.keys.position[first:last]
        rotated = rotated_keys(key_pool, slot, position, table, interleaved) if form == "KR" else None
        for at, together in enumerate(_blocks(calls)):
            parts = []
            for call, slots in together:
                here = slice(call.keys[0] - first, call.keys[1] - first)
                key = _keys(key_pool, (call, slots), cuts, scores) if rotated is None else rotated[here]
                parts.append(_attend_to(next(queries), key, _taken(value_pool, slots), scale, call, cuts))
            start, stop = together[0][0].rows
            _merge(out[start * heads : stop * heads], lse[start * heads : stop * heads], *_joined(parts), fresh=at == 0)
    out, lse = unfolded(out, heads), unfolded(lse, heads)
    if cuts.order is None:
        return out, lse
    back = cuts.order.argsort()
    return out[back], lse[back]


def _queries(rows: Tensor, batch: SpanBatch, cuts: Plan, scores: Scores, kv_heads: int) -> Iterator[Tensor]:
    """The queries of each call, [1, kv_heads, rows · heads of each, D], those of a row side by side."""
    form, table, _, interleaved = scores
    heads = rows.shape[1] // kv_heads
    if form == "QR":
        for turn in _turns(batch, table, interleaved):
            turned = folded(rows.index_select(0, turn.rows), kv_heads, turn.angles, interleaved)
            yield from turned.split([count * heads for count in turn.counts], dim=2)
        return
    angles = angles_at(cuts.shift, table, interleaved) if batch.shifted else None
    queries = folded(rows, kv_heads, angles, interleaved)
    for _, calls in cuts.groups:
        for call, _ in calls:
            start, stop = call.rows
            yield queries[:, :, start * heads : stop * heads]


def _keys(pool: Tensor, slotted: Slotted, cuts: Plan, scores: Scores) -> Tensor:
    """The keys of a call, where they lie or copied."""
    call, slots = slotted
    if cuts.turns is None or not call.turned:
        return _taken(pool, slots)
    here = slice(*call.keys)
    return rotated_keys(pool, cuts.keys.slot[here], cuts.turns[here], scores.table, scores.interleaved)


def _taken(pool: Tensor, slots: slice | Tensor) -> Tensor:
    """Rows of a pool; `index_select` takes whole rows, and several times faster than an index does."""
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


def _blocks(calls: Iterable[Slotted]) -> Iterator[list[Slotted]]:
    """Neighbours with the same rows, as many as hold few rows together: their outputs are joined at once."""
    waiting: list[Slotted] = []
    for each in calls:
        rows = each[0].rows
        if waiting and (waiting[0][0].rows != rows or (len(waiting) + 1) * (rows[1] - rows[0]) > JOINED):
            yield waiting
            waiting = []
        waiting.append(each)
    if waiting:
        yield waiting


class Turns(NamedTuple):
    """Rows that several calls read, one behind the other, and what each is rotated by."""

    rows: Tensor
    angles: Angles
    counts: list[int]  # of each call


@lru_cache(maxsize=4)
def _turns(batch: SpanBatch, table: AngleTable, interleaved: bool) -> list[Turns]:
    """Calls of form QR in blocks of rows that are rotated at once; kept, as plans are, for all layers."""
    cuts = plan(batch, per_span=True)
    found, waiting, held = [], [], 0
    for call in (call for _, calls in cuts.groups for call, _ in calls):
        count = call.rows[1] - call.rows[0]
        if held and held + count > TURNED:
            found.append(_turned_together(waiting, cuts, table, interleaved))
            waiting, held = [], 0
        waiting.append(call)
        held += count
    return [*found, _turned_together(waiting, cuts, table, interleaved)] if waiting else found


def _turned_together(calls: list[Call], cuts: Plan, table: AngleTable, interleaved: bool) -> Turns:
    rows = torch.cat([torch.arange(*call.rows) for call in calls])
    shift = torch.cat([cuts.shift[slice(*call.rows)] - call.behind for call in calls])
    return Turns(rows, angles_at(shift, table, interleaved), [call.rows[1] - call.rows[0] for call in calls])


def _attend_to(q: Tensor, key: Tensor, value: Tensor, scale: float, call: Call, cuts: Plan) -> tuple[Tensor, Tensor]:
    """Attention of one call: out [rows · heads of each, kv_heads, D] in the dtype of `q`, lse the same without D."""
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [kv_heads, keys, D]
    if not (call.causal or call.masked):
        out, lse = torch_cpu.flash(q, key[None], value[None], scale=scale)
        return out[0].transpose(0, 1), lse[0].T
    mask = _mask(call, cuts, q.dtype) if call.masked else None
    # kv heads are the batch, and their keys are repeated with a stride of 0
    heads = q[0].unflatten(1, (call.rows[1] - call.rows[0], -1)).transpose(1, 2)  # [kv_heads, heads of each, rows, D]
    key, value = (x[:, None].expand(-1, heads.shape[1], -1, -1) for x in (key, value))
    out, lse = torch_cpu.flash(heads, key, value, is_causal=call.causal, attn_mask=mask, scale=scale)
    return out.permute(2, 1, 0, 3).flatten(0, 1), lse.permute(2, 1, 0).flatten(0, 1)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention of the same rows over the keys of all parts, shaped as each of them, float32."""
    out, lse = parts[0]
    if len(parts) > 1:
        each = torch.stack([own for _, own in parts])
        lse = each.logsumexp(0)
        weights = (each - lse).exp_()[..., None]
        out = out.float() * weights[0]
        for (more, _), weight in zip(parts[1:], weights[1:], strict=True):
            out.addcmul_(more.float(), weight)
    return out.float(), lse


def _mask(call: Call, cuts: Plan, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a masked call, [1, 1, rows, keys]."""
    unseen = cuts.keys.place[slice(*call.keys)] > cuts.place[slice(*call.rows), None]
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)[None, None]


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, *, fresh: bool) -> None:
    """Take `more` keys into `out` and `lse`, in place; every row of `more` has seen one, none before if `fresh`."""
    if fresh:
        out.copy_(more)
        lse.copy_(more_lse)
        return
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(more, (more_lse - both).exp_()[..., None])
    lse.copy_(both)
