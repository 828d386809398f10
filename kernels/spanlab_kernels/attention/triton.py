"""Launching the attention kernels: tile sizes, number of pieces, one launch for prefill and one for
decode."""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from spanlab_kernels.attention.batch import (
    GroupArrays,
    Numbers,
    Scores,
    SpanBatch,
    pack,
    starts_of,
    to_device,
)
from spanlab_kernels.attention.kernel import (
    Tiles,
    angles,
    attend_tiles,
    blocks,
    channels,
    count_work,
    list_tiles,
    merge_pieces,
    rotate_tile,
)
from spanlab_kernels.attention.reference import flash
from spanlab_kernels.blocks import rotate

# ------------------------------------------------------------------------------
# Attention over contiguous keys at their final positions, by the libraries that implement it.
#
# The first library that is installed and accepts the query is used; torch is always installed.
# Only torch's on a CPU has been run here: the others are called as documented.
# ------------------------------------------------------------------------------

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows and keys of concatenated sequences; the rows of a sequence are its last tokens.

    Row i of n sees the first keys - n + 1 + i of the keys. `rows` and `keys` have the start of each
    sequence and the end of the last one, on the host; the tensors have the same numbers, int32, on
    the device.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    row_starts: Tensor
    key_starts: Tensor

    @property
    def max_lengths(self) -> tuple[int, int]:
        """The largest number of rows and of keys of a sequence."""
        longest_rows, longest_keys = (
            max(stop - start for start, stop in pairwise(starts))
            for starts in (self.rows, self.keys)
        )
        return longest_rows, longest_keys


class Library(ABC):
    """Causal attention of several sequences by one library."""

    module: ClassVar[str]

    def serves(self, query: Tensor) -> bool:
        """Whether the library is installed and accepts such queries."""
        return query.is_cuda and query.dtype in HALF and _is_installed(self.module)

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Out [T, Hq, D] and natural log-sum-exps, float32 [T, Hq], of keys and values [K, Hkv,
        D]."""


@cache
def _is_installed(module: str) -> bool:
    # searches folders, which takes longer than a launch
    return importlib.util.find_spec(module) is not None


class FlashAttention(Library):
    """`flash_attn_varlen_func` of flash-attn 2.6 or later, with the causal mask aligned to the last
    row."""

    module = "flash_attn"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_varlen_func

        out, lse, _ = flash_attn_varlen_func(
            query, key, value, sequences.row_starts, sequences.key_starts, *sequences.max_lengths,
            softmax_scale=scale, causal=True, return_attn_probs=True,
        )  # fmt: skip
        return out, lse.T


class FlashInfer(Library):
    """`BatchPrefillWithRaggedKVCacheWrapper` of FlashInfer, whose log-sum-exps are to base 2."""

    module = "flashinfer"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        planned = _planned(
            sequences, query.shape[1], key.shape[1], query.shape[2], query.dtype, scale
        )
        out, lse = planned.run(query, key, value, return_lse=True)
        return out, lse * math.log(2)


@lru_cache(maxsize=4)
def _planned(
    sequences: Sequences, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float
) -> Any:  # of a library without type annotations
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=sequences.row_starts.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        sequences.row_starts, sequences.key_starts, heads, kv_heads, head_dim,
        causal=True, sm_scale=scale, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return wrapper


class Sdpa(Library):
    """Torch's flash attention over the keys before the rows and over the rows' own keys, merged by
    log-sum-exp."""

    def serves(self, query: Tensor) -> bool:
        return not query.is_cuda or query.dtype in HALF

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for rows, keys in zip(pairwise(sequences.rows), pairwise(sequences.keys), strict=True):
            own_rows, middle = slice(*rows), keys[1] - (rows[1] - rows[0])
            parts = [
                _flash(
                    query[own_rows],
                    key[middle : keys[1]],
                    value[middle : keys[1]],
                    scale,
                    causal=True,
                )
            ]
            if middle > keys[0]:
                parts.append(
                    _flash(
                        query[own_rows],
                        key[keys[0] : middle],
                        value[keys[0] : middle],
                        scale,
                        causal=False,
                    )
                )
            if len(parts) == 1:
                out[own_rows], lse[own_rows] = parts[0]
                continue
            sums = torch.stack([part_lse for _, part_lse in parts])
            total = sums.logsumexp(0)
            weights = (sums - total).exp()[..., None]
            out[own_rows] = sum(
                weight * result.float() for weight, (result, _) in zip(weights, parts, strict=True)
            )
            lse[own_rows] = total
        return out, lse


LIBRARIES: dict[str, Library] = {
    "flash_attn": FlashAttention(),
    "flashinfer": FlashInfer(),
    "sdpa": Sdpa(),
}
"""Libraries by name, the preferred one first."""


def select_library(query: Tensor) -> Library | None:
    """The first library that accepts such queries, or None."""
    return next((library for library in LIBRARIES.values() if library.serves(query)), None)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Out [rows, Hq, D] and log-sum-exps [rows, Hq]; kv heads are the batch, their keys repeated
    with a stride of 0."""
    heads = query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)
    key, value = (
        x.transpose(0, 1)[:, None].expand(-1, heads.shape[1], -1, -1) for x in (key, value)
    )
    if query.is_cuda:
        results = torch.ops.aten._scaled_dot_product_flash_attention(
            heads, key, value, 0.0, causal, False, scale=scale
        )
    else:
        results = flash(heads, key, value, is_causal=causal, scale=scale)
    out, lse = results[:2]
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


