"""Slots of the recurrent states and span maps in the policy's store."""

from __future__ import annotations

from spanlab.core.tree import State
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.slot_pool import SlotPool
from spanlab.engine.state_pool import StatePool


class StoredSlots:
    """Pool slots by state of the store, updated when states are stored or evicted."""

    def __init__(self, slots: SlotPool) -> None:
        self._pool = slots
        self._slots: dict[State, int] = {}

    def __contains__(self, state: State) -> bool:
        return state in self._slots

    def __getitem__(self, state: State) -> int:
        """The state's slot; its position must equal the state's."""
        slot = self._slots[state]
        self._pool.check_position(slot, state.position)
        return slot

    def all(self) -> list[int]:
        """All slots of stored states."""
        return list(self._slots.values())

    def allocate(self) -> int:
        """Allocate an uncleared slot for a state that may be stored; the caller must write all of it."""
        return self._pool.allocate(cleared=False)

    def free(self, slot: int) -> None:
        """Free a slot that the store does not need."""
        self._pool.free([slot])

    def add(self, state: State, slot: int) -> None:
        """Register the slot of a newly stored state; its position must equal the state's."""
        self._pool.check_position(slot, state.position)
        self._slots[state] = slot

    def remove(self, state: State) -> None:
        """Free the slot of an evicted state, if it was registered."""
        if state in self._slots:
            self._pool.free([self._slots.pop(state)])


class StateSlots(StoredSlots):
    """States at positions of ordered text, in the pool that running requests use too."""

    def __init__(self, pool: StatePool) -> None:
        super().__init__(pool)
        self.pool = pool


class MapSlots(StoredSlots):
    """Maps of independent spans, in the pool of stored maps."""

    def __init__(self, maps: SpanMaps) -> None:
        super().__init__(maps.stored)
        self.maps = maps
