"""Pool of slots with tensors for all recurrent layers; every slot has a position, its number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Layers = int | slice
"""One recurrent layer, or `ALL` of them."""

ALL = slice(None)


class TensorSpec(NamedTuple):
    """Shape and type of one tensor per layer and slot; `shape` excludes the layer axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SlotPool:
    """Slots with equal tensors [layers, …], created on demand and reused; one of them is `conv`.

    The position of a slot is checked on use, so that a state is never used for a prefix of another length.
    With `poison` uncleared and free slots hold NaN.
    """

    def __init__(
        self, layers: int, specs: Mapping[str, TensorSpec], device: torch.device | str, *, poison: bool = False
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
        return self.layers * sum(prod(spec.shape) * spec.dtype.itemsize for spec in self.specs.values())

    # -- allocation ---------------------------------------------------------------------------------------------------

    def allocate(self, *, cleared: bool = True) -> int:
        """Allocate a slot at position 0; without `cleared` its contents are undefined and must be overwritten."""
        return self._activate(self._free.pop() if self._free else self._add(self._new_tensors()), cleared=cleared)

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

    def _new_tensors(self) -> dict[str, Tensor]:
        return {
            name: torch.empty((self.layers, *spec.shape), dtype=spec.dtype, device=self.device)
            for name, spec in self.specs.items()
        }

    def _add(self, tensors: dict[str, Tensor]) -> int:
        self._slots.append(tensors)
        self._positions.append(-1)
        return len(self._slots) - 1

    # -- positions ----------------------------------------------------------------------------------------------------

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

    # -- memory -------------------------------------------------------------------------------------------------------

    def tensor(self, name: str, layer: Layers, slot: int) -> Tensor:
        """A tensor of a slot in one layer [*shape], or in all layers [layers, *shape], as a view."""
        return self._slots[slot][name][layer]

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """Conv state, the last inputs [channels, kernel − 1] of the layer's convolution, zero-padded, as a view."""
        return self.tensor("conv", layer, slot)
