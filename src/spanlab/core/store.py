"""The byte-budgeted store: what is kept, what is locked, what must leave."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence

from spanlab.core.budget import UNLIMITED, Budget
from spanlab.core.eviction import EVICTION_ORDERS, EvictionFacts, EvictionRules
from spanlab.core.eviction_queue import EvictionQueue, Key, leaf_may_leave, state_may_leave
from spanlab.core.request import Request
from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, PrefixTree, State, position_of, unlocked_tokens


class Store:
    """Keeps prefixes and states under a budget that holds after every operation; it refuses, it never overshoots.

    Three kinds of bytes count: *cached* (in the tree), *reserved* (running requests, not in the tree) and, among the
    cached, *locked* (in use, so they cannot leave). Locking a node locks its ancestors; only leaves are evicted, so
    what is cached is always closed under prefixes. States leave with their leaf, or alone.
    """

    def __init__(
        self,
        tree: PrefixTree,
        kv_bytes_per_token: int,
        state_bytes: int,
        budget: Budget,
        eviction: str,
        rules: EvictionRules | None = None,
    ) -> None:
        self.tree, self.budget = tree, budget
        self.token_bytes, self.state_bytes = kv_bytes_per_token, state_bytes
        rules = rules or EvictionRules()
        facts = EvictionFacts(tree, budget, kv_bytes_per_token, rules)
        order = EVICTION_ORDERS.make(eviction, {}, rules.options, facts=facts)
        self._leaves, self._states, self._whole_leaves = order.leaves, order.states, order.whole_leaves
        self.pins, self._moment = order.pins, facts.moment
        self.on_admission: Callable[[Request], None] = rules.future.admitted if rules.future else order.admitted
        self.kv_reserved = self.kv_locked = 0
        self.state_cached = self.state_reserved = self.state_locked = 0
        self.inserted_bytes = self.evicted_bytes = 0
        self.on_drop: Callable[[State], None] = lambda state: None
        self.on_stored: Callable[[State], None] | None = None  # both while the state is on its node
        self.on_leaving: Callable[[State], None] | None = None
        self._clock = self._state_serial = 0
        self._states_may_leave = min(budget.state_bytes, budget.total_bytes) < UNLIMITED
        if not self._states_may_leave:  # nor are they ranked
            self._states = EvictionQueue(_by_serial, state_may_leave)

    @property
    def kv_cached(self) -> int:
        """Bytes of KV in the tree."""
        return self.tree.num_tokens * self.token_bytes

    @property
    def entries(self) -> int:
        """Stored sequences that no other one extends."""
        return self.tree.num_leaves

    def note(self, now: int, request: Request | None = None) -> None:
        """Say when, and for which request, the store is used next."""
        self._moment.now = now
        if request is not None:
            self._moment.request = request

    # -- room ---------------------------------------------------------------------------------------------------------

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

    def cut(self, node: Node, tokens: TokenString, depth: int) -> Node:
        """The node that ends at `depth` on the stored path of `tokens` below `node`.

        An edge is split if it must be; both of its parts count as used now.
        """
        return self.tree.extend(node, tokens, depth, self._tick())

    def _tick(self) -> int:
        """The next time stamp of uses: one for each operation, so that no two operations tie."""
        self._clock += 1
        return self._clock

    # -- contents -----------------------------------------------------------------------------------------------------

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
            first = bisect_right(todo, self._last_block(node, todo[-1]))
            self._put_states(node, todo[first:], each, now)
            todo = todo[:first]
        self._leaves.offer(end)
        return end

    def _last_block(self, node: Node, position: int) -> int:
        """Where what is kept and evicted together with a position of a node begins: its block, or the whole edge."""
        block_size = self.tree.block_size
        return (position - 1) // block_size * block_size if self.tree.fixed_blocks else node.start

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
            node = self._cut_at(node, depth)
        end = node
        while node.parent is not None:
            node.used = now
            node.uses += 1
            node = node.parent
        self._leaves.used(end.path())

    def _cut_at(self, node: Node, depth: int) -> Node:
        """The node of a path that ends at `depth`, cut off if it must be; the path's own end where that is higher."""
        while node.parent is not None and node.start >= depth:
            node = node.parent
        return self.tree.split(node, depth) if node.depth > depth else node

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
        at_end = self._whole_leaves and leaf_may_leave(node) and state.position > self._last_block(node, node.depth)
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


def _mark_path(node: Node, now: int) -> None:
    """Set the time of the last use of a node and its ancestors."""
    while node.parent is not None:
        node.used = now
        node = node.parent


def _by_serial(state: State) -> Key:
    return (state.serial,)
