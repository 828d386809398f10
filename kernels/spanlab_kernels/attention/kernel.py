"""Attention over spans on the device: the two kernels, and what they share.

A tile is BLOCK_M pairs (row, query head) of one group and one kv head, so that few rows of many heads still fill it and
every key is read once for all heads that share it. A program takes a tile through its keys, or through one of several
parts of them, span by span, with an online softmax (arXiv 2205.14135); a second kernel merges the parts by log-sum-exp.

Channels are held as two halves, the first and the second partners of the rotated pairs. Products of queries and keys do
not mind the order of channels, so the channels that are not rotated pair up as they come, with an angle of 0, and both
layouts of pairs, any rotary_dim and head dims that are no power of two share one code.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _channels(pair, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Channels of the first and of the second partners: those of ROTARY_HALF rotated pairs, then all others."""
    if INTERLEAVED:
        first = tl.where(pair < ROTARY_HALF, 2 * pair, pair + ROTARY_HALF)
        second = tl.where(pair < ROTARY_HALF, 2 * pair + 1, pair + HALF)
    elif ROTARY_HALF == HALF:
        first, second = pair, pair + HALF
    else:
        first = pair + tl.where(pair < ROTARY_HALF, 0, ROTARY_HALF)
        second = pair + tl.where(pair < ROTARY_HALF, ROTARY_HALF, HALF)
        if ROTARY_HALF % 8 == 0 and HALF % 8 == 0:  # what the compiler cannot see through `where`: 16-byte loads
            first = tl.max_contiguous(tl.multiple_of(first, 8), 8)
            second = tl.max_contiguous(tl.multiple_of(second, 8), 8)
    return first, second


@triton.jit
def _angles(cos, sin, shift, pair, is_rotated, ROTARY_HALF: tl.constexpr):
    """Cosine and sine of `shift` positions, any sign; those of angle 0 where not `is_rotated`."""
    at = tl.abs(shift).to(tl.int64) * ROTARY_HALF + pair
    s = tl.load(sin + at, mask=is_rotated, other=0.0)
    return tl.load(cos + at, mask=is_rotated, other=1.0), tl.where(shift < 0, -s, s)


@triton.jit
def _last_not_above(starts, first, end, bound, SCALE: tl.constexpr, DIVISOR: tl.constexpr, STEP: tl.constexpr):
    """The last i of [first, end) with starts[i] · SCALE // DIVISOR + i · STEP <= bound; `first` where none is."""
    while end - first > 1:
        middle = (first + end) // 2
        if tl.load(starts + middle) * SCALE // DIVISOR + middle * STEP <= bound:
            first = middle
        else:
            end = middle
    return first


