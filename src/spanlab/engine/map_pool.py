"""Maps of spans in numbered slots: those that are stored, in their form, and those of spans that are being computed."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab.engine.affine import AffineMap
from spanlab.engine.map_forms import MapForm, StoredMap
from spanlab.engine.slot_pool import Layers, Part, SlotPool
from spanlab.engine.state_pool import StateShape


class WorkingMaps(SlotPool):
    """Maps of the beginnings of spans in float32: exact, but for columns of A that the form has no use for."""

    def __init__(
        self, shape: StateShape, form: MapForm, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        columns = shape.key_dim if form.carries_a else 0
        parts = {
            "written": shape.memory(),
            "transition": Part((shape.heads, shape.key_dim, columns), torch.float32),
            "decay": Part((shape.heads,), torch.float32),
            "conv": shape.window(dtype),
        }
        super().__init__(shape.layers, parts, device, poison=poison)

    def clear(self, layer: Layers, slot: int) -> None:
        """Make it the map of no tokens, with zeros before it."""
        super().clear(layer, slot)
        self.empty(layer, slot)

    def empty(self, layer: Layers, slot: int) -> None:
        """Make it the map of no tokens, A = I and B = 0, but for its convolution's inputs."""
        self.part("written", layer, slot).zero_()
        self.part("transition", layer, slot).zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        self.part("decay", layer, slot).fill_(1)

    def map(self, layer: Layers, slot: int) -> AffineMap:
        """The map of one layer or of all: the memory itself."""
        return AffineMap(*(self.part(name, layer, slot) for name in ("transition", "written", "decay")))

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """The span's last convolution inputs [channels, kernel], zeros where it has fewer: the memory itself."""
        return self.part("conv", layer, slot)


class StoredMaps(SlotPool):
    """Maps as they are stored: B and the convolution's inputs, and what the form keeps of A."""

    def __init__(
        self, shape: StateShape, form: MapForm, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.form, self._of_a = form, form.parts(shape)
        parts = {"written": shape.memory(form.dtype), "conv": shape.window(dtype)} | self._of_a
        super().__init__(shape.layers, parts, device, poison=poison)

    def packed(self, span: AffineMap) -> StoredMap:
        """A map as a slot would hold it, rounding included."""
        packed = self.form.pack(span)
        of_a = {name: packed[name].to(part.dtype) for name, part in self._of_a.items()}
        return StoredMap(self.form, span.state.to(self.form.dtype), of_a)

    def put(self, layer: Layers, slot: int, span: AffineMap) -> None:
        """Store a map, but for its convolution's inputs."""
        target, source = self.held(layer, slot), self.packed(span)
        target.written.copy_(source.written)
        for name, tensor in source.of_a.items():
            target.of_a[name].copy_(tensor)

    def held(self, layer: Layers, slot: int) -> StoredMap:
        """The map of one layer or of all: the memory itself."""
        of_a = {name: self.part(name, layer, slot) for name in self._of_a}
        return StoredMap(self.form, self.part("written", layer, slot), of_a)

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """The span's last convolution inputs [channels, kernel], zeros where it has fewer: the memory itself."""
        return self.part("conv", layer, slot)


class SpanMaps:
    """The maps of one engine: those being computed, and those of its policy's store."""

    def __init__(
        self, shape: StateShape, form: MapForm, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.working = WorkingMaps(shape, form, dtype, device, poison=poison)
        self.stored = StoredMaps(shape, form, dtype, device, poison=poison)

    def store(self, layer: Layers, working: int, stored: int) -> None:
        """Put a working map, in its form, into a slot of stored ones, but for its convolution's inputs."""
        self.stored.put(layer, stored, self.working.map(layer, working))

    def go_on_from(self, stored: int, layer: Layers, working: int) -> None:
        """Make a working map one that is stored, but for its convolution's inputs."""
        self.working.map(layer, working).copy_(self.stored.held(layer, stored).unpacked())
