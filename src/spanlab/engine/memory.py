"""Memory of the recurrent layers of an engine: pools of states and maps, and the slots of stored ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from spanlab.core.reuse import TreeAllocation
from spanlab.core.tree import State
from spanlab.engine.decode_recurrence import DecodeRecurrence
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.mixer_calls import LayeredRows
from spanlab.engine.recurrent import Action, Recurrence, StateScan, run_changes
from spanlab.engine.running_state import RunningState, StateRows
from spanlab.engine.state_pool import StatePool
from spanlab.engine.stored_slots import MapSlots, StateSlots
from spanlab_kernels.attention import Send


class Memory:
    """States, and maps of spans if the policy's rules use them."""

    def __init__(self, states: StatePool, maps: SpanMaps | None) -> None:
        self.states = StateSlots(states)
        self.maps = None if maps is None else MapSlots(maps)
        self._last: LayeredRows | None = None

    @property
    def slab_rows(self) -> int:
        """Rows of the slab of running states; the slab's address changes with this number."""
        return self.states.pool.slab.rows

    def begin(self, allocation: TreeAllocation) -> RunningState:
        """Create the running state of an admitted request."""
        return RunningState(allocation, self.states, self.maps)

    def drop(self, state: State) -> None:
        """Free the slot of a state or map that the store evicted."""
        self.states.remove(state)
        if self.maps is not None:
            self.maps.remove(state)

    def load(self, state: RunningState, rows: StateRows) -> None:
        """Load states and apply maps before these rows; no rows of the state may precede them in the same forward."""
        run_changes(state.enter(rows), self.states.pool)

    def recurrence(
        self,
        packed: Iterable[tuple[RunningState, StateRows]],
        device: torch.device,
        send: Send,
        decode_rows: int | None = None,
    ) -> LayeredRows:
        """Build the recurrent layers' computation for rows packed in this order; `send` may copy indexes later.

        `decode_rows`  number of rows of a decode-only forward, one per state; further rows are padding
        """
        sequences: dict[RunningState, list[Action]] = {}
        row = 0
        for state, rows in packed:
            sequences.setdefault(state, []).extend(state.actions(rows, row))
            row += rows.stop - rows.start
        if decode_rows is None:
            self._last = Recurrence(self.states.pool, list(sequences.values()), device, send)
        else:
            actions = list(chain.from_iterable(sequences.values()))
            scans = [action for action in actions if isinstance(action, StateScan)]
            assert len(scans) == len(actions), "a decode has no loads or map applications"
            self._last = DecodeRecurrence(self.states.pool, scans, decode_rows, device, send)
        return self._last

    def finish(self) -> None:
        """Update slot positions after all layers of the last recurrence have run."""
        assert self._last is not None, "a forward has a recurrence"
        self._last.finish()
