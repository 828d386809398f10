"""Attention over spans on the CPU: torch's flash attention call by call, merged by log-sum-exp.

Attention over two sets of keys is the mean of both, weighted by exp of their log-sum-exps (arXiv 2205.14135, §3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention.batch import SpanBatch
from spanlab_kernels.attention.plan import Call, Plan, plan
from spanlab_kernels.rope import reference as rope

ROTATED = 256  # keys at once
TURNED = 1024  # rows at once, in form QR
JOINED = 4096  # rows of outputs that are joined at once

Slotted = tuple[Call, slice | Tensor]
"""A call and the slots of its keys."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
    rotate_by = partial(_rotate, table=table, interleaved=interleaved)
    cuts = plan(batch, per_span=form == "QR")
    rows = query if cuts.order is None else query[cuts.order]
    if form != "QR" and batch.shifted:
        rows = rotate_by(rows, cuts.shift)
    key_pool, value_pool = key_pages.flatten(0, 1), value_pages.flatten(0, 1)
    out = torch.zeros_like(rows, dtype=torch.float32)
    lse = out.new_full(out.shape[:2], -torch.inf)
    turned = _rotated_rows(rows, _turns(batch, table), interleaved) if form == "QR" else None
    for (first, last), calls in cuts.groups:
        slot, position = cuts.keys.slot[first:last], cuts.keys.position[first:last]
        keys = _rotated(key_pool, slot, position, rotate_by) if form == "KR" else None
        for together in _blocks(calls):
            here, parts = slice(*together[0][0].rows), []
            for call, slots in together:
                q = rows[here] if turned is None else next(turned)
                key = key_pool[slots] if keys is None else keys[call.keys[0] - first : call.keys[1] - first]
                parts.append(_attend_to(q, key, value_pool[slots], scale, call, cuts))
            _merge(out[here], lse[here], *_joined(parts))
    if cuts.order is None:
        return out.to(query.dtype), lse
    back = cuts.order.argsort()
    return out[back].to(query.dtype), lse[back]


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
    """Rows that several calls read, one behind the other, and what each is rotated by, [rows, 1, rotary_dim / 2]."""

    rows: Tensor
    cos: Tensor
    sin: Tensor
    counts: list[int]  # of each call


def _rotated_rows(rows: Tensor, turns: Iterable[Turns], interleaved: bool) -> Iterator[Tensor]:
    """The rows of each call in form QR."""
    for turn in turns:
        x = rows[turn.rows]
        yield from rope.rotate_by(x, turn.cos, turn.sin, interleaved=interleaved, out=x).split(turn.counts)


@lru_cache(maxsize=4)
def _turns(batch: SpanBatch, table: AngleTable) -> list[Turns]:
    """Calls of form QR in blocks of rows that are rotated at once; kept, as plans are, for all layers."""
    cuts = plan(batch, per_span=True)
    found, waiting, held = [], [], 0
    for call in (call for _, calls in cuts.groups for call, _ in calls):
        count = call.rows[1] - call.rows[0]
        if held and held + count > TURNED:
            found.append(_turned_together(waiting, cuts, table))
            waiting, held = [], 0
        waiting.append(call)
        held += count
    return [*found, _turned_together(waiting, cuts, table)] if waiting else found


def _turned_together(calls: list[Call], cuts: Plan, table: AngleTable) -> Turns:
    rows = torch.cat([torch.arange(*call.rows) for call in calls])
    shift = torch.cat([cuts.shift[slice(*call.rows)] - call.behind for call in calls])
    return Turns(rows, *table.at(shift[:, None]), [call.rows[1] - call.rows[0] for call in calls])


def _rotate(x: Tensor, shift: Tensor, table: AngleTable, interleaved: bool) -> Tensor:
    return rope.rotate(x, shift, table, interleaved=interleaved, out=torch.empty_like(x))


def _rotated(pool: Tensor, slot: Tensor, position: Tensor, rotate_by: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The rows of `pool` at `slot`, rotated to `position`, a block at a time so that what is between stays in cache."""
    out = pool.new_empty((len(slot), *pool.shape[1:]))
    for block, at, to in zip(out.split(ROTATED), slot.split(ROTATED), position.split(ROTATED), strict=True):
        block.copy_(rotate_by(pool[at], to))
    return out


def _attend_to(q: Tensor, key: Tensor, value: Tensor, scale: float, call: Call, cuts: Plan) -> tuple[Tensor, Tensor]:
    """Attention of one call: out [kv_heads, heads of each, rows, D] in the dtype of `q` and lse, the same without D."""
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [kv_heads, keys, D]
    heads = q.unflatten(1, (len(key), -1)).permute(1, 2, 0, 3)  # [kv_heads, heads of each, rows, D]
    if not (call.causal or call.masked):
        # rows of all heads that share a kv head are rows to the kernel, so that its keys are read once
        out, lse = _flash(heads.flatten(1, 2)[None], key[None], value[None], scale=scale)
        out, lse = (x[0].unflatten(1, heads.shape[1:3]) for x in (out, lse))
    else:
        mask = _mask(call, cuts, q.dtype) if call.masked else None
        # kv heads are the batch, and their keys are repeated with a stride of 0
        key, value = (x[:, None].expand(-1, heads.shape[1], -1, -1) for x in (key, value))
        out, lse = _flash(heads, key, value, is_causal=call.causal, attn_mask=mask, scale=scale)
    return out, lse


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention of the same rows over the keys of all parts: out [rows, heads, D] and lse [rows, heads]."""
    out, lse = parts[0]
    if len(parts) > 1:
        each = torch.stack([own for _, own in parts])
        lse = each.logsumexp(0)
        weights = (each - lse).exp_()[..., None]
        out = out.float() * weights[0]
        for (more, _), weight in zip(parts[1:], weights[1:], strict=True):
            out.addcmul_(more.float(), weight)
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


def _mask(call: Call, cuts: Plan, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a masked call, [1, 1, rows, keys]."""
    unseen = cuts.keys.place[slice(*call.keys)] > cuts.place[slice(*call.rows), None]
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)[None, None]


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Take `more` keys into `out` and `lse`, in place; every row of `more` has seen a key."""
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(more.float(), (more_lse - both).exp_()[..., None])
    lse.copy_(both)
