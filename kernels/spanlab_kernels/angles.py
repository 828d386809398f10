"""Rotary angles as tables: the cosine and sine of every position, exact to fp32 rounding.

R(p) rotates the pair of channels i of a head by p · frequencies[i] (RoPE, arXiv 2104.09864). A table holds pure
rotations: the caller applies YaRN's factor of queries and keys, since no later shift changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AngleTable:
    """Cosine and sine of positions [0, length): two float32 tensors [length, rotary_dim / 2] on one device."""

    cos: Tensor
    sin: Tensor

    @property
    def length(self) -> int:
        """Number of positions; shifts may lie in (-length, length)."""
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that are rotated."""
        return 2 * self.cos.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self.cos.device

    def lookup(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., rotary_dim / 2] of signed integer shifts [...]: cos(-a) = cos a, sin(-a) = -sin a."""
        distance = shift.abs().long()
        return self.cos[distance], self.sin[distance] * shift.sign()[..., None].to(self.sin.dtype)


def angle_table(frequencies: Tensor, length: int, device: torch.device | str = "cpu") -> AngleTable:
    """Tabulate positions [0, length) for `frequencies` [rotary_dim / 2], in radians per position.

    Angles are formed in float64 on the CPU and cast once, so that a position of 1e6 is as exact as position 1: in
    float32 its angle alone would be off by 0.03 rad. ValueError for invalid frequencies or an invalid length.
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
