"""Tensors of all recurrent layers in numbered slots, each of which knows how many tokens it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Layers = int | slice
"""One recurrent layer, or `ALL` of them."""

ALL = slice(None)


class Part(NamedTuple):
    """What a slot holds of every layer: `shape` without the layers."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SlotPool:
    """Slots of the same parts [layers, …]; they are made when they are first needed, and used again.

    Every slot knows how many tokens it has seen, so that none can stand for a stretch of another length.
    With `poison` a slot holds NaN until it is cleared or copied into, and again once it is free.
    """

    def __init__(
        self, layers: int, parts: Mapping[str, Part], device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.layers, self.parts, self.poison = layers, dict(parts), poison
        self.device = torch.device(device)
        self._slots: list[dict[str, Tensor]] = []
        self._positions: list[int] = []
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Slots that somebody holds."""
        return sum(position >= 0 for position in self._positions)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, as its tensors count them."""
        return self.layers * sum(prod(part.shape) * part.dtype.itemsize for part in self.parts.values())

    # -- who holds what -----------------------------------------------------------------------------------------------

    def take(self, *, cleared: bool = True) -> int:
        """A slot that has seen nothing, or if not `cleared` whatever lies there, to be written whole."""
        return self._taken(self._free.pop() if self._free else self._add(self._make()), cleared=cleared)

    def clear(self, layer: Layers, slot: int) -> None:
        """Make a slot, or one layer of it, that of nothing: zeros."""
        for name in self.parts:
            self.part(name, layer, slot).zero_()

    def copy(self, layer: Layers, source: int, target: int) -> None:
        """Copy a slot, or one layer of it, to another; positions are left to the caller."""
        for name in self.parts:
            self.part(name, layer, target).copy_(self.part(name, layer, source))

    def give(self, slots: Iterable[int]) -> None:
        """Give slots back."""
        for slot in slots:
            assert self._positions[slot] >= 0, "a slot was given back twice"
            self._positions[slot] = -1
            self._waiting(slot).append(slot)
            if self.poison:
                for name in self.parts:
                    self.part(name, ALL, slot).fill_(torch.nan)

    def _waiting(self, slot: int) -> list[int]:
        """Where a slot waits until it is used again."""
        return self._free

    def _taken(self, slot: int, *, cleared: bool) -> int:
        if cleared:
            self.clear(ALL, slot)
        self._positions[slot] = 0
        return slot

    def _make(self) -> dict[str, Tensor]:
        return {
            name: torch.empty((self.layers, *part.shape), dtype=part.dtype, device=self.device)
            for name, part in self.parts.items()
        }

    def _add(self, made: dict[str, Tensor]) -> int:
        self._slots.append(made)
        self._positions.append(-1)
        return len(self._slots) - 1

    # -- which tokens they stand for ----------------------------------------------------------------------------------

    def expect(self, slot: int, position: int) -> None:
        """Refuse a slot that has not seen just so many tokens."""
        seen = self._positions[slot]
        assert seen == position, f"a state of {seen} tokens was taken for one of {position}"

    def reach(self, slot: int, start: int, stop: int) -> None:
        """Note that what had seen `start` tokens has gone on to `stop`."""
        self.expect(slot, start)
        self._positions[slot] = stop

    def set(self, slot: int, position: int) -> None:
        """Note that a slot now stands for `position` tokens, whatever it stood for."""
        assert self._positions[slot] >= 0, "a free slot was written"
        self._positions[slot] = position

    # -- what lies where ----------------------------------------------------------------------------------------------

    def part(self, name: str, layer: Layers, slot: int) -> Tensor:
        """A part of a slot in one layer [*shape], or in all [layers, *shape]: the memory itself."""
        return self._slots[slot][name][layer]
