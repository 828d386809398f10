"""Attention over spans on the device: the kernel, and what others share with it.

A tile of rows is BLOCK_M pairs (row, query head) of one group and one kv head, so that few rows of many heads still
fill it and every key is read once for all heads that share it. A program takes a tile of rows through a run of the
group's key tiles (`work.py`), across spans without a break, with an online softmax (arXiv 2205.14135); `merge.py` joins
the pieces of a tile of rows.

Products of queries and keys do not mind the order of channels, so both are held in the order `channels` gives: with
that, the partners of rotated pairs are runs side by side, two halves or neighbours, any rotary_dim and any head_dim
share one code, and interleaved pairs are read as they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of all finite float32


@triton.jit
def channels(
    place, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """The channel of a head at each place of [0, 2 · HALF_BLOCK); 2 · HALF or more where there is none.

    RUN first partners and their second ones take turns, where pairs do not come INTERLEAVED.
    """
    if INTERLEAVED or (ROTARY_HALF == HALF and HALF == HALF_BLOCK and RUN == HALF_BLOCK):
        at = place
    else:
        pair = place // (2 * RUN) * RUN + place % RUN
        first = pair + tl.where(pair < ROTARY_HALF, 0, ROTARY_HALF)
        second = pair + tl.where(pair < ROTARY_HALF, ROTARY_HALF, HALF)
        at = tl.where(pair < HALF, tl.where(place % (2 * RUN) < RUN, first, second), 2 * HALF)
        # what the compiler cannot see through `where`: 16-byte loads
        if ROTARY_HALF % 8 == 0 and HALF % 8 == 0 and RUN % 8 == 0:
            at = tl.max_contiguous(tl.multiple_of(at, 8), 8)
    return at


@triton.jit
def _halves(x, ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, RUN: tl.constexpr):
    """First and second partners of all pairs, which lie in runs as `channels` says."""
    first, second = tl.split(tl.permute(tl.reshape(x, [ROWS, HALF_BLOCK // RUN, 2, RUN]), (0, 1, 3, 2)))
    return tl.reshape(first, [ROWS, HALF_BLOCK]), tl.reshape(second, [ROWS, HALF_BLOCK])


@triton.jit
def _whole(first, second, ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, RUN: tl.constexpr):
    """What `_halves` takes apart."""
    first = tl.reshape(first, [ROWS, HALF_BLOCK // RUN, RUN])
    second = tl.reshape(second, [ROWS, HALF_BLOCK // RUN, RUN])
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), [ROWS, 2 * HALF_BLOCK])


@triton.jit
def rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def angles(cos, sin, shift, pair, is_rotated, ROTARY_HALF: tl.constexpr):
    """Cosine and sine of `shift` positions, any sign; those of angle 0 where not `is_rotated`."""
    at = tl.abs(shift).to(tl.int64) * ROTARY_HALF + pair
    s = tl.load(sin + at, mask=is_rotated, other=0.0)
    return tl.load(cos + at, mask=is_rotated, other=1.0), tl.where(shift < 0, -s, s)


@triton.jit
def _back(
    first, second, cos, sin, position, like: tl.constexpr,
    ROTARY_HALF: tl.constexpr, BLOCK_M: tl.constexpr, HALF_BLOCK: tl.constexpr, RUN: tl.constexpr,
    PARTNERS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """The query rotated back by `position`, which is where a key of angle 0 stands.

    PARTNERS: all first partners, and all second ones. IN_PLACE: all channels in two parts, since neighbours of one part
    share a register. Else all channels, twice.
    """
    # added before the pair, and pairs are no numbers that keys have too: all loads of a thread are left one address
    pair = tl.arange(HALF_BLOCK, 2 * HALF_BLOCK)
    at = position.to(tl.int64) * ROTARY_HALF - HALF_BLOCK
    c = tl.load(cos + at + pair, mask=pair < HALF_BLOCK + ROTARY_HALF, other=1.0)
    s = tl.load(sin + at + pair, mask=pair < HALF_BLOCK + ROTARY_HALF, other=0.0)
    r1 = (first.to(tl.float32) * c[None, :] + second.to(tl.float32) * s[None, :]).to(like)
    r2 = (second.to(tl.float32) * c[None, :] - first.to(tl.float32) * s[None, :]).to(like)
    if not PARTNERS:
        r = _whole(r1, r2, BLOCK_M, HALF_BLOCK, RUN)
        if IN_PLACE:
            r1, r2 = _halves(r, BLOCK_M, HALF_BLOCK, HALF_BLOCK // 2)
        else:
            r1, r2 = r, r
    return r1, r2


@triton.jit
def last_not_above(starts, first, end, bound):
    """The last i of [first, end) with starts[i] <= bound, where starts ascend; `first` where none is."""
    while end - first > 1:
        middle = (first + end) // 2
        if tl.load(starts + middle) <= bound:
            first = middle
        else:
            end = middle
    return first


@triton.jit
def _read(pool, at_row, channel, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Channels of rows; 0 where a head has no such channel."""
    from_row = (pool + channel)[None, :] + at_row  # in this order: the sum with the channel is made once
    return tl.load(from_row, mask=(channel < HEAD_DIM)[None, :], other=0.0) if PADDED else tl.load(from_row)


