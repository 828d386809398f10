"""The recurrent state of one admitted request: how it runs through ordered text, and takes in spans by their maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from spanlab.core.reuse import CacheSpanPlan, TreeAllocation
from spanlab.engine.kept_states import Kept, KeptMaps, KeptStates
from spanlab.engine.recurrent import Action, Piece
from spanlab.engine.span_actions import BeginSpan, Fold, LoadState, SpanPiece, StoreMap


class StateRows(NamedTuple):
    """Prompt or output tokens `[start, stop)` of a cache span, computed in one forward.

    `captures`  positions in (start, stop], increasing, of which a state or map is to be kept
    """

    cache_span: int
    start: int
    stop: int
    captures: Sequence[int]


class _Stretch(NamedTuple):
    """Tokens `[start, stop)` of a cache span that begins at `origin` of its prompt, from `row` of a forward on.

    `captured`  what they leave is to be kept
    """

    cache_span: int
    origin: int
    start: int
    stop: int
    row: int
    captured: bool


class Taken(NamedTuple):
    """A slot with what may be stored for a cache span; `kept` says where it belongs."""

    cache_span: int
    kept: Kept
    slot: int


class RunningState:
    """The one state of a request, from where it resumes, and the copies and maps that its prefill takes.

    Cache spans come in prompt order. Ordered text runs the state on; an independent span has a map, found or computed,
    and is folded in when the next cache span is entered. So one working map is enough.
    """

    def __init__(self, allocation: TreeAllocation, kept: KeptStates, maps: KeptMaps | None = None) -> None:
        self._allocation, self._kept, self._maps = allocation, kept, maps
        self._slot = kept.pool.take()
        self._working: int | None = None
        self._entered = -1  # the cache span that rows were last computed of
        self._taken: dict[int, Taken] = {}  # by prompt position; not stored yet

    # -- from cache span to cache span --------------------------------------------------------------------------------

    def enter(self, cache_span: int) -> list[Action]:
        """What has to happen before a cache span's first rows are computed; nothing once that has been asked for."""
        if cache_span == self._entered:
            return []
        plans = self._allocation.plan.cache_spans
        found: list[Action] = []
        if self._entered >= 0 and plans[self._entered].cache_span.independent:
            found.append(self._fold(plans[self._entered], working=self._working))
        for plan in plans[self._entered + 1 : cache_span]:
            assert plan.whole, "a cache span is neither computed nor reused"
            found.append(self._reuse(plan))
        self._entered = cache_span
        return _from_last_load([*found, *self._resume(plans[cache_span])])

    def _reuse(self, plan: CacheSpanPlan) -> Action:
        if not plan.cache_span.independent:
            return self._load(plan)
        assert self._maps is not None and plan.resume_state is not None, "a reused span has a stored map"
        return self._fold(plan, stored=self._maps[plan.resume_state])

    def _resume(self, plan: CacheSpanPlan) -> list[Action]:
        if plan.cache_span.independent:
            return [self._begin(plan)]
        return [] if plan.resume_state is None else [self._load(plan)]

    def _fold(self, plan: CacheSpanPlan, stored: int | None = None, working: int | None = None) -> Action:
        assert self._maps is not None, "spans of hybrid models have maps"
        return Fold(self._maps.maps, self._slot, plan.cache_span.start, plan.cache_span.stop, stored, working)

    def _load(self, plan: CacheSpanPlan) -> Action:
        assert plan.resume_state is not None, "reused text ends at a stored state"
        return LoadState(self._slot, self._kept[plan.resume_state], plan.cache_span.start + plan.resume)

    def _begin(self, plan: CacheSpanPlan) -> Action:
        assert self._maps is not None, "spans of hybrid models have maps"
        if self._working is None:
            self._working = self._maps.maps.working.take(cleared=False)
        source = None if plan.resume_state is None else self._maps[plan.resume_state]
        return BeginSpan(self._maps.maps, self._working, plan.resume, source)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def actions(self, rows: StateRows, row: int) -> list[Action]:
        """All that computing these rows does, from `row` of the forward on, cut where a state or map is to be kept."""
        cache_span = self._allocation.plan.cache_spans[rows.cache_span].cache_span
        run = self._run_map if cache_span.independent else self._run_state
        found = self.enter(rows.cache_span)
        for start, stop in _cut(rows):
            first = row + start - rows.start
            found += run(_Stretch(rows.cache_span, cache_span.start, start, stop, first, stop in rows.captures))
        return found

    def _run_state(self, part: _Stretch) -> list[Action]:
        keep = self._take(self._kept, part) if part.captured else None
        last = part.row + part.stop - part.start
        return [Piece(part.row, last, self._slot, part.start, keep, part.stop - part.origin)]

    def _run_map(self, part: _Stretch) -> list[Action]:
        assert self._maps is not None and self._working is not None, "a span is entered before it is computed"
        maps, working, last = self._maps.maps, self._working, part.row + part.stop - part.start
        scan = SpanPiece(maps, part.row, last, working, part.start - part.origin)
        if not part.captured:
            return [scan]
        return [scan, StoreMap(maps, working, part.stop - part.origin, self._take(self._maps, part))]

    # -- what is stored, and what is given back -----------------------------------------------------------------------

    def _take(self, kept: Kept, part: _Stretch) -> int:
        slot = kept.take()
        self._taken[part.stop] = Taken(part.cache_span, kept, slot)
        return slot

    def adopt(self) -> None:
        """Hand over what has been stored since; what the store had already, or counts no longer, is given back."""
        for position in [position for position in self._taken if position not in self._allocation.captures]:
            cache_span, kept, slot = self._taken.pop(position)
            start = self._allocation.plan.cache_spans[cache_span].cache_span.start
            path = self._allocation.nodes[cache_span].path()
            stored = {state.position: state for node in path for state in node.states}
            state = stored.get(position - start)
            if state is None or state in kept:
                kept.give(slot)
            else:
                kept.keep(state, slot)
        if not self._allocation.working_map:
            self._give_working()

    def leave(self) -> None:
        """Give back everything that is the request's own."""
        self._kept.pool.give([self._slot])
        for _, kept, slot in self._taken.values():
            kept.give(slot)
        self._give_working()

    def _give_working(self) -> None:
        if self._maps is not None and self._working is not None:
            self._maps.maps.working.give([self._working])
            self._working = None


def _cut(rows: StateRows) -> Iterable[tuple[int, int]]:
    """The same tokens up to each capture, and the rest."""
    return pairwise(sorted({rows.start, *rows.captures, rows.stop}))


def _from_last_load(actions: list[Action]) -> list[Action]:
    """A state that is loaded owes nothing to what was done before."""
    loads = [at for at, action in enumerate(actions) if isinstance(action, LoadState)]
    return actions[loads[-1] :] if loads else actions
