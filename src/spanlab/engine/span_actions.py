"""What a forward does with the maps of spans: compute them, store them, and fold them into a request's state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spanlab.engine.map_forms import StoredMap
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.recurrent import MapCache, Scan
from spanlab.engine.slot_pool import Layers
from spanlab.engine.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class LoadState:
    """The state in `slot` becomes a copy of the stored one in `source`, and stands at `position` of its prompt."""

    slot: int
    source: int
    position: int

    def run(self, states: StatePool, layer: Layers, scan: Scan) -> None:
        """Copy."""
        states.copy(layer, self.source, self.slot)

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

    def run(self, states: StatePool, layer: Layers, scan: Scan) -> None:
        """Clear or copy."""
        if self.source is None:
            self.maps.working.clear(layer, self.slot)
        else:
            self.maps.go_on_from(self.source, layer, self.slot)

    def done(self, states: StatePool) -> None:
        """Note what the map is of."""
        self.maps.working.set(self.slot, self.position)


@dataclass(frozen=True, slots=True)
class SpanPiece:
    """Rows `[start, stop)` of a forward, over which the working map in `slot` goes on; it is of `position` tokens."""

    maps: SpanMaps
    start: int
    stop: int
    slot: int
    position: int

    def run(self, states: StatePool, layer: Layers, scan: Scan) -> None:
        """Scan the rows, A included."""
        working = self.maps.working
        scan(self.start, self.stop, MapCache(working.map(layer, self.slot)[None], working.conv(layer, self.slot)[None]))

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

    def run(self, states: StatePool, layer: Layers, scan: Scan) -> None:
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

    def run(self, states: StatePool, layer: Layers, scan: Scan) -> None:
        """Apply the map."""
        span, conv = self._read(layer)
        state = states.recurrent(layer, self.slot)
        state.copy_(span.apply(state))
        states.conv(layer, self.slot).copy_(conv)

    def done(self, states: StatePool) -> None:
        """Move the state's position on."""
        if self.working is not None:
            self.maps.working.expect(self.working, self.stop - self.start)
        states.reach(self.slot, self.start, self.stop)

    def _read(self, layer: Layers) -> tuple[StoredMap, Tensor]:
        maps = self.maps
        if self.stored is not None:
            return maps.stored.held(layer, self.stored), maps.stored.conv(layer, self.stored)
        assert self.working is not None, "a span has a map"
        return maps.stored.packed(maps.working.map(layer, self.working)), maps.working.conv(layer, self.working)
