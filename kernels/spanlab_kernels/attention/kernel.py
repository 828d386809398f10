"""Attention over spans on the device: the kernel, its lists of tiles, and functions that other
kernels share.

A tile of rows is BLOCK_M pairs (row, query head) of one group and one kv head, so that few rows of
many heads still fill it and every key is read once for all heads that share it. A program processes
a tile of rows over a run of the group's key tiles, across spans without a break, with an online
softmax (arXiv 2205.14135); `merge_pieces` merges the pieces of a tile of rows.

Products of queries and keys do not depend on the order of channels, so both use the order of
`channels`. In that order, the partners of rotated pairs are adjacent runs, two halves or
neighbours. So any rotary_dim and any head_dim share one code path, and interleaved pairs are read
in memory order.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from spanlab_kernels.attention.batch import SpanBatch

LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of all finite float32


@triton.jit
def channels(
    index, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """The channel of a head at each index of [0, 2 · HALF_BLOCK); 2 · HALF or more for padding.

    RUN first partners alternate with their RUN second partners, where pairs are not INTERLEAVED.
    """
    if INTERLEAVED or (ROTARY_HALF == HALF and HALF == HALF_BLOCK and RUN == HALF_BLOCK):
        channel = index
    else:
        pair = index // (2 * RUN) * RUN + index % RUN
        first = pair + tl.where(pair < ROTARY_HALF, 0, ROTARY_HALF)
        second = pair + tl.where(pair < ROTARY_HALF, ROTARY_HALF, HALF)
        channel = tl.where(pair < HALF, tl.where(index % (2 * RUN) < RUN, first, second), 2 * HALF)
        # the compiler cannot derive this through `where`; it allows 16-byte loads
        if ROTARY_HALF % 8 == 0 and HALF % 8 == 0 and RUN % 8 == 0:
            channel = tl.max_contiguous(tl.multiple_of(channel, 8), 8)
    return channel


@triton.jit
def _split_partners(x, ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, RUN: tl.constexpr):
    """Split channels in the order of `channels` into the first and second partners of all pairs."""
    first, second = tl.split(
        tl.permute(tl.reshape(x, [ROWS, HALF_BLOCK // RUN, 2, RUN]), (0, 1, 3, 2))
    )
    return tl.reshape(first, [ROWS, HALF_BLOCK]), tl.reshape(second, [ROWS, HALF_BLOCK])


@triton.jit
def _join_partners(first, second, ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, RUN: tl.constexpr):
    """Join first and second partners, the inverse of `_split_partners`."""
    first = tl.reshape(first, [ROWS, HALF_BLOCK // RUN, RUN])
    second = tl.reshape(second, [ROWS, HALF_BLOCK // RUN, RUN])
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), [ROWS, 2 * HALF_BLOCK])


@triton.jit
def rotate_tile(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def angles(cos, sin, shift, pair, is_rotated, ROTARY_HALF: tl.constexpr):
    """Cosine and sine of `shift` positions of any sign; those of angle 0 where `is_rotated` is
    false."""
    offset = tl.abs(shift).to(tl.int64) * ROTARY_HALF + pair
    s = tl.load(sin + offset, mask=is_rotated, other=0.0)
    return tl.load(cos + offset, mask=is_rotated, other=1.0), tl.where(shift < 0, -s, s)


@triton.jit
def _rotate_back(
    first, second, cos, sin, position, like: tl.constexpr,
    ROTARY_HALF: tl.constexpr, BLOCK_M: tl.constexpr, HALF_BLOCK: tl.constexpr, RUN: tl.constexpr,
    PARTNERS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """The query rotated back by `position`, the position of a key that is stored at angle 0.

    PARTNERS: return all first partners, and all second ones. IN_PLACE: return all channels in two
    parts, since neighbours of one part share a register. Else return all channels, twice.
    """
    # offset first, and a range that keys do not use: then all loads of a thread share one address
    pair = tl.arange(HALF_BLOCK, 2 * HALF_BLOCK)
    offset = position.to(tl.int64) * ROTARY_HALF - HALF_BLOCK
    c = tl.load(cos + offset + pair, mask=pair < HALF_BLOCK + ROTARY_HALF, other=1.0)
    s = tl.load(sin + offset + pair, mask=pair < HALF_BLOCK + ROTARY_HALF, other=0.0)
    r1 = (first.to(tl.float32) * c[None, :] + second.to(tl.float32) * s[None, :]).to(like)
    r2 = (second.to(tl.float32) * c[None, :] - first.to(tl.float32) * s[None, :]).to(like)
    if not PARTNERS:
        r = _join_partners(r1, r2, BLOCK_M, HALF_BLOCK, RUN)
        if IN_PLACE:
            r1, r2 = _split_partners(r, BLOCK_M, HALF_BLOCK, HALF_BLOCK // 2)
        else:
            r1, r2 = r, r
    return r1, r2


@triton.jit
def last_not_above(starts, first, end, bound):
    """The last i of [first, end) with starts[i] <= bound, for ascending starts; `first` if there is
    none."""
    while end - first > 1:
        middle = (first + end) // 2
        if tl.load(starts + middle) <= bound:
            first = middle
        else:
            end = middle
    return first


@triton.jit
def _load_rows(pool, at_row, channel, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load channels of rows of the pool; 0 for padding channels."""
    # in this order, the sum with the channel is computed once
    from_row = (pool + channel)[None, :] + at_row
    return (
        tl.load(from_row, mask=(channel < HEAD_DIM)[None, :], other=0.0)
        if PADDED
        else tl.load(from_row)
    )


