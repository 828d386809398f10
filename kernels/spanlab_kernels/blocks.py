"""Gather, scatter and copy of rows in paged memory.

Pages are one contiguous float tensor [num_pages, page_size, H, D]. Slot = page · page_size + offset names one of its
rows [H, D]. Slots are int32 or int64 tensors [N] on the device of the pages; that they lie in
[0, num_pages · page_size) is checked on the CPU. On a CUDA device the caller must ensure it, since a check would wait
for the device: there, a slot outside the pages reads NaN and writes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels import uses_triton

# ------------------------------------------------------------------------------
# Reference of gather, scatter and copy, by indexing.
# ------------------------------------------------------------------------------


def gather_reference(pages: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """Write the rows at `slots` into `out`; see `spanlab_kernels.blocks.gather`."""
    return out.copy_(pages.flatten(0, 1)[slots.long()])


def scatter_reference(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write `values` to `slots`; see `spanlab_kernels.blocks.scatter`."""
    pages.flatten(0, 1)[slots.long()] = values


def copy_reference(pages: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy rows within the pages; see `spanlab_kernels.blocks.copy`."""
    rows = pages.flatten(0, 1)
    rows[target_slots.long()] = rows[source_slots.long()]


SLOT_DTYPES = (torch.int32, torch.int64)


def gather(pages: Tensor, slots: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The rows at `slots`, [N, H, D] contiguous, in `out` or in new memory.

    A slot may occur more than once. ValueError for arguments that do not match.
    """
    _check_pages(pages)
    _check_slots("slots", slots, pages)
    shape = (len(slots), *pages.shape[2:])
    out = pages.new_empty(shape) if out is None else out
    _check_rows("out", out, slots, pages)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, not of strides {out.stride()}.")
    if uses_triton(pages):
        from spanlab_kernels import row_kernels

        return row_kernels.gather(pages, slots, out)
    return gather_reference(pages, slots, out)


def scatter(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write `values` [N, H, D], of any strides, to `slots`, which are distinct.

    ValueError for arguments that do not match.
    """
    _check_pages(pages)
    _check_slots("slots", slots, pages)
    _check_rows("values", values, slots, pages)
    if uses_triton(pages):
        from spanlab_kernels import row_kernels

        return row_kernels.scatter(pages, slots, values)
    return scatter_reference(pages, slots, values)


def copy(pages: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy rows to other rows of the same pages, as copy-on-write does.

    Targets are distinct and none is a source, since the order of copies is undefined. ValueError
    for arguments that do not match.
    """
    _check_pages(pages)
    _check_slots("source_slots", source_slots, pages)
    _check_slots("target_slots", target_slots, pages)
    if len(source_slots) != len(target_slots):
        raise ValueError(f"target_slots must be as many as source_slots, {len(source_slots)}, not {len(target_slots)}.")
    if uses_triton(pages):
        from spanlab_kernels import row_kernels

        return row_kernels.copy(pages, source_slots, target_slots)
    return copy_reference(pages, source_slots, target_slots)


def _check_pages(pages: Tensor) -> None:
    if pages.ndim != 4 or not pages.is_contiguous() or not pages.is_floating_point():
        raise ValueError(
            f"pages must be a contiguous float tensor [num_pages, page_size, heads, head_dim], "
            f"not {pages.dtype} of shape {tuple(pages.shape)} and strides {pages.stride()}."
        )


def _check_slots(name: str, slots: Tensor, pages: Tensor) -> None:
    if slots.ndim != 1 or slots.dtype not in SLOT_DTYPES or slots.device != pages.device or not slots.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous integer tensor [N] on {pages.device}, "
            f"not {slots.dtype} of shape {tuple(slots.shape)} on {slots.device}."
        )
    if slots.is_cuda or not len(slots):
        return
    least, most, end = int(slots.min()), int(slots.max()), pages.shape[0] * pages.shape[1]
    if least < 0 or most >= end:
        raise ValueError(f"{name} must lie in [0, {end}), not in [{least}, {most}].")


def _check_rows(name: str, rows: Tensor, slots: Tensor, pages: Tensor) -> None:
    expected = (len(slots), *pages.shape[2:])
    if (tuple(rows.shape), rows.dtype, rows.device) != (expected, pages.dtype, pages.device):
        raise ValueError(
            f"{name} must be {expected} in {pages.dtype} on {pages.device}, "
            f"not {tuple(rows.shape)} in {rows.dtype} on {rows.device}."
        )
