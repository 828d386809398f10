"""Plain paged attention, the yardstick: causal flash attention over a page table, without spans or rotation.

Written from the formula (arXiv 2205.14135, 2309.06180). Rows of a sequence are its last ones; a tile has BLOCK_M pairs
(row, query head) of one kv head, as in our kernel, and both take the same blocks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tile(
    seen, largest, total, q, keys, values, page, start, length, place, scale,
    ROW: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, DIM_BLOCK)
    at = (page.to(tl.int64) * PAGE + key % PAGE)[:, None] * ROW + channel[None, :]
    if MASKED or HEAD_DIM != DIM_BLOCK:
        read = (key < length)[:, None] & (channel < HEAD_DIM)[None, :]
        k = tl.load(keys + at, mask=read, other=0.0)
        v = tl.load(values + at, mask=read, other=0.0)
    else:
        k, v = tl.load(keys + at), tl.load(values + at)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        score = tl.where(key[None, :] <= place[:, None], score, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new_largest[:, None])
    faded = tl.exp2(largest - new_largest)
    seen = tl.dot(weight.to(v.dtype), v, seen * faded[:, None], input_precision="ieee")
    return seen, new_largest, total * faded + tl.sum(weight, 1)


@triton.jit
def attend_pages(
    query, keys, values, out, page_table, lengths, rows, table_row, scale,
    KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    DIM_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a sequence, kv heads, sequences); `query` and `out` are [sequences, rows, heads, D]."""
    tile, kv_head, sequence = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    table = page_table + sequence * table_row
    entry = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_entry = entry < rows * GROUP_HEADS
    row = entry // GROUP_HEADS
    # an entry beyond the last sees what the last sees
    place = length - rows + tl.minimum(row, rows - 1)
    head = kv_head * GROUP_HEADS + entry % GROUP_HEADS
    channel = tl.arange(0, DIM_BLOCK)
    at = ((sequence * rows + row).to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head)[:, None] * HEAD_DIM
    is_channel = is_entry[:, None] & (channel < HEAD_DIM)[None, :]
    q = tl.load(query + at + channel[None, :], mask=is_channel, other=0.0)
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    row_size: tl.constexpr = KV_HEADS * HEAD_DIM
    seen = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    middle = (tl.min(place, 0) + 1) // BLOCK_N * BLOCK_N
    near = tl.arange(0, BLOCK_N)
    page = tl.load(table + near // PAGE, mask=near < length, other=0)
    for start in range(0, middle, BLOCK_N):
        key = start + BLOCK_N + near
        next_page = tl.load(table + key // PAGE, mask=key < length, other=0)
        seen, largest, total = _tile(
            seen, largest, total, q, keys, values, page, start, length, place, scale,
            row_size, PAGE, HEAD_DIM, DIM_BLOCK, BLOCK_N, False,
        )  # fmt: skip
        page = next_page
    for start in tl.range(middle, tl.max(place, 0) + 1, BLOCK_N, num_stages=1):
        key = start + near
        page = tl.load(table + key // PAGE, mask=key < length, other=0)
        seen, largest, total = _tile(
            seen, largest, total, q, keys, values, page, start, length, place, scale,
            row_size, PAGE, HEAD_DIM, DIM_BLOCK, BLOCK_N, True,
        )  # fmt: skip
    tl.store(out + at + channel[None, :], (seen / total[:, None]).to(out.dtype.element_ty), mask=is_channel)


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float,
    *, block_m: int, block_n: int, warps: int, stages: int,
) -> Tensor:  # fmt: skip
    """Causal attention of `query` [sequences, rows, heads, D] over pages [P, page_size, kv_heads, D].

    `page_table` int32 [sequences, pages of each], `lengths` int32 [sequences], at least `rows`.
    """
    sequences, rows, heads, head_dim = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    group_heads, out = heads // kv_heads, torch.empty_like(query)
    attend_pages[(triton.cdiv(rows * group_heads, block_m), kv_heads, sequences)](
        query, key_pages, value_pages, out, page_table, lengths, rows, page_table.shape[1], scale * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP_HEADS=group_heads, HEAD_DIM=head_dim, PAGE=page_size,
        DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
