"""Triton kernels for position-independent attention, each with a torch reference that defines its
result."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# ------------------------------------------------------------------------------
# Choice of the implementation of an operation: Triton on a CUDA device, the CPU path everywhere
# else.
# ------------------------------------------------------------------------------


def uses_triton(tensor: Tensor) -> bool:
    """Whether Triton runs operations on this tensor: it is on a CUDA device and Triton is
    installed.

    CPU tensors never reach Triton here, whatever TRITON_INTERPRET is; its interpreter is for tests,
    which call the launchers directly. Warn once of a CUDA device without Triton.
    """
    if not tensor.is_cuda:
        return False
    if not _has_triton():
        _warn_once()
        return False
    return True


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _warn_once() -> None:
    warnings.warn(
        "Triton is not installed: torch references serve on this CUDA device, slowly.", stacklevel=4
    )


# ------------------------------------------------------------------------------
# Rotary angles as tables: the cosine and sine of every position, exact to fp32 rounding.
#
# R(p) rotates the pair of channels i of a head by p · frequencies[i] (RoPE, arXiv 2104.09864).
# A table holds pure rotations: the caller applies YaRN's factor of queries and keys, since no
# later shift changes it.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AngleTable:
    """Cosine and sine of positions [0, length): two float32 tensors [length, rotary_dim / 2] on one
    device."""

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
        """Cosine and sine [..., rotary_dim / 2] of signed integer shifts [...]: cos(-a) = cos a,
        sin(-a) = -sin a."""
        distance = shift.abs().long()
        return self.cos[distance], self.sin[distance] * shift.sign()[..., None].to(self.sin.dtype)
