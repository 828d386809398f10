"""Maps of spans in numbered slots: those that are stored, in their form, and those of spans that are being computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spanlab.engine.affine import AffineMap
from spanlab.engine.map_forms import MapForm, StoredMap
from spanlab.engine.slot_pool import Layers, Part, SlotPool
from spanlab.engine.state_pool import StateShape


@dataclass(frozen=True)
class MapShape:
    """What maps of spans are made of.

    `state`     shapes of a recurrent state
    `form`      what is stored of A
    `dtype`     of the convolution's inputs
    `repaired`  tokens at the beginning of every span that are computed again: a map is of the tokens behind them
    """

    state: StateShape
    form: MapForm
    dtype: torch.dtype
    repaired: int = 0


class WorkingMaps(SlotPool):
    """Maps of the beginnings of spans in float32: exact, but for columns of A that the form has no use for.

    Behind tokens that are repaired the scan goes on from the state B that they leave, as it must for its outputs, and
    takes what becomes of that state along: B of the tokens behind them is the difference of the two.
    """

    def __init__(self, shape: MapShape, device: torch.device | str, *, poison: bool = False) -> None:
        self._repairs, state = shape.repaired > 0, shape.state
        columns = state.key_dim if shape.form.carries_a else 0
        parts = {
            "written": state.memory(),
            "transition": Part((state.heads, state.key_dim, columns), torch.float32),
            "decay": Part((state.heads,), torch.float32),
            "conv": state.window(shape.dtype),
        }
        if self._repairs:
            parts["before"] = state.memory()
        super().__init__(state.layers, parts, device, poison=poison)

    def clear(self, layer: Layers, slot: int) -> None:
        """Make it the map of no tokens, with zeros before it."""
        super().clear(layer, slot)
        self.empty(layer, slot)

    def empty(self, layer: Layers, slot: int) -> None:
        """Make it the map of no tokens, A = I and B = 0, but for its convolution's inputs."""
        self.part("written", layer, slot).zero_()
        if self._repairs:
            self.part("before", layer, slot).zero_()
        self._begin(layer, slot)

    def _begin(self, layer: Layers, slot: int) -> None:
        self.part("transition", layer, slot).zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        self.part("decay", layer, slot).fill_(1)

    def begin_behind_repair(self, layer: Layers, slot: int) -> None:
        """Make it the map of no tokens behind those that it is of."""
        self.part("before", layer, slot).copy_(self.part("written", layer, slot))
        self._begin(layer, slot)

    def columns(self, layer: Layers, slot: int) -> tuple[Tensor, ...]:
        """What runs through rows, side by side, values being written to the first alone: the memory itself."""
        names = ("written", "before", "transition") if self._repairs else ("written", "transition")
        return tuple(self.part(name, layer, slot) for name in names)

    def decay(self, layer: Layers, slot: int) -> Tensor:
        """γ of one layer or of all: the memory itself."""
        return self.part("decay", layer, slot)

    def alone(self, layer: Layers, slot: int) -> Tensor:
        """B of all tokens, those that are computed again among them."""
        return self.part("written", layer, slot)

    def map(self, layer: Layers, slot: int) -> AffineMap:
        """The map of one layer or of all."""
        transition, written, decay = (self.part(name, layer, slot) for name in ("transition", "written", "decay"))
        return AffineMap(transition, written - self.part("before", layer, slot) if self._repairs else written, decay)

    def go_on_from(self, layer: Layers, slot: int, span: AffineMap, alone: Tensor) -> None:
        """Make it a map, and B of all tokens, but for its convolution's inputs."""
        for name, tensor in (("transition", span.transition), ("decay", span.decay), ("written", alone)):
            self.part(name, layer, slot).copy_(tensor)
        if self._repairs:
            self.part("before", layer, slot).copy_(alone - span.state)

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """The span's last convolution inputs [channels, kernel], zeros where it has fewer: the memory itself."""
        return self.part("conv", layer, slot)


class StoredMaps(SlotPool):
    """Maps as they are stored: B and the convolution's inputs, and what the form keeps of A.

    Where tokens are repaired, B of all tokens is stored, too.
    """

    def __init__(self, shape: MapShape, device: torch.device | str, *, poison: bool = False) -> None:
        form, state = shape.form, shape.state
        self.form, self._repairs, self._of_a = form, shape.repaired > 0, form.parts(state)
        parts = {"written": state.memory(form.dtype), "conv": state.window(shape.dtype)} | self._of_a
        if self._repairs:
            parts["alone"] = state.memory(form.dtype)
        super().__init__(state.layers, parts, device, poison=poison)

    def packed(self, span: AffineMap) -> StoredMap:
        """A map as a slot would hold it, rounding included."""
        packed = self.form.pack(span)
        of_a = {name: packed[name].to(part.dtype) for name, part in self._of_a.items()}
        return StoredMap(self.form, span.state.to(self.form.dtype), of_a)

    def put(self, layer: Layers, slot: int, span: AffineMap, alone: Tensor) -> None:
        """Store a map, and B of all tokens where that is another, but for its convolution's inputs."""
        target, source = self.held(layer, slot), self.packed(span)
        if self._repairs:
            self.part("alone", layer, slot).copy_(alone)
        target.written.copy_(source.written)
        for name, tensor in source.of_a.items():
            target.of_a[name].copy_(tensor)

    def held(self, layer: Layers, slot: int) -> StoredMap:
        """The map of one layer or of all: the memory itself."""
        of_a = {name: self.part(name, layer, slot) for name in self._of_a}
        return StoredMap(self.form, self.part("written", layer, slot), of_a)

    def alone(self, layer: Layers, slot: int) -> Tensor:
        """B of all tokens, those that are computed again among them: the memory itself."""
        return self.part("alone" if self._repairs else "written", layer, slot)

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """The span's last convolution inputs [channels, kernel], zeros where it has fewer: the memory itself."""
        return self.part("conv", layer, slot)


class SpanMaps:
    """The maps of one engine: those being computed, and those of its policy's store."""

    def __init__(self, shape: MapShape, device: torch.device | str, *, poison: bool = False) -> None:
        self.shape = shape
        self.working = WorkingMaps(shape, device, poison=poison)
        self.stored = StoredMaps(shape, device, poison=poison)

    def store(self, layer: Layers, working: int, stored: int) -> None:
        """Put a working map, in its form, into a slot of stored ones, but for its convolution's inputs."""
        self.stored.put(layer, stored, self.working.map(layer, working), self.working.alone(layer, working))

    def go_on_from(self, stored: int, layer: Layers, working: int) -> None:
        """Make a working map one that is stored, but for its convolution's inputs."""
        alone = self.stored.alone(layer, stored).float()
        self.working.go_on_from(layer, working, self.stored.held(layer, stored).unpacked(), alone)
