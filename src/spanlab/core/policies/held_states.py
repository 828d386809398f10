"""States that a running request holds: those that it will store, with their bytes, and those that it reads."""

from __future__ import annotations

from bisect import bisect_right, insort

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.policies.captures import Captures
from spanlab.core.policies.path_cap import surplus
from spanlab.core.reuse import TreeAllocation
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import Node


class HeldStates:
    """Changes what allocations hold, and the store's locks and reserved bytes with it."""

    def __init__(self, rules: ReuseRules, store: Store, captures: Captures) -> None:
        self._rules, self._store, self._captures = rules, store, captures

    def follow(self, allocation: TreeAllocation, start: int, stop: int) -> None:
        """Note the states that computing tokens `[start, stop)` takes, as far as there is room for them."""
        progress, captures, store = self._rules.progress, allocation.captures, self._store
        if progress is None:
            return
        assert self._rules.keeps, "somebody follows what is kept"
        for position in progress.positions(allocation.plan.prompt, start, stop):
            replaced = captures[-1] if captures and captures[-1] > allocation.plan.prompt else None
            if position in captures:
                continue
            if replaced is not None and not progress.stays(replaced):
                captures[-1] = position
            elif store.spare_state_bytes() >= store.state_bytes and store.reserve(0, store.state_bytes):
                insort(captures, position)
                allocation.state_bytes += store.state_bytes

    def take_due(self, allocation: TreeAllocation, part: CacheSpan, stop: int) -> list[int]:
        """Take the captures of a cache span up to `stop`, in its own tokens, out of an allocation with their bytes."""
        first, last = (bisect_right(allocation.captures, part.start + length) for length in (0, stop))
        due = [position - part.start for position in allocation.captures[first:last]]
        state = len(due) * self._captures.bytes_in(part)
        self._store.unreserve(0, state)
        allocation.state_bytes -= state
        del allocation.captures[first:last]
        allocation.captured += len(due)
        allocation.captured_maps += len(due) * part.independent
        return due

    def stored(self, allocation: TreeAllocation, node: Node) -> None:
        """Hold the newest of the states that have been stored, and keep to the cap of their path."""
        if self._rules.cache.hold_state:
            self._hold(allocation, node)
        if self._rules.cache.states_per_path is not None:
            self._store.drop_states(surplus(node, self._rules.cache.states_per_path))

    def _hold(self, allocation: TreeAllocation, node: Node) -> None:
        """Lock the newest state of a request's path, if its node has one at its end."""
        self.let_go(allocation)
        state = node.deepest_state(node.depth)
        if state is not None and state.position == node.depth:
            self._store.lock_state(state)
            allocation.states = [state]

    def let_go(self, allocation: TreeAllocation) -> None:
        """Unlock the states that have been read."""
        for state in allocation.states:
            self._store.unlock_state(state)
        allocation.states = []

    def give_back(self, allocation: TreeAllocation) -> None:
        """What was reserved for states that no insertion took, and for the map of a span that is computed."""
        spare = allocation.working_map + self._captures.bytes_of(allocation.plan, allocation.captures)
        self._store.unreserve(0, spare)
        allocation.state_bytes -= spare
        allocation.working_map, allocation.captures = 0, []
