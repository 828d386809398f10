"""Triton kernels of rows: rotation of keys, and copies in paged memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spanlab_kernels import AngleTable

# ------------------------------------------------------------------------------
# Rotation on the device: every element is read once and written once.
# ------------------------------------------------------------------------------

ROWS = 16  # heads of one token or of adjacent tokens: enough to fill the threads of a block at any rotary_dim in use


@triton.jit(do_not_specialize=["shift"])
def _rotate(
    x,
    out,
    shift,
    shifts,
    cos,
    sin,
    rows,
    length,
    x_token,
    x_head,
    x_channel,
    out_token,
    out_head,
    out_channel,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    COPIED_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    token, head = row // HEADS, row % HEADS
    from_row = x + (token * x_token + head * x_head)[:, None]
    to_row = out + (token * out_token + head * out_head)[:, None]

    if PER_TOKEN:
        rotation = tl.load(shifts + token, mask=is_row, other=0).to(tl.int32)
    else:
        rotation = tl.zeros([ROWS], tl.int32) + shift
    distance = tl.abs(rotation)
    pair = tl.arange(0, HALF_BLOCK)
    is_pair = is_row[:, None] & (pair < HALF)[None, :]
    # a shift outside the table must access no memory, and its NaN shows the error
    in_table = is_pair & (distance < length)[:, None]
    offset = distance.to(tl.int64)[:, None] * HALF + pair[None, :]
    c = tl.load(cos + offset, mask=in_table, other=float("nan"))
    s = tl.load(sin + offset, mask=in_table, other=float("nan"))
    s = tl.where(rotation[:, None] < 0, -s, s)

    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    a = tl.load(from_row + (first * x_channel)[None, :], mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(from_row + (second * x_channel)[None, :], mask=is_pair, other=0.0).to(tl.float32)
    # both partners are in registers before either is written, so that out may be x
    tl.store(
        to_row + (first * out_channel)[None, :],
        (a * c - b * s).to(out.dtype.element_ty),
        mask=is_pair,
    )
    tl.store(
        to_row + (second * out_channel)[None, :],
        (b * c + a * s).to(out.dtype.element_ty),
        mask=is_pair,
    )

    if COPIED > 0:
        extra = tl.arange(0, COPIED_BLOCK)
        is_extra = is_row[:, None] & (extra < COPIED)[None, :]
        channel = 2 * HALF + extra
        unrotated = tl.load(from_row + (channel * x_channel)[None, :], mask=is_extra, other=0.0)
        tl.store(to_row + (channel * out_channel)[None, :], unrotated, mask=is_extra)


def rotate(
    x: Tensor, shift: int | Tensor, table: AngleTable, *, interleaved: bool, out: Tensor
) -> Tensor:
    """Launch the kernel; the contract of `spanlab_kernels.blocks.rotate`, whose checks come
    first."""
    tokens, heads, head_dim = x.shape
    rows = tokens * heads
    if not rows:
        return out
    half = table.rotary_dim // 2
    copied = 0 if out is x else head_dim - table.rotary_dim
    per_token = isinstance(shift, Tensor)
    _rotate[(triton.cdiv(rows, ROWS),)](
        x,
        out,
        0 if per_token else shift,
        shift if per_token else table.cos,  # a pointer that is never read
        table.cos,
        table.sin,
        rows,
        table.length,
        *x.stride(),
        *out.stride(),
        HEADS=heads,
        HALF=half,
        COPIED=copied,
        INTERLEAVED=interleaved,
        PER_TOKEN=per_token,
        ROWS=ROWS,
        HALF_BLOCK=triton.next_power_of_2(half),
        COPIED_BLOCK=triton.next_power_of_2(max(1, copied)),
    )
    return out


# ------------------------------------------------------------------------------
# Gather, scatter and copy on the device, by one kernel that copies rows from and to slots or
# contiguous memory.
# ------------------------------------------------------------------------------

BLOCK = 2048  # elements of a row that one program copies


@triton.jit(do_not_specialize=["source_rows", "target_rows"])
def _move(
    source,
    target,
    source_slots,
    target_slots,
    source_rows,
    target_rows,
    source_row,
    source_head,
    source_channel,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FROM_SLOTS: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = element < HEADS * HEAD_DIM
    source_index, target_index = row, row
    if FROM_SLOTS:
        source_index = tl.load(source_slots + row).to(tl.int64)
    if TO_SLOTS:
        target_index = tl.load(target_slots + row).to(tl.int64)
    # a slot outside the pages must access no memory; it reads NaN, which shows the error in the
    # result
    is_source = in_row & (source_index >= 0) & (source_index < source_rows)
    is_target = in_row & (target_index >= 0) & (target_index < target_rows)
    offset = (element // HEAD_DIM) * source_head + (element % HEAD_DIM) * source_channel
    values = tl.load(
        source + source_index * source_row + offset, mask=is_source, other=float("nan")
    )
    tl.store(target + target_index * (HEADS * HEAD_DIM) + element, values, mask=is_target)


def gather(pages: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """Launch for `spanlab_kernels.blocks.gather`, whose checks come first."""
    _launch(pages.flatten(0, 1), out, slots, None)
    return out


def scatter(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """Launch for `spanlab_kernels.blocks.scatter`, whose checks come first."""
    _launch(values, pages.flatten(0, 1), None, slots)


def copy(pages: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Launch for `spanlab_kernels.blocks.copy`, whose checks come first."""
    rows = pages.flatten(0, 1)
    _launch(rows, rows, source_slots, target_slots)


@triton.jit(do_not_specialize=["target_rows"])
def _write(
    keys,
    values,
    to_keys,
    to_values,
    slots,
    target_rows,
    key_row,
    key_head,
    key_channel,
    value_row,
    value_head,
    value_channel,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    in_row = element < HEADS * HEAD_DIM
    # a slot outside the pages must access no memory
    is_target = in_row & (slot >= 0) & (slot < target_rows)
    head, channel = element // HEAD_DIM, element % HEAD_DIM
    target = slot * (HEADS * HEAD_DIM) + element
    key = tl.load(keys + row * key_row + head * key_head + channel * key_channel, mask=in_row)
    value = tl.load(
        values + row * value_row + head * value_head + channel * value_channel, mask=in_row
    )
    tl.store(to_keys + target, key, mask=is_target)
    tl.store(to_values + target, value, mask=is_target)


def write(
    key_pages: Tensor, value_pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Launch for `spanlab_kernels.blocks.write`, whose checks come first."""
    _, heads, head_dim = keys.shape
    width = heads * head_dim
    if not len(slots) or not width:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    _write[(len(slots), triton.cdiv(width, block))](
        keys,
        values,
        key_pages,
        value_pages,
        slots,
        key_pages.shape[0] * key_pages.shape[1],
        *keys.stride(),
        *values.stride(),
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
    )


def _launch(
    source: Tensor, target: Tensor, source_slots: Tensor | None, target_slots: Tensor | None
) -> None:
    slots = source_slots if source_slots is not None else target_slots
    assert slots is not None, "rows are copied from slots or to slots"
    _, heads, head_dim = target.shape
    width = heads * head_dim
    if not len(slots) or not width:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    _move[(len(slots), triton.cdiv(width, block))](
        source,
        target,
        slots if source_slots is None else source_slots,
        slots if target_slots is None else target_slots,
        len(source),
        len(target),
        *source.stride(),
        HEADS=heads,
        HEAD_DIM=head_dim,
        FROM_SLOTS=source_slots is not None,
        TO_SLOTS=target_slots is not None,
        BLOCK=block,
    )