# ------------------------------------------------------------------------------
# Prefill over rotated copies of spans: keys are copied once, at their final positions, and read
# without rotation.
#
# With many rows, this costs less than rotating the keys for every tile of rows, or the rows for
# every span.
# ------------------------------------------------------------------------------

PAGE = 16  # page size of the copies
TILE = 32  # keys that one program rotates


@dataclass(frozen=True, eq=False)
class RotationPlan:
    """Plan of the rotated copies of a batch: its groups of several rows over the pool, and over the
    copies.

    `keys` is the number of copied keys. `sequences` has the groups as causal sequences, if each has
    the last rows of contiguous keys, else None. `rows` has their rows in the batch.
    """

    source: SpanBatch
    target: SpanBatch
    keys: int
    sequences: Sequences | None
    rows: Tensor


@lru_cache(maxsize=4)
def plan_rotation(batch: SpanBatch) -> RotationPlan:
    """Plan the copies of a batch; cached for the last few batches, since all layers of a model use
    the same plan."""
    groups = batch.groups_on_host
    assert groups is not None, "a batch of rows chosen on the device has no copies"
    chosen = groups.rows > 1
    spans = groups.of_span.where(np.repeat(chosen, groups.spans))
    groups = groups._replace(spans=np.where(chosen, groups.spans, 0), of_span=spans)
    source = pack(groups, batch.pages, page_size=batch.page_size, page_count=batch.page_count)
    starts = starts_of(spans.length)
    count = -(-int(starts[-1]) // PAGE)
    copied_spans = spans._replace(
        position=np.zeros_like(starts[:-1]),
        first_page=starts[:-1] // PAGE,
        offset=starts[:-1] % PAGE,
    )
    pages = torch.arange(count, dtype=torch.int32, device=batch.device)
    target = pack(groups._replace(of_span=copied_spans), pages, page_size=PAGE, page_count=count)
    rows = np.flatnonzero(np.repeat(chosen, groups.rows))
    (rows_on_device,) = to_device([rows], torch.int32, batch.device)
    return RotationPlan(
        source, target, int(starts[-1]), _sequences(groups, chosen, batch.device), rows_on_device
    )


def _sequences(groups: GroupArrays, chosen: Numbers, device: torch.device) -> Sequences | None:
    """The chosen groups as sequences; None if any group is not the last rows of contiguous keys."""
    row_starts, span_starts = starts_of(groups.rows), starts_of(groups.spans)
    spans, rows, keys = groups.of_span, [0], [0]
    for group in np.flatnonzero(chosen):
        query_index = groups.query_index[slice(*row_starts[group : group + 2])]
        group_spans = slice(*span_starts[group : group + 2])
        index, length = spans.index[group_spans], spans.length[group_spans]
        contiguous = (np.diff(query_index) == 1).all() and (
            index[1:] == (index + length)[:-1]
        ).all()
        if not (
            len(index)
            and contiguous
            and query_index[-1] + 1 == index[-1] + length[-1]
            and query_index[0] >= index[0]
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
    """Grid (key tiles or more, kv heads): copy keys rotated by the position of their tile, and
    values unchanged.

    PER_KEY: each key is rotated by its own position.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(tile_starts + spans):
        return
    near = tl.arange(0, BLOCK_N)
    pair = tl.arange(0, HALF_BLOCK)
    channel = tl.arange(0, 2 * HALF_BLOCK)
    count, position = tl.load(source + tile * 4 + 1), tl.load(source + tile * 4 + 3)
    is_key = (near < count)[:, None]
    from_row = tl.load(source_rows + tile * BLOCK_N + near).to(tl.int64)
    to_row = (tl.load(target + tile * 4) + near).to(tl.int64)
    source_offset = (from_row[:, None] * KV_HEADS + kv_head) * HEAD_DIM
    target_offset = (to_row[:, None] * KV_HEADS + kv_head) * HEAD_DIM
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
    is_first = is_key & (first < HEAD_DIM)[None, :]
    is_second = is_key & (second < HEAD_DIM)[None, :]
    k1 = tl.load(keys + source_offset + first[None, :], mask=is_first, other=0.0)
    k2 = tl.load(keys + source_offset + second[None, :], mask=is_second, other=0.0)
    shift = position + (near if PER_KEY else tl.zeros_like(near))
    in_table = (is_key & (shift < table_length)[:, None]) & (pair < ROTARY_HALF)[None, :]
    c, s = angles(cos, sin, shift[:, None], pair[None, :], in_table, ROTARY_HALF)
    t1, t2 = rotate_tile(k1.to(tl.float32), k2.to(tl.float32), c, s)
    tl.store(to_keys + target_offset + first[None, :], t1.to(k1.dtype), mask=is_first)
    tl.store(to_keys + target_offset + second[None, :], t2.to(k2.dtype), mask=is_second)
    is_value = is_key & (channel < HEAD_DIM)[None, :]
    tl.store(
        to_values + target_offset + channel[None, :],
        tl.load(values + source_offset + channel[None, :], mask=is_value),
        mask=is_value,
    )


def copy_rotated(
    key_pages: Tensor, value_pages: Tensor, plan: RotationPlan, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Key and value pages [pages, `PAGE`, Hkv, D] of the rotated copies, which `plan.target` reads
    in form MAT."""
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


KEYS_PER_PIECE = 256  # at least: with fewer, merging costs more than it saves
# pairs (row, head of a kv head) of a group from which copies are cheaper; an estimate
ROTATE_ONCE_ENTRIES = 1024
# above, the product that puts rows in place needs more memory than a multiprocessor has
IN_PLACE_DIM = 128
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
        if (
            scores.form != "MAT"
            and entries >= ROTATE_ONCE_ENTRIES
            and batch.groups_on_host is not None
        ):
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
    """Attend with all groups of several rows over rotated copies of their spans, by a library or
    our kernel."""
    copies, (_, table, scale, interleaved) = (
        copy_rotated(key_pages, value_pages, plan, call.scores),
        call.scores,
    )
    library = select_library(call.query) if plan.sequences is not None else None
    if library is None or plan.sequences is None:
        _launch(call, *copies, plan.target, "MAT", one_row=False)
        return
    rows = plan.rows.long()
    query, shift = call.query[rows], plan.target.query_shift[rows]
    if plan.target.shifted:
        query = rotate(query, shift, table, interleaved=interleaved)
    keys, values = (pages.flatten(0, 1)[: plan.keys] for pages in copies)
    call.out[rows], call.lse[rows] = library.attend(query, keys, values, plan.sequences, scale)


def _launch(
    call: Call,
    key_pages: Tensor,
    value_pages: Tensor,
    batch: SpanBatch,
    form: str,
    *,
    one_row: bool,
) -> None:
    """Attend with all groups of one row, or with all other groups, and write the results of their
    rows."""
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
    entries = group_heads * (1 if one_row else batch.max_rows)
    from_registers = multiplies_registers(query.device)
    if form == "QR" and head_dim > IN_PLACE_DIM and not from_registers:
        # more rows, rotated and not rotated, do not fit into the registers of these devices
        entries = min(entries, 64)
    size = blocks(head_dim, query.dtype, entries, query.device)
    in_place = form == "QR" and size.m >= 64 and head_dim <= IN_PLACE_DIM and from_registers
    tiles = list_tiles(batch, size.n, per_key=bool(constants["ROTATE_KEYS"]))
    work = count_work(
        batch, tiles, one_row=one_row, group_heads=group_heads, block_m=size.m, keys=size.n, kv_heads=kv_heads,
        programs=target_programs(query.device), min_tiles=KEYS_PER_PIECE // size.n,
    )  # fmt: skip
    pieces = work.max_pieces * kv_heads * size.m if work.split else 0
    parts, part_lse = (
        query.new_empty(shape, dtype=torch.float32) for shape in ((pieces, head_dim), (pieces,))
    )
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
    """Half of the channels of a tile, a power of two; `separate`: each half is a separate
    product."""
    return max(LEAST_DOT if separate else LEAST_DOT // 2, triton.next_power_of_2(head_dim) // 2)


@cache
def target_programs(device: torch.device) -> int:
    """Number of programs that fill the device: two per multiprocessor, or one for the
    interpreter."""
    return (
        2 * torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


@cache
def multiplies_registers(device: torch.device) -> bool:
    """Whether products of 64 rows read the rows from registers, as from compute capability 9.0
    on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shares_rows(device: torch.device) -> bool:
    """Whether two groups of warps share the rows of a product, as on compute capability 10.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
