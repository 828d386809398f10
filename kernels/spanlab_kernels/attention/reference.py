"""Reference of attention over spans: every score in float32, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spanlab_kernels import AngleTable
from spanlab_kernels.attention.batch import Scores, SpanBatch, check
from spanlab_kernels.blocks import by_channel, rotate_by, rotate_reference

SCORES = 1 << 24  # in memory at once: 64 MiB of float32


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The contract of `spanlab_kernels.attention.attend`, whose checks come first; runs on any
    device."""
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    values, (slot, *_) = value_pages.flatten(0, 1), batch.keys()
    for rows, keys, products in score_blocks(query, key_pages, batch, scores):
        scaled = products * scores.scale
        lse[rows] = scaled.logsumexp(-1)
        # an lse of -inf is that of a row that sees no key: its weights are 0
        finite = torch.where(lse[rows] == -torch.inf, 0.0, lse[rows])
        value, weights = values[slot[keys]].float(), (scaled - finite[..., None]).exp()
        folded = weights.unflatten(1, (value.shape[1], -1))
        weighted = torch.einsum("rhgk,khd->rhgd", folded, value).flatten(1, 2)
        out[rows] = weighted.to(out.dtype)
    return out, lse


def score_blocks(
    query: Tensor, key_pages: Tensor, batch: SpanBatch, scores: Scores
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, the batch's keys that their group reads, and their unscaled scores, -inf for keys that
    a row cannot see."""
    form, table, _, interleaved = scores
    slot, prompt_index, position = batch.keys()
    starts, spans, keys = (numbers.tolist() for numbers in batch.starts)
    lengths = batch.starts.keys[1:] - batch.starts.keys[:-1]
    first_position = batch.positions.tolist()
    for group in range(batch.groups):
        first, last = spans[group], spans[group + 1]
        here = slice(keys[first], keys[last])
        key = key_pages.flatten(0, 1)[slot[here]].float()
        if form == "KR":
            key = _rotate(key, position[here], table, interleaved)
        # keys of each span, and the shift that rotates them to their positions
        span_keys = list(
            zip(key.split(lengths[first:last].tolist()), first_position[first:last], strict=True)
        )
        step = max(1, SCORES // max(1, query.shape[1] * len(key)))
        for start in range(starts[group], starts[group + 1], step):
            rows = slice(start, min(start + step, starts[group + 1]))
            shift = batch.query_shift[rows]
            products = [query.new_empty((len(shift), query.shape[1], 0), dtype=torch.float32)]
            for span_key, key_shift in span_keys:
                rotation = shift - key_shift if form == "QR" else shift
                rotated = _rotate(query[rows].float(), rotation, table, interleaved)
                folded = rotated.unflatten(1, (span_key.shape[1], -1))
                products.append(torch.einsum("rhgd,khd->rhgk", folded, span_key).flatten(1, 2))
            unseen = prompt_index[here] > batch.query_index[rows, None]
            yield rows, here, torch.cat(products, -1).masked_fill(unseen[:, None], -torch.inf)


def _rotate(x: Tensor, shift: Tensor, table: AngleTable, interleaved: bool) -> Tensor:
    return rotate_reference(x, shift, table, interleaved=interleaved, out=torch.empty_like(x))


# ------------------------------------------------------------------------------
# Attention mass of every key: the softmax weight that it receives.
# ------------------------------------------------------------------------------


def key_mass(
    query: Tensor,
    lse: Tensor,
    key_pages: Tensor,
    batch: SpanBatch,
    *,
    form: str,
    table: AngleTable,
    scale: float,
    interleaved: bool = False,
) -> Tensor:
    """Softmax weight of every key of `batch`, summed over rows and heads: float32 [keys], in the
    order of its spans.

    `query`, `batch` and the other arguments are as in `attend`; `lse` float32 [T, Hq] is that
    function's result for all keys that the rows see, of which `batch` may have a subset. Runs on
    any device; every score is computed, a block of rows at a time. ValueError for arguments that do
    not match.
    """
    scores = Scores(form, table, scale, interleaved)
    check(query, key_pages, key_pages, batch, scores)
    mass = query.new_zeros(int(batch.starts.keys[-1]), dtype=torch.float32)
    for rows, keys, products in score_blocks(query, key_pages, batch, scores):
        mass[keys] += (products * scale - lse[rows, :, None]).exp().sum((0, 1))
    return mass


# ------------------------------------------------------------------------------
# Building blocks of attention on a CPU: torch's flash attention, and rotation of keys during
# their copy.
# ------------------------------------------------------------------------------

ROTATED = 512  # keys at once, so that intermediate results stay in cache

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Angles(NamedTuple):
    """Cosine and sine of the rotation of rows, by channel, float32 [rows, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor


def angles_at(shift: Tensor, table: AngleTable, interleaved: bool) -> Angles:
    """Angles of rows for signed integer shifts [rows]."""
    return Angles(*by_channel(*table.lookup(shift[:, None]), interleaved=interleaved))


def folded(query: Tensor, kv_heads: int, angles: Angles | None, interleaved: bool) -> Tensor:
    """Queries [T, Hq, D], rotated if `angles` is set, as [1, kv_heads, T · heads per kv head, D],
    row by row.

    All heads that share a kv head become rows of the kernel, so that it reads keys once.
    """
    rows = query.unflatten(1, (kv_heads, -1))
    out = query.new_empty(kv_heads, len(rows), *rows.shape[2:])
    if angles is None:
        out.copy_(rows.transpose(0, 1))
    else:
        cos, sin = (of_rows[:, None] for of_rows in angles)
        rotate_by(rows, cos, sin, interleaved=interleaved, out=out.transpose(0, 1))
    return out.flatten(1, 2)[None]


def rotated_keys(
    pool: Tensor, slot: Tensor, position: Tensor, table: AngleTable, interleaved: bool
) -> Tensor:
    """Keys of `pool` at slots int64 [K], rotated by positions int64 [K], which are not negative."""
    out = pool.new_empty((len(slot), *pool.shape[1:]))
    angles = _by_position(table, interleaved)
    for block, block_slot, block_position in zip(
        out.split(ROTATED), slot.split(ROTATED), position.split(ROTATED), strict=True
    ):
        cos, sin = angles.index_select(0, block_position).chunk(2, -1)
        rotate_by(pool.index_select(0, block_slot), cos, sin, interleaved=interleaved, out=block)
    return out


@lru_cache(maxsize=2)
def _by_position(table: AngleTable, interleaved: bool) -> Tensor:
    """Cosine and sine of every channel, concatenated, [positions, 1, 2 · rotary_dim]; cached by
    table."""
    return torch.cat(by_channel(table.cos, table.sin, interleaved=interleaved), -1)[:, None]
