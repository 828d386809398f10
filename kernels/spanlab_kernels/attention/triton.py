"""Launching the attention kernels: tile sizes, number of pieces, one launch for prefill and one for decode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from spanlab_kernels.attention import dense
from spanlab_kernels.attention.batch import Scores, SpanBatch
from spanlab_kernels.attention.blocks import blocks
from spanlab_kernels.attention.kernel import attend_tiles
from spanlab_kernels.attention.merge import merge_pieces
from spanlab_kernels.attention.rotated_copies import RotationPlan, copy_rotated, plan_rotation
from spanlab_kernels.attention.work import count_work, list_tiles
from spanlab_kernels.rope import rotate

KEYS_PER_PIECE = 256  # at least: with fewer, merging costs more than it saves
ROTATE_ONCE_ENTRIES = 1024  # pairs (row, head of a kv head) of a group from which copies are cheaper; an estimate
IN_PLACE_DIM = 128  # above, the product that puts rows in place needs more memory than a multiprocessor has
LEAST_DOT = 16  # channels: the fewest of a matrix product in Triton


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The contract of `spanlab_kernels.attention.attend`, whose checks come first.

    Groups of one row, as in decoding, have a separate launch with small tiles and more pieces.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    call = Call(query, out, lse, scores)
    if batch.max_rows > 1:
        entries = batch.max_rows * (query.shape[1] // key_pages.shape[2])
        if scores.form != "MAT" and entries >= ROTATE_ONCE_ENTRIES and batch.groups_on_host is not None:
            _attend_copies(call, key_pages, value_pages, plan_rotation(batch))
        else:
            _launch(call, key_pages, value_pages, batch, scores.form, one_row=False)
    if len(batch.one_row_groups):
        _launch(call, key_pages, value_pages, batch, scores.form, one_row=True)
    return out, lse


@dataclass(frozen=True)
class Call:
    """Arguments that all launches of one call share."""

    query: Tensor
    out: Tensor
    lse: Tensor
    scores: Scores


def _attend_copies(call: Call, key_pages: Tensor, value_pages: Tensor, plan: RotationPlan) -> None:
    """Attend with all groups of several rows over rotated copies of their spans, by a library or our kernel."""
    copies, (_, table, scale, interleaved) = copy_rotated(key_pages, value_pages, plan, call.scores), call.scores
    library = dense.select_library(call.query) if plan.sequences is not None else None
    if library is None or plan.sequences is None:
        _launch(call, *copies, plan.target, "MAT", one_row=False)
        return
    rows = plan.rows.long()
    query, shift = call.query[rows], plan.target.query_shift[rows]
    if plan.target.shifted:
        query = rotate(query, shift, table, interleaved=interleaved)
    keys, values = (pages.flatten(0, 1)[: plan.keys] for pages in copies)
    call.out[rows], call.lse[rows] = library.attend(query, keys, values, plan.sequences, scale)


def _launch(call: Call, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, form: str, *, one_row: bool) -> None:
    """Attend with all groups of one row, or with all other groups, and write the results of their rows."""
    query, (_, table, scale, interleaved) = call.query, call.scores
    (rows, heads, head_dim), kv_heads = query.shape, key_pages.shape[2]
    rotates = form != "MAT" or batch.shifted
    constants = {
        "ROTATE_KEYS": form == "KR",
        "ROTATE_QUERIES": form == "QR",
        "SHIFTED": batch.shifted,
        # without rotation, any order of channels is valid, and memory order is the fastest to read
        "ROTARY_HALF": table.rotary_dim // 2 if rotates else head_dim // 2,
        "INTERLEAVED": interleaved or not rotates,
    }
    group_heads = heads // kv_heads
    entries, from_registers = group_heads * (1 if one_row else batch.max_rows), multiplies_registers(query.device)
    if form == "QR" and head_dim > IN_PLACE_DIM and not from_registers:
        entries = min(entries, 64)  # more rows, rotated and not rotated, do not fit into the registers of these devices
    size = blocks(head_dim, query.dtype, entries, query.device)
    in_place = form == "QR" and size.m >= 64 and head_dim <= IN_PLACE_DIM and from_registers
    tiles = list_tiles(batch, size.n, per_key=bool(constants["ROTATE_KEYS"]))
    work = count_work(
        batch, tiles, one_row=one_row, group_heads=group_heads, block_m=size.m, keys=size.n, kv_heads=kv_heads,
        programs=target_programs(query.device), min_tiles=KEYS_PER_PIECE // size.n,
    )  # fmt: skip
    pieces = work.max_pieces * kv_heads * size.m if work.split else 0
    parts, part_lse = (query.new_empty(shape, dtype=torch.float32) for shape in ((pieces, head_dim), (pieces,)))
    attend_tiles[(work.max_pieces, kv_heads)](
        query, key_pages, value_pages, call.out, call.lse, parts, part_lse,
        batch.query_starts, batch.query_index, batch.query_shift, batch.span_starts, batch.span_index,
        batch.span_least, tiles.of_tile, tiles.rows, tiles.starts, work.starts, work.pieces, table.cos, table.sin,
        *query.stride()[:2], batch.groups, table.length, scale * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP_HEADS=group_heads, HEAD_DIM=head_dim, **constants,
        SPLIT=work.split, IN_PLACE=in_place, HALF_SUMS=shares_rows(query.device),
        HALF_BLOCK=half_block(head_dim, separate=bool(constants["ROTATE_KEYS"])),
        BLOCK_M=size.m, BLOCK_N=size.n, num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    if work.split:
        merge_pieces[(rows, heads)](
            parts, part_lse, call.out, call.lse, batch.query_starts, work.starts, work.pieces, batch.groups,
            KV_HEADS=kv_heads, GROUP_HEADS=group_heads, HEAD_DIM=head_dim, BLOCK_M=size.m,
            DIM_BLOCK=triton.next_power_of_2(head_dim), TOGETHER=16,
        )  # fmt: skip


def half_block(head_dim: int, *, separate: bool) -> int:
    """Half of the channels of a tile, a power of two; `separate`: each half is a separate product."""
    return max(LEAST_DOT if separate else LEAST_DOT // 2, triton.next_power_of_2(head_dim) // 2)


@cache
def target_programs(device: torch.device) -> int:
    """Number of programs that fill the device: two per multiprocessor, or one for the interpreter."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def multiplies_registers(device: torch.device) -> bool:
    """Whether products of 64 rows read the rows from registers, as from compute capability 9.0 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shares_rows(device: torch.device) -> bool:
    """Whether two groups of warps share the rows of a product, as on compute capability 10.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
