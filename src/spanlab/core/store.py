"""The byte-budgeted store: stored prefixes and states, their ages and their locks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from spanlab.core.budget import Budget
from spanlab.core.eviction import EVICTION_ORDERS, EvictionFacts, EvictionRules
from spanlab.core.request import Request
from spanlab.core.room import Room
from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, PrefixTree, State, position_of


class Store(Room):
    """Stores prefixes and states within its budget; it refuses an entry rather than exceed the budget."""

    def __init__(
        self,
        tree: PrefixTree,
        kv_bytes_per_token: int,
        state_bytes: int,
        budget: Budget,
        eviction: str,
        rules: EvictionRules | None = None,
    ) -> None:
        rules = rules or EvictionRules()
        facts = EvictionFacts(tree, budget, kv_bytes_per_token, rules)
        order = EVICTION_ORDERS.make(eviction, {}, rules.options, facts=facts)
        super().__init__(tree, kv_bytes_per_token, state_bytes, budget, order)
        self.pins, self._moment = order.pins, facts.moment
        self.on_admission: Callable[[Request], None] = rules.future.admitted if rules.future else order.admitted
        self.inserted_bytes = 0
        self.on_stored: Callable[[State], None] | None = None  # with the state on its node
        self._clock = self._state_serial = 0

    def note(self, now: int, request: Request | None = None) -> None:
        """Set the time of the next operation, and its request."""
        self._moment.now = now
        if request is not None:
            self._moment.request = request

    def cut(self, node: Node, tokens: TokenString, depth: int) -> Node:
        """Return the node that ends at `depth` on the stored path of `tokens` below `node`.

        An edge is split if needed; both of its parts count as used now.
        """
        return self.tree.extend(node, tokens, depth, self._tick())

    def _tick(self) -> int:
        """Return the next use time: one for each operation, so that no two operations tie."""
        self._clock += 1
        return self._clock

    def insert(self, start: Node, tokens: TokenString, stop: int, states: Sequence[int], each: int) -> Node:
        """Store tokens `[0, stop)` below `start`, which they contain, and states of `each` bytes at `states`.

        `states` are increasing positions in (start.depth, stop]. The bytes must have been reserved and released just
        before, so nothing is evicted here. Returns the node at `stop`. A stored state is not stored twice. The whole
        path counts as used now, as do the states that were stored already.
        """
        before, now = self.tree.num_tokens, self._tick()
        end = self.tree.extend(start, tokens, stop, now)
        _mark_path(end, now)
        if end.created == now:
            self._leaves.add([end])
        self._leaves.renewed(end.path())
        self.inserted_bytes += (self.tree.num_tokens - before) * self.token_bytes
        pending, node = list(states), end
        while pending:
            while pending[-1] <= node.start:
                assert node.parent is not None, "a state lies above the start of its insertion"
                node = node.parent
            first = bisect_right(pending, self.tree.unit_start(node, pending[-1]))
            self._put_states(node, pending[first:], each, now)
            pending = pending[:first]
        self._leaves.offer(end)
        return end

    def _put_states(self, node: Node, positions: list[int], each: int, now: int) -> None:
        """Add states to a node at those `positions`, increasing, that have none."""
        if node.states:
            stored = {state.position: state for state in node.states}
            renewed = [stored[position] for position in positions if position in stored]
            for state in renewed:
                state.used = now
            self._states.renewed(renewed)
            positions = [position for position in positions if position not in stored]
        if node.lost:
            again = set(positions)
            node.lost = [position for position in node.lost if position not in again]
        fresh = []
        for position in positions:
            self._state_serial += 1
            fresh.append(State(position, node, self._state_serial, now, each))
        node.states = sorted(node.states + fresh, key=position_of) if node.states else fresh
        added = len(fresh) * each
        self.state_cached += added
        self.inserted_bytes += added
        if self._states_evictable:
            self._states.add(fresh)
        if self.on_stored is not None:
            for state in fresh:
                self.on_stored(state)

    def touch(self, node: Node, depth: int) -> None:
        """Count a use of a prefix and its ancestors; with fixed blocks, of its blocks up to `depth`."""
        now = self._tick()
        if self.tree.fixed_blocks:
            node = self.tree.end_at(node, depth)
        end = node
        while node.parent is not None:
            node.used = now
            node.uses += 1
            node = node.parent
        self._leaves.used(end.path())

    def refresh(self, node: Node, states_from: int) -> None:
        """Set the last use of a prefix, and of its states from a position on, to now; counts no use."""
        now = self._tick()
        states: list[State] = []
        for ancestor in node.path():
            ancestor.used = now
            if ancestor.depth >= states_from:
                states += [state for state in ancestor.states if state.position >= states_from]
        for state in states:
            state.used = now
        self._leaves.renewed(node.path())
        self._states.renewed(states)

    def touch_state(self, state: State) -> None:
        """Count a use of a state."""
        state.used = self._tick()
        state.uses += 1
        self._states.used([state])

    # -- locks --------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Lock a node and its ancestors against eviction, until `unlock`."""
        while node.parent is not None:
            if node.locks == 0:
                self.kv_locked += (node.depth - node.start) * self.token_bytes
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        step = node
        while step.parent is not None:
            step.locks -= 1
            if step.locks == 0:
                self.kv_locked -= (step.depth - step.start) * self.token_bytes
            step = step.parent
        if node.parent is not None:
            self._leaves.offer(node)

    def lock_state(self, state: State) -> None:
        """Lock a state against eviction, until `unlock_state`; its node must be locked too."""
        if state.locks == 0:
            self.state_locked += state.num_bytes
        state.locks += 1

    def unlock_state(self, state: State) -> None:
        """Undo one `lock_state`."""
        state.locks -= 1
        if state.locks == 0:
            self.state_locked -= state.num_bytes
            if self._states_evictable:
                self._states.offer(state)


def _mark_path(node: Node, now: int) -> None:
    """Set the time of the last use of a node and its ancestors."""
    while node.parent is not None:
        node.used = now
        node = node.parent
