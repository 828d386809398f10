"""Memory of equal slots on the device: the pool of numbers, the slab and the pool of states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# ------------------------------------------------------------------------------
# Pool of slots with tensors for all recurrent layers; every slot has a position, its number of
# tokens.
# ------------------------------------------------------------------------------

Layers = int | slice
"""One recurrent layer, or `ALL` of them."""

ALL = slice(None)


class TensorSpec(NamedTuple):
    """Shape and type of one tensor per layer and slot; `shape` excludes the layer axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SlotPool:
    """Slots with equal tensors [layers, …], created on demand and reused; one of them is `conv`.

    The position of a slot is checked on use, so that a state is never used for a prefix of another
    length. With `poison` uncleared and free slots hold NaN.
    """

    def __init__(
        self,
        layers: int,
        specs: Mapping[str, TensorSpec],
        device: torch.device | str,
        *,
        poison: bool = False,
    ) -> None:
        self.layers, self.specs, self.poison = layers, dict(specs), poison
        self.device = torch.device(device)
        self._slots: list[dict[str, Tensor]] = []
        self._positions: list[int] = []
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Number of allocated slots."""
        return sum(position >= 0 for position in self._positions)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the tensors of one slot."""
        return self.layers * sum(
            prod(spec.shape) * spec.dtype.itemsize for spec in self.specs.values()
        )

    # -- allocation --------------------------------------------------------------------------------

    def allocate(self, *, cleared: bool = True) -> int:
        """Allocate a slot at position 0; without `cleared` its contents are undefined and must be
        overwritten."""
        if self._free:
            slot = self._free.pop()
        else:
            tensors = {
                name: torch.empty((self.layers, *spec.shape), dtype=spec.dtype, device=self.device)
                for name, spec in self.specs.items()
            }
            slot = self._add(tensors)
        return self._activate(slot, cleared=cleared)

    def clear(self, layer: Layers, slot: int) -> None:
        """Zero a slot, or one layer of it."""
        for name in self.specs:
            self.tensor(name, layer, slot).zero_()

    def copy(self, layer: Layers, source: int, target: int) -> None:
        """Copy a slot, or one layer of it, to another; the caller sets positions."""
        for name in self.specs:
            self.tensor(name, layer, target).copy_(self.tensor(name, layer, source))

    def free(self, slots: Iterable[int]) -> None:
        """Free slots."""
        for slot in slots:
            assert self._positions[slot] >= 0, "a slot was freed twice"
            self._positions[slot] = -1
            self._free_list(slot).append(slot)
            if self.poison:
                for name in self.specs:
                    self.tensor(name, ALL, slot).fill_(torch.nan)

    def _free_list(self, slot: int) -> list[int]:
        """The free list of a slot."""
        return self._free

    def _activate(self, slot: int, *, cleared: bool) -> int:
        if cleared:
            self.clear(ALL, slot)
        self._positions[slot] = 0
        return slot

    def _add(self, tensors: dict[str, Tensor]) -> int:
        self._slots.append(tensors)
        self._positions.append(-1)
        return len(self._slots) - 1

    # -- positions ---------------------------------------------------------------------------------

    def check_position(self, slot: int, position: int) -> None:
        """Check that a slot is at a position."""
        current = self._positions[slot]
        assert current == position, f"a state of {current} tokens was used as one of {position}"

    def advance(self, slot: int, start: int, stop: int) -> None:
        """Advance a slot from position `start` to `stop`."""
        self.check_position(slot, start)
        self._positions[slot] = stop

    def set_position(self, slot: int, position: int) -> None:
        """Set the position of a slot without a check of the previous one."""
        assert self._positions[slot] >= 0, "a free slot was written"
        self._positions[slot] = position

    # -- memory ------------------------------------------------------------------------------------

    def tensor(self, name: str, layer: Layers, slot: int) -> Tensor:
        """A tensor of a slot in one layer [*shape], or in all layers [layers, *shape], as a
        view."""
        return self._slots[slot][name][layer]

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """Conv state, the last inputs [channels, kernel − 1] of the layer's convolution,
        zero-padded, as a view."""
        return self.tensor("conv", layer, slot)


# ------------------------------------------------------------------------------
# Contiguous tensors of many slots, so that one device index gathers the slots of a batch.
# ------------------------------------------------------------------------------

PADDING_ROW = 0
"""The row that padding reads and writes: initially zeros, never used for a request."""


class Slab:
    """Memory [rows, layers, …] of each tensor; its addresses change when rows are added.

    `rows`  number of rows; addresses are constant while it is unchanged
    """

    def __init__(self, layers: int, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        self._memory = {
            name: torch.zeros((1, layers, *spec.shape), dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }
        self.rows = 1

    def extend(self) -> range:
        """Double the rows, without the padding row; return the new, uninitialised rows."""
        before, self.rows = self.rows, max(2, 2 * self.rows - 1)
        for name, old in self._memory.items():
            self._memory[name] = old.new_empty(self.rows, *old.shape[1:])
            self._memory[name][:before] = old
        return range(before, self.rows)

    def row(self, row: int) -> dict[str, Tensor]:
        """Views [layers, …] of a row's tensors, valid until the slab is extended."""
        return {name: memory[row] for name, memory in self._memory.items()}

    def tensor(self, name: str, layer: int) -> Tensor:
        """View [rows, …] of a tensor of one layer in all rows, valid until the slab is extended."""
        return self._memory[name][:, layer]


# ------------------------------------------------------------------------------
# Pool of recurrent states: the recurrent and conv state of all recurrent layers after a prefix.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateShape:
    """Sizes of one state: recurrent layers; per layer, value heads of key_dim × value_dim, and conv
    inputs.

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

    Recurrent states are float32 for every model; conv states have the model's `dtype`. States of
    running requests are rows of one slab, so that a decode step gathers them with one index tensor;
    stored states are separate tensors.
    """

    def __init__(
        self,
        shape: StateShape,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        poison: bool = False,
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
            # add slab rows for further running states; the slab's memory moves
            new = self.slab.extend()
            for slot, row in self._rows.items():
                self._slots[slot] = self.slab.row(row)
            for row in reversed(new):  # the first row is allocated first
                slot = self._add(self.slab.row(row))
                self._rows[slot] = row
                self._free_rows.append(slot)
        return self._activate(self._free_rows.pop(), cleared=True)

    def rows(self, slots: Iterable[int]) -> NDArray[np.int64]:
        """Slab rows of running states."""
        return np.array([self._rows[slot] for slot in slots], np.int64)

    def _free_list(self, slot: int) -> list[int]:
        return self._free_rows if slot in self._rows else super()._free_list(slot)

    def recurrent(self, layer: Layers, slot: int) -> Tensor:
        """Recurrent state, float32 [heads, key_dim, value_dim], as a view."""
        return self.tensor("recurrent", layer, slot)
