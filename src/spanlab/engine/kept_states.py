"""Which slots hold the recurrent states that are stored, and those that a running request has and takes."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.reuse import TreeAllocation
from spanlab.core.tree import State
from spanlab.engine.recurrent import Piece
from spanlab.engine.state_pool import StatePool


class KeptStates:
    """Slots by state of the policy's store; follows the states as they leave it."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self._slots: dict[State, int] = {}

    def __contains__(self, state: State) -> bool:
        return state in self._slots

    def __getitem__(self, state: State) -> int:
        return self._slots[state]

    def all(self) -> list[int]:
        """Every slot that holds something stored."""
        return list(self._slots.values())

    def keep(self, state: State, slot: int) -> None:
        """Enter a state that has just been stored; the slot's must have seen as many tokens."""
        self.pool.expect(slot, state.position)
        self._slots[state] = slot

    def drop(self, state: State) -> None:
        """Free the slot of a state that has left; one that left before it was entered here has none."""
        if state in self._slots:
            self.pool.give([self._slots.pop(state)])


class RunningState:
    """The recurrent state of one admitted request, from where it resumes, and the copies that its prefill takes."""

    def __init__(self, allocation: TreeAllocation, kept: KeptStates) -> None:
        self._allocation, self._kept = allocation, kept
        resumed, start = next(iter(allocation.states), None), allocation.plan.resume
        self._slot = kept.pool.take() if resumed is None else kept.pool.copy_of(kept[resumed], start)
        self._taken: dict[int, int] = {}  # by position; not stored yet

    def pieces(self, start: int, stop: int, captures: Sequence[int], row: int) -> list[Piece]:
        """Tokens `[start, stop)`, the first of which is `row` of the forward, cut where a state is to be kept."""
        found, at = [], start
        for position in captures:
            self._taken[position] = self._kept.pool.take(cleared=False)
            found.append(Piece(row + at - start, row + position - start, self._slot, at, self._taken[position]))
            at = position
        return [*found, Piece(row + at - start, row + stop - start, self._slot, at)] if at < stop else found

    def adopt(self) -> None:
        """Hand over what has been stored since; a state that the store had already, or did not take, is given back."""
        stored = {state.position: state for node in self._allocation.nodes[0].path() for state in node.states}
        for position in [position for position in self._taken if position not in self._allocation.captures]:
            slot, state = self._taken.pop(position), stored.get(position)
            if state is None or state in self._kept:
                self._kept.pool.give([slot])
            else:
                self._kept.keep(state, slot)

    def leave(self) -> None:
        """Give back everything that is the request's own."""
        self._kept.pool.give([self._slot, *self._taken.values()])
