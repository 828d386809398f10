"""Captures of a prefill and their bytes: checkpoints in ordered text, and maps of spans."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.reuse import CacheSpanPlan, ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store


class Captures:
    """Positions of captures in the prompt: checkpoints on the grid of their cache span, maps at block ends."""

    def __init__(self, rules: ReuseRules, store: Store) -> None:
        self._maps, self._map_bytes, self._state_bytes = rules.maps, rules.map_bytes, store.state_bytes
        self._block_size = store.tree.block_size
        self._unit = max(self._block_size, rules.grid) if rules.needs_states else self._block_size

    def unit(self, cache_span: CacheSpan) -> int:
        """Return the unit to which resume positions in a cache span are rounded down."""
        return self._block_size if cache_span.independent else self._unit

    def bytes_in(self, cache_span: CacheSpan) -> int:
        """Return the bytes of one capture in a cache span."""
        return self._map_bytes if cache_span.independent else self._state_bytes

    def bytes_of(self, plan: ReusePlan, positions: Sequence[int]) -> int:
        """Return the bytes of captures at positions of a prompt."""
        if self._maps is None:
            return len(positions) * self._state_bytes
        return sum([self.bytes_in(plan.cache_span_at(position)) for position in positions])

    def positions(self, span_plan: CacheSpanPlan, placed: Sequence[int], computed_from: int) -> list[int]:
        """Return the captures in a cache span, increasing: `placed` positions in ordered text, or maps of a span.

        `computed_from`  tokens of the cache span that the prefill does not compute
        """
        cache_span = span_plan.cache_span
        start, stop, unit = cache_span.start, cache_span.stop, self.unit(cache_span)
        ends = self._map_ends(cache_span) if cache_span.independent else placed
        floored = {start + (position - start) // unit * unit for position in ends if start < position <= stop}
        return sorted([position for position in floored if position > start + computed_from])

    def _map_ends(self, span: CacheSpan) -> Sequence[int]:
        """Return the ends of a span's maps, as positions in the prompt."""
        assert self._maps is not None, "spans of a model with recurrent layers are stored as maps"
        return [span.start + length for length in self._maps.positions(span.stop - span.start)]

    def deepest(self, plan: ReusePlan, positions: list[int], spare: int) -> list[int]:
        """Return the last of these positions, as many as fit in `spare` bytes."""
        first, needed = 0, self.bytes_of(plan, positions)
        while needed > spare:
            needed -= self.bytes_of(plan, positions[first : first + 1])
            first += 1
        return positions[first:]
