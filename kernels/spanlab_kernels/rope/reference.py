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
    rotated = x[..., :width].float()
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    pairs = torch.stack((first, second), -1) if interleaved else torch.stack((first, second), -2)
    if out is not x:
        out[..., width:] = x[..., width:]
    out[..., :width] = pairs.flatten(-2).to(x.dtype)
    return out
