"""The recurrent state of one admitted request: scans over ordered text, and application of span maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from spanlab.core.passes import is_repair
from spanlab.core.reuse import CacheSpanPlan, TreeAllocation
from spanlab.core.scheduled import ScheduledChunk
from spanlab.engine.conv_windows import SlotRef
from spanlab.engine.recurrent import Action, StateScan
from spanlab.engine.span_actions import ApplyMap, BeginAfterRepair, BeginSpan, LoadState, MapScan, StoreMap
from spanlab.engine.stored_slots import MapSlots, StateSlots, StoredSlots


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
    """Tokens `[start, stop)` of a cache span that begins at prompt position `origin`; `row` is their first row.

    `captured`  whether the state or map at `stop` is captured
    """

    cache_span: int
    origin: int
    start: int
    stop: int
    row: int
    captured: bool


class PendingSlot(NamedTuple):
    """A captured state or map of a cache span that is not stored yet; `slots` is the collection for its slot."""

    cache_span: int
    slots: StoredSlots
    slot: int


class RunningState:
    """The running state of a request from its resume point, and the states and maps that its prefill captures.

    Cache spans are processed in prompt order. Ordered text advances the state; an independent span has a stored or
    computed map, which is applied when the next cache span is entered. So one working map suffices. If a repair
    recomputes a span's first tokens, the state scans them, and the map of the remaining tokens is applied after them.
    """

    def __init__(self, allocation: TreeAllocation, states: StateSlots, maps: MapSlots | None = None) -> None:
        self._allocation, self._states, self._maps = allocation, states, maps
        self._slot = states.pool.allocate_running()
        self._working: int | None = None
        self._computed_map: int | None = None  # cache span of the working map, until the map is applied
        self._entered = -1  # the cache span that the state is scanning
        self._passed = 0  # cache spans whose end the state has reached or is scanning towards
        self._pending: dict[int, PendingSlot] = {}  # by prompt position

    # -- from cache span to cache span --------------------------------------------------------------------------------

    def enter(self, rows: StateRows) -> list[Action]:
        """Actions before these rows; empty for further rows of the same cache span."""
        cache_span, plan = rows.cache_span, self._allocation.plan.cache_spans[rows.cache_span]
        if plan.cache_span.independent and not rows.again:
            if self._computed_map == cache_span:
                return []
            actions = self._advance(cache_span)
            self._computed_map = cache_span
            return _from_last_load([*actions, self._begin(plan)])
        if self._entered == cache_span:
            return []
        actions = self._advance(cache_span)
        assert self._passed == cache_span, "a cache span is neither computed nor reused"
        self._entered, self._passed = cache_span, cache_span + 1
        return _from_last_load([*actions, *self._resume(plan)])

    def _advance(self, cache_span: int) -> list[Action]:
        """Advance the state to a cache span, or to earlier tokens that are recomputed with the full prompt visible."""
        plan, actions = self._allocation.plan, []
        while self._passed < cache_span:
            span_plan = plan.cache_spans[self._passed]
            complete = span_plan.fully_reused or self._passed == self._computed_map
            if span_plan.recomputed_prefix(plan.repair) or not complete:
                break
            actions.append(self._apply_map(self._passed) if span_plan.cache_span.independent else self._load(span_plan))
            self._passed += 1
        return actions

    def _resume(self, plan: CacheSpanPlan) -> list[Action]:
        """Load the state at the resume point within ordered text, if any."""
        return [] if plan.cache_span.independent or plan.resume_state is None else [self._load(plan)]

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
        return LoadState(self._slot, self._states[plan.resume_state], plan.cache_span.start + plan.resume)

    def _begin(self, plan: CacheSpanPlan) -> Action:
        assert self._maps is not None, "spans of hybrid models have maps"
        if self._working is None:
            self._working = self._maps.maps.working.allocate(cleared=False)
        source = None if plan.resume_state is None else self._maps[plan.resume_state]
        return BeginSpan(self._maps.maps, self._working, plan.resume, source)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def actions(self, rows: StateRows, row: int) -> list[Action]:
        """Actions of these rows, starting at `row` of the forward and split at captures."""
        cache_span = self._allocation.plan.cache_spans[rows.cache_span].cache_span
        scan = self._scan_map if cache_span.independent and not rows.again else self._scan_state
        actions = self.enter(rows)
        for start, stop in self._cut(rows):
            first = row + start - rows.start
            actions += scan(_ScanRange(rows.cache_span, cache_span.start, start, stop, first, stop in rows.captures))
        return actions + self._after_repair(rows) if rows.again else actions

    def _cut(self, rows: StateRows) -> Iterable[tuple[int, int]]:
        """Split token ranges at captures and at the start of the span's map."""
        begin = self._map_start(rows.cache_span)
        inside = {begin} if rows.start < begin < rows.stop else set()
        return pairwise(sorted({rows.start, *rows.captures, *inside, rows.stop}))

    def _map_start(self, index: int) -> int:
        """Prompt position of the first token of a cache span that a repair does not recompute."""
        span_plan = self._allocation.plan.cache_spans[index]
        return span_plan.cache_span.start + span_plan.repaired_prefix(self._allocation.plan.repair)

    def _after_repair(self, rows: StateRows) -> list[Action]:
        """Application of the map of the remaining tokens after a span's last recomputed token, if any remain."""
        if rows.stop < self._map_start(rows.cache_span):
            return []
        cache_span = self._allocation.plan.cache_spans[rows.cache_span].cache_span
        if rows.stop < cache_span.stop:
            return [self._apply_map(rows.cache_span, rows.stop - cache_span.start)]
        self._computed_map = None
        return []

    def _scan_state(self, tokens: _ScanRange) -> list[Action]:
        copy_slot = self._capture(self._states, tokens) if tokens.captured else None
        last = tokens.row + tokens.stop - tokens.start
        return [StateScan(tokens.row, last, self._slot, tokens.start, copy_slot, tokens.stop - tokens.origin)]

    def _scan_map(self, tokens: _ScanRange) -> list[Action]:
        assert self._maps is not None and self._working is not None, "a span is entered before it is computed"
        maps, working, last = self._maps.maps, self._working, tokens.row + tokens.stop - tokens.start
        actions: list[Action] = [MapScan(maps, tokens.row, last, working, tokens.start - tokens.origin)]
        position = tokens.stop - tokens.origin
        if tokens.start < tokens.stop == self._map_start(tokens.cache_span):
            actions.append(BeginAfterRepair(maps, working, position))
        if tokens.captured:
            actions.append(StoreMap(maps, working, position, self._capture(self._maps, tokens)))
        return actions

    # -- captured states and maps -------------------------------------------------------------------------------------

    def _capture(self, slots: StoredSlots, tokens: _ScanRange) -> int:
        slot = slots.allocate()
        self._pending[tokens.stop] = PendingSlot(tokens.cache_span, slots, slot)
        return slot

    def adopt(self) -> None:
        """Register slots of newly stored states and maps; free those that the store already had or has evicted."""
        for position in [position for position in self._pending if position not in self._allocation.captures]:
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
