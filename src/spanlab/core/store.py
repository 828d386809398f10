"""The byte-budgeted store: what is kept, what is locked, what must leave."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from spanlab.core.eviction import EVICTION_ORDERS, Key
from spanlab.core.tree import TOKEN_BYTES, Node, PrefixTree

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Budget:
    """What the store may hold, running requests included: bytes of KV, of states, of both together, and entries.

    An entry is a stored sequence that no other stored sequence extends, that is, a leaf.
    """

    kv_bytes: int = UNLIMITED
    state_bytes: int = UNLIMITED
    total_bytes: int = UNLIMITED
    entries: int = UNLIMITED


class Store:
    """Keeps prefixes and states under a budget that holds after every operation; it refuses, it never overshoots.

    Three kinds of bytes count: *cached* (in the tree), *reserved* (running requests, not in the tree) and, among the
    cached, *locked* (in use, so they cannot leave). Locking a node locks its ancestors; only leaves are evicted, so
    what is cached is always closed under prefixes. A state may leave alone; a childless node whose state left leaves
    with it, for nothing could resume from its KV.
    """

    def __init__(
        self, tree: PrefixTree, kv_bytes_per_token: int, state_bytes: int, budget: Budget, eviction: str
    ) -> None:
        self.tree, self.budget = tree, budget
        self.token_bytes, self.state_bytes = kv_bytes_per_token, state_bytes
        self._order = EVICTION_ORDERS[eviction]
        self.kv_cached = self.kv_reserved = self.kv_locked = 0
        self.state_cached = self.state_reserved = self.state_locked = 0
        self.entries = 0
        self.inserted_bytes = self.evicted_bytes = 0
        self._leaves: list[tuple[Key, int, Node]] = []
        self._states: list[tuple[Key, int, Node]] = []

    # -- room ---------------------------------------------------------------------------------------------------------

    def fits(self, kv: int, state: int) -> bool:
        """Whether `kv` and `state` more bytes could be held, evicting everything that may leave."""
        kv += self.kv_reserved + self.kv_locked
        state += self.state_reserved + self.state_locked
        budget = self.budget
        return kv <= budget.kv_bytes and state <= budget.state_bytes and kv + state <= budget.total_bytes

    def spare_tokens(self) -> int:
        """How many more tokens of KV could be held, evicting everything that may leave."""
        if self.token_bytes == 0:
            return UNLIMITED
        kv = self.kv_reserved + self.kv_locked
        both = kv + self.state_reserved + self.state_locked
        return min(self.budget.kv_bytes - kv, self.budget.total_bytes - both) // self.token_bytes

    def spare_states(self, kv: int) -> int:
        """How many states could be held beside `kv` more bytes of KV, evicting everything that may leave."""
        if self.state_bytes == 0:
            return UNLIMITED
        state = self.state_reserved + self.state_locked
        both = kv + self.kv_reserved + self.kv_locked + state
        return min(self.budget.state_bytes - state, self.budget.total_bytes - both) // self.state_bytes

    def reserve(self, kv: int, state: int) -> bool:
        """Set bytes aside for a running request, evicting what must leave; False, and no change, if they cannot fit."""
        if not self.fits(kv, state):
            return False
        self._make_room(kv, state)
        self.kv_reserved += kv
        self.state_reserved += state
        return True

    def unreserve(self, kv: int, state: int) -> None:
        """Give reserved bytes back."""
        self.kv_reserved -= kv
        self.state_reserved -= state
        assert self.kv_reserved >= 0 and self.state_reserved >= 0, "gave back more than was reserved"

    def reserve_entry(self, start: Node, tokens: bytes, stop: int) -> bool:
        """Make room for the entry, if any, that storing `[0, stop)` would add; False where no other can leave."""
        if self.budget.entries >= UNLIMITED or not self._adds_entry(start, tokens, stop):
            return True
        while self.entries >= self.budget.entries:
            leaf = self._peek(self._leaves, self._leaf_rank)
            if leaf is None:
                return False
            self._drop(leaf[2])
        return True

    def _adds_entry(self, start: Node, tokens: bytes, stop: int) -> bool:
        node, length = self.tree.match(start, tokens[: stop * TOKEN_BYTES])
        extends_leaf = length == node.depth and not node.children and node.parent is not None
        return length < stop and not extends_leaf

    # -- contents -----------------------------------------------------------------------------------------------------

    def insert(self, start: Node, tokens: bytes, stop: int, states: Sequence[int], now: int) -> Node:
        """Keep tokens `[0, stop)` below `start`, which they contain, and a state at each of `states`, increasing.

        The bytes must have been reserved and given back just before, so nothing is evicted here. Returns the node at
        `stop`. States at positions that have one already are not stored twice.
        """
        node = start
        for position in (*states, stop):
            node = self._extend(node, tokens, position, now)
            if position != stop or (states and states[-1] == stop):
                self._put_state(node, now)
        self._offer_leaf(node)
        return node

    def _extend(self, node: Node, tokens: bytes, stop: int, now: int) -> Node:
        end, added = self.tree.extend(node, tokens, stop, now)
        if added:
            top = end
            while top.depth > stop - added:
                assert top.parent is not None
                top = top.parent
            joins_leaf = top.parent is not None and len(top.children) == 1
            self.entries += 0 if joins_leaf else 1
            self.kv_cached += added * self.token_bytes
            self.inserted_bytes += added * self.token_bytes
        return end

    def _put_state(self, node: Node, now: int) -> None:
        if node.state:
            return
        node.state, node.state_lost = True, False
        node.state_created = node.state_used = now
        self.state_cached += self.state_bytes
        self.inserted_bytes += self.state_bytes
        self._offer_state(node)

    def touch(self, node: Node, now: int) -> None:
        """Note a use of a prefix, all the way up."""
        while node.parent is not None:
            node.used = now
            node.uses += 1
            node = node.parent

    def touch_state(self, node: Node, now: int) -> None:
        """Note a use of the state at a node."""
        node.state_used = now
        node.state_uses += 1

    # -- locks --------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep a node and its ancestors from leaving until `unlock`."""
        while node.parent is not None:
            if node.locks == 0:
                self.kv_locked += (node.depth - node.start) * self.token_bytes
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`; a node that became useless meanwhile leaves."""
        step = node
        while step.parent is not None:
            step.locks -= 1
            if step.locks == 0:
                self.kv_locked -= (step.depth - step.start) * self.token_bytes
            step = step.parent
        if node.state_lost and not node.locks and not node.children:
            self._drop(node)
        elif node.parent is not None:
            self._offer_leaf(node)

    def lock_state(self, node: Node) -> None:
        """Keep the state at a node from leaving until `unlock_state`."""
        if node.state_locks == 0:
            self.state_locked += self.state_bytes
        node.state_locks += 1

    def unlock_state(self, node: Node) -> None:
        """Undo one `lock_state`."""
        node.state_locks -= 1
        if node.state_locks == 0:
            self.state_locked -= self.state_bytes
            self._offer_state(node)

    # -- eviction -----------------------------------------------------------------------------------------------------

    def _make_room(self, kv: int, state: int) -> None:
        while True:
            kv_used = self.kv_cached + self.kv_reserved + kv
            state_used = self.state_cached + self.state_reserved + state
            total_over = kv_used + state_used > self.budget.total_bytes
            kv_over = kv_used > self.budget.kv_bytes
            state_over = state_used > self.budget.state_bytes
            if not (total_over or kv_over or state_over):
                return
            self._evict_one(kv_over, state_over)

    def _evict_one(self, kv_over: bool, state_over: bool) -> None:
        """Evict for what is over its own budget; where only the common budget is, whatever ranks lower leaves."""
        leaf = None if state_over and not kv_over else self._peek(self._leaves, self._leaf_rank)
        state = None if kv_over else self._peek(self._states, self._state_rank)
        assert leaf or state, "room was promised, and nothing may leave"
        if state is None or (leaf is not None and leaf[0] <= state[0]):
            assert leaf
            self._drop(leaf[2])
        else:
            self._evict_state(state[2])

    def _leaf_rank(self, node: Node) -> Key | None:
        return None if node.children or node.locks or node.parent is None else self._order.leaf(node)

    def _state_rank(self, node: Node) -> Key | None:
        return self._order.state(node) if node.state and not node.state_locks and node.parent is not None else None

    def _peek(
        self, heap: list[tuple[Key, int, Node]], rank: Callable[[Node], Key | None]
    ) -> tuple[Key, int, Node] | None:
        """The true minimum of a heap of possibly stale keys; drops what is no longer a candidate."""
        while heap:
            key, serial, node = heap[0]
            current = rank(node)
            if current == key:
                return heap[0]
            if current is not None:
                heapq.heapreplace(heap, (current, serial, node))
                continue
            heapq.heappop(heap)
            if heap is self._leaves:
                node.in_leaf_heap = False
            else:
                node.in_state_heap = False
        return None

    def _evict_state(self, node: Node) -> None:
        if not node.children and not node.locks:
            self._drop(node)
        else:
            self._drop_state(node)
            node.state_lost = True

    def _drop(self, node: Node) -> None:
        """Take a leaf out, and every ancestor that has become a childless, unlocked tombstone."""
        while True:
            self._drop_state(node)
            size = (node.depth - node.start) * self.token_bytes
            self.kv_cached -= size
            self.evicted_bytes += size
            node = self.tree.remove(node)
            if node.children or node.parent is None:
                self.entries -= 1
                return
            if node.locks or not node.state_lost:
                self._offer_leaf(node)
                return

    def _drop_state(self, node: Node) -> None:
        if node.state:
            node.state = False
            self.state_cached -= self.state_bytes
            self.evicted_bytes += self.state_bytes

    def _offer_leaf(self, node: Node) -> None:
        if not (node.children or node.locks or node.in_leaf_heap):
            node.in_leaf_heap = True
            heapq.heappush(self._leaves, (self._order.leaf(node), node.serial, node))

    def _offer_state(self, node: Node) -> None:
        if node.state and not (node.state_locks or node.in_state_heap):
            node.in_state_heap = True
            heapq.heappush(self._states, (self._order.state(node), node.serial, node))

    # -- audit --------------------------------------------------------------------------------------------------------

    def check(self, roots: Iterable[Node]) -> None:
        """Recount everything under `roots` from scratch and compare; slow, for tests and for idle moments."""
        nodes = [node for root in roots for node in _below(root)]
        spans = [(node, node.depth - node.start) for node in nodes]
        states = [node for node in nodes if node.state]
        assert self.kv_cached == sum(size for _, size in spans) * self.token_bytes, "cached KV bytes are miscounted"
        assert self.kv_locked == sum(size for node, size in spans if node.locks) * self.token_bytes, "locked KV bytes"
        assert self.state_cached == len(states) * self.state_bytes, "cached state bytes are miscounted"
        locked = sum(node.state_locks > 0 for node in states)
        assert self.state_locked == locked * self.state_bytes, "locked state bytes are miscounted"
        assert self.entries == sum(not node.children for node in nodes), "entries are miscounted"
        for node in nodes:
            _check_node(node, self.tree.page)
        kv, state = self.kv_cached + self.kv_reserved, self.state_cached + self.state_reserved
        assert kv <= self.budget.kv_bytes and state <= self.budget.state_bytes, "over a budget"
        assert kv + state <= self.budget.total_bytes and self.entries <= self.budget.entries, "over a budget"


def _below(root: Node) -> Iterator[Node]:
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        yield node


def _check_node(node: Node, page: int) -> None:
    assert node.parent is not None and node.parent.depth == node.start, "a node does not hang on its parent"
    assert len(node.edge) == (node.depth - node.start) * TOKEN_BYTES and node.depth % page == 0, (
        "an edge is off its page"
    )
    assert node.parent.children[node.edge[: page * TOKEN_BYTES]] is node, "a child is filed under another key"
    assert node.locks >= sum(child.locks for child in node.children.values()), "locks do not reach the ancestors"
    assert node.children or node.locks or not node.state_lost, "a tombstone became a leaf"
    assert not (node.state and node.state_lost), "a state is both here and lost"
