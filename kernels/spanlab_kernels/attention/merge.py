"""Merging the results of the pieces of a tile of rows on the device, by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from spanlab_kernels.attention.kernel import last_not_above


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
        partial = tl.load(parts + source[:, None] * HEAD_DIM + channel[None, :], mask=is_read, other=0.0)
        merged = merged * rescale + tl.sum(partial * weight[:, None], 0)
        largest, total = new_largest, total * rescale + tl.sum(weight, 0)
    of_total = tl.where(total > 0, total, 1.0)
    target = row.to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head
    tl.store(out + target * HEAD_DIM + channel, (merged / of_total).to(out.dtype.element_ty), mask=channel < HEAD_DIM)
    tl.store(lse + target, tl.where(total > 0, largest + tl.log(of_total), float("-inf")))
