"""The byte-budgeted store: stored prefixes and states, their ages and their locks."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    EvictionFacts,
    EvictionOrder,
    EvictionRules,
)
from spanlab.core.request import UNLIMITED, Budget, Request
from spanlab.core.token_string import TokenString
from spanlab.core.tree import (
    EvictionQueue,
    Node,
    PrefixTree,
    State,
    leaf_may_leave,
    position_of,
    state_may_leave,
    unlocked_tokens,
)

# ------------------------------------------------------------------------------
# Byte accounting of a store: what fits, what is reserved, and what is evicted to make space.
# ------------------------------------------------------------------------------


class Room:
    """Bytes of a tree's KV and states under a budget that holds after every operation.

    Three kinds of bytes count: *cached* (in the tree), *reserved* (running requests, not in the
    tree) and, among the cached, *locked* (in use, so not evictable). Only leaves are evicted, so
    the cached tokens are always closed under prefixes. States are evicted with their leaf, or
    alone.
    """

    def __init__(
        self,
        tree: PrefixTree,
        kv_bytes_per_token: int,
        state_bytes: int,
        budget: Budget,
        order: EvictionOrder,
    ) -> None:
        self.tree, self.budget = tree, budget
        self.token_bytes, self.state_bytes = kv_bytes_per_token, state_bytes
        self._leaves = order.leaves
        self._states = order.states
        self._whole_leaves = order.whole_leaves
        self._by_block = order.by_block
        self._states_evictable = min(budget.state_bytes, budget.total_bytes) < UNLIMITED
        if not self._states_evictable:  # ranks are not needed
            self._states = EvictionQueue(lambda state: (state.serial,), state_may_leave)
        self.kv_reserved = self.kv_locked = 0
        self.state_cached = self.state_reserved = self.state_locked = 0
        self.evicted_bytes = 0
        self.on_drop: Callable[[State], None] = lambda state: None
        self.before_drop: Callable[[State], None] | None = None  # while the state is on its node

    @property
    def kv_cached(self) -> int:
        """Bytes of KV in the tree."""
        return self.tree.num_tokens * self.token_bytes

    @property
    def entries(self) -> int:
        """Stored sequences that no other stored sequence extends."""
        return self.tree.num_leaves

    def fits(self, kv: int, state: int) -> bool:
        """Whether `kv` and `state` more bytes fit after evicting all evictable entries."""
        kv += self.kv_reserved + self.kv_locked
        state += self.state_reserved + self.state_locked
        budget = self.budget
        return (
            kv <= budget.kv_bytes
            and state <= budget.state_bytes
            and kv + state <= budget.total_bytes
        )

    def fits_with_locks(
        self, paths: Sequence[tuple[Node, int]], states: Iterable[State], kv: int, state: int
    ) -> bool:
        """Whether `kv` and `state` more bytes would fit if each path up to its depth, and `states`,
        were locked.

        A state may be listed twice, as where a prompt contains one document twice; it counts once.
        """
        kv += unlocked_tokens(paths) * self.token_bytes
        state += sum([item.num_bytes for item in set(states) if item.locks == 0])
        return self.fits(kv, state)

    def free_bytes(self) -> int:
        """Return the bytes that fit without an eviction."""
        kv, state = self.kv_cached + self.kv_reserved, self.state_cached + self.state_reserved
        budget = self.budget
        return min(budget.kv_bytes - kv, budget.total_bytes - kv - state)

    def spare_tokens(self) -> int:
        """Return how many more tokens of KV fit after evicting all evictable entries."""
        if self.token_bytes == 0:
            return UNLIMITED
        kv = self.kv_reserved + self.kv_locked
        both = kv + self.state_reserved + self.state_locked
        return min(self.budget.kv_bytes - kv, self.budget.total_bytes - both) // self.token_bytes

    def spare_state_bytes(self) -> int:
        """Return how many more bytes of states fit after evicting all evictable entries."""
        state = self.state_reserved + self.state_locked
        both = self.kv_reserved + self.kv_locked + state
        return min(self.budget.state_bytes - state, self.budget.total_bytes - both)

    def reserve(self, kv: int, state: int) -> bool:
        """Reserve bytes for a running request, evicting as needed; False, without a change, if they
        cannot fit."""
        if not self.fits(kv, state):
            return False
        self._make_room(kv, state)
        self.kv_reserved += kv
        self.state_reserved += state
        return True

    def unreserve(self, kv: int, state: int) -> None:
        """Release reserved bytes."""
        self.kv_reserved -= kv
        self.state_reserved -= state
        assert self.kv_reserved >= 0 and self.state_reserved >= 0, (
            "gave back more than was reserved"
        )

    def reserve_entry(self, start: Node, tokens: TokenString, stop: int) -> bool:
        """Evict entries for the one, if any, that storing `[0, stop)` adds; False where none is
        evictable."""
        if self.budget.entries >= UNLIMITED:
            return True
        node, length = self.tree.match(start, tokens.cut(0, stop))
        extends_leaf = length == node.depth and not node.children and node.parent is not None
        if length >= stop or extends_leaf:
            return True
        while self.entries >= self.budget.entries:
            leaf = self._leaves.lowest()
            if leaf is None:
                return False
            node = leaf[1]
            while node.parent is not None and not node.children and not node.locks:
                node = self._drop(node)
        return True

    # -- eviction ----------------------------------------------------------------------------------

    def _make_room(self, kv: int, state: int) -> None:
        budget, tree, token_bytes = self.budget, self.tree, self.token_bytes
        kv += self.kv_reserved
        state += self.state_reserved
        while True:
            kv_used, state_used = tree.num_tokens * token_bytes + kv, self.state_cached + state
            kv_over, state_over = kv_used > budget.kv_bytes, state_used > budget.state_bytes
            if not (kv_over or state_over or kv_used + state_used > budget.total_bytes):
                return
            # from the exceeded budget; where only the common one is, the entry with the lower rank
            leaf = None if state_over and not kv_over else self._leaves.lowest()
            latest = None if kv_over else self._states.lowest()
            assert leaf or latest, "space was promised, and nothing is evictable"
            if latest is None or (leaf is not None and leaf[0] <= latest[0]):
                assert leaf
                over = (
                    kv_used - budget.kv_bytes
                    if kv_over
                    else kv_used + state_used - budget.total_bytes
                )
                self._drop(self._end_of(leaf[1], -(-over // max(1, token_bytes))))
            else:
                self._evict_state(latest[1])

    def evict(self, tokens: int, states: int) -> None:
        """Evict leaves for `tokens` tokens, then states for `states` states, as far as entries are
        evictable."""
        target_tokens = self.tree.num_tokens - tokens
        target_bytes = self.state_cached - states * self.state_bytes
        while (more := self.tree.num_tokens - target_tokens) > 0 and (
            leaf := self._leaves.lowest()
        ):
            self._drop(self._end_of(leaf[1], more))
        while self.state_cached > target_bytes and (state := self._states.lowest()):
            self._evict_state(state[1])

    def drop_states(self, states: Iterable[State]) -> None:
        """Remove unlocked states; their KV stays."""
        for state in states:
            assert not state.locks, "a state in use is not removed"
            self._drop_state(state)

    def _end_of(self, leaf: Node, tokens: int) -> Node:
        """Return the part of a leaf to evict for `tokens` tokens: all of it, or its last blocks.

        States are evicted with their blocks and may free enough, so a leaf with states is evicted
        block by block; so is every leaf where the order depends on sizes.
        """
        if not self.tree.fixed_blocks:
            return leaf
        depth = leaf.depth - 1 if leaf.states or self._by_block else leaf.depth - tokens
        depth = depth // self.tree.block_size * self.tree.block_size
        if depth > leaf.start:
            self.tree.split(leaf, depth)
        return leaf

    def _evict_state(self, state: State) -> None:
        """Evict a state; where the rules say so, with the unlocked end of its leaf that contains
        it."""
        node = state.node
        assert node is not None, "a state is removed once"
        at_end = (
            self._whole_leaves
            and leaf_may_leave(node)
            and state.position > self.tree.unit_start(node, node.depth)
        )
        if at_end:
            self._drop(self._end_of(node, 1))
        else:
            self._drop_state(state)

    def _drop(self, leaf: Node) -> Node:
        """Remove a leaf with its states; returns its parent, which may be a leaf now."""
        states = sum([state.num_bytes for state in leaf.states])
        self.state_cached -= states
        self.evicted_bytes += states + (leaf.depth - leaf.start) * self.token_bytes
        for state in leaf.states:
            self._forget(state)
        parent = self.tree.remove(leaf)
        if parent.parent is not None:
            self._leaves.offer(parent)
        return parent

    def _drop_state(self, state: State) -> None:
        """Remove one state; its KV stays."""
        node = state.node
        assert node is not None, "a state is removed once"
        node.states.remove(state)
        insort(node.lost, state.position)
        self._forget(state)
        self.state_cached -= state.num_bytes
        self.evicted_bytes += state.num_bytes

    def _forget(self, state: State) -> None:
        if self.before_drop is not None:
            self.before_drop(state)
        state.node = None
        self._states.removed(state)
        self.on_drop(state)


class Store(Room):
    """Stores prefixes and states within its budget; it refuses an entry rather than exceed the
    budget."""

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
        self.on_admission: Callable[[Request], None] = (
            rules.future.admitted if rules.future else order.admitted
        )
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

    def insert(
        self, start: Node, tokens: TokenString, stop: int, states: Sequence[int], each: int
    ) -> Node:
        """Store tokens `[0, stop)` below `start`, which they contain, and states of `each` bytes at
        `states`.

        `states` are increasing positions in (start.depth, stop]. The bytes must have been reserved
        and released just before, so nothing is evicted here. Returns the node at `stop`. A stored
        state is not stored twice. The whole path counts as used now, as do the states that were
        stored already.
        """
        before, now = self.tree.num_tokens, self._tick()
        end = self.tree.extend(start, tokens, stop, now)
        node = end
        while node.parent is not None:
            node.used = now
            node = node.parent
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
        """Count a use of a prefix and its ancestors; with fixed blocks, of its blocks up to
        `depth`."""
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
        """Set the last use of a prefix, and of its states from a position on, to now; counts no
        use."""
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

    # -- locks -------------------------------------------------------------------------------------

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


# ------------------------------------------------------------------------------
# A recount of a store from scratch, for tests and idle moments.
# ------------------------------------------------------------------------------


def recount(store: Store, roots: Iterable[Node]) -> None:
    """Recount everything under `roots` and compare with the store's counters; slow, for tests and
    idle moments."""
    nodes = [node for root in roots for node in _descendants(root)]
    sizes = [(node.depth - node.start) * store.token_bytes for node in nodes]
    states = [state for node in nodes for state in node.states]
    assert store.kv_cached == sum(sizes), "cached KV bytes are miscounted"
    locked = [size for node, size in zip(nodes, sizes, strict=True) if node.locks]
    assert store.kv_locked == sum(locked), "locked KV bytes are miscounted"
    assert store.state_cached == sum(state.num_bytes for state in states), (
        "cached state bytes are miscounted"
    )
    in_use = sum(state.num_bytes for state in states if state.locks)
    assert store.state_locked == in_use, "locked state bytes are miscounted"
    assert store.entries == sum(not node.children for node in nodes), "entries are miscounted"
    for node in nodes:
        assert node.parent is not None and node.parent.depth == node.start, (
            "a node does not start where its parent ends"
        )
        assert (
            len(node.edge) == node.depth - node.start and node.depth % store.tree.block_size == 0
        ), "an edge is off its block"
        assert node.parent.children[node.key] is node, (
            "a child has another key than its parent's entry for it"
        )
        assert node.locks >= sum(child.locks for child in node.children.values()), (
            "locks do not reach the ancestors"
        )
        positions = [state.position for state in node.states]
        for values in (positions, node.lost):
            assert values == sorted(set(values)), "positions are not increasing"
            assert all(node.start < position <= node.depth for position in values), (
                "a state lies outside its node"
            )
        assert not set(positions) & set(node.lost), "a state is both here and lost"
        assert all(state.node is node for state in node.states), "a state points to another node"
    kv, state = store.kv_cached + store.kv_reserved, store.state_cached + store.state_reserved
    assert kv <= store.budget.kv_bytes and state <= store.budget.state_bytes, "over a budget"
    assert kv + state <= store.budget.total_bytes and store.entries <= store.budget.entries, (
        "over a budget"
    )


def _descendants(root: Node) -> Iterator[Node]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node
