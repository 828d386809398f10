"""Rotation and re-rotation of heads by a number of positions (RoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.dispatch import uses_triton
from spanlab_kernels.rope import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHIFT_DTYPES = (torch.int32, torch.int64)


def rotate(
    x: Tensor, shift: int | Tensor, table: AngleTable, *, interleaved: bool = False, out: Tensor | None = None
) -> Tensor:
    """Rotate the first `table.rotary_dim` channels of each head of `x` [T, H, D] by `shift` positions; copy the others.

    `shift` is one number for all, or an integer tensor [T] on the device of `x`; it may be negative. A key rotated to
    position p is rotated to p + shift afterwards, since R(a) R(b) = R(a + b). Pairs are channels
    (i, i + rotary_dim / 2), or (2i, 2i + 1) when `interleaved`. Products are formed in float32 and cast once.

    Returns `out`, of the shape of `x`: `x` itself (in place), memory that does not overlap it, or a new tensor.
    ValueError for arguments that do not match. On a CUDA device the caller must ensure that shifts are in
    (-table.length, table.length), since a check would wait for the device: outside it the result is NaN.
    """
    out = torch.empty_like(x) if out is None else out
    _check_tensors(x, table, out)
    _check_shift(x, shift, table)
    if uses_triton(x):
        from spanlab_kernels.rope import triton

        return triton.rotate(x, shift, table, interleaved=interleaved, out=out)
    return reference.rotate(x, shift, table, interleaved=interleaved, out=out)


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
        raise ValueError(f"table.rotary_dim must be at most head_dim, {x.shape[2]}, not {table.rotary_dim}.")
    if table.device != x.device:
        raise ValueError(f"table must lie on the device of x, {x.device}, not on {table.device}.")


def _check_shift(x: Tensor, shift: int | Tensor, table: AngleTable) -> None:
    if isinstance(shift, Tensor):
        if shift.shape != x.shape[:1] or shift.dtype not in SHIFT_DTYPES or shift.device != x.device:
            raise ValueError(
                f"shift must be an int or an integer tensor [{x.shape[0]}] on {x.device}, "
                f"not {tuple(shift.shape)} in {shift.dtype} on {shift.device}."
            )
        if shift.is_cuda or not len(shift):
            return
    largest = int(shift.abs().max()) if isinstance(shift, Tensor) else abs(shift)
    if largest >= table.length:
        raise ValueError(f"shift must stay under the table's length, {table.length}, not {largest}.")
