"""States of recurrent layers in memory: stored slots, actions on spans, and running states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from spanlab.core.plan import CacheSpanPlan, TreeAllocation
from spanlab.core.step import ScheduledChunk, is_repair
from spanlab.core.tree import State
from spanlab.engine.maps import SpanMaps
from spanlab.engine.recurrent import (
    Action,
    DecodeRecurrence,
    LayeredRows,
    Recurrence,
    Scan,
    SlotRef,
    StateScan,
    Windows,
    run_changes,
)
from spanlab.engine.scan import ScanInputs
from spanlab.engine.slots import Layers, SlotPool, StatePool
from spanlab_kernels.attention.batch import Send

# ------------------------------------------------------------------------------
# Slots of the recurrent states and span maps in the policy's store.
# ------------------------------------------------------------------------------


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
        """Allocate an uncleared slot for a state that may be stored; the caller must write all of
        it."""
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


# ------------------------------------------------------------------------------
# Actions of a forward on maps of spans: compute them, store them, and apply them to a request's
# state.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadState:
    """Copy the stored state in `source`, at `position` of the prompt, to the running state in
    `slot`."""

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
    """Initialise the working map in `slot`: empty, or from the stored map of `position` tokens in
    `source`."""

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
    """Scan rows `[start, stop)` of a forward with the working map in `slot`, from `position` of the
    span."""

    maps: SpanMaps
    start: int
    stop: int
    slot: int
    position: int

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Advance the conv window over the rows."""
        windows.scan(SlotRef(self.maps.working, self.slot), self.start, self.stop)

    def memory(self, states: StatePool, layer: int) -> tuple[Tensor, ...]:
        """B and A: state columns are independent, so a scan over values [v, 0] from [B, A] yields
        the next [B, A]."""
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
    """Restart the working map in `slot`, at `position` of the span, as the map of tokens after the
    repaired ones."""

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
    """Store the working map in `slot`, of `position` tokens, in `target`, and continue from the
    stored form.

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
    """Apply a span's map to the state in `slot`, S ← A S + B, from prompt position `start` to
    `stop`.

    The conv window becomes that of the span's last inputs.

    `source`    slot of a stored map, or of a working map, which is applied in the form in which it
                would be stored
    `repaired`  number of span tokens before `start` that the state has scanned. If maps start after
                repaired tokens and this is 0, the span begins the prompt, and the state becomes B
                of the whole span.
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
        state, (pool, slot) = states.recurrent(layer, self.slot), self.source
        stored, working = self.maps.stored, self.maps.working
        if self.maps.shape.repaired and not self.repaired:
            if pool is stored:
                state.copy_(stored.span_state(layer, slot))
            else:
                state.copy_(working.span_state(layer, slot).to(stored.form.dtype))
        else:
            applied = (
                stored.map(layer, slot)
                if pool is stored
                else stored.packed(working.map(layer, slot))
            )
            state.copy_(applied.apply(state))

    def finish(self, states: StatePool) -> None:
        """Advance the state's position."""
        if self.source.pool is self.maps.working:
            self.maps.working.check_position(
                self.source.slot, self.repaired + self.stop - self.start
            )
        states.advance(self.slot, self.start, self.stop)


# ------------------------------------------------------------------------------
# The recurrent state of one admitted request: scans over ordered text, and application of span
# maps.
# ------------------------------------------------------------------------------


class StateRows(NamedTuple):
    """Prompt or output tokens `[start, stop)` of a cache span, computed in one forward.

    `captures`  positions in (start, stop], increasing, at which a state or map is captured
    `again`     span tokens that are recomputed with the full prompt visible
    """

    cache_span: int
    start: int
    stop: int
    captures: Sequence[int]
    again: bool = False


def state_rows(chunk: ScheduledChunk) -> list[StateRows]:
    """Contiguous token ranges of a chunk for the recurrent layers, in row order."""
    allocation, ranges = chunk.sequence.allocation, []
    assert allocation is not None, "a scheduled sequence has an allocation"
    for index, start, stop in chunk.work.runs(allocation.plan, chunk.start, chunk.stop):
        captures = [position for position in chunk.captures if start < position <= stop]
        again = is_repair(chunk) and allocation.plan.cache_spans[index].cache_span.independent
        ranges.append(StateRows(index, start, stop, captures, again))
    return ranges


