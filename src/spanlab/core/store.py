"""The byte-budgeted store: what is kept, how old it is, and what is locked."""

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
    """Keeps prefixes and states within its room; it refuses, it never overshoots."""

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
        """Say when, and for which request, the store is used next."""
        self._moment.now = now
        if request is not None:
            self._moment.request = request

    def cut(self, node: Node, tokens: TokenString, depth: int) -> Node:
        """The node that ends at `depth` on the stored path of `tokens` below `node`.

        An edge is split if it must be; both of its parts count as used now.
        """
        return self.tree.extend(node, tokens, depth, self._tick())

    def _tick(self) -> int:
        """The next time stamp of uses: one for each operation, so that no two operations tie."""
        self._clock += 1
        return self._clock

    def insert(self, start: Node, tokens: TokenString, stop: int, states: Sequence[int], each: int) -> Node:
        """Keep tokens `[0, stop)` below `start`, which they contain, and a state of `each` bytes at each of `states`.

        `states` are increasing positions in (start.depth, stop]. The bytes must have been reserved and given back just
        before, so nothing is evicted here. Returns the node at `stop`. A state that is there already is not stored
        twice. Everything on the path counts as used now, as do the states that were there.
        """
        before, now = self.tree.num_tokens, self._tick()
        end = self.tree.extend(start, tokens, stop, now)
        _mark_path(end, now)
        if end.created == now:
            self._leaves.add([end])
        self._leaves.renewed(end.path())
        self.inserted_bytes += (self.tree.num_tokens - before) * self.token_bytes
        todo, node = list(states), end
        while todo:
            while todo[-1] <= node.start:
                assert node.parent is not None, "a state was placed above where its insertion starts"
                node = node.parent
            first = bisect_right(todo, self.tree.unit_start(node, todo[-1]))
            self._put_states(node, todo[first:], each, now)
            todo = todo[:first]
        self._leaves.offer(end)
        return end

    def _put_states(self, node: Node, positions: list[int], each: int, now: int) -> None:
        """Add states to a node at those of `positions`, increasing, that have none."""
        if node.states:
            there = {state.position: state for state in node.states}
            known = [there[position] for position in positions if position in there]
            for state in known:
                state.used = now
            self._states.renewed(known)
            positions = [position for position in positions if position not in there]
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
        if self._states_may_leave:
            self._states.add(fresh)
        if self.on_stored is not None:
            for state in fresh:
                self.on_stored(state)

    def touch(self, node: Node, depth: int) -> None:
        """Count a use of a prefix, all the way up; of its blocks up to `depth`, where they have ages of their own."""
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
        """Give a prefix, and its states from a position on, the age of what is used now; counts no use."""
        now = self._tick()
        states: list[State] = []
        for one in node.path():
            one.used = now
            if one.depth >= states_from:
                states += [state for state in one.states if state.position >= states_from]
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
        """Keep a node and its ancestors from leaving until `unlock`."""
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
        """Keep a state from leaving until `unlock_state`; its node must be locked too."""
        if state.locks == 0:
            self.state_locked += state.num_bytes
        state.locks += 1

    def unlock_state(self, state: State) -> None:
        """Undo one `lock_state`."""
        state.locks -= 1
        if state.locks == 0:
            self.state_locked -= state.num_bytes
            if self._states_may_leave:
                self._states.offer(state)


def _mark_path(node: Node, now: int) -> None:
    """Set the time of the last use of a node and its ancestors."""
    while node.parent is not None:
        node.used = now
        node = node.parent
