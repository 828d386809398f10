"""Which slots hold the recurrent states, and the maps of spans, that the policy's store says are stored."""

from __future__ import annotations

from spanlab.core.tree import State
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.slot_pool import SlotPool
from spanlab.engine.state_pool import StatePool


class Kept:
    """Slots of a pool by state of the store; follows the states as they leave it."""

    def __init__(self, slots: SlotPool) -> None:
        self._pool = slots
        self._slots: dict[State, int] = {}

    def __contains__(self, state: State) -> bool:
        return state in self._slots

    def __getitem__(self, state: State) -> int:
        """The state's slot, which must have seen as many tokens."""
        slot = self._slots[state]
        self._pool.expect(slot, state.position)
        return slot

    def all(self) -> list[int]:
        """Every slot that holds something stored."""
        return list(self._slots.values())

    def take(self) -> int:
        """A slot for what may be stored; it is to be written whole."""
        return self._pool.take(cleared=False)

    def give(self, slot: int) -> None:
        """Give back a slot that the store has no use for."""
        self._pool.give([slot])

    def keep(self, state: State, slot: int) -> None:
        """Enter a state that has just been stored; the slot's must have seen as many tokens."""
        self._pool.expect(slot, state.position)
        self._slots[state] = slot

    def drop(self, state: State) -> None:
        """Free the slot of a state that has left; one that left before it was entered here has none."""
        if state in self._slots:
            self._pool.give([self._slots.pop(state)])


class KeptStates(Kept):
    """States at positions of ordered text, in the pool that running requests have theirs in too."""

    def __init__(self, pool: StatePool) -> None:
        super().__init__(pool)
        self.pool = pool


class KeptMaps(Kept):
    """Maps of independent spans."""

    def __init__(self, maps: SpanMaps) -> None:
        super().__init__(maps.stored)
        self.maps = maps
