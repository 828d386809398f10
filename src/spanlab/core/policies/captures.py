"""Which states a prefill leaves, and what they weigh: checkpoints in ordered text, and maps of spans."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.reuse import CacheSpanPlan, ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store


class Captures:
    """Positions are those of the prompt; checkpoints stand on the grid of their cache span, maps at ends of blocks."""

    def __init__(self, rules: ReuseRules, store: Store) -> None:
        self._maps, self._map_bytes, self._state_bytes = rules.maps, rules.map_bytes, store.state_bytes
        self._block_size = store.tree.block_size
        self._unit = max(self._block_size, rules.grid) if rules.needs_states else self._block_size

    def unit(self, cache_span: CacheSpan) -> int:
        """Tokens that lengths of a cache span are rounded down to where computation resumes."""
        return self._block_size if cache_span.independent else self._unit

    def bytes_in(self, cache_span: CacheSpan) -> int:
        """Bytes of what is captured in a cache span."""
        return self._map_bytes if cache_span.independent else self._state_bytes

    def bytes_of(self, plan: ReusePlan, positions: Sequence[int]) -> int:
        """Bytes of what is captured at positions of a prompt."""
        if self._maps is None:
            return len(positions) * self._state_bytes
        return sum([self.bytes_in(plan.cache_span_at(position)) for position in positions])

    def positions(self, part: CacheSpanPlan, placed: Sequence[int], least: int) -> list[int]:
        """What is captured of a cache span: `placed` positions within ordered text, maps of a span; increasing.

        `least`  the length of the cache span that no prefill passes through
        """
        start, stop, unit = part.cache_span.start, part.cache_span.stop, self.unit(part.cache_span)
        ends = self._ends(part.cache_span) if part.cache_span.independent else placed
        floored = {start + (position - start) // unit * unit for position in ends if start < position <= stop}
        return sorted([position for position in floored if position > start + least])

    def _ends(self, span: CacheSpan) -> Sequence[int]:
        """Where a span's maps end, in the prompt."""
        assert self._maps is not None, "recurrent layers keep spans as maps"
        return [span.start + length for length in self._maps.positions(span.stop - span.start)]

    def deepest(self, plan: ReusePlan, positions: list[int], spare: int) -> list[int]:
        """The last of these positions, as many as `spare` bytes can hold."""
        first, needed = 0, self.bytes_of(plan, positions)
        while needed > spare:
            needed -= self.bytes_of(plan, positions[first : first + 1])
            first += 1
        return positions[first:]
