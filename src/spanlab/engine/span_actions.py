"""Actions of a forward on maps of spans: compute them, store them, and apply them to a request's state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spanlab.engine.chunk_scan import ScanInputs
from spanlab.engine.conv_windows import SlotRef, Windows
from spanlab.engine.map_forms import StoredMap
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.recurrent import Scan
from spanlab.engine.slot_pool import Layers
from spanlab.engine.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class LoadState:
    """Copy the stored state in `source`, at `position` of the prompt, to the running state in `slot`."""

    slot: int
    source: int
    position: int

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Copy the conv window too."""
        windows.copy(SlotRef(states, self.source), SlotRef(states, self.slot))

    def run(self, states: StatePool, layer: Layers) -> None:
        """Copy the recurrent state."""
        states.recurrent(layer, self.slot).copy_(states.recurrent(layer, self.source))

    def finish(self, states: StatePool) -> None:
        """Set the slot's position."""
        states.set_position(self.slot, self.position)


@dataclass(frozen=True, slots=True)
class BeginSpan:
    """Initialise the working map in `slot`: empty, or from the stored map of `position` tokens in `source`."""

    maps: SpanMaps
    slot: int
    position: int
    source: int | None

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Start with zeros or with the stored conv window."""
        working = SlotRef(self.maps.working, self.slot)
        if self.source is None:
            windows.clear(working)
        else:
            windows.copy(SlotRef(self.maps.stored, self.source), working)

    def run(self, states: StatePool, layer: Layers) -> None:
        """Reset or load the map."""
        if self.source is None:
            self.maps.working.reset(layer, self.slot)
        else:
            self.maps.load_map(self.source, layer, self.slot)

    def finish(self, states: StatePool) -> None:
        """Set the map's position."""
        self.maps.working.set_position(self.slot, self.position)


@dataclass(frozen=True, slots=True)
class MapScan(Scan):
    """Scan rows `[start, stop)` of a forward with the working map in `slot`, from `position` of the span."""

    maps: SpanMaps
    start: int
    stop: int
    slot: int
    position: int

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Advance the conv window over the rows."""
        windows.scan(SlotRef(self.maps.working, self.slot), self.start, self.stop)

    def memory(self, states: StatePool, layer: int) -> tuple[Tensor, ...]:
        """B and A: state columns are independent, so a scan over values [v, 0] from [B, A] yields the next [B, A]."""
        return self.maps.working.columns(layer, self.slot)

    def on_stop(self, states: StatePool, layer: int, inputs: ScanInputs, after: Tensor) -> None:
        """Multiply γ by the decay of the rows."""
        decay = self.maps.working.tensor("decay", layer, self.slot)
        decay.mul_(inputs.g[self.start : self.stop].float().sum(0).exp())

    def finish(self, states: StatePool) -> None:
        """Advance the map's position."""
        self.maps.working.advance(self.slot, self.position, self.position + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class BeginAfterRepair:
    """Restart the working map in `slot`, at `position` of the span, as the map of tokens after the repaired ones."""

    maps: SpanMaps
    slot: int
    position: int

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Keep the conv window: later tokens read the inputs before them."""

    def run(self, states: StatePool, layer: Layers) -> None:
        """Restart the map of one layer."""
        self.maps.working.begin_after_repair(layer, self.slot)

    def finish(self, states: StatePool) -> None:
        """Check that the position is unchanged."""
        self.maps.working.check_position(self.slot, self.position)


@dataclass(frozen=True, slots=True)
class StoreMap:
    """Store the working map in `slot`, of `position` tokens, in `target`, and continue from the stored form.

    So the approximation of a form affects this request like later requests that reuse the span.
    """

    maps: SpanMaps
    slot: int
    position: int
    target: int

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Copy the conv window."""
        windows.copy(SlotRef(self.maps.working, self.slot), SlotRef(self.maps.stored, self.target))

    def run(self, states: StatePool, layer: Layers) -> None:
        """Pack the map, store it, and reload the working map from it."""
        self.maps.store(layer, self.slot, self.target)
        self.maps.load_map(self.target, layer, self.slot)

    def finish(self, states: StatePool) -> None:
        """Set the stored map's position."""
        self.maps.working.check_position(self.slot, self.position)
        self.maps.stored.advance(self.target, 0, self.position)


@dataclass(frozen=True, slots=True)
class ApplyMap:
    """Apply a span's map to the state in `slot`, S ← A S + B, from prompt position `start` to `stop`.

    The conv window becomes that of the span's last inputs.

    `source`    slot of a stored map, or of a working map, which is applied in the form in which it would be stored
    `repaired`  number of span tokens before `start` that the state has scanned. If maps start after repaired tokens
                and this is 0, the span begins the prompt, and the state becomes B of the whole span.
    """

    maps: SpanMaps
    slot: int
    start: int
    stop: int
    source: SlotRef
    repaired: int = 0

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Set the window to the span's last inputs, after those of repaired tokens."""
        target = SlotRef(states, self.slot)
        if self.repaired:
            windows.append(self.source, target, self.stop - self.start)
        else:
            windows.copy(self.source, target)

    def run(self, states: StatePool, layer: Layers) -> None:
        """Apply the map in one layer."""
        state = states.recurrent(layer, self.slot)
        if self.maps.shape.repaired and not self.repaired:
            state.copy_(self._span_state(layer))
        else:
            state.copy_(self._map(layer).apply(state))

    def finish(self, states: StatePool) -> None:
        """Advance the state's position."""
        if self.source.pool is self.maps.working:
            self.maps.working.check_position(self.source.slot, self.repaired + self.stop - self.start)
        states.advance(self.slot, self.start, self.stop)

    def _map(self, layer: Layers) -> StoredMap:
        pool, slot = self.source
        if pool is self.maps.stored:
            return self.maps.stored.map(layer, slot)
        return self.maps.stored.packed(self.maps.working.map(layer, slot))

    def _span_state(self, layer: Layers) -> Tensor:
        pool, slot = self.source
        if pool is self.maps.stored:
            return self.maps.stored.span_state(layer, slot)
        return self.maps.working.span_state(layer, slot).to(self.maps.stored.form.dtype)
