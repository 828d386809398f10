"""Tiles of the Triton kernel: their lists, sizes, and the merge of their pieces."""

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
from spanlab_kernels.attention.kernel import last_not_above

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
    """Write `tiles` and `rows` as defined in `Tiles`; PER_KEY: with the position of the first key, else of its span."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + spans
    for _ in range(steps):
        middle = (first + end) // 2
        below = (end - first > 1) & (tl.load(tile_starts + middle) <= tile)
        first, end = tl.where(below, middle, first), tl.where(below | (end - first <= 1), end, middle)
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
    tl.store(to_row, tl.where(is_tile[:, None], page * PAGE + key % PAGE, 0), mask=is_listed[:, None])


@triton.jit(do_not_specialize=["groups", "share"])
def _count_work(
    query_starts, span_starts, tile_starts, work_starts, work_pieces, groups, share,
    GROUP_HEADS: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: pieces per tile of rows of each group, and pieces of all groups before it; 0 if ONE_ROW differs."""
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

    For each tile, `of_tile` int32 [max_tiles, 4] has the offset of its first key in the page table, in keys; its number
    of keys; the index of its first key in the prompt; and the position that `_list_tiles` defines. `rows` int32
    [max_tiles, keys] has the pool rows of its keys, with the last one repeated in a tile that is not full. They are
    looked up once for all layers and kv heads, so that attention reads keys after two dependent reads and not three.
    The tiles of span s are [starts[s], starts[s + 1]).
    """

    of_tile: Tensor
    rows: Tensor
    starts: Tensor
    max_tiles: int


@lru_cache(maxsize=4)
def list_tiles(batch: SpanBatch, keys: int, *, per_key: bool) -> Tiles:
    """The tiles of a batch, cached for the last few batches, since all layers of a model use the same tiles."""
    spans = len(batch.span_length)
    max_tiles = batch.key_count // keys + spans
    starts = torch.empty(spans + 1, dtype=torch.int32, device=batch.device)
    of_tile, rows = (
        torch.empty((max_tiles + AHEAD, columns), dtype=torch.int32, device=batch.device) for columns in (4, keys)
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
    """Clear cached tiles and work of batches: a captured graph must read those that are computed within it."""
    list_tiles.cache_clear()
    count_work.cache_clear()


@dataclass(frozen=True, eq=False)
class Work:
    """Pieces per tile of rows of each group, int32 [G], and pieces of all groups before it, int32 [G + 1].

    A piece is an equal share of the key tiles that its tile of rows sees. There are at most `max_pieces`, and no tile
    of rows has more than one unless `split`.
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
    """The work of all groups of one row, or of all other groups, in pieces of equal numbers of key tiles.

    A piece is as long as `programs` programs over all kv heads allow, and at least `min_tiles` tiles long.
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
    """The static sizes of one compiled kernel: pairs (row, head) and keys of a tile, warps, and tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int


def blocks(head_dim: int, dtype: torch.dtype, entries: int, device: torch.device | str = "cpu") -> Blocks:
    """Sizes for groups of up to `entries` pairs (row, query head of a kv head): tuned for the card, else fixed.

    The fixed sizes are for H100 and H200. Few entries are bound by memory: tiles are small, so that several programs on
    one processor keep keys in flight. Many entries are bound by the tensor cores: each of two groups of four warps
    multiplies 64 rows at once. float32 is for exactness: its products do not run on tensor cores.
    """
    device = torch.device(device)
    fixed = _fixed(head_dim, dtype, entries)
    if device.type != "cuda":
        return fixed
    tuned = choices(torch.cuda.get_device_name(device), cache_file())
    return tuned.get(variant(head_dim, dtype, entries), fixed)


def variant(head_dim: int, dtype: torch.dtype, entries: int) -> str:
    """The key of tuned sizes in the cache file: entries count by powers of two, up to the largest tile."""
    return f"{head_dim} {str(dtype).removeprefix('torch.')} {min(_power(entries), LARGEST)}"


def cache_file() -> Path:
    """The file of tuned sizes by card: `spanlab/blocks.json` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spanlab" / "blocks.json"


@cache
def choices(card: str, file: Path) -> dict[str, Blocks]:
    """Tuned sizes of a card by variant; ValueError for a file that `save_choices` cannot have written."""
    try:
        stored = json.loads(file.read_text())[card] if file.exists() else {}
        return {name: Blocks(**sizes) for name, sizes in stored.items()}
    except KeyError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: expected sizes of blocks by card and variant, as tune writes them.") from error


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


def _fixed(head_dim: int, dtype: torch.dtype, entries: int) -> Blocks:
    rows, wide = _power(entries), head_dim > 128
    if dtype == torch.float32:
        return Blocks(min(rows, 32), 32, 8, 2)
    if rows <= 32:
        return Blocks(rows, 32 if wide else 64, 4, 3)
    if rows <= 64:
        return Blocks(64, 32 if wide else 64, 8, 3)
    return Blocks(LARGEST, 32 if wide else 64, 8, 2 if wide else 3)


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
        partial = tl.load(parts + source[:, None] * HEAD_DIM + channel[None, :], mask=is_read, other=0.0)
        merged = merged * rescale + tl.sum(partial * weight[:, None], 0)
        largest, total = new_largest, total * rescale + tl.sum(weight, 0)
    of_total = tl.where(total > 0, total, 1.0)
    target = row.to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head
    tl.store(out + target * HEAD_DIM + channel, (merged / of_total).to(out.dtype.element_ty), mask=channel < HEAD_DIM)
    tl.store(lse + target, tl.where(total > 0, largest + tl.log(of_total), float("-inf")))
