"""Pool of recurrent states: the recurrent and conv state of all recurrent layers after a prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.engine.slab import Slab
from spanlab.engine.slot_pool import Layers, SlotPool, TensorSpec


@dataclass(frozen=True)
class StateShape:
    """Sizes of one state: recurrent layers; per layer, value heads of key_dim × value_dim, and conv inputs.

    The conv state has the last `kernel` − 1 inputs of each channel, which the next output needs.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int

    def state_spec(self, dtype: torch.dtype = torch.float32) -> TensorSpec:
        """Spec of a layer's recurrent state [heads, key_dim, value_dim]."""
        return TensorSpec((self.heads, self.key_dim, self.value_dim), dtype)

    def window_spec(self, dtype: torch.dtype) -> TensorSpec:
        """Spec of a layer's conv state [channels, kernel − 1]."""
        return TensorSpec((self.channels, self.kernel - 1), dtype)


class StatePool(SlotPool):
    """Slots of states of all recurrent layers.

    Recurrent states are float32 for every model; conv states have the model's `dtype`. States of running requests are
    rows of one slab, so that a decode step gathers them with one index tensor; stored states are separate tensors.
    """

    def __init__(
        self, shape: StateShape, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        specs = {"recurrent": shape.state_spec(), "conv": shape.window_spec(dtype)}
        super().__init__(shape.layers, specs, device, poison=poison)
        self.shape = shape
        self.slab = Slab(shape.layers, specs, self.device)
        self._rows: dict[int, int] = {}  # slab row by slot
        self._free_rows: list[int] = []  # free slots with a slab row

    def allocate_running(self) -> int:
        """Allocate a cleared slot in the slab for a running request."""
        if not self._free_rows:
            self._extend()
        return self._activate(self._free_rows.pop(), cleared=True)

    def rows(self, slots: Iterable[int]) -> NDArray[np.int64]:
        """Slab rows of running states."""
        return np.array([self._rows[slot] for slot in slots], np.int64)

    def _free_list(self, slot: int) -> list[int]:
        return self._free_rows if slot in self._rows else super()._free_list(slot)

    def _extend(self) -> None:
        """Add slab rows for further running states; the slab's memory moves."""
        new = self.slab.extend()
        for slot, row in self._rows.items():
            self._slots[slot] = self.slab.row(row)
        for row in reversed(new):  # the first row is allocated first
            slot = self._add(self.slab.row(row))
            self._rows[slot] = row
            self._free_rows.append(slot)

    def recurrent(self, layer: Layers, slot: int) -> Tensor:
        """Recurrent state, float32 [heads, key_dim, value_dim], as a view."""
        return self.tensor("recurrent", layer, slot)
