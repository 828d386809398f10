"""Recurrent states in numbered slots: what the recurrent layers hold after a prefix of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


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


class StatePool:
    """States of all recurrent layers by slot; slots are made when they are first needed, and used again.

    The recurrent part is float32 whatever the model computes in, the convolution's part is the model's own `dtype`.
    Every slot knows how many tokens its state has seen, so that no state can stand for a prefix of another length.
    With `poison` a slot holds NaN until it is cleared or copied into, and again once it is free.
    """

    def __init__(
        self, shape: StateShape, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.shape, self.poison = shape, poison
        self._dtype, self._device = dtype, device
        self._recurrent: list[Tensor] = []
        self._conv: list[Tensor] = []
        self._positions: list[int] = []
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Slots that somebody holds."""
        return len(self._positions) - len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, as its tensors count them."""
        shape = self.shape
        recurrent = shape.layers * shape.heads * shape.key_dim * shape.value_dim * torch.float32.itemsize
        return recurrent + shape.layers * shape.channels * shape.kernel * self._dtype.itemsize

    # -- who holds what -----------------------------------------------------------------------------------------------

    def take(self, *, cleared: bool = True) -> int:
        """A slot: the state of an empty prefix, or if not `cleared` whatever lies there, to be written whole."""
        slot = self._free.pop() if self._free else self._make()
        if cleared:
            self._recurrent[slot].zero_()
            self._conv[slot].zero_()
        self._positions[slot] = 0
        return slot

    def copy_of(self, slot: int, position: int) -> int:
        """A new slot with the state of another, which must have seen `position` tokens."""
        self.expect(slot, position)
        taken = self.take(cleared=False)
        self._recurrent[taken].copy_(self._recurrent[slot])
        self._conv[taken].copy_(self._conv[slot])
        self._positions[taken] = position
        return taken

    def give(self, slots: Iterable[int]) -> None:
        """Give slots back."""
        for slot in slots:
            assert self._positions[slot] >= 0, "a slot was given back twice"
            self._positions[slot] = -1
            self._free.append(slot)
            if self.poison:
                self._recurrent[slot].fill_(torch.nan)
                self._conv[slot].fill_(torch.nan)

    def _make(self) -> int:
        shape = self.shape
        matrix = (shape.layers, shape.heads, shape.key_dim, shape.value_dim)
        window = (shape.layers, shape.channels, shape.kernel)
        self._recurrent.append(torch.empty(matrix, dtype=torch.float32, device=self._device))
        self._conv.append(torch.empty(window, dtype=self._dtype, device=self._device))
        self._positions.append(-1)
        return len(self._positions) - 1

    # -- which prefix they stand for ----------------------------------------------------------------------------------

    def expect(self, slot: int, position: int) -> None:
        """Refuse a state that has not seen just so many tokens."""
        seen = self._positions[slot]
        assert seen == position, f"a state of {seen} tokens was taken for one of {position}"

    def reach(self, slot: int, start: int, stop: int) -> None:
        """Note that the state of `start` tokens has gone on to `stop`."""
        self.expect(slot, start)
        self._positions[slot] = stop

    # -- what lies where ----------------------------------------------------------------------------------------------

    def recurrent(self, layer: int, slot: int) -> Tensor:
        """A recurrent layer's state, float32 [heads, key_dim, value_dim]: the memory itself."""
        return self._recurrent[slot][layer]

    def conv(self, layer: int, slot: int) -> Tensor:
        """A recurrent layer's last convolution inputs [channels, kernel]: the memory itself."""
        return self._conv[slot][layer]
