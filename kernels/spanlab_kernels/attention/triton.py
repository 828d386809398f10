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
from spanlab_kernels.attention.kernel import attend_tiles, merge_pieces
from spanlab_kernels.attention.work import count_work, list_tiles

KEYS_PER_PIECE = 256  # at least: below that merging costs more than it wins
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

    Groups of one row, as in decoding, are a launch of their own with small tiles and more pieces.
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
        "INTERLEAVED": interleaved or not rotates,
    }
    for one_row, has_work in ((False, batch.max_rows > 1), (True, len(batch.one_row_groups) > 0)):
        if has_work:
            _launch(query, key_pages, value_pages, batch, out, lse, table, scale, forms, one_row=one_row)
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
    tiles = list_tiles(batch, size.n, per_key=bool(forms["ROTATE_KEYS"]))
    work = count_work(
        batch, tiles, one_row=one_row, group_heads=group_heads, block_m=size.m, keys=size.n, kv_heads=kv_heads,
        wanted=wanted_programs(query.device), least=KEYS_PER_PIECE // size.n,
    )  # fmt: skip
    pieces = work.most * kv_heads * size.m if work.split else 0
    parts, part_lse = (out.new_empty(shape, dtype=torch.float32) for shape in ((pieces, head_dim), (pieces,)))
    attend_tiles[(work.most, kv_heads)](
        query, key_pages, value_pages, out, lse, parts, part_lse,
        batch.query_starts, batch.query_index, batch.query_shift, batch.span_starts, batch.span_index,
        batch.span_least, batch.pages, tiles.of_tile, tiles.starts, work.starts, work.pieces, table.cos, table.sin,
        *query.stride()[:2], batch.groups, table.length, scale * math.log2(math.e),
        KV_HEADS=kv_heads, GROUP_HEADS=group_heads, HEAD_DIM=head_dim, PAGE=batch.page_size, **forms,
        SPLIT=work.split, HALF_BLOCK=half_block(head_dim, apart=bool(forms["ROTATE_KEYS"])),
        BLOCK_M=size.m, BLOCK_N=size.n, num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    if work.split:
        merge_pieces[(rows, heads)](
            parts, part_lse, out, lse, batch.query_starts, work.starts, work.pieces, batch.groups,
            KV_HEADS=kv_heads, GROUP_HEADS=group_heads, HEAD_DIM=head_dim, BLOCK_M=size.m,
            DIM_BLOCK=triton.next_power_of_2(head_dim), TOGETHER=16,
        )  # fmt: skip


def half_block(head_dim: int, *, apart: bool) -> int:
    """Half of the channels of a tile, a power of two; `apart`: each half is a product of its own."""
    return max(LEAST_DOT if apart else LEAST_DOT // 2, triton.next_power_of_2(head_dim) // 2)


@cache
def wanted_programs(device: torch.device) -> int:
    """Programs that fill the device: two on each multiprocessor. The interpreter runs them one by one."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
