"""The recurrent layers' part of an engine: pools of states and maps, and what the policy's store keeps in them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from spanlab.core.reuse import TreeAllocation
from spanlab.core.tree import State
from spanlab.engine.decode_recurrence import DecodeRecurrence
from spanlab.engine.kept_states import KeptMaps, KeptStates
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.mixer_calls import LayeredRows
from spanlab.engine.recurrent import Action, Piece, Recurrence, run_at_once
from spanlab.engine.running_state import RunningState, StateRows
from spanlab.engine.state_pool import StatePool
from spanlab_kernels.attention import Send, to_device


class Memory:
    """States, and maps of spans where the policy's rules have any."""

    def __init__(self, states: StatePool, maps: SpanMaps | None) -> None:
        self.states = KeptStates(states)
        self.maps = None if maps is None else KeptMaps(maps)
        self._last: LayeredRows | None = None

    @property
    def room(self) -> int:
        """Rows of the slab of states that run, which moves when there are more of them."""
        return self.states.pool.slab.rows

    def begin(self, allocation: TreeAllocation) -> RunningState:
        """The state of a request that has just been admitted."""
        return RunningState(allocation, self.states, self.maps)

    def drop(self, state: State) -> None:
        """Follow a state, or a map, out of the store."""
        self.states.drop(state)
        if self.maps is not None:
            self.maps.drop(state)

    def load(self, state: RunningState, rows: StateRows) -> None:
        """Load and compose what these rows begin with, where no rows of the same forward come before."""
        run_at_once(state.enter(rows), self.states.pool)

    def recurrence(
        self, packed: Iterable[tuple[RunningState, StateRows]], device: torch.device, send: Send = to_device
    ) -> LayeredRows:
        """What the recurrent layers do with rows that are packed in this order; `send` may bring numbers later."""
        sequences: dict[RunningState, list[Action]] = {}
        row = 0
        for state, rows in packed:
            sequences.setdefault(state, []).extend(state.actions(rows, row))
            row += rows.stop - rows.start
        self._last = Recurrence(self.states.pool, list(sequences.values()), device, send)
        return self._last

    def decodes(
        self, packed: Iterable[tuple[RunningState, StateRows]], rows: int, device: torch.device, send: Send = to_device
    ) -> LayeredRows:
        """The same where each state runs through one row; of `rows` in all, those behind are of no request."""
        actions = [action for row, (state, each) in enumerate(packed) for action in state.actions(each, row)]
        pieces = [action for action in actions if isinstance(action, Piece)]
        assert len(pieces) == len(actions), "what decodes is in its text already"
        self._last = DecodeRecurrence(self.states.pool, pieces, rows, device, send)
        return self._last

    def done(self) -> None:
        """Note what every state has seen, once all layers of the last recurrence have run."""
        assert self._last is not None, "a forward has a recurrence"
        self._last.done()
