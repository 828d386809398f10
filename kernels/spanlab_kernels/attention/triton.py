"""Launching the attention kernels: which blocks, how many parts, one launch for prefill and one for decode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention.batch import SpanBatch
from spanlab_kernels.attention.kernel import attend_tiles, merge_parts

KEYS_PER_PART = 256  # at least: below that merging costs more than it wins
MAX_PARTS = 64
LEAST_DOT = 16  # channels: Triton compiles no matrix product over fewer


@dataclass(frozen=True)
class Blocks:
    """The static sizes of one compiled kernel: pairs (row, head) and keys of a tile, warps, and tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int


def blocks(head_dim: int, dtype: torch.dtype, entries: int) -> Blocks:
    """Sizes for groups of up to `entries` pairs (row, query head of a kv head), chosen for H100 and H200.

    Few entries are bound by memory: small tiles, so that several programs on one processor keep keys in flight. Many
    are bound by the tensor cores: two groups of four warps, each of which multiplies 64 rows at once. All are as large
    as leaves the loop over keys free of spilled registers. float32 is for exactness: its products do not run on tensor
    cores.
    """
    few = max(16, triton.next_power_of_2(entries))
    wide = head_dim > 128
    if dtype == torch.float32:
        return Blocks(min(few, 32), 32, 8, 2)
    if few <= 32:
        return Blocks(few, 32 if wide else 64, 4, 3)
    if few <= 64:
        return Blocks(64, 32 if wide else 64, 8, 3)
    return Blocks(128, 32 if wide else 64, 8, 2 if wide else 3)


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
    """The contract of `spanlab_kernels.attention.attend`, whose checks come first.

    Groups of one row, as in decoding, are a launch of their own with small tiles and more parts.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    rotates = form != "MAT" or batch.shifted
    forms = {
        "ROTATE_KEYS": form == "KR",
        "ROTATE_QUERIES": form == "QR",
        "SHIFTED": batch.shifted,
        # without rotation any order of channels will do, and the plain one is the fastest to read
        "ROTARY_HALF": table.rotary_dim // 2 if rotates else query.shape[2] // 2,
        "INTERLEAVED": interleaved and rotates,
    }
    # decode comes second: merging parts of the first launch also writes the rows that it left out
    if batch.max_rows > 1:
        _launch(query, key_pages, value_pages, batch, out, lse, table, scale, forms, one_row=False)
    if len(batch.one_row_groups):
        _launch(query, key_pages, value_pages, batch, out, lse, table, scale, forms, one_row=True)
    return out, lse


def _launch(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    batch: SpanBatch,
    out: Tensor,
    lse: Tensor,
    table: AngleTable,
    scale: float,
    forms: dict[str, bool | int],
    *,
    one_row: bool,
) -> None:
    """Attend with all groups of one row, or with all others, and write their rows of `out` and `lse`."""
    (rows, heads, head_dim), kv_heads = query.shape, key_pages.shape[2]
    group_heads = heads // kv_heads
    size = blocks(head_dim, query.dtype, group_heads * (1 if one_row else batch.max_rows))
    part_rows = len(batch.one_row_groups) if one_row else rows
    tiles = part_rows * triton.cdiv(group_heads, size.m) if one_row else rows * group_heads // size.m + batch.groups
    parts = _parts(tiles * kv_heads, batch.max_keys, query.device)
    to_out, to_lse = out, lse
    if parts > 1:
        to_out = torch.empty((parts, part_rows, heads, head_dim), dtype=torch.float32, device=query.device)
        # rows that this launch leaves out see nothing
        to_lse = torch.full((parts, part_rows, heads), -torch.inf, device=query.device)
    attend_tiles[(tiles, kv_heads, parts)](
        query, key_pages, value_pages, to_out, to_lse, *_tensors(batch), table.cos, table.sin,
        *query.stride()[:2], batch.groups, part_rows, table.length, scale * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP_HEADS=group_heads, HEAD_DIM=head_dim, PAGE=batch.page_size, **forms,
        ONE_ROW=one_row, SPLIT=parts > 1, HALF_BLOCK=half_block(head_dim),
        BLOCK_M=size.m, BLOCK_N=size.n, num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    if parts > 1:
        merge_parts[(part_rows, heads)](
            to_out, to_lse, out, lse, batch.query_starts, batch.one_row_groups, part_rows,
            HEADS=heads, HEAD_DIM=head_dim, ONE_ROW=one_row, PARTS=parts, DIM_BLOCK=triton.next_power_of_2(head_dim),
        )  # fmt: skip


def half_block(head_dim: int) -> int:
    """Channels of one tile half: a power of two that covers head_dim / 2, at least the least K of `tl.dot`."""
    return max(LEAST_DOT, triton.next_power_of_2(head_dim) // 2)


def _tensors(batch: SpanBatch) -> tuple[Tensor, ...]:
    """In the order of the kernel's arguments."""
    rows = batch.query_starts, batch.query_index, batch.query_shift
    spans = batch.span_starts, batch.span_index, batch.span_length, batch.span_position, batch.span_pages
    return *rows, *spans, batch.span_offset, batch.pages, batch.key_starts, batch.one_row_groups


def _parts(programs: int, max_keys: int, device: torch.device) -> int:
    """Into how many parts each tile's keys are split, a power of two: what fills the device, of long runs only."""
    most = min(wanted_programs(device) // max(1, programs), max_keys // KEYS_PER_PART, MAX_PARTS)
    return 1 << (max(1, most).bit_length() - 1)


@cache
def wanted_programs(device: torch.device) -> int:
    """Programs that fill the device: two on each multiprocessor. The interpreter runs them one by one."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
