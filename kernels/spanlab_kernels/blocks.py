"""Gather, scatter and copy of rows in paged memory.

Pages are one contiguous float tensor [num_pages, page_size, H, D]. Slot = page · page_size + offset
names one of its rows [H, D]. Slots are int32 or int64 tensors [N] on the device of the pages; that
they lie in [0, num_pages · page_size) is checked on the CPU. On a CUDA device the caller must
ensure it, since a check would wait for the device: there, a slot outside the pages reads NaN and
writes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels import AngleTable, uses_triton

# ------------------------------------------------------------------------------
# Reference of gather, scatter and copy, by indexing.
# ------------------------------------------------------------------------------


def gather_reference(pages: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """Write the rows at `slots` into `out`; see `spanlab_kernels.blocks.gather`."""
    return out.copy_(pages.flatten(0, 1)[slots.long()])


def scatter_reference(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write `values` to `slots`; see `spanlab_kernels.blocks.scatter`."""
    pages.flatten(0, 1)[slots.long()] = values


def write_reference(
    key_pages: Tensor, value_pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write keys and values to `slots`; see `spanlab_kernels.blocks.write`."""
    scatter_reference(key_pages, slots, keys)
    scatter_reference(value_pages, slots, values)


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


def write(
    key_pages: Tensor, value_pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write `keys` and `values` [N, H, D], of any strides, to the same distinct `slots` of two
    equal sets of pages.

    As two calls of `scatter`, in one launch. ValueError for arguments that do not match.
    """
    _check_pages(key_pages)
    _check_slots("slots", slots, key_pages)
    _check_rows("keys", keys, slots, key_pages)
    if (value_pages.shape, value_pages.stride()) != (key_pages.shape, key_pages.stride()):
        raise ValueError(
            f"value_pages must be like key_pages, {tuple(key_pages.shape)}, not {tuple(value_pages.shape)}."
        )
    _check_rows("values", values, slots, value_pages)
    if uses_triton(key_pages):
        from spanlab_kernels import row_kernels

        return row_kernels.write(key_pages, value_pages, slots, keys, values)
    return write_reference(key_pages, value_pages, slots, keys, values)


def copy(pages: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy rows to other rows of the same pages, as copy-on-write does.

    Targets are distinct and none is a source, since the order of copies is undefined. ValueError
    for arguments that do not match.
    """
    _check_pages(pages)
    _check_slots("source_slots", source_slots, pages)
    _check_slots("target_slots", target_slots, pages)
    if len(source_slots) != len(target_slots):
        raise ValueError(
            f"target_slots must be as many as source_slots, {len(source_slots)}, not {len(target_slots)}."
        )
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
    if (
        slots.ndim != 1
        or slots.dtype not in SLOT_DTYPES
        or slots.device != pages.device
        or not slots.is_contiguous()
    ):
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


# ------------------------------------------------------------------------------
# Rotation of keys by position (RoPE): angles, the public function, and its reference.
# ------------------------------------------------------------------------------


def angle_table(frequencies: Tensor, length: int, device: torch.device | str = "cpu") -> AngleTable:
    """Tabulate positions [0, length) for `frequencies` [rotary_dim / 2], in radians per position.

    Angles are formed in float64 on the CPU and cast once, so that a position of 1e6 is as exact as
    position 1: in float32 its angle alone would be off by 0.03 rad. ValueError for invalid
    frequencies or an invalid length.
    """
    if frequencies.ndim != 1 or not len(frequencies) or not frequencies.is_floating_point():
        raise ValueError(
            f"frequencies must be a float tensor [rotary_dim / 2], "
            f"not {frequencies.dtype} of shape {tuple(frequencies.shape)}."
        )
    if not frequencies.isfinite().all():
        raise ValueError(f"frequencies must be finite, not {frequencies.tolist()}.")
    if length < 1:
        raise ValueError(f"length must be at least 1, not {length}.")
    positions = torch.arange(length, dtype=torch.float64)
    angles = torch.outer(positions, frequencies.detach().to("cpu", torch.float64))
    return AngleTable(angles.cos().float().to(device), angles.sin().float().to(device))


# ------------------------------------------------------------------------------
# Reference of rotation, in plain torch.
# ------------------------------------------------------------------------------


def rotate_reference(
    x: Tensor, shift: int | Tensor, table: AngleTable, *, interleaved: bool, out: Tensor
) -> Tensor:
    """Write R(shift) x into `out`, which may be `x`; see `spanlab_kernels.blocks.rotate`."""
    angles = by_channel(
        *table.lookup(torch.as_tensor(shift, device=x.device).reshape(-1, 1)),
        interleaved=interleaved,
    )
    return rotate_by(x, *angles, interleaved=interleaved, out=out)


def by_channel(cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every channel [..., rotary_dim] from those of pairs, with -sin for the
    first channel."""
    if interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, out: Tensor) -> Tensor:
    """Rotate `x` into `out` by the cosine and sine of every channel, [T or 1, 1, rotary_dim].

    Both halves of the channels are processed together: half as many launches, over runs of twice
    the length.
    """
    width = cos.shape[-1]
    rotated, target = x[..., :width].float(), out[..., :width]
    # the two channels of every pair exchanged, in a copy, so `out` may be `x`
    partner = (
        rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        if interleaved
        else rotated.roll(width // 2, -1)
    )
    if out is not x and width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    if out.dtype == torch.float32:
        torch.mul(rotated, cos, out=target).addcmul_(partner, sin)
    else:
        target.copy_((rotated * cos).addcmul_(partner, sin))
    return out


# ------------------------------------------------------------------------------
# Rotation and re-rotation of heads by a number of positions (RoPE).
# ------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHIFT_DTYPES = (torch.int32, torch.int64)


def rotate(
    x: Tensor,
    shift: int | Tensor,
    table: AngleTable,
    *,
    interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate the first `table.rotary_dim` channels of each head of `x` [T, H, D] by `shift`
    positions; copy the others.

    `shift` is one number for all, or an integer tensor [T] on the device of `x`; it may be
    negative. A key rotated to position p is rotated to p + shift afterwards, since R(a) R(b) = R(a
    + b). Pairs are channels (i, i + rotary_dim / 2), or (2i, 2i + 1) when `interleaved`. Products
    are formed in float32 and cast once.

    Returns `out`, of the shape of `x`: `x` itself (in place), memory that does not overlap it, or a
    new tensor. ValueError for arguments that do not match. On a CUDA device the caller must ensure
    that shifts are in (-table.length, table.length), since a check would wait for the device:
    outside it the result is NaN.
    """
    out = torch.empty_like(x) if out is None else out
    _check_tensors(x, table, out)
    _check_shift(x, shift, table)
    if uses_triton(x):
        from spanlab_kernels import row_kernels

        return row_kernels.rotate(x, shift, table, interleaved=interleaved, out=out)
    return rotate_reference(x, shift, table, interleaved=interleaved, out=out)


def _check_tensors(x: Tensor, table: AngleTable, out: Tensor) -> None:
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"x must be [tokens, heads, head_dim] in float32, float16 or bfloat16, not {tuple(x.shape)} in {x.dtype}."
        )
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out must be like x, {tuple(x.shape)} in {x.dtype} on {x.device}, "
            f"not {tuple(out.shape)} in {out.dtype} on {out.device}."
        )
    if table.rotary_dim > x.shape[2]:
        raise ValueError(
            f"table.rotary_dim must be at most head_dim, {x.shape[2]}, not {table.rotary_dim}."
        )
    if table.device != x.device:
        raise ValueError(f"table must lie on the device of x, {x.device}, not on {table.device}.")


def _check_shift(x: Tensor, shift: int | Tensor, table: AngleTable) -> None:
    if isinstance(shift, Tensor):
        if (
            shift.shape != x.shape[:1]
            or shift.dtype not in SHIFT_DTYPES
            or shift.device != x.device
        ):
            raise ValueError(
                f"shift must be an int or an integer tensor [{x.shape[0]}] on {x.device}, "
                f"not {tuple(shift.shape)} in {shift.dtype} on {shift.device}."
            )
        if shift.is_cuda or not len(shift):
            return
    largest = int(shift.abs().max()) if isinstance(shift, Tensor) else abs(shift)
    if largest >= table.length:
        raise ValueError(
            f"shift must stay under the table's length, {table.length}, not {largest}."
        )
