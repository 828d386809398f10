"""The recurrent layers' part of an engine: pools of states and maps, and what the policy's store keeps in them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from spanlab.core.reuse import TreeAllocation
from spanlab.core.tree import State
from spanlab.engine.kept_states import KeptMaps, KeptStates
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.recurrent import Action, Recurrence, run_at_once
from spanlab.engine.running_state import RunningState, StateRows
from spanlab.engine.state_pool import StatePool


class Memory:
    """States, and maps of spans where the policy's rules have any."""

    def __init__(self, states: StatePool, maps: SpanMaps | None) -> None:
        self.states = KeptStates(states)
        self.maps = None if maps is None else KeptMaps(maps)
        self._last: Recurrence | None = None

    def begin(self, allocation: TreeAllocation) -> RunningState:
        """The state of a request that has just been admitted."""
        return RunningState(allocation, self.states, self.maps)

    def drop(self, state: State) -> None:
        """Follow a state, or a map, out of the store."""
        self.states.drop(state)
        if self.maps is not None:
            self.maps.drop(state)

    def load(self, state: RunningState, cache_span: int) -> None:
        """Load and compose what a cache span's rows begin with, where no rows of the same forward come before."""
        run_at_once(state.enter(cache_span), self.states.pool)

    def recurrence(self, packed: Iterable[tuple[RunningState, StateRows]], device: torch.device) -> Recurrence:
        """What the recurrent layers do with rows that are packed in this order."""
        sequences: dict[RunningState, list[Action]] = {}
        row = 0
        for state, rows in packed:
            sequences.setdefault(state, []).extend(state.actions(rows, row))
            row += rows.stop - rows.start
        actions = list(sequences.values())
        again = None if self._last is None else self._last.again(actions)
        self._last = again or Recurrence(self.states.pool, actions, device)
        return self._last
