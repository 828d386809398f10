"""Prefill over rotated copies of spans: keys are copied once, at their final positions, and read without rotation.

With many rows, this costs less than rotating the keys for every tile of rows, or the rows for every span.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from spanlab_kernels.attention.batch import Scores, SpanBatch, pack, starts_of, to_device
from spanlab_kernels.attention.dense import Sequences
from spanlab_kernels.attention.groups import GroupArrays, Numbers
from spanlab_kernels.attention.kernel import angles, channels, rotate
from spanlab_kernels.attention.work import Tiles, list_tiles

PAGE = 16  # page size of the copies
TILE = 32  # keys that one program rotates


@dataclass(frozen=True, eq=False)
class RotationPlan:
    """Plan of the rotated copies of a batch: its groups of several rows over the pool, and over the copies.

    `keys` is the number of copied keys. `sequences` has the groups as causal sequences, if each has the last rows of
    contiguous keys, else None. `rows` has their rows in the batch.
    """

    source: SpanBatch
    target: SpanBatch
    keys: int
    sequences: Sequences | None
    rows: Tensor


@lru_cache(maxsize=4)
def plan_rotation(batch: SpanBatch) -> RotationPlan:
    """Plan the copies of a batch; cached for the last few batches, since all layers of a model use the same plan."""
    groups = batch.groups_on_host
    assert groups is not None, "a batch of rows chosen on the device has no copies"
    chosen = groups.rows > 1
    spans = groups.of_span.where(np.repeat(chosen, groups.spans))
    groups = groups._replace(spans=np.where(chosen, groups.spans, 0), of_span=spans)
    source = pack(groups, batch.pages, page_size=batch.page_size, page_count=batch.page_count)
    starts = starts_of(spans.length)
    count = -(-int(starts[-1]) // PAGE)
    copied_spans = spans._replace(
        position=np.zeros_like(starts[:-1]), first_page=starts[:-1] // PAGE, offset=starts[:-1] % PAGE
    )
    pages = torch.arange(count, dtype=torch.int32, device=batch.device)
    target = pack(groups._replace(of_span=copied_spans), pages, page_size=PAGE, page_count=count)
    rows = np.flatnonzero(np.repeat(chosen, groups.rows))
    (rows_on_device,) = to_device([rows], torch.int32, batch.device)
    return RotationPlan(source, target, int(starts[-1]), _sequences(groups, chosen, batch.device), rows_on_device)


def _sequences(groups: GroupArrays, chosen: Numbers, device: torch.device) -> Sequences | None:
    """The chosen groups as sequences; None if any group is not the last rows of contiguous keys."""
    row_starts, span_starts = starts_of(groups.rows), starts_of(groups.spans)
    spans, rows, keys = groups.of_span, [0], [0]
    for group in np.flatnonzero(chosen):
        query_index = groups.query_index[slice(*row_starts[group : group + 2])]
        group_spans = slice(*span_starts[group : group + 2])
        index, length = spans.index[group_spans], spans.length[group_spans]
        contiguous = (np.diff(query_index) == 1).all() and (index[1:] == (index + length)[:-1]).all()
        if not (
            len(index) and contiguous and query_index[-1] + 1 == index[-1] + length[-1] and query_index[0] >= index[0]
        ):
            return None
        rows.append(rows[-1] + len(query_index))
        keys.append(keys[-1] + int(length.sum()))
    on_device = to_device([np.array(rows), np.array(keys)], torch.int32, device)
    return Sequences(tuple(rows), tuple(keys), *on_device)


@triton.jit(do_not_specialize=["table_length"])
def _copy_rotated(
    keys, values, to_keys, to_values, source, source_rows, target, tile_starts, spans, cos, sin, table_length,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PER_KEY: tl.constexpr,
    ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles or more, kv heads): copy keys rotated by the position of their tile, and values unchanged.

    PER_KEY: each key is rotated by its own position.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(tile_starts + spans):
        return
    near, pair, channel = tl.arange(0, BLOCK_N), tl.arange(0, HALF_BLOCK), tl.arange(0, 2 * HALF_BLOCK)
    count, position = tl.load(source + tile * 4 + 1), tl.load(source + tile * 4 + 3)
    is_key = (near < count)[:, None]
    from_row = tl.load(source_rows + tile * BLOCK_N + near).to(tl.int64)
    to_row = (tl.load(target + tile * 4) + near).to(tl.int64)
    source_offset = (from_row[:, None] * KV_HEADS + kv_head) * HEAD_DIM
    target_offset = (to_row[:, None] * KV_HEADS + kv_head) * HEAD_DIM
    first = channels(pair * 2 if INTERLEAVED else pair, HEAD_DIM // 2, HALF_BLOCK, ROTARY_HALF, INTERLEAVED, HALF_BLOCK)
    second = pair * 2 + 1 if INTERLEAVED else pair + HALF_BLOCK
    second = channels(second, HEAD_DIM // 2, HALF_BLOCK, ROTARY_HALF, INTERLEAVED, HALF_BLOCK)
    is_first, is_second = is_key & (first < HEAD_DIM)[None, :], is_key & (second < HEAD_DIM)[None, :]
    k1 = tl.load(keys + source_offset + first[None, :], mask=is_first, other=0.0)
    k2 = tl.load(keys + source_offset + second[None, :], mask=is_second, other=0.0)
    shift = position + (near if PER_KEY else tl.zeros_like(near))
    in_table = (is_key & (shift < table_length)[:, None]) & (pair < ROTARY_HALF)[None, :]
    c, s = angles(cos, sin, shift[:, None], pair[None, :], in_table, ROTARY_HALF)
    t1, t2 = rotate(k1.to(tl.float32), k2.to(tl.float32), c, s)
    tl.store(to_keys + target_offset + first[None, :], t1.to(k1.dtype), mask=is_first)
    tl.store(to_keys + target_offset + second[None, :], t2.to(k2.dtype), mask=is_second)
    is_value = is_key & (channel < HEAD_DIM)[None, :]
    tl.store(
        to_values + target_offset + channel[None, :],
        tl.load(values + source_offset + channel[None, :], mask=is_value),
        mask=is_value,
    )


def copy_rotated(key_pages: Tensor, value_pages: Tensor, plan: RotationPlan, scores: Scores) -> tuple[Tensor, Tensor]:
    """Key and value pages [pages, `PAGE`, Hkv, D] of the rotated copies, which `plan.target` reads in form MAT."""
    (form, table, _, interleaved), (kv_heads, head_dim) = scores, key_pages.shape[2:]
    shape = (len(plan.target.pages), PAGE, kv_heads, head_dim)
    copies = key_pages.new_empty(shape), value_pages.new_empty(shape)
    source = list_tiles(plan.source, TILE, per_key=form == "KR")
    target: Tiles = list_tiles(plan.target, TILE, per_key=False)
    _copy_rotated[(source.max_tiles, kv_heads)](
        key_pages, value_pages, *copies, source.of_tile, source.rows, target.of_tile, source.starts,
        len(plan.source.span_length), table.cos, table.sin, table.length,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, PER_KEY=form == "KR",
        ROTARY_HALF=table.rotary_dim // 2, INTERLEAVED=interleaved,
        HALF_BLOCK=max(1, triton.next_power_of_2(head_dim) // 2), BLOCK_N=TILE, num_warps=4,
    )  # fmt: skip
    return copies
