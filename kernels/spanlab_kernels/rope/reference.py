"""The truth of rotation, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable


def rotate(x: Tensor, shift: int | Tensor, table: AngleTable, *, interleaved: bool, out: Tensor) -> Tensor:
    """Write R(shift) x into `out`, which may be `x`; see `spanlab_kernels.rope.rotate`."""
    angles = table.at(torch.as_tensor(shift, device=x.device).reshape(-1, 1))
    return rotate_by(x, *angles, interleaved=interleaved, out=out)


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, out: Tensor) -> Tensor:
    """The same by angles that are known, [T or 1, 1, rotary_dim / 2]."""
    width = 2 * cos.shape[-1]
    first, second = _halves(x[..., :width].float(), interleaved)
    to_first, to_second = _halves(out[..., :width], interleaved)
    if out is not x:
        out[..., width:] = x[..., width:]
    if out is x or out.dtype != torch.float32:
        turned = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
        to_first.copy_(turned[0])
        to_second.copy_(turned[1])
    else:  # the same without a copy
        torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return out


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second channel of every pair."""
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.tensor_split(2, dim=-1)
