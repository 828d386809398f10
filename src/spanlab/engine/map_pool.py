"""Slots for maps of spans: stored maps in their storage form, and working maps of spans under computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spanlab.engine.affine import AffineMap
from spanlab.engine.map_forms import MapForm, StoredMap
from spanlab.engine.slot_pool import Layers, SlotPool, TensorSpec
from spanlab.engine.state_pool import StateShape


@dataclass(frozen=True)
class MapShape:
    """Shapes and types of span maps.

    `state`     shapes of a recurrent state
    `form`      storage form of A
    `dtype`     data type of the conv state
    `repaired`  number of leading tokens of every span that are recomputed; a map covers the tokens after them
    """

    state: StateShape
    form: MapForm
    dtype: torch.dtype
    repaired: int = 0


class WorkingMaps(SlotPool):
    """Maps of span prefixes in float32; columns of A that the form does not use are omitted.

    After repaired tokens the scan continues from their state, as its outputs require. The scan also transforms a copy
    of that state without writing values to it; B of the tokens after the repair is the difference of the two.
    """

    def __init__(self, shape: MapShape, device: torch.device | str, *, poison: bool = False) -> None:
        self._repairs, state = shape.repaired > 0, shape.state
        columns = state.key_dim if shape.form.carries_a else 0
        specs = {
            "written": state.state_spec(),
            "transition": TensorSpec((state.heads, state.key_dim, columns), torch.float32),
            "decay": TensorSpec((state.heads,), torch.float32),
            "conv": state.window_spec(shape.dtype),
        }
        if self._repairs:
            specs["before"] = state.state_spec()
        super().__init__(state.layers, specs, device, poison=poison)

    def clear(self, layer: Layers, slot: int) -> None:
        """Make a slot the map of no tokens, with a zero conv window."""
        super().clear(layer, slot)
        self.reset(layer, slot)

    def reset(self, layer: Layers, slot: int) -> None:
        """Make a slot the map of no tokens, A = I and B = 0; the conv window is unchanged."""
        self.tensor("written", layer, slot).zero_()
        if self._repairs:
            self.tensor("before", layer, slot).zero_()
        self._reset_transition(layer, slot)

    def _reset_transition(self, layer: Layers, slot: int) -> None:
        self.tensor("transition", layer, slot).zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        self.tensor("decay", layer, slot).fill_(1)

    def begin_after_repair(self, layer: Layers, slot: int) -> None:
        """Restart a map after the tokens that it covers, which are recomputed on reuse."""
        self.tensor("before", layer, slot).copy_(self.tensor("written", layer, slot))
        self._reset_transition(layer, slot)

    def columns(self, layer: Layers, slot: int) -> tuple[Tensor, ...]:
        """Views of the columns that a scan updates; values are written to the first tensor only."""
        names = ("written", "before", "transition") if self._repairs else ("written", "transition")
        return tuple(self.tensor(name, layer, slot) for name in names)

    def span_state(self, layer: Layers, slot: int) -> Tensor:
        """B of all tokens, including recomputed ones."""
        return self.tensor("written", layer, slot)

    def map(self, layer: Layers, slot: int) -> AffineMap:
        """The working map of one layer or of all."""
        transition, written, decay = (self.tensor(name, layer, slot) for name in ("transition", "written", "decay"))
        return AffineMap(transition, written - self.tensor("before", layer, slot) if self._repairs else written, decay)

    def load_map(self, layer: Layers, slot: int, span: AffineMap, span_state: Tensor) -> None:
        """Set a slot to a map and to `span_state`, B of all tokens; the conv window is unchanged."""
        for name, tensor in (("transition", span.transition), ("decay", span.decay), ("written", span_state)):
            self.tensor(name, layer, slot).copy_(tensor)
        if self._repairs:
            self.tensor("before", layer, slot).copy_(span_state - span.state)


class StoredMaps(SlotPool):
    """Maps in storage form: B, the conv state, and the form's representation of A.

    If leading tokens are repaired, B of all tokens is stored too.
    """

    def __init__(self, shape: MapShape, device: torch.device | str, *, poison: bool = False) -> None:
        form, state = shape.form, shape.state
        self.form, self._repairs, self._transition_specs = form, shape.repaired > 0, form.specs(state)
        specs = {"written": state.state_spec(form.dtype), "conv": state.window_spec(shape.dtype)}
        specs |= self._transition_specs
        if self._repairs:
            specs["alone"] = state.state_spec(form.dtype)
        super().__init__(state.layers, specs, device, poison=poison)

    def packed(self, span: AffineMap) -> StoredMap:
        """Convert a map to its stored form, including rounding."""
        packed = self.form.pack(span)
        tensors = {name: packed[name].to(spec.dtype) for name, spec in self._transition_specs.items()}
        return StoredMap(self.form, span.state.to(self.form.dtype), tensors)

    def write(self, layer: Layers, slot: int, span: AffineMap, span_state: Tensor) -> None:
        """Store a map and `span_state`, B of all tokens; the conv window is unchanged."""
        target, source = self.map(layer, slot), self.packed(span)
        if self._repairs:
            self.tensor("alone", layer, slot).copy_(span_state)
        target.state.copy_(source.state)
        for name, tensor in source.transition_tensors.items():
            target.transition_tensors[name].copy_(tensor)

    def map(self, layer: Layers, slot: int) -> StoredMap:
        """The stored map of one layer or of all, as views."""
        tensors = {name: self.tensor(name, layer, slot) for name in self._transition_specs}
        return StoredMap(self.form, self.tensor("written", layer, slot), tensors)

    def span_state(self, layer: Layers, slot: int) -> Tensor:
        """B of all tokens, including recomputed ones, as a view."""
        return self.tensor("alone" if self._repairs else "written", layer, slot)


class SpanMaps:
    """The maps of one engine: working maps, and maps in the policy's store."""

    def __init__(self, shape: MapShape, device: torch.device | str, *, poison: bool = False) -> None:
        self.shape = shape
        self.working = WorkingMaps(shape, device, poison=poison)
        self.stored = StoredMaps(shape, device, poison=poison)

    def store(self, layer: Layers, working: int, stored: int) -> None:
        """Write a working map to a slot of the stored maps; the conv window is not copied."""
        self.stored.write(layer, stored, self.working.map(layer, working), self.working.span_state(layer, working))

    def load_map(self, stored: int, layer: Layers, working: int) -> None:
        """Load a stored map into a working map; the conv window is not copied."""
        span_state = self.stored.span_state(layer, stored).float()
        self.working.load_map(layer, working, self.stored.map(layer, stored).to_affine(), span_state)
