"""What a forward does with the maps of spans: compute them, store them, and fold them into a request's state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spanlab.engine.chunk_scan import ScanInputs
from spanlab.engine.conv_windows import Place, Windows
from spanlab.engine.map_forms import StoredMap
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.recurrent import Scan
from spanlab.engine.slot_pool import Layers
from spanlab.engine.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class LoadState:
    """The state in `slot` becomes a copy of the stored one in `source`, and stands at `position` of its prompt."""

    slot: int
    source: int
    position: int

    def note(self, states: StatePool, windows: Windows) -> None:
        """They are copied too."""
        windows.copy(Place(states, self.source), Place(states, self.slot))

    def run(self, states: StatePool, layer: Layers) -> None:
        """Copy."""
        states.recurrent(layer, self.slot).copy_(states.recurrent(layer, self.source))

    def done(self, states: StatePool) -> None:
        """Note where it stands."""
        states.set(self.slot, self.position)


@dataclass(frozen=True, slots=True)
class BeginSpan:
    """The working map in `slot` becomes that of no tokens, or of the first `position`, stored in `source`."""

    maps: SpanMaps
    slot: int
    position: int
    source: int | None

    def note(self, states: StatePool, windows: Windows) -> None:
        """A span is computed as if nothing stood before it."""
        working = Place(self.maps.working, self.slot)
        if self.source is None:
            windows.clear(working)
        else:
            windows.copy(Place(self.maps.stored, self.source), working)

    def run(self, states: StatePool, layer: Layers) -> None:
        """Clear or copy."""
        if self.source is None:
            self.maps.working.empty(layer, self.slot)
        else:
            self.maps.go_on_from(self.source, layer, self.slot)

    def done(self, states: StatePool) -> None:
        """Note what the map is of."""
        self.maps.working.set(self.slot, self.position)


@dataclass(frozen=True, slots=True)
class SpanPiece(Scan):
    """Rows `[start, stop)` of a forward, over which the working map in `slot` goes on; it is of `position` tokens."""

    maps: SpanMaps
    start: int
    stop: int
    slot: int
    position: int

    def note(self, states: StatePool, windows: Windows) -> None:
        """The last inputs are those of the rows."""
        windows.scan(Place(self.maps.working, self.slot), self.start, self.stop)

    def memory(self, states: StatePool, layer: int) -> tuple[Tensor, ...]:
        """B and A: columns of a state do not mix, so a scan over values [v, 0] from [B, A] ends in the next [B, A]."""
        working = self.maps.working.map(layer, self.slot)
        return working.state, working.transition

    def reached(self, states: StatePool, layer: int, inputs: ScanInputs, after: Tensor) -> None:
        """Forget as much as every row does."""
        decay = self.maps.working.map(layer, self.slot).decay
        decay.mul_(inputs.g[self.start : self.stop].float().sum(0).exp())

    def done(self, states: StatePool) -> None:
        """Move the map's position on."""
        self.maps.working.reach(self.slot, self.position, self.position + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class StoreMap:
    """The stored map `keep` gets the working map in `slot`, of `position` tokens, which goes on from what is stored.

    So what a form leaves out is missing here as it is for whoever reuses the span.
    """

    maps: SpanMaps
    slot: int
    position: int
    keep: int

    def note(self, states: StatePool, windows: Windows) -> None:
        """They are stored as they are."""
        windows.copy(Place(self.maps.working, self.slot), Place(self.maps.stored, self.keep))

    def run(self, states: StatePool, layer: Layers) -> None:
        """Pack and unpack."""
        self.maps.store(layer, self.slot, self.keep)
        self.maps.go_on_from(self.keep, layer, self.slot)

    def done(self, states: StatePool) -> None:
        """Note what the stored map is of."""
        self.maps.working.expect(self.slot, self.position)
        self.maps.stored.reach(self.keep, 0, self.position)


@dataclass(frozen=True, slots=True)
class Fold:
    """The state in `slot`, at `start` of its prompt, becomes S ← A S + B, at `stop`; convolutions see the span's tail.

    `stored`   the map's slot if it was stored
    `working`  its slot if it has just been computed; it is folded in the form that it would be stored in
    """

    maps: SpanMaps
    slot: int
    start: int
    stop: int
    stored: int | None = None
    working: int | None = None

    def note(self, states: StatePool, windows: Windows) -> None:
        """They are the span's."""
        windows.copy(self._place(), Place(states, self.slot))

    def run(self, states: StatePool, layer: Layers) -> None:
        """Apply the map."""
        state = states.recurrent(layer, self.slot)
        state.copy_(self._map(layer).apply(state))

    def done(self, states: StatePool) -> None:
        """Move the state's position on."""
        if self.working is not None:
            self.maps.working.expect(self.working, self.stop - self.start)
        states.reach(self.slot, self.start, self.stop)

    def _place(self) -> Place:
        if self.stored is not None:
            return Place(self.maps.stored, self.stored)
        assert self.working is not None, "a span has a map"
        return Place(self.maps.working, self.working)

    def _map(self, layer: Layers) -> StoredMap:
        pool, slot = self._place()
        if pool is self.maps.stored:
            return self.maps.stored.held(layer, slot)
        return self.maps.stored.packed(self.maps.working.map(layer, slot))
