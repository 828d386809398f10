"""Which states a prefill leaves, and what they weigh: checkpoints in ordered text, and one map for every span."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.reuse import ReusePlan, SectionPlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.sections import Section
from spanlab.core.store import Store


class Captures:
    """Positions are those of the prompt; checkpoints stand on the grid of their section, maps at ends of pages."""

    def __init__(self, rules: ReuseRules, store: Store) -> None:
        self._maps, self._map_bytes, self._state_bytes = rules.maps is not None, rules.map_bytes, store.state_bytes
        self._page = store.tree.page
        self._unit = max(self._page, rules.grid) if rules.needs_states else self._page

    def unit(self, section: Section) -> int:
        """Tokens that lengths of a section are rounded down to where computation resumes."""
        return self._page if section.independent else self._unit

    def bytes_in(self, section: Section) -> int:
        """Bytes of what is captured in a section."""
        return self._map_bytes if section.independent else self._state_bytes

    def bytes_of(self, plan: ReusePlan, positions: Sequence[int]) -> int:
        """Bytes of what is captured at positions of a prompt."""
        if not self._maps:
            return len(positions) * self._state_bytes
        return sum([self.bytes_in(plan.section_at(position)) for position in positions])

    def positions(self, part: SectionPlan, placed: Sequence[int], least: int) -> list[int]:
        """What is captured of a section: `placed` positions within ordered text, the end of a span; increasing.

        `least`  the length of the section that no prefill passes through
        """
        start, stop, unit = part.section.start, part.section.stop, self.unit(part.section)
        ends = (stop,) if part.section.independent else placed
        floored = {start + (position - start) // unit * unit for position in ends if start < position <= stop}
        return sorted([position for position in floored if position > start + least])

    def deepest(self, plan: ReusePlan, positions: list[int], spare: int) -> list[int]:
        """The last of these positions, as many as `spare` bytes can hold."""
        first, needed = 0, self.bytes_of(plan, positions)
        while needed > spare:
            needed -= self.bytes_of(plan, positions[first : first + 1])
            first += 1
        return positions[first:]