@triton.jit
def _seen_tiles(newest, span, end_span, span_index, span_least, tile_starts, BLOCK_N: tl.constexpr):
    """How many key tiles of a group, from its first, have a key at `newest` or before it."""
    last = last_not_above(span_least, span, end_span, newest)
    has_span = span < end_span
    ahead = newest - tl.load(span_index + last, mask=has_span, other=0)
    base, before = tl.load(tile_starts + span), tl.load(tile_starts + last)
    of_last = tl.minimum(tl.load(tile_starts + last + 1, mask=has_span, other=0) - before, ahead // BLOCK_N + 1)
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
    """Grid (pieces of work, or more, kv heads). `scale` is that of the scores times log2(e), and positive.

    A tile of rows in one piece goes to `out` and `lse`, a piece of any other to `parts` [pieces, kv heads, BLOCK_M, D]
    and `part_lse`, both float32. No tile of rows has more than one piece unless SPLIT. IN_PLACE: rows are rotated in
    the registers that products read. HALF_SUMS: warps share the rows of large tiles, each for half of the keys.
    """
    # late tiles first: they see most keys, and nothing should wait for them at the end
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
    place = tl.load(query_index + row, mask=is_entry, other=-1)
    newest = tl.max(place, 0)
    oldest = tl.min(tl.where(is_entry, place, newest), 0)
    span, end_span = tl.load(span_starts + group), tl.load(span_starts + group + 1)
    seen_tiles = _seen_tiles(newest, span, end_span, span_index, span_least, tile_starts, BLOCK_N)
    base, piece = tl.load(tile_starts + span), within % pieces
    tile, end_tile = base + seen_tiles * piece // pieces, base + seen_tiles * (piece + 1) // pieces

    channel, pair, near = tl.arange(0, 2 * HALF_BLOCK), tl.arange(0, HALF_BLOCK), tl.arange(0, BLOCK_N)
    # rotated in place, both partners are in one half of the channels: on sm_100 each half is in other warps
    RUN: tl.constexpr = 1 if INTERLEAVED else HALF_BLOCK // 2 if IN_PLACE else HALF_BLOCK
    of_key = channels(channel, HEAD_DIM // 2, HALF_BLOCK, ROTARY_HALF, INTERLEAVED, RUN)
    # the places of first and second partners
    first = channels(pair * 2 if INTERLEAVED else pair, HEAD_DIM // 2, HALF_BLOCK, ROTARY_HALF, INTERLEAVED, HALF_BLOCK)
    second = pair * 2 + 1 if INTERLEAVED else pair + HALF_BLOCK
    second = channels(second, HEAD_DIM // 2, HALF_BLOCK, ROTARY_HALF, INTERLEAVED, HALF_BLOCK)
    from_query = query + (row.to(tl.int64) * query_row + head * query_head)[:, None]
    like: tl.constexpr = keys.dtype.element_ty
    if IN_PLACE or not (ROTATE_KEYS or ROTATE_QUERIES or SHIFTED):
        q = tl.load(from_query + of_key[None, :], mask=is_entry[:, None] & (of_key < HEAD_DIM)[None, :], other=0.0)
    else:
        q1 = tl.load(from_query + first[None, :], mask=is_entry[:, None] & (first < HEAD_DIM)[None, :], other=0.0)
        q2 = tl.load(from_query + second[None, :], mask=is_entry[:, None] & (second < HEAD_DIM)[None, :], other=0.0)
    if IN_PLACE:
        # a product by 1 leaves the query where products take it from: rotated there, it need not move
        q = tl.dot(q, (channel[:, None] == channel[None, :]).to(tl.float32).to(like), input_precision="ieee")
        q1, q2 = _halves(q, BLOCK_M, HALF_BLOCK, RUN)
    if SHIFTED:
        shift = tl.load(query_shift + row, mask=is_entry, other=0)[:, None]
        is_rotated = is_entry[:, None] & (pair < ROTARY_HALF)[None, :]
        own_cos, own_sin = angles(cos, sin, shift, pair[None, :], is_rotated, ROTARY_HALF)
        q1, q2 = rotate(q1.to(tl.float32), q2.to(tl.float32), own_cos, own_sin)
        q = _whole(q1.to(like), q2.to(like), BLOCK_M, HALF_BLOCK, RUN)
    # where a tile has fewer rows than keys, the way to its first key is rotated in its rows
    FAR_IN_ROWS: tl.constexpr = ROTATE_KEYS and BLOCK_M < BLOCK_N
    if ROTATE_KEYS:
        if not FAR_IN_ROWS:
            r1, r2 = q1.to(like), q2.to(like)
        in_table = (near < table_length)[:, None] & (pair < ROTARY_HALF)[None, :]
        near_cos, near_sin = angles(cos, sin, near[:, None], pair[None, :], in_table, ROTARY_HALF)

    row_size: tl.constexpr = KV_HEADS * HEAD_DIM
    padded: tl.constexpr = HEAD_DIM != 2 * HALF_BLOCK
    from_keys, from_values = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
    seen = tl.zeros([BLOCK_M, 2 * HALF_BLOCK], tl.float32)
    # finite, so that a row which sees no key of a tile needs no case of its own
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    # what warps share a row sum apart, few rows for so many keys at once, waits until the end to be added
    TOTALS: tl.constexpr = min(32, BLOCK_N) if BLOCK_M < 64 else 2 if HALF_SUMS else 1
    total = tl.zeros([BLOCK_M, TOTALS], tl.float32)
    # what the next tile needs is read while a tile is taken, else its keys could not be read ahead
    has_tile, of_tile = tile < end_tile, tiles + tile * 4
    of_row = tile_rows + tile.to(tl.int64) * BLOCK_N
    count, index = tl.load(of_tile + 1, mask=has_tile, other=1), tl.load(of_tile + 2, mask=has_tile, other=0)
    position = tl.load(of_tile + 3, mask=has_tile, other=0)
    key_row = tl.load(of_row + near, mask=has_tile, other=0)
    if ROTATE_QUERIES or FAR_IN_ROWS:
        r1, r2 = _back(q1, q2, cos, sin, position, like, ROTARY_HALF, BLOCK_M, HALF_BLOCK, RUN, ROTATE_KEYS, IN_PLACE)
    for _ in range(tile, end_tile):
        of_row += BLOCK_N
        of_tile += 4
        next_row = tl.load(of_row + near)
        next_position = tl.load(of_tile + 3)
        at_row = (key_row.to(tl.int64) * row_size)[:, None]
        if ROTATE_KEYS:
            k1 = _read(from_keys, at_row, first, HEAD_DIM, padded)
            k2 = _read(from_keys, at_row, second, HEAD_DIM, padded)
            c, s = near_cos, near_sin
            if not FAR_IN_ROWS:
                # R(far + near) from both: two vectors are read for a tile, not two tables as large as the keys
                far_cos, far_sin = angles(cos, sin, position, pair, pair < ROTARY_HALF, ROTARY_HALF)
                c = far_cos[None, :] * near_cos - far_sin[None, :] * near_sin
                s = far_sin[None, :] * near_cos + far_cos[None, :] * near_sin
            t1, t2 = rotate(k1.to(tl.float32), k2.to(tl.float32), c, s)
            score = tl.dot(r1, tl.trans(t1.to(like)), input_precision="ieee")
            score = tl.dot(r2, tl.trans(t2.to(like)), score, input_precision="ieee")
        else:
            k = _read(from_keys, at_row, of_key, HEAD_DIM, padded)
            by = r1 if ROTATE_QUERIES else q
            if IN_PLACE:
                by = _whole(r1, r2, BLOCK_M, HALF_BLOCK, HALF_BLOCK // 2)
            score = tl.dot(by, tl.trans(k), input_precision="ieee")
        v = _read(from_values, at_row, channel, HEAD_DIM, padded)
        if (count < BLOCK_N) | (index + BLOCK_N - 1 > oldest):
            limit = tl.minimum(count, place - index + 1)
            score = tl.where(near[None, :] < limit[:, None], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_largest[:, None])
        faded = tl.exp2(largest - new_largest)
        seen = tl.dot(weight.to(v.dtype), v, seen * faded[:, None], input_precision="ieee")
        if BLOCK_M < 64:
            sums = tl.sum(tl.reshape(weight, [BLOCK_M, BLOCK_N // TOTALS, TOTALS]), 1)
        else:
            sums = tl.sum(tl.reshape(weight, [BLOCK_M, TOTALS, BLOCK_N // TOTALS]), 2)
        largest, total = new_largest, total * faded[:, None] + sums
        if ROTATE_QUERIES or FAR_IN_ROWS:  # noqa: SIM102 (known to the compiler)
            if FAR_IN_ROWS or next_position != position:
                r1, r2 = _back(
                    q1, q2, cos, sin, next_position, like,
                    ROTARY_HALF, BLOCK_M, HALF_BLOCK, RUN, ROTATE_KEYS, IN_PLACE,
                )  # fmt: skip
        key_row, count, index, position = next_row, tl.load(of_tile + 1), tl.load(of_tile + 2), next_position

    total = tl.sum(total, 1)
    sees = total > 0
    result = seen / tl.where(sees, total, 1.0)[:, None]
    log = tl.where(sees, (largest + tl.log2(tl.where(sees, total, 1.0))) * LN_2, float("-inf"))
    if SPLIT and pieces > 1:
        to = (work.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(parts + to[:, None] * HEAD_DIM + channel[None, :], result, mask=(channel < HEAD_DIM)[None, :])
        tl.store(part_lse + to, log)
    else:
        if not ROTATE_KEYS:
            # made anew, of other numbers, since the compiler would keep the old ones in registers all the while
            entry = (within // pieces - 1) * BLOCK_M + tl.arange(BLOCK_M, 2 * BLOCK_M)
            is_entry = entry < entries
            row = first_row + entry // GROUP_HEADS
            head = kv_head * GROUP_HEADS + entry % GROUP_HEADS
        to = row.to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head
        is_out = is_entry[:, None] & (channel < HEAD_DIM)[None, :]
        tl.store(out + to[:, None] * HEAD_DIM + channel[None, :], result.to(out.dtype.element_ty), mask=is_out)
        tl.store(lse + to, log, mask=is_entry)