@triton.jit
def _pages(pages, offset, start, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the keys of the tile that begins at key `start` of a span; none from `stop` on."""
    key = start + tl.arange(0, BLOCK_N)
    return tl.load(pages + (offset + key) // PAGE, mask=key < stop, other=0)


@triton.jit
def _take(
    seen, largest, total, q1, q2, keys, values, page, cos, sin, near_cos, near_sin, first, second, place,
    offset, index, position, start, stop, scale,
    ROW: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_HALF: tl.constexpr, ROTATE_KEYS: tl.constexpr,
    MASKED: tl.constexpr, HALF_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of keys, from `start` of the span: (values seen, largest score, sum of weights) with it taken in.

    MASKED: rows see keys up to their place, and nothing behind `stop` is read; else all rows see all of the tile.
    """
    near = tl.arange(0, BLOCK_N)
    pair = tl.arange(0, HALF_BLOCK)
    channel = tl.arange(0, 2 * HALF_BLOCK)
    key = start + near
    is_key = key < stop if MASKED else near < BLOCK_N
    at = (page.to(tl.int64) * PAGE + (offset + key) % PAGE) * ROW
    if MASKED or HEAD_DIM != 2 * HALF_BLOCK:
        is_half = is_key[:, None] & (pair < HEAD_DIM // 2)[None, :]
        k1 = tl.load(keys + at[:, None] + first[None, :], mask=is_half, other=0.0)
        k2 = tl.load(keys + at[:, None] + second[None, :], mask=is_half, other=0.0)
        is_value = is_key[:, None] & (channel < HEAD_DIM)[None, :]
        # what is not read must be 0: a weight of 0 does not silence a NaN
        v = tl.load(values + at[:, None] + channel[None, :], mask=is_value, other=0.0)
    else:
        k1 = tl.load(keys + at[:, None] + first[None, :])
        k2 = tl.load(keys + at[:, None] + second[None, :])
        v = tl.load(values + at[:, None] + channel[None, :])
    if ROTATE_KEYS:
        # R(far + near) from both: two vectors are read for a tile instead of two tables as large as the keys themselves
        far_cos, far_sin = _angles(cos, sin, position + start, pair, pair < ROTARY_HALF, ROTARY_HALF)
        c = far_cos[None, :] * near_cos - far_sin[None, :] * near_sin
        s = far_sin[None, :] * near_cos + far_cos[None, :] * near_sin
        t1, t2 = _rotate(k1.to(tl.float32), k2.to(tl.float32), c, s)
        k1, k2 = t1.to(k1.dtype), t2.to(k2.dtype)
    score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
    if MASKED:
        score = tl.where(is_key[None, :] & (index + key[None, :] <= place[:, None]), score, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest) if MASKED else new_largest
    weight = tl.exp2(score * scale - base[:, None])
    faded = tl.exp2(largest - base)
    seen = tl.dot(weight.to(v.dtype), v, seen * faded[:, None], input_precision="ieee")
    return seen, new_largest, total * faded + tl.sum(weight, 1)


@triton.jit(do_not_specialize=["group_count", "part_rows", "table_length"])
def attend_tiles(
    query, keys, values, out, lse,
    query_starts, query_index, query_shift,
    span_starts, span_index, span_length, span_position, span_pages, span_offset, pages, key_starts,
    one_row_groups, cos, sin,
    query_row, query_head, group_count, part_rows, table_length, scale,
    KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROTATE_KEYS: tl.constexpr, ROTATE_QUERIES: tl.constexpr, SHIFTED: tl.constexpr, ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ONE_ROW: tl.constexpr, SPLIT: tl.constexpr,
    HALF_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, parts of the keys). `scale` is that of the scores times log2(e), and positive.

    ONE_ROW: the tiles are those of the groups one_row_groups; else those of all groups, less the groups of one row.
    SPLIT, into more parts than one: `out` and `lse` are float32 [parts, part_rows, heads, D] and [parts, part_rows,
    heads], in the order of one_row_groups where ONE_ROW and by row else.
    """
    # late tiles first: they see most keys, and nothing should wait for them at the end
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    entry = tl.arange(0, BLOCK_M)
    if ONE_ROW:
        tiles_of_row: tl.constexpr = (GROUP_HEADS + BLOCK_M - 1) // BLOCK_M
        single = tile // tiles_of_row
        entry += tile % tiles_of_row * BLOCK_M
        group = tl.load(one_row_groups + single)
    else:
        # group g has tiles from query_starts[g] · GROUP_HEADS // BLOCK_M + g on, which are enough for it
        group = _last_not_above(query_starts, tl.full([], 0, tl.int32), group_count, tile, GROUP_HEADS, BLOCK_M, 1)
    first_row = tl.load(query_starts + group)
    row_count = tl.load(query_starts + group + 1) - first_row
    if not ONE_ROW:
        entry += (tile - (first_row * GROUP_HEADS // BLOCK_M + group)) * BLOCK_M
        if row_count == 1 or tl.min(entry, 0) >= row_count * GROUP_HEADS:
            return
    is_entry = entry < row_count * GROUP_HEADS
    row = first_row + entry // GROUP_HEADS
    head = kv_head * GROUP_HEADS + entry % GROUP_HEADS
    place = tl.load(query_index + row, mask=is_entry, other=-1)
    newest = tl.max(place, 0)
    oldest = tl.min(tl.where(is_entry, place, newest), 0)

    pair = tl.arange(0, HALF_BLOCK)
    first, second = _channels(pair, HEAD_DIM // 2, ROTARY_HALF, INTERLEAVED)
    is_half = is_entry[:, None] & (pair < HEAD_DIM // 2)[None, :]
    from_query = query + (row.to(tl.int64) * query_row + head * query_head)[:, None]
    b1 = tl.load(from_query + first[None, :], mask=is_half, other=0.0)
    b2 = tl.load(from_query + second[None, :], mask=is_half, other=0.0)
    if SHIFTED:
        shift = tl.load(query_shift + row, mask=is_entry, other=0)[:, None]
        is_rotated = is_entry[:, None] & (pair < ROTARY_HALF)[None, :]
        c, s = _angles(cos, sin, shift, pair[None, :], is_rotated, ROTARY_HALF)
        b1, b2 = _rotate(b1.to(tl.float32), b2.to(tl.float32), c, s)
    q1, q2 = b1.to(keys.dtype.element_ty), b2.to(keys.dtype.element_ty)
    near_cos, near_sin = 1.0, 0.0
    if ROTATE_KEYS:
        near = tl.arange(0, BLOCK_N)[:, None]
        in_table = (near < table_length) & (pair < ROTARY_HALF)[None, :]
        near_cos, near_sin = _angles(cos, sin, near, pair[None, :], in_table, ROTARY_HALF)

    span, end_span = tl.load(span_starts + group), tl.load(span_starts + group + 1)
    from_key, end_key = tl.load(key_starts + span), tl.load(key_starts + end_span)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end_key - from_key, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        from_key += part * share
        end_key = tl.minimum(end_key, from_key + share)
        first_span = _last_not_above(key_starts, span, end_span, from_key, 1, 1, 0)
        last_span = _last_not_above(key_starts, span, end_span, end_key - 1, 1, 1, 0)
        span, end_span = first_span, tl.where(from_key < end_key, last_span + 1, first_span)
    row_size: tl.constexpr = KV_HEADS * HEAD_DIM
    from_keys, from_values = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
    seen = tl.zeros([BLOCK_M, 2 * HALF_BLOCK], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for of_span in range(span, end_span):
        index, position = tl.load(span_index + of_span), tl.load(span_position + of_span)
        offset, first_page = tl.load(span_offset + of_span), pages + tl.load(span_pages + of_span)
        before = tl.load(key_starts + of_span)
        start = tl.maximum(0, from_key - before)
        stop = tl.minimum(tl.load(span_length + of_span), end_key - before)
        # up to `middle` whole tiles that every row sees; from `stop` on no row sees anything
        middle = start + tl.maximum(0, tl.minimum(stop, oldest - index + 1) - start) // BLOCK_N * BLOCK_N
        stop = tl.minimum(stop, newest - index + 1)
        if ROTATE_QUERIES:
            back_cos, back_sin = _angles(cos, sin, -position, pair, pair < ROTARY_HALF, ROTARY_HALF)
            t1, t2 = _rotate(b1.to(tl.float32), b2.to(tl.float32), back_cos[None, :], back_sin[None, :])
            q1, q2 = t1.to(keys.dtype.element_ty), t2.to(keys.dtype.element_ty)
        # a tile's pages are read while the tile before is taken, else the pipeline could not read keys ahead
        page = _pages(first_page, offset, start, stop, PAGE, BLOCK_N)
        for key in range(start, middle, BLOCK_N):
            next_page = _pages(first_page, offset, key + BLOCK_N, stop, PAGE, BLOCK_N)
            seen, largest, total = _take(
                seen, largest, total, q1, q2, from_keys, from_values, page, cos, sin, near_cos, near_sin,
                first, second, place, offset, index, position, key, stop, scale, row_size, PAGE, HEAD_DIM, ROTARY_HALF,
                ROTATE_KEYS, False, HALF_BLOCK, BLOCK_N,
            )  # fmt: skip
            page = next_page
        for key in tl.range(middle, stop, BLOCK_N, num_stages=1):  # a tile or two: nothing to keep in flight
            next_page = _pages(first_page, offset, key + BLOCK_N, stop, PAGE, BLOCK_N)
            seen, largest, total = _take(
                seen, largest, total, q1, q2, from_keys, from_values, page, cos, sin, near_cos, near_sin,
                first, second, place, offset, index, position, key, stop, scale, row_size, PAGE, HEAD_DIM, ROTARY_HALF,
                ROTATE_KEYS, True, HALF_BLOCK, BLOCK_N,
            )  # fmt: skip
            page = next_page

    sees = total > 0
    to_row = part * part_rows + (single if SPLIT and ONE_ROW else row)
    to = to_row.to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head
    channel = tl.arange(0, 2 * HALF_BLOCK)
    result = seen / tl.where(sees, total, 1.0)[:, None]
    is_out = is_entry[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(out + to[:, None] * HEAD_DIM + channel[None, :], result.to(out.dtype.element_ty), mask=is_out)
    log = (largest + tl.log2(tl.where(sees, total, 1.0))) * LN_2
    tl.store(lse + to, tl.where(sees, log, float("-inf")), mask=is_entry)


@triton.jit(do_not_specialize=["part_rows"])
def merge_parts(
    parts, part_lse, out, lse, query_starts, one_row_groups, part_rows,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ONE_ROW: tl.constexpr, PARTS: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (part_rows, heads): the parts of one row and head, weighted by their log-sum-exps, to where they belong."""
    part_row, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, DIM_BLOCK)
    from_part = (tl.arange(0, PARTS).to(tl.int64) * part_rows + part_row) * HEADS + head
    each = tl.load(part_lse + from_part)
    largest = tl.max(each, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(each - base)
    total = tl.sum(weight, 0)
    of_total = tl.where(total > 0, total, 1.0)
    is_channel = channel < HEAD_DIM
    part = tl.load(parts + from_part[:, None] * HEAD_DIM + channel[None, :], mask=is_channel[None, :], other=0.0)
    row = part_row
    if ONE_ROW:
        row = tl.load(query_starts + tl.load(one_row_groups + part_row))
    to = row.to(tl.int64) * HEADS + head
    # a part that saw nothing may never have been written, and a weight of 0 does not silence a NaN
    merged = tl.sum(tl.where(weight[:, None] > 0, part * weight[:, None], 0.0), 0) / of_total
    tl.store(out + to * HEAD_DIM + channel, merged.to(out.dtype.element_ty), mask=is_channel)
    tl.store(lse + to, base + tl.log(of_total) if total > 0 else float("-inf"))