class _ScanRange(NamedTuple):
    """Tokens `[start, stop)` of a cache span that begins at prompt position `origin`; `row` is
    their first row.

    `captured`  whether the state or map at `stop` is captured
    """

    cache_span: int
    origin: int
    start: int
    stop: int
    row: int
    captured: bool


class PendingSlot(NamedTuple):
    """A captured state or map of a cache span that is not stored yet; `slots` is the collection for
    its slot."""

    cache_span: int
    slots: StoredSlots
    slot: int


class RunningState:
    """The running state of a request from its resume point, and the states and maps that its
    prefill captures.

    Cache spans are processed in prompt order. Ordered text advances the state; an independent span
    has a stored or computed map, which is applied when the next cache span is entered. So one
    working map suffices. If a repair recomputes a span's first tokens, the state scans them, and
    the map of the remaining tokens is applied after them.
    """

    def __init__(
        self, allocation: TreeAllocation, states: StateSlots, maps: MapSlots | None = None
    ) -> None:
        self._allocation, self._states, self._maps = allocation, states, maps
        self._slot = states.pool.allocate_running()
        self._working: int | None = None
        # cache span of the working map, until the map is applied
        self._computed_map: int | None = None
        self._entered = -1  # the cache span that the state is scanning
        self._passed = 0  # cache spans whose end the state has reached or is scanning towards
        self._pending: dict[int, PendingSlot] = {}  # by prompt position

    # -- from cache span to cache span -------------------------------------------------------------

    def enter(self, rows: StateRows) -> list[Action]:
        """Actions before these rows; empty for further rows of the same cache span."""
        cache_span, plan = rows.cache_span, self._allocation.plan.cache_spans[rows.cache_span]
        if plan.cache_span.independent and not rows.again:
            if self._computed_map == cache_span:
                return []
            actions = self._advance(cache_span)
            self._computed_map = cache_span
            assert self._maps is not None, "spans of hybrid models have maps"
            if self._working is None:
                self._working = self._maps.maps.working.allocate(cleared=False)
            source = None if plan.resume_state is None else self._maps[plan.resume_state]
            begin = BeginSpan(self._maps.maps, self._working, plan.resume, source)
            return _from_last_load([*actions, begin])
        if self._entered == cache_span:
            return []
        actions = self._advance(cache_span)
        assert self._passed == cache_span, "a cache span is neither computed nor reused"
        self._entered, self._passed = cache_span, cache_span + 1
        if not plan.cache_span.independent and plan.resume_state is not None:
            actions.append(self._load(plan))
        return _from_last_load(actions)

    def _advance(self, cache_span: int) -> list[Action]:
        """Advance the state to a cache span, or to earlier tokens that are recomputed with the full
        prompt visible."""
        plan, actions = self._allocation.plan, []
        while self._passed < cache_span:
            span_plan = plan.cache_spans[self._passed]
            complete = span_plan.fully_reused or self._passed == self._computed_map
            if span_plan.recomputed_prefix(plan.repair) or not complete:
                break
            actions.append(
                self._apply_map(self._passed)
                if span_plan.cache_span.independent
                else self._load(span_plan)
            )
            self._passed += 1
        return actions

    def _apply_map(self, index: int, repaired: int = 0) -> Action:
        """Apply the stored or just computed map of a span."""
        assert self._maps is not None, "spans of hybrid models have maps"
        plan, maps = self._allocation.plan.cache_spans[index], self._maps.maps
        if index == self._computed_map:
            assert self._working is not None, "a computed map has a slot"
            source, self._computed_map = SlotRef(maps.working, self._working), None
        else:
            assert plan.resume_state is not None, "a reused span has a stored map"
            source = SlotRef(maps.stored, self._maps[plan.resume_state])
        start, stop = plan.cache_span.start + repaired, plan.cache_span.stop
        return ApplyMap(maps, self._slot, start, stop, source, repaired)

    def _load(self, plan: CacheSpanPlan) -> Action:
        assert plan.resume_state is not None, "reused text ends at a stored state"
        return LoadState(
            self._slot, self._states[plan.resume_state], plan.cache_span.start + plan.resume
        )

    # -- rows --------------------------------------------------------------------------------------

    def actions(self, rows: StateRows, row: int) -> list[Action]:
        """Actions of these rows, starting at `row` of the forward and split at captures."""
        cache_span = self._allocation.plan.cache_spans[rows.cache_span].cache_span
        scan = self._scan_map if cache_span.independent and not rows.again else self._scan_state
        actions = self.enter(rows)
        # split token ranges at captures and at the start of the span's map
        begin = self._map_start(rows.cache_span)
        inside = {begin} if rows.start < begin < rows.stop else set()
        for start, stop in pairwise(sorted({rows.start, *rows.captures, *inside, rows.stop})):
            first = row + start - rows.start
            actions += scan(
                _ScanRange(
                    rows.cache_span, cache_span.start, start, stop, first, stop in rows.captures
                )
            )
        if rows.again and rows.stop >= begin:
            # the map of the tokens behind a span's last recomputed one, if any remain
            if rows.stop < cache_span.stop:
                actions.append(self._apply_map(rows.cache_span, rows.stop - cache_span.start))
            else:
                self._computed_map = None
        return actions

    def _map_start(self, index: int) -> int:
        """Prompt position of the first token of a cache span that a repair does not recompute."""
        span_plan = self._allocation.plan.cache_spans[index]
        return span_plan.cache_span.start + span_plan.repaired_prefix(self._allocation.plan.repair)

    def _scan_state(self, tokens: _ScanRange) -> list[Action]:
        copy_slot = self._capture(self._states, tokens) if tokens.captured else None
        last = tokens.row + tokens.stop - tokens.start
        return [
            StateScan(
                tokens.row, last, self._slot, tokens.start, copy_slot, tokens.stop - tokens.origin
            )
        ]

    def _scan_map(self, tokens: _ScanRange) -> list[Action]:
        assert self._maps is not None and self._working is not None, (
            "a span is entered before it is computed"
        )
        maps = self._maps.maps
        working = self._working
        last = tokens.row + tokens.stop - tokens.start
        actions: list[Action] = [
            MapScan(maps, tokens.row, last, working, tokens.start - tokens.origin)
        ]
        position = tokens.stop - tokens.origin
        if tokens.start < tokens.stop == self._map_start(tokens.cache_span):
            actions.append(BeginAfterRepair(maps, working, position))
        if tokens.captured:
            actions.append(StoreMap(maps, working, position, self._capture(self._maps, tokens)))
        return actions

    # -- captured states and maps ------------------------------------------------------------------

    def _capture(self, slots: StoredSlots, tokens: _ScanRange) -> int:
        slot = slots.allocate()
        self._pending[tokens.stop] = PendingSlot(tokens.cache_span, slots, slot)
        return slot

    def adopt(self) -> None:
        """Register slots of newly stored states and maps; free those that the store already had or
        has evicted."""
        for position in [
            position for position in self._pending if position not in self._allocation.captures
        ]:
            cache_span, slots, slot = self._pending.pop(position)
            start = self._allocation.plan.cache_spans[cache_span].cache_span.start
            path = self._allocation.nodes[cache_span].path()
            stored = {state.position: state for node in path for state in node.states}
            state = stored.get(position - start)
            if state is None or state in slots:
                slots.free(slot)
            else:
                slots.add(state, slot)
        if not self._allocation.working_map:
            self._free_working()

    def free(self) -> None:
        """Free the request's running state, pending slots and working map."""
        self._states.pool.free([self._slot])
        for _, slots, slot in self._pending.values():
            slots.free(slot)
        self._free_working()

    def _free_working(self) -> None:
        if self._maps is not None and self._working is not None:
            self._maps.maps.working.free([self._working])
            self._working = None


def _from_last_load(actions: list[Action]) -> list[Action]:
    """Drop actions before the last load of a state, which overwrites their results."""
    loads = [index for index, action in enumerate(actions) if isinstance(action, LoadState)]
    return actions[loads[-1] :] if loads else actions


# ------------------------------------------------------------------------------
# Memory of the recurrent layers of an engine: pools of states and maps, and the slots of stored
# ones.
# ------------------------------------------------------------------------------


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
        """Load states and apply maps before these rows; no rows of the state may precede them in
        the same forward."""
        run_changes(state.enter(rows), self.states.pool)

    def recurrence(
        self,
        packed: Iterable[tuple[RunningState, StateRows]],
        device: torch.device,
        send: Send,
        decode_rows: int | None = None,
    ) -> LayeredRows:
        """Build the recurrent layers' computation for rows packed in this order; `send` may copy
        indexes later.

        `decode_rows`  number of rows of a decode-only forward, one per state; further rows are
                       padding
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
