"""Room in a byte budget: what fits, what is reserved, and what leaves to make more."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from spanlab.core.budget import UNLIMITED, Budget
from spanlab.core.eviction import EvictionOrder
from spanlab.core.eviction_queue import EvictionQueue, Key, leaf_may_leave, state_may_leave
from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, PrefixTree, State, unlocked_tokens


class Room:
    """Bytes of a tree's KV and states under a budget that holds after every operation.

    Three kinds of bytes count: *cached* (in the tree), *reserved* (running requests, not in the tree) and, among the
    cached, *locked* (in use, so they cannot leave). Only leaves are evicted, so what is cached is always closed under
    prefixes. States leave with their leaf, or alone.
    """

    def __init__(
        self, tree: PrefixTree, kv_bytes_per_token: int, state_bytes: int, budget: Budget, order: EvictionOrder
    ) -> None:
        self.tree, self.budget = tree, budget
        self.token_bytes, self.state_bytes = kv_bytes_per_token, state_bytes
        self._leaves, self._states, self._whole_leaves = order.leaves, order.states, order.whole_leaves
        self._states_may_leave = min(budget.state_bytes, budget.total_bytes) < UNLIMITED
        if not self._states_may_leave:  # nor are they ranked
            self._states = EvictionQueue(_by_serial, state_may_leave)
        self.kv_reserved = self.kv_locked = 0
        self.state_cached = self.state_reserved = self.state_locked = 0
        self.evicted_bytes = 0
        self.on_drop: Callable[[State], None] = lambda state: None
        self.on_leaving: Callable[[State], None] | None = None  # while the state is on its node

    @property
    def kv_cached(self) -> int:
        """Bytes of KV in the tree."""
        return self.tree.num_tokens * self.token_bytes

    @property
    def entries(self) -> int:
        """Stored sequences that no other one extends."""
        return self.tree.num_leaves

    def fits(self, kv: int, state: int) -> bool:
        """Whether `kv` and `state` more bytes could be held, evicting everything that may leave."""
        kv += self.kv_reserved + self.kv_locked
        state += self.state_reserved + self.state_locked
        budget = self.budget
        return kv <= budget.kv_bytes and state <= budget.state_bytes and kv + state <= budget.total_bytes

    def fits_beside(self, paths: Sequence[tuple[Node, int]], held: Iterable[State], kv: int, state: int) -> bool:
        """Whether `kv` and `state` more bytes would fit if each path up to its depth, and states, were locked.

        A state may be named twice, as where a prompt holds one document twice; it counts once.
        """
        kv += unlocked_tokens(paths) * self.token_bytes
        state += sum([one.num_bytes for one in set(held) if one.locks == 0])
        return self.fits(kv, state)

    def free_bytes(self) -> int:
        """Bytes that could be held without an eviction."""
        kv, state = self.kv_cached + self.kv_reserved, self.state_cached + self.state_reserved
        budget = self.budget
        return min(budget.kv_bytes - kv, budget.total_bytes - kv - state)

    def spare_tokens(self) -> int:
        """How many more tokens of KV could be held, evicting everything that may leave."""
        if self.token_bytes == 0:
            return UNLIMITED
        kv = self.kv_reserved + self.kv_locked
        both = kv + self.state_reserved + self.state_locked
        return min(self.budget.kv_bytes - kv, self.budget.total_bytes - both) // self.token_bytes

    def spare_state_bytes(self) -> int:
        """How many more bytes of states could be held, evicting everything that may leave."""
        state = self.state_reserved + self.state_locked
        both = self.kv_reserved + self.kv_locked + state
        return min(self.budget.state_bytes - state, self.budget.total_bytes - both)

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

    def reserve_entry(self, start: Node, tokens: TokenString, stop: int) -> bool:
        """Make room for the entry, if any, that storing `[0, stop)` would add; False where no other can leave."""
        if self.budget.entries >= UNLIMITED or not self._adds_entry(start, tokens, stop):
            return True
        while self.entries >= self.budget.entries:
            leaf = self._leaves.lowest()
            if leaf is None:
                return False
            self._drop_entry(leaf[1])
        return True

    def _adds_entry(self, start: Node, tokens: TokenString, stop: int) -> bool:
        node, length = self.tree.match(start, tokens.cut(0, stop))
        extends_leaf = length == node.depth and not node.children and node.parent is not None
        return length < stop and not extends_leaf

    # -- eviction -----------------------------------------------------------------------------------------------------

    def _make_room(self, kv: int, state: int) -> None:
        budget, tree, token_bytes = self.budget, self.tree, self.token_bytes
        kv += self.kv_reserved
        state += self.state_reserved
        while True:
            kv_used, state_used = tree.num_tokens * token_bytes + kv, self.state_cached + state
            kv_over, state_over = kv_used > budget.kv_bytes, state_used > budget.state_bytes
            if not (kv_over or state_over or kv_used + state_used > budget.total_bytes):
                return
            over = kv_used - budget.kv_bytes if kv_over else kv_used + state_used - budget.total_bytes
            self._evict_one(kv_over, state_over, over)

    def evict(self, tokens: int, states: int) -> None:
        """Evict leaves until `tokens` are gone, then states until `states` are, or until nothing else may leave."""
        kept, left = self.tree.num_tokens - tokens, self.state_cached - states * self.state_bytes
        while (more := self.tree.num_tokens - kept) > 0 and (leaf := self._leaves.lowest()):
            self._drop(self._end_of(leaf[1], more))
        while self.state_cached > left and (state := self._states.lowest()):
            self._evict_state(state[1])

    def drop_states(self, states: Iterable[State]) -> None:
        """Let these states leave alone, which nobody uses; their KV stays."""
        for state in states:
            assert not state.locks, "a state in use stays"
            self._drop_state(state)

    def _evict_one(self, kv_over: bool, state_over: bool, over: int) -> None:
        """Evict for what is over its own budget; where only the common budget is, whatever ranks lower leaves.

        `over`  bytes of KV that must leave, if it is KV that leaves
        """
        leaf = None if state_over and not kv_over else self._leaves.lowest()
        state = None if kv_over else self._states.lowest()
        assert leaf or state, "room was promised, and nothing may leave"
        if state is None or (leaf is not None and leaf[0] <= state[0]):
            assert leaf
            self._drop(self._end_of(leaf[1], -(-over // max(1, self.token_bytes))))
        else:
            self._evict_state(state[1])

    def _end_of(self, leaf: Node, tokens: int) -> Node:
        """What leaves of a leaf when `tokens` must: all of it, or as many of its last blocks as hold them.

        States leave with their blocks, and may make it enough; so blocks of a leaf that has some leave one by one.
        """
        if not self.tree.fixed_blocks:
            return leaf
        depth = leaf.depth - 1 if leaf.states else leaf.depth - tokens
        depth = depth // self.tree.block_size * self.tree.block_size
        if depth > leaf.start:
            self.tree.split(leaf, depth)
        return leaf

    def _evict_state(self, state: State) -> None:
        """Evict a state, with the end of a leaf where the rules say so, the leaf is unlocked and the state in there."""
        node = state.node
        assert node is not None, "a state leaves once"
        at_end = self._whole_leaves and leaf_may_leave(node) and state.position > self.tree.unit_start(node, node.depth)
        if at_end:
            self._drop(self._end_of(node, 1))
        else:
            self._drop_state(state)

    def _drop(self, leaf: Node) -> Node:
        """Take a leaf out, with its states; returns its parent, which may be a leaf now."""
        states = sum([state.num_bytes for state in leaf.states])
        self.state_cached -= states
        self.evicted_bytes += states + (leaf.depth - leaf.start) * self.token_bytes
        for state in leaf.states:
            self._forget(state)
        parent = self.tree.remove(leaf)
        if parent.parent is not None:
            self._leaves.offer(parent)
        return parent

    def _drop_entry(self, leaf: Node) -> None:
        """Take a leaf out, with the part of its path that is neither shared nor locked."""
        node = leaf
        while node.parent is not None and not node.children and not node.locks:
            node = self._drop(node)

    def _drop_state(self, state: State) -> None:
        """Take one state out; its KV stays."""
        node = state.node
        assert node is not None, "a state leaves once"
        node.states.remove(state)
        insort(node.lost, state.position)
        self._forget(state)
        self.state_cached -= state.num_bytes
        self.evicted_bytes += state.num_bytes

    def _forget(self, state: State) -> None:
        if self.on_leaving is not None:
            self.on_leaving(state)
        state.node = None
        self._states.removed(state)
        self.on_drop(state)


def _by_serial(state: State) -> Key:
    return (state.serial,)
