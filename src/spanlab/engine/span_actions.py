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
    """Rows `[start, stop)` of a forward, over which the working map in `slot` goes on, from `position` of the span."""

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
        return self.maps.working.columns(layer, self.slot)

    def reached(self, states: StatePool, layer: int, inputs: ScanInputs, after: Tensor) -> None:
        """Forget as much as every row does."""
        decay = self.maps.working.decay(layer, self.slot)
        decay.mul_(inputs.g[self.start : self.stop].float().sum(0).exp())

    def done(self, states: StatePool) -> None:
        """Move the map's position on."""
        self.maps.working.reach(self.slot, self.position, self.position + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class BeginBehindRepair:
    """The working map in `slot`, at `position` of the span, becomes that of what follows what is repaired."""

    maps: SpanMaps
    slot: int
    position: int

    def note(self, states: StatePool, windows: Windows) -> None:
        """What follows sees the inputs before it."""

    def run(self, states: StatePool, layer: Layers) -> None:
        """Begin."""
        self.maps.working.begin_behind_repair(layer, self.slot)

    def done(self, states: StatePool) -> None:
        """Its position stays."""
        self.maps.working.expect(self.slot, self.position)


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

    `stored`    the map's slot if it was stored
    `working`   its slot if it has just been computed; it is folded in the form that it would be stored in
    `repaired`  tokens of the span before `start`, which the state has run through; where maps are of what follows
                such tokens and there are none, the span begins the prompt, and the state is what it leaves alone
    """

    maps: SpanMaps
    slot: int
    start: int
    stop: int
    stored: int | None = None
    working: int | None = None
    repaired: int = 0

    def note(self, states: StatePool, windows: Windows) -> None:
        """They are the span's, behind those of tokens that were computed again."""
        target = Place(states, self.slot)
        if self.repaired:
            windows.follow(self._place(), target, self.stop - self.start)
        else:
            windows.copy(self._place(), target)

    def run(self, states: StatePool, layer: Layers) -> None:
        """Apply the map."""
        state = states.recurrent(layer, self.slot)
        if self.maps.shape.repaired and not self.repaired:
            state.copy_(self._alone(layer))
        else:
            state.copy_(self._map(layer).apply(state))

    def done(self, states: StatePool) -> None:
        """Move the state's position on."""
        if self.working is not None:
            self.maps.working.expect(self.working, self.repaired + self.stop - self.start)
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

    def _alone(self, layer: Layers) -> Tensor:
        if self.stored is not None:
            return self.maps.stored.alone(layer, self.stored)
        assert self.working is not None, "a span has a map"
        return self.maps.working.alone(layer, self.working).to(self.maps.stored.form.dtype)
