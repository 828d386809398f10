"""Recurrent states in numbered slots: what the recurrent layers hold after a prefix of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.engine.slab import Slab
from spanlab.engine.slot_pool import Layers, Part, SlotPool


@dataclass(frozen=True)
class StateShape:
    """Sizes of one state: recurrent layers; per layer, value heads of key_dim × value_dim, and conv channels × kernel.

    The convolution keeps its last `kernel` inputs, as transformers' caches do, though one fewer would be enough.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int

    def memory(self, dtype: torch.dtype = torch.float32) -> Part:
        """A layer's recurrent state [heads, key_dim, value_dim]."""
        return Part((self.heads, self.key_dim, self.value_dim), dtype)

    def window(self, dtype: torch.dtype) -> Part:
        """A layer's last convolution inputs [channels, kernel]."""
        return Part((self.channels, self.kernel), dtype)


class StatePool(SlotPool):
    """States of all recurrent layers by slot.

    The recurrent part is float32 whatever the model computes in, the convolution's part is the model's own `dtype`.
    States that run have rows of one slab, so that a decode finds them all by one index; stored ones lie anywhere.
    """

    def __init__(
        self, shape: StateShape, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        parts = {"recurrent": shape.memory(), "conv": shape.window(dtype)}
        super().__init__(shape.layers, parts, device, poison=poison)
        self.shape = shape
        self.slab = Slab(shape.layers, parts, self.device)
        self._rows: dict[int, int] = {}  # in the slab, by slot
        self._free_rows: list[int] = []  # slots that have one and nobody holds

    def take_running(self) -> int:
        """A slot that has seen nothing, for a state that runs."""
        if not self._free_rows:
            self._extend()
        return self._taken(self._free_rows.pop(), cleared=True)

    def rows(self, slots: Iterable[int]) -> NDArray[np.int64]:
        """Where states that run lie in the slab."""
        return np.array([self._rows[slot] for slot in slots], np.int64)

    def _waiting(self, slot: int) -> list[int]:
        return self._free_rows if slot in self._rows else super()._waiting(slot)

    def _extend(self) -> None:
        """Make room for more states that run; those that do move with their slab."""
        new = self.slab.extend()
        for slot, row in self._rows.items():
            self._slots[slot] = self.slab.row(row)
        for row in reversed(new):  # the first is taken first
            slot = self._add(self.slab.row(row))
            self._rows[slot] = row
            self._free_rows.append(slot)

    def recurrent(self, layer: Layers, slot: int) -> Tensor:
        """Recurrent states, float32 [heads, key_dim, value_dim]: the memory itself."""
        return self.part("recurrent", layer, slot)

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """The last convolution inputs [channels, kernel]: the memory itself."""
        return self.part("conv", layer, slot)
