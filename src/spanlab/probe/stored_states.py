"""Storage formats of recurrent states smaller than float32; inputs of the convolution stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

_LARGEST = 127


@dataclass(frozen=True)
class Int8:
    """A state as int8 numbers with shared scales.

    `values`  int8 [..., heads, d_k, d_v]
    `scale`   float32, one number for all values that share it: [..., heads, 1 or d_k, 1 or d_v]
    """

    values: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def state(self) -> Tensor:
        """The dequantised state, float32."""
        return self.values * self.scale


@dataclass(frozen=True)
class BFloat16:
    """A state as bfloat16 numbers."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def state(self) -> Tensor:
        """The dequantised state, float32."""
        return self.values.float()


def int8(state: Tensor, shared: tuple[int, ...]) -> Int8:
    """Round to the nearest multiples of a scale, set by the largest magnitude over the axes `shared`."""
    largest = state.abs().amax(shared, keepdim=True)
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    return Int8((state / scale).round().to(torch.int8), scale)


Format = Callable[[Tensor], Int8 | BFloat16]
"""Converts a state [..., heads, d_k, d_v] to its stored form."""

FORMATS: dict[str, Format] = {
    "bf16": lambda state: BFloat16(state.bfloat16()),
    "int8 per head": partial(int8, shared=(-2, -1)),
    "int8 per row": partial(int8, shared=(-1,)),
    "int8 per column": partial(int8, shared=(-2,)),
}
"""A row is a key channel, a column a value channel."""
