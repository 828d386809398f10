"""Reference of rotation, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable


def rotate(x: Tensor, shift: int | Tensor, table: AngleTable, *, interleaved: bool, out: Tensor) -> Tensor:
    """Write R(shift) x into `out`, which may be `x`; see `spanlab_kernels.rope.rotate`."""
    angles = by_channel(*table.lookup(torch.as_tensor(shift, device=x.device).reshape(-1, 1)), interleaved=interleaved)
    return rotate_by(x, *angles, interleaved=interleaved, out=out)


def by_channel(cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every channel [..., rotary_dim] from those of pairs, with -sin for the first channel."""
    if interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, out: Tensor) -> Tensor:
    """Rotate `x` into `out` by the cosine and sine of every channel, [T or 1, 1, rotary_dim].

    Both halves of the channels are processed together: half as many launches, over runs of twice the length.
    """
    width = cos.shape[-1]
    rotated, target = x[..., :width].float(), out[..., :width]
    partner = _partners(rotated, interleaved)  # a copy, so `out` may be `x`
    if out is not x and width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    if out.dtype == torch.float32:
        torch.mul(rotated, cos, out=target).addcmul_(partner, sin)
    else:
        target.copy_((rotated * cos).addcmul_(partner, sin))
    return out


def _partners(x: Tensor, interleaved: bool) -> Tensor:
    """Channels with the two of every pair exchanged."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)
