"""Gather, scatter and copy on the device, by one kernel that copies rows from and to slots or contiguous memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a row that one program copies


@triton.jit
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
    # a slot outside the pages must access no memory; it reads NaN, which shows the error in the result
    is_source = in_row & (source_index >= 0) & (source_index < source_rows)
    is_target = in_row & (target_index >= 0) & (target_index < target_rows)
    offset = (element // HEAD_DIM) * source_head + (element % HEAD_DIM) * source_channel
    values = tl.load(source + source_index * source_row + offset, mask=is_source, other=float("nan"))
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


def _launch(source: Tensor, target: Tensor, source_slots: Tensor | None, target_slots: Tensor | None) -> None:
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
