"""The recurrent state of one admitted request: how it runs through ordered text, and takes in spans by their maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from spanlab.core.passes import is_repair
from spanlab.core.reuse import CacheSpanPlan, TreeAllocation
from spanlab.core.scheduled import ScheduledChunk
from spanlab.engine.kept_states import Kept, KeptMaps, KeptStates
from spanlab.engine.recurrent import Action, Piece
from spanlab.engine.span_actions import BeginBehindRepair, BeginSpan, Fold, LoadState, SpanPiece, StoreMap


class StateRows(NamedTuple):
    """Prompt or output tokens `[start, stop)` of a cache span, computed in one forward.

    `captures`  positions in (start, stop], increasing, of which a state or map is to be kept
    `again`     tokens of a span that are computed in full view, whether or not they were computed alone
    """

    cache_span: int
    start: int
    stop: int
    captures: Sequence[int]
    again: bool = False


def state_rows(chunk: ScheduledChunk) -> list[StateRows]:
    """What of a chunk runs through recurrent layers without a gap, in order of its rows."""
    allocation, found = chunk.sequence.allocation, []
    assert allocation is not None, "only who is admitted computes"
    for at, start, stop in chunk.work.runs(allocation.plan, chunk.start, chunk.stop):
        captures = [position for position in chunk.captures if start < position <= stop]
        again = is_repair(chunk) and allocation.plan.cache_spans[at].cache_span.independent
        found.append(StateRows(at, start, stop, captures, again))
    return found


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
    and is folded in when the next cache span is entered. So one working map is enough. Where a repair computes a span's
    first tokens again, the state runs through these, and the map of what follows is folded in behind them.
    """

    def __init__(self, allocation: TreeAllocation, kept: KeptStates, maps: KeptMaps | None = None) -> None:
        self._allocation, self._kept, self._maps = allocation, kept, maps
        self._slot = kept.pool.take_running()
        self._working: int | None = None
        self._computed: int | None = None  # the span that the working map is of, until it is folded in
        self._entered = -1  # the cache span that the state itself is in
        self._passed = 0  # cache spans whose end the state has reached or is on its way to
        self._taken: dict[int, Taken] = {}  # by prompt position; not stored yet

    # -- from cache span to cache span --------------------------------------------------------------------------------

    def enter(self, rows: StateRows) -> list[Action]:
        """What has to happen before these rows are computed; nothing once that has been asked for."""
        cache_span, plan = rows.cache_span, self._allocation.plan.cache_spans[rows.cache_span]
        if plan.cache_span.independent and not rows.again:
            if self._computed == cache_span:
                return []
            found = self._advance(cache_span)
            self._computed = cache_span
            return _from_last_load([*found, self._begin(plan)])
        if self._entered == cache_span:
            return []
        found = self._advance(cache_span)
        assert self._passed == cache_span, "a cache span is neither computed nor reused"
        self._entered, self._passed = cache_span, cache_span + 1
        return _from_last_load([*found, *self._resume(plan)])

    def _advance(self, cache_span: int) -> list[Action]:
        """Let the state run up to a cache span, or up to tokens before it that are to be computed in full view."""
        plan, found = self._allocation.plan, []
        while self._passed < cache_span:
            part = plan.cache_spans[self._passed]
            if part.again(plan.repair) or not (part.whole or self._passed == self._computed):
                break
            found.append(self._fold(self._passed) if part.cache_span.independent else self._load(part))
            self._passed += 1
        return found

    def _resume(self, plan: CacheSpanPlan) -> list[Action]:
        """A state to go on from within text."""
        return [] if plan.cache_span.independent or plan.resume_state is None else [self._load(plan)]

    def _fold(self, at: int, repaired: int = 0) -> Action:
        """Take in the map of a span, which was stored or has just been computed."""
        assert self._maps is not None, "spans of hybrid models have maps"
        plan, stored, working = self._allocation.plan.cache_spans[at], None, None
        if at == self._computed:
            working, self._computed = self._working, None
        else:
            assert plan.resume_state is not None, "a reused span has a stored map"
            stored = self._maps[plan.resume_state]
        start, stop = plan.cache_span.start + repaired, plan.cache_span.stop
        return Fold(self._maps.maps, self._slot, start, stop, stored, working, repaired)

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
        run = self._run_map if cache_span.independent and not rows.again else self._run_state
        found = self.enter(rows)
        for start, stop in self._cut(rows):
            first = row + start - rows.start
            found += run(_Stretch(rows.cache_span, cache_span.start, start, stop, first, stop in rows.captures))
        return found + self._behind_repair(rows) if rows.again else found

    def _cut(self, rows: StateRows) -> Iterable[tuple[int, int]]:
        """The same tokens up to each capture, up to where a span's map begins, and the rest."""
        begin = self._map_start(rows.cache_span)
        inside = {begin} if rows.start < begin < rows.stop else set()
        return pairwise(sorted({rows.start, *rows.captures, *inside, rows.stop}))

    def _map_start(self, at: int) -> int:
        """Where the tokens of a cache span begin that a repair leaves as they are."""
        part = self._allocation.plan.cache_spans[at]
        return part.cache_span.start + part.first(self._allocation.plan.repair)

    def _behind_repair(self, rows: StateRows) -> list[Action]:
        """What follows a span's last token that is computed again: the map of the others, if there are any."""
        if rows.stop < self._map_start(rows.cache_span):
            return []
        part = self._allocation.plan.cache_spans[rows.cache_span].cache_span
        if rows.stop < part.stop:
            return [self._fold(rows.cache_span, rows.stop - part.start)]
        self._computed = None
        return []

    def _run_state(self, part: _Stretch) -> list[Action]:
        keep = self._take(self._kept, part) if part.captured else None
        last = part.row + part.stop - part.start
        return [Piece(part.row, last, self._slot, part.start, keep, part.stop - part.origin)]

    def _run_map(self, part: _Stretch) -> list[Action]:
        assert self._maps is not None and self._working is not None, "a span is entered before it is computed"
        maps, working, last = self._maps.maps, self._working, part.row + part.stop - part.start
        done: list[Action] = [SpanPiece(maps, part.row, last, working, part.start - part.origin)]
        position = part.stop - part.origin
        if part.start < part.stop == self._map_start(part.cache_span):
            done.append(BeginBehindRepair(maps, working, position))
        if part.captured:
            done.append(StoreMap(maps, working, position, self._take(self._maps, part)))
        return done

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


def _from_last_load(actions: list[Action]) -> list[Action]:
    """A state that is loaded owes nothing to what was done before."""
    loads = [at for at, action in enumerate(actions) if isinstance(action, LoadState)]
    return actions[loads[-1] :] if loads else actions