@triton.jit
def _visible_tiles(
    last_index, span, end_span, span_index, span_least, tile_starts, BLOCK_N: tl.constexpr
):
    """Number of leading key tiles of a group that have a key of index `last_index` or less."""
    last = last_not_above(span_least, span, end_span, last_index)
    has_span = span < end_span
    ahead = last_index - tl.load(span_index + last, mask=has_span, other=0)
    base, before = tl.load(tile_starts + span), tl.load(tile_starts + last)
    of_last = tl.minimum(
        tl.load(tile_starts + last + 1, mask=has_span, other=0) - before, ahead // BLOCK_N + 1
    )
    return tl.where(has_span & (ahead >= 0), before - base + of_last, 0)


@triton.jit(do_not_specialize=["groups", "table_length"])
def attend_tiles(
    query, keys, values, out, lse, parts, part_lse,
    query_starts, query_index, query_shift, span_starts, span_index, span_least, tiles, tile_rows,
    tile_starts, work_starts, work_pieces, cos, sin, query_row, query_head, groups, table_length, scale,
    KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATE_KEYS: tl.constexpr, ROTATE_QUERIES: tl.constexpr, SHIFTED: tl.constexpr, ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, SPLIT: tl.constexpr, IN_PLACE: tl.constexpr, HALF_SUMS: tl.constexpr,
    HALF_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (pieces of work or more, kv heads). `scale` is the positive scale of the scores times
    log2(e).

    A tile of rows in one piece is written to `out` and `lse`, a piece of any other tile to `parts`
    [pieces, kv heads, BLOCK_M, D] and `part_lse`, both float32. No tile of rows has more than one
    piece unless SPLIT. IN_PLACE: rows are rotated in the registers that products read. HALF_SUMS:
    warps share the rows of large tiles, each for half of the keys.
    """
    # late tiles start first: they see most keys, and would delay the end
    work, kv_head = tl.load(work_starts + groups) - 1 - tl.program_id(0), tl.program_id(1)
    if work < 0:
        return
    group = last_not_above(work_starts, tl.full([], 0, tl.int32), groups, work)
    pieces, within = tl.load(work_pieces + group), work - tl.load(work_starts + group)
    first_row = tl.load(query_starts + group)
    entries = (tl.load(query_starts + group + 1) - first_row) * GROUP_HEADS
    entry = within // pieces * BLOCK_M + tl.arange(0, BLOCK_M)
    is_entry = entry < entries
    row = first_row + entry // GROUP_HEADS
    head = kv_head * GROUP_HEADS + entry % GROUP_HEADS
    row_index = tl.load(query_index + row, mask=is_entry, other=-1)
    last_index = tl.max(row_index, 0)
    first_index = tl.min(tl.where(is_entry, row_index, last_index), 0)
    span, end_span = tl.load(span_starts + group), tl.load(span_starts + group + 1)
    visible_tiles = _visible_tiles(
        last_index, span, end_span, span_index, span_least, tile_starts, BLOCK_N
    )
    base, piece = tl.load(tile_starts + span), within % pieces
    tile = base + visible_tiles * piece // pieces
    end_tile = base + visible_tiles * (piece + 1) // pieces

    channel = tl.arange(0, 2 * HALF_BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    near = tl.arange(0, BLOCK_N)
    # rotated in place, both partners are in one half of the channels: on sm_100 each half is in
    # other warps
    RUN: tl.constexpr = 1 if INTERLEAVED else HALF_BLOCK // 2 if IN_PLACE else HALF_BLOCK
    of_key = channels(channel, HEAD_DIM // 2, HALF_BLOCK, ROTARY_HALF, INTERLEAVED, RUN)
    # channels of first and second partners
    first = channels(
        pair * 2 if INTERLEAVED else pair,
        HEAD_DIM // 2,
        HALF_BLOCK,
        ROTARY_HALF,
        INTERLEAVED,
        HALF_BLOCK,
    )
    second = pair * 2 + 1 if INTERLEAVED else pair + HALF_BLOCK
    second = channels(second, HEAD_DIM // 2, HALF_BLOCK, ROTARY_HALF, INTERLEAVED, HALF_BLOCK)
    from_query = query + (row.to(tl.int64) * query_row + head * query_head)[:, None]
    like: tl.constexpr = keys.dtype.element_ty
    if IN_PLACE or not (ROTATE_KEYS or ROTATE_QUERIES or SHIFTED):
        q = tl.load(
            from_query + of_key[None, :],
            mask=is_entry[:, None] & (of_key < HEAD_DIM)[None, :],
            other=0.0,
        )
    else:
        q1 = tl.load(
            from_query + first[None, :],
            mask=is_entry[:, None] & (first < HEAD_DIM)[None, :],
            other=0.0,
        )
        q2 = tl.load(
            from_query + second[None, :],
            mask=is_entry[:, None] & (second < HEAD_DIM)[None, :],
            other=0.0,
        )
    if IN_PLACE:
        # a product by the identity puts the query into the registers that products read; there it
        # is rotated in place
        q = tl.dot(
            q,
            (channel[:, None] == channel[None, :]).to(tl.float32).to(like),
            input_precision="ieee",
        )
        q1, q2 = _split_partners(q, BLOCK_M, HALF_BLOCK, RUN)
    if SHIFTED:
        shift = tl.load(query_shift + row, mask=is_entry, other=0)[:, None]
        is_rotated = is_entry[:, None] & (pair < ROTARY_HALF)[None, :]
        row_cos, row_sin = angles(cos, sin, shift, pair[None, :], is_rotated, ROTARY_HALF)
        q1, q2 = rotate_tile(q1.to(tl.float32), q2.to(tl.float32), row_cos, row_sin)
        q = _join_partners(q1.to(like), q2.to(like), BLOCK_M, HALF_BLOCK, RUN)
    # if a tile has fewer rows than keys, the rotation to its first key is applied to its rows
    FAR_IN_ROWS: tl.constexpr = ROTATE_KEYS and BLOCK_M < BLOCK_N
    if ROTATE_KEYS:
        if not FAR_IN_ROWS:
            r1, r2 = q1.to(like), q2.to(like)
        in_table = (near < table_length)[:, None] & (pair < ROTARY_HALF)[None, :]
        near_cos, near_sin = angles(cos, sin, near[:, None], pair[None, :], in_table, ROTARY_HALF)

    row_size: tl.constexpr = KV_HEADS * HEAD_DIM
    padded: tl.constexpr = HEAD_DIM != 2 * HALF_BLOCK
    from_keys, from_values = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
    weighted = tl.zeros([BLOCK_M, 2 * HALF_BLOCK], tl.float32)
    # finite, so that a row that sees no key of a tile needs no special case
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    # if warps share rows, each keeps partial sums, which are added once at the end
    TOTALS: tl.constexpr = min(32, BLOCK_N) if BLOCK_M < 64 else 2 if HALF_SUMS else 1
    total = tl.zeros([BLOCK_M, TOTALS], tl.float32)
    # the rows of the next tile are read during the current tile, so that its keys can be prefetched
    has_tile, of_tile = tile < end_tile, tiles + tile * 4
    of_row = tile_rows + tile.to(tl.int64) * BLOCK_N
    count = tl.load(of_tile + 1, mask=has_tile, other=1)
    index = tl.load(of_tile + 2, mask=has_tile, other=0)
    position = tl.load(of_tile + 3, mask=has_tile, other=0)
    key_row = tl.load(of_row + near, mask=has_tile, other=0)
    if ROTATE_QUERIES or FAR_IN_ROWS:
        r1, r2 = _rotate_back(
            q1,
            q2,
            cos,
            sin,
            position,
            like,
            ROTARY_HALF,
            BLOCK_M,
            HALF_BLOCK,
            RUN,
            ROTATE_KEYS,
            IN_PLACE,
        )
    for _ in range(tile, end_tile):
        of_row += BLOCK_N
        of_tile += 4
        next_row = tl.load(of_row + near)
        next_position = tl.load(of_tile + 3)
        at_row = (key_row.to(tl.int64) * row_size)[:, None]
        if ROTATE_KEYS:
            k1 = _load_rows(from_keys, at_row, first, HEAD_DIM, padded)
            k2 = _load_rows(from_keys, at_row, second, HEAD_DIM, padded)
            c, s = near_cos, near_sin
            if not FAR_IN_ROWS:
                # R(far + near) from R(far) and R(near): a tile reads two vectors, not two tables as
                # large as its keys
                far_cos, far_sin = angles(cos, sin, position, pair, pair < ROTARY_HALF, ROTARY_HALF)
                c = far_cos[None, :] * near_cos - far_sin[None, :] * near_sin
                s = far_sin[None, :] * near_cos + far_cos[None, :] * near_sin
            t1, t2 = rotate_tile(k1.to(tl.float32), k2.to(tl.float32), c, s)
            score = tl.dot(r1, tl.trans(t1.to(like)), input_precision="ieee")
            score = tl.dot(r2, tl.trans(t2.to(like)), score, input_precision="ieee")
        else:
            k = _load_rows(from_keys, at_row, of_key, HEAD_DIM, padded)
            rows = r1 if ROTATE_QUERIES else q
            if IN_PLACE:
                rows = _join_partners(r1, r2, BLOCK_M, HALF_BLOCK, HALF_BLOCK // 2)
            score = tl.dot(rows, tl.trans(k), input_precision="ieee")
        v = _load_rows(from_values, at_row, channel, HEAD_DIM, padded)
        if (count < BLOCK_N) | (index + BLOCK_N - 1 > first_index):
            limit = tl.minimum(count, row_index - index + 1)
            score = tl.where(near[None, :] < limit[:, None], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        weighted = tl.dot(
            weight.to(v.dtype), v, weighted * rescale[:, None], input_precision="ieee"
        )
        if BLOCK_M < 64:
            sums = tl.sum(tl.reshape(weight, [BLOCK_M, BLOCK_N // TOTALS, TOTALS]), 1)
        else:
            sums = tl.sum(tl.reshape(weight, [BLOCK_M, TOTALS, BLOCK_N // TOTALS]), 2)
        largest, total = new_largest, total * rescale[:, None] + sums
        if ROTATE_QUERIES or FAR_IN_ROWS:  # noqa: SIM102 (a compile-time condition)
            if FAR_IN_ROWS or next_position != position:
                r1, r2 = _rotate_back(
                    q1, q2, cos, sin, next_position, like,
                    ROTARY_HALF, BLOCK_M, HALF_BLOCK, RUN, ROTATE_KEYS, IN_PLACE,
                )  # fmt: skip
        key_row = next_row
        count = tl.load(of_tile + 1)
        index = tl.load(of_tile + 2)
        position = next_position

    total = tl.sum(total, 1)
    has_keys = total > 0
    result = weighted / tl.where(has_keys, total, 1.0)[:, None]
    log = tl.where(
        has_keys, (largest + tl.log2(tl.where(has_keys, total, 1.0))) * LN_2, float("-inf")
    )
    if SPLIT and pieces > 1:
        target = (work.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(
            parts + target[:, None] * HEAD_DIM + channel[None, :],
            result,
            mask=(channel < HEAD_DIM)[None, :],
        )
        tl.store(part_lse + target, log)
    else:
        if not ROTATE_KEYS:
            # recomputed in another way, since the compiler would keep the first results in
            # registers during the loop
            entry = (within // pieces - 1) * BLOCK_M + tl.arange(BLOCK_M, 2 * BLOCK_M)
            is_entry = entry < entries
            row = first_row + entry // GROUP_HEADS
            head = kv_head * GROUP_HEADS + entry % GROUP_HEADS
        target = row.to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head
        is_out = is_entry[:, None] & (channel < HEAD_DIM)[None, :]
        tl.store(
            out + target[:, None] * HEAD_DIM + channel[None, :],
            result.to(out.dtype.element_ty),
            mask=is_out,
        )
        tl.store(lse + target, log, mask=is_entry)


# ------------------------------------------------------------------------------
# The work of a batch on the device: one list of all key tiles of all spans, and equal pieces of
# it.
#
# Both are computed on the device from the batch's tensors. The host computes upper bounds only,
# so a step does not wait for the device.
# ------------------------------------------------------------------------------

AHEAD = 1  # padding tiles after the last, which a program reads ahead
TOGETHER = 16  # tiles that one program lists, with the rows of their keys


@triton.jit(do_not_specialize=["spans"])
def _count_tiles(span_length, tile_starts, spans, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """One program: cumulative number of tiles before each span, [spans + 1]."""
    total = tl.full([], 0, tl.int32)
    tl.store(tile_starts, total)
    for start in range(0, spans, BLOCK):
        span = start + tl.arange(0, BLOCK)
        tiles = tl.cdiv(tl.load(span_length + span, mask=span < spans, other=0), BLOCK_N)
        tl.store(tile_starts + span + 1, total + tl.cumsum(tiles, 0), mask=span < spans)
        total += tl.sum(tiles, 0)


@triton.jit(do_not_specialize=["spans", "steps", "capacity"])
def _list_tiles(
    span_index, span_length, span_position, span_pages, span_offset, pages, tile_starts, tiles, rows, spans, steps,
    capacity,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PER_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `tiles` and `rows` as defined in `Tiles`; PER_KEY: with the position of the first key,
    else of its span."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + spans
    for _ in range(steps):
        middle = (first + end) // 2
        below = (end - first > 1) & (tl.load(tile_starts + middle) <= tile)
        first, end = (
            tl.where(below, middle, first),
            tl.where(below | (end - first <= 1), end, middle),
        )
    is_tile = tile < tl.load(tile_starts + spans)
    start = (tile - tl.load(tile_starts + first)) * BLOCK_N
    slot = tl.load(span_pages + first, mask=is_tile, other=0) * PAGE + tl.load(
        span_offset + first, mask=is_tile, other=0
    )
    count = tl.minimum(tl.load(span_length + first, mask=is_tile, other=1) - start, BLOCK_N)
    position = tl.load(span_position + first, mask=is_tile, other=0) + (start if PER_KEY else 0)
    target, is_listed = tiles + tile * 4, tile < capacity
    tl.store(target, tl.where(is_tile, slot + start, 0), mask=is_listed)
    tl.store(target + 1, tl.where(is_tile, count, 1), mask=is_listed)
    tl.store(target + 2, tl.load(span_index + first, mask=is_tile, other=0) + start, mask=is_listed)
    tl.store(target + 3, position, mask=is_listed)
    near = tl.arange(0, BLOCK_N)
    key = (slot + start)[:, None] + tl.minimum(near[None, :], count[:, None] - 1)
    page = tl.load(pages + key // PAGE, mask=is_tile[:, None], other=0)
    to_row = rows + tile.to(tl.int64)[:, None] * BLOCK_N + near[None, :]
    tl.store(
        to_row, tl.where(is_tile[:, None], page * PAGE + key % PAGE, 0), mask=is_listed[:, None]
    )


@triton.jit(do_not_specialize=["groups", "share"])
def _count_work(
    query_starts, span_starts, tile_starts, work_starts, work_pieces, groups, share,
    GROUP_HEADS: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: pieces per tile of rows of each group, and pieces of all groups before it; 0 if
    ONE_ROW differs."""
    total = tl.full([], 0, tl.int32)
    tl.store(work_starts, total)
    for start in range(0, groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        is_group = group < groups
        rows = tl.load(query_starts + group + 1, mask=is_group, other=0)
        rows -= tl.load(query_starts + group, mask=is_group, other=0)
        last = tl.load(tile_starts + tl.load(span_starts + group + 1, mask=is_group, other=0))
        tiles = last - tl.load(tile_starts + tl.load(span_starts + group, mask=is_group, other=0))
        pieces = tl.maximum(tl.cdiv(tiles, share), 1)
        work = tl.where((rows == 1) == ONE_ROW, tl.cdiv(rows * GROUP_HEADS, BLOCK_M) * pieces, 0)
        tl.store(work_pieces + group, pieces, mask=is_group)
        tl.store(work_starts + group + 1, total + tl.cumsum(work, 0), mask=is_group)
        total += tl.sum(work, 0)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of up to `keys` keys of every span, in the order of the spans.

    For each tile, `of_tile` int32 [max_tiles, 4] has the offset of its first key in the page table,
    in keys; its number of keys; the index of its first key in the prompt; and the position that
    `_list_tiles` defines. `rows` int32 [max_tiles, keys] has the pool rows of its keys, with the
    last one repeated in a tile that is not full. They are looked up once for all layers and kv
    heads, so that attention reads keys after two dependent reads and not three. The tiles of span s
    are [starts[s], starts[s + 1]).
    """

    of_tile: Tensor
    rows: Tensor
    starts: Tensor
    max_tiles: int


@lru_cache(maxsize=4)
def list_tiles(batch: SpanBatch, keys: int, *, per_key: bool) -> Tiles:
    """The tiles of a batch, cached for the last few batches, since all layers of a model use the
    same tiles."""
    spans = len(batch.span_length)
    max_tiles = batch.key_count // keys + spans
    starts = torch.empty(spans + 1, dtype=torch.int32, device=batch.device)
    of_tile, rows = (
        torch.empty((max_tiles + AHEAD, columns), dtype=torch.int32, device=batch.device)
        for columns in (4, keys)
    )
    _count_tiles[(1,)](batch.span_length, starts, spans, BLOCK_N=keys, BLOCK=1024)
    if spans:
        _list_tiles[(triton.cdiv(len(of_tile), TOGETHER),)](
            batch.span_index, batch.span_length, batch.span_position, batch.span_pages, batch.span_offset,
            batch.pages, starts, of_tile, rows, spans, spans.bit_length(), len(of_tile),
            PAGE=batch.page_size, BLOCK_N=keys, PER_KEY=per_key, BLOCK=TOGETHER,
        )  # fmt: skip
    return Tiles(of_tile, rows, starts, max_tiles)


def forget_lists() -> None:
    """Clear cached tiles and work of batches: a captured graph must read those that are computed
    within it."""
    list_tiles.cache_clear()
    count_work.cache_clear()


@dataclass(frozen=True, eq=False)
class Work:
    """Pieces per tile of rows of each group, int32 [G], and pieces of all groups before it, int32
    [G + 1].

    A piece is an equal share of the key tiles that its tile of rows sees. There are at most
    `max_pieces`, and no tile of rows has more than one unless `split`.
    """

    pieces: Tensor
    starts: Tensor
    max_pieces: int
    split: bool


@lru_cache(maxsize=8)
def count_work(
    batch: SpanBatch, tiles: Tiles, *, one_row: bool, group_heads: int, block_m: int, keys: int, kv_heads: int,
    programs: int, min_tiles: int,
) -> Work:  # fmt: skip
    """The work of all groups of one row, or of all other groups, in pieces of equal numbers of key
    tiles.

    A piece is as long as `programs` programs over all kv heads allow, and at least `min_tiles`
    tiles long.
    """
    most_tiles = batch.max_keys // keys + batch.max_spans  # of a group
    if one_row:
        row_tiles = triton.cdiv(group_heads, block_m)
        share = max(min_tiles, triton.cdiv(row_tiles * tiles.max_tiles * kv_heads, programs), 1)
        max_pieces = row_tiles * (tiles.max_tiles // share + len(batch.one_row_groups))
    else:
        row_tiles = batch.rows * group_heads // block_m + batch.groups
        share = max(min_tiles, triton.cdiv(row_tiles * most_tiles * kv_heads, programs), 1)
        max_pieces = row_tiles * max(1, triton.cdiv(most_tiles, share))
    pieces = torch.empty(batch.groups, dtype=torch.int32, device=batch.device)
    starts = torch.empty(batch.groups + 1, dtype=torch.int32, device=batch.device)
    _count_work[(1,)](
        batch.query_starts, batch.span_starts, tiles.starts, starts, pieces, batch.groups, share,
        GROUP_HEADS=group_heads, ONE_ROW=one_row, BLOCK_M=block_m, BLOCK=256,
    )  # fmt: skip
    return Work(pieces, starts, max_pieces, most_tiles > share)


# ------------------------------------------------------------------------------
# Static sizes of the attention kernel: fixed ones, or the fastest ones that `tune` measured on
# this card.
# ------------------------------------------------------------------------------

LARGEST = 128  # pairs (row, head) of a tile


@dataclass(frozen=True)
class Blocks:
    """The static sizes of one compiled kernel: pairs (row, head) and keys of a tile, warps, and
    tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int


def blocks(
    head_dim: int, dtype: torch.dtype, entries: int, device: torch.device | str = "cpu"
) -> Blocks:
    """Sizes for groups of up to `entries` pairs (row, query head of a kv head): tuned for the card,
    else fixed.

    The fixed sizes are for H100 and H200. Few entries are bound by memory: tiles are small, so that
    several programs on one processor keep keys in flight. Many entries are bound by the tensor
    cores: each of two groups of four warps multiplies 64 rows at once. float32 is for exactness:
    its products do not run on tensor cores.
    """
    device = torch.device(device)
    rows, wide = _power(entries), head_dim > 128
    if dtype == torch.float32:
        fixed = Blocks(min(rows, 32), 32, 8, 2)
    elif rows <= 32:
        fixed = Blocks(rows, 32 if wide else 64, 4, 3)
    elif rows <= 64:
        fixed = Blocks(64, 32 if wide else 64, 8, 3)
    else:
        fixed = Blocks(LARGEST, 32 if wide else 64, 8, 2 if wide else 3)
    if device.type != "cuda":
        return fixed
    tuned = choices(torch.cuda.get_device_name(device), cache_file())
    return tuned.get(variant(head_dim, dtype, entries), fixed)


def variant(head_dim: int, dtype: torch.dtype, entries: int) -> str:
    """The key of tuned sizes in the cache file: entries count by powers of two, up to the largest
    tile."""
    return f"{head_dim} {str(dtype).removeprefix('torch.')} {min(_power(entries), LARGEST)}"


def cache_file() -> Path:
    """The file of tuned sizes by card: `spanlab/blocks.json` in the user's cache."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spanlab" / "blocks.json"
    )


@cache
def choices(card: str, file: Path) -> dict[str, Blocks]:
    """Tuned sizes of a card by variant; ValueError for a file that `save_choices` cannot have
    written."""
    try:
        stored = json.loads(file.read_text())[card] if file.exists() else {}
        return {name: Blocks(**sizes) for name, sizes in stored.items()}
    except KeyError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file}: expected sizes of blocks by card and variant, as tune writes them."
        ) from error


def save_choices(card: str, tuned: dict[str, Blocks], file: Path) -> None:
    """Add tuned sizes of one card to a file, and use them from now on."""
    stored = json.loads(file.read_text()) if file.exists() else {}
    stored[card] = stored.get(card, {}) | {name: asdict(sizes) for name, sizes in tuned.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    temporary.replace(file)  # a concurrent reader sees the old file or the new one
    choices.cache_clear()


def _power(entries: int) -> int:
    return max(16, 1 << (entries - 1).bit_length())


# ------------------------------------------------------------------------------
# Merging the results of the pieces of a tile of rows on the device, by log-sum-exp.
# ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["groups"])
def merge_pieces(
    parts, part_lse, out, lse, query_starts, work_starts, work_pieces, groups,
    KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    DIM_BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads): merge the pieces of one row and head, weighted by their log-sum-exps."""
    row, head = tl.program_id(0), tl.program_id(1)
    group = last_not_above(query_starts, tl.full([], 0, tl.int32), groups, row)
    work, pieces = tl.load(work_starts + group), tl.load(work_pieces + group)
    if tl.load(work_starts + group + 1) == work or pieces == 1:
        return
    entry = (row - tl.load(query_starts + group)) * GROUP_HEADS + head % GROUP_HEADS
    channel, near = tl.arange(0, DIM_BLOCK), tl.arange(0, TOGETHER)
    largest, total = float("-inf"), 0.0
    merged = tl.zeros([DIM_BLOCK], tl.float32)
    for start in range(0, pieces, TOGETHER):
        is_piece = start + near < pieces
        piece = (work + entry // BLOCK_M * pieces + start + near).to(tl.int64)
        source = (piece * KV_HEADS + head // GROUP_HEADS) * BLOCK_M + entry % BLOCK_M
        sums = tl.load(part_lse + source, mask=is_piece, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(sums, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight, rescale = tl.exp(sums - base), tl.exp(largest - base)
        is_read = is_piece[:, None] & (channel < HEAD_DIM)[None, :]
        partial = tl.load(
            parts + source[:, None] * HEAD_DIM + channel[None, :], mask=is_read, other=0.0
        )
        merged = merged * rescale + tl.sum(partial * weight[:, None], 0)
        largest, total = new_largest, total * rescale + tl.sum(weight, 0)
    of_total = tl.where(total > 0, total, 1.0)
    target = row.to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head
    tl.store(
        out + target * HEAD_DIM + channel,
        (merged / of_total).to(out.dtype.element_ty),
        mask=channel < HEAD_DIM,
    )
    tl.store(lse + target, tl.where(total > 0, largest + tl.log(of_total), float("-inf")))
