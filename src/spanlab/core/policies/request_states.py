"""States of a running request: reserved states that it will store, and locked states that it reads."""

from __future__ import annotations

from bisect import bisect_right, insort

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.policies.captures import Captures
from spanlab.core.policies.path_cap import excess_states
from spanlab.core.reuse import TreeAllocation
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import Node


class RequestStates:
    """Updates the states of allocations together with the store's locks and reserved bytes."""

    def __init__(self, rules: ReuseRules, store: Store, captures: Captures) -> None:
        self._rules, self._store, self._captures = rules, store, captures

    def follow(self, allocation: TreeAllocation, start: int, stop: int) -> None:
        """Add the captures of computing tokens `[start, stop)`, as far as memory allows."""
        progress, captures, store = self._rules.progress, allocation.captures, self._store
        if progress is None:
            return
        assert self._rules.keeps, "states are followed only where they are stored"
        for position in progress.positions(allocation.plan.prompt, start, stop):
            replaced = captures[-1] if captures and captures[-1] > allocation.plan.prompt else None
            if position in captures:
                continue
            if replaced is not None and not progress.stays(replaced):
                captures[-1] = position
            elif store.spare_state_bytes() >= store.state_bytes and store.reserve(0, store.state_bytes):
                insort(captures, position)
                allocation.state_bytes += store.state_bytes

    def take_captures(self, allocation: TreeAllocation, span: CacheSpan, stop: int) -> list[int]:
        """Remove the captures of a cache span up to `stop` and unreserve their bytes; return them in span tokens."""
        first, last = (bisect_right(allocation.captures, span.start + length) for length in (0, stop))
        positions = [position - span.start for position in allocation.captures[first:last]]
        state_bytes = len(positions) * self._captures.bytes_in(span)
        self._store.unreserve(0, state_bytes)
        allocation.state_bytes -= state_bytes
        del allocation.captures[first:last]
        allocation.captured += len(positions)
        allocation.captured_maps += len(positions) * span.independent
        return positions

    def after_insert(self, allocation: TreeAllocation, node: Node) -> None:
        """Lock the newest stored state, and enforce the cap of states per path."""
        if self._rules.cache.hold_state:
            self._lock_newest(allocation, node)
        if self._rules.cache.states_per_path is not None:
            self._store.drop_states(excess_states(node, self._rules.cache.states_per_path))

    def _lock_newest(self, allocation: TreeAllocation, node: Node) -> None:
        """Lock the newest state of a request's path, if its node has one at its end."""
        self.unlock(allocation)
        state = node.deepest_state(node.depth)
        if state is not None and state.position == node.depth:
            self._store.lock_state(state)
            allocation.states = [state]

    def unlock(self, allocation: TreeAllocation) -> None:
        """Unlock the states of an allocation after they were read."""
        for state in allocation.states:
            self._store.unlock_state(state)
        allocation.states = []

    def release_reserved(self, allocation: TreeAllocation) -> None:
        """Unreserve the bytes of states that were not inserted, and of the working map of a span."""
        spare = allocation.working_map + self._captures.bytes_of(allocation.plan, allocation.captures)
        self._store.unreserve(0, spare)
        allocation.state_bytes -= spare
        allocation.working_map, allocation.captures = 0, []
