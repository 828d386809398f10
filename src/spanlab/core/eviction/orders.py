"""The contract of an eviction order, and the orders that rank entries by one number."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from spanlab.core.request import Budget, Moment, Request
from spanlab.core.token_string import TokenString
from spanlab.core.tree import (
    CacheSpan,
    EvictionQueue,
    Key,
    Layout,
    Node,
    PrefixTree,
    Ranked,
    State,
    leaf_may_leave,
    state_may_leave,
)
from spanlab.model_spec import Cost, CostOf, in_tokens
from spanlab.registry import Registry

# ------------------------------------------------------------------------------
# Names of entries, the same when an entry is evicted and stored again.
# ------------------------------------------------------------------------------


class PathNames:
    """Digests of paths, which do not depend on where edges are split; a watcher of the tree.

    A node is named by the path above it and its first block, as the tree looks it up.
    """

    def __init__(self) -> None:
        self._digests: dict[Node, blake2b] = {}

    def of_node(self, node: Node) -> bytes:
        """The name of a node in the tree."""
        assert node.parent is not None, "a node is named while it is in the tree"
        key = node.key
        # 9 bytes: those of blocks are a multiple of 4
        first = key if isinstance(key, bytes) else key.to_bytes(9, "little", signed=True)
        return self._path_digest(node.parent).digest() + first

    def of_state(self, state: State) -> bytes:
        """The name of a stored state: the digest of its prefix."""
        assert state.node is not None, "a state is named while it is stored"
        return self.of_position(state.node, state.position)

    def of_position(self, node: Node, position: int) -> bytes:
        """The name of a state at a position on a node's edge: the digest of the tokens up to it."""
        assert node.parent is not None and node.start < position <= node.depth, (
            "a position lies on an edge"
        )
        path = self._path_digest(node.parent).copy()
        path.update(node.edge.cut(0, position - node.start).tobytes())
        return path.digest()

    def split(self, upper: Node, lower: Node) -> None:
        """Do nothing: the digest of a path does not depend on its nodes."""

    def removed(self, node: Node) -> None:
        """Forget a node."""
        self._digests.pop(node, None)

    def _path_digest(self, node: Node) -> blake2b:
        missing = []
        while node not in self._digests:
            missing.append(node)
            if node.parent is None:
                break
            node = node.parent
        for new in reversed(missing):
            if new.parent is None:
                self._digests[new] = blake2b(new.root_name, digest_size=16)
            else:
                path = self._digests[new.parent].copy()
                path.update(new.edge.tobytes())
                self._digests[new] = path
        return self._digests[missing[0] if missing else node]


# ------------------------------------------------------------------------------
# The future of a run: the prefixes of the requests to come, and the next request that uses
# each.
# ------------------------------------------------------------------------------

NEVER = 1 << 62


RootName = Callable[[Request, CacheSpan], bytes]


class FuturePosition(NamedTuple):
    """A position on a path of future requests: within `node`, `depth` tokens from the start of the
    path."""

    node: Node
    depth: int


class Future:
    """A tree of the prefixes of requests in order of arrival, split wherever two of them diverge.

    An admitted request is no longer in the future. Requests are assumed to be admitted in order of
    arrival.

    `num_admitted`  number of admitted requests
    """

    def __init__(
        self, requests: Sequence[Request], layout: Layout, root_name: RootName, block_size: int
    ) -> None:
        self._tree, self._block_size, self.num_admitted = PrefixTree(block_size), block_size, 0
        self._roots: dict[bytes, Node] = {}
        self._admitted = [False] * len(requests)
        self._number = {request.id: index for index, request in enumerate(requests)}
        self._users: dict[Node, list[int]] = {}  # future requests by node, the next one last
        ends = []
        for index, request in enumerate(requests):
            for cache_span in layout(request):
                if not cache_span.storable:
                    continue
                name, tokens = root_name(request, cache_span), cache_span.tokens
                start = self._roots.setdefault(name, self._tree.new_root())
                end = self._tree.extend(start, tokens, len(tokens) // block_size * block_size, 0)
                ends.append((index, end))
        for index, end in reversed(ends):
            for node in end.path():
                self._users.setdefault(node, []).append(index)

    def admitted(self, request: Request) -> None:
        """Remove an admitted request from the future."""
        assert request.id in self._number, "a clairvoyant order needs all requests of its run"
        number = self._number[request.id]
        self.num_admitted += not self._admitted[number]
        self._admitted[number] = True

    def root(self, name: bytes) -> FuturePosition | None:
        """The start of the paths under a root; None where no request has this root."""
        node = self._roots.get(name)
        return None if node is None else FuturePosition(node, 0)

    def next_use(self, position: FuturePosition | None) -> int:
        """The index of the next request that uses the prefix up to a position; `NEVER` without
        one."""
        if position is None:
            return NEVER
        users = self._users.get(position.node, [])
        while users and self._admitted[users[-1]]:
            users.pop()
        return users[-1] if users else NEVER

    def ancestor_at(self, position: FuturePosition | None, depth: int) -> FuturePosition | None:
        """The position at a smaller depth of the same path."""
        if position is None:
            return None
        node = position.node
        while node.start >= depth:
            assert node.parent is not None, "the root starts at zero"
            node = node.parent
        return FuturePosition(node, depth)

    def branch_points(self, position: FuturePosition, edge: TokenString) -> list[FuturePosition]:
        """Positions along an edge where future requests diverge, then the deepest match; empty
        where none matches."""
        points, (node, depth), start = list[FuturePosition](), position, position.depth
        while depth - start < len(edge):
            if depth == node.depth:
                child = node.children.get(edge.key(depth - start, self._block_size))
                if child is None:
                    break
                node = child
            remainder = node.edge.cut(depth - node.start, len(node.edge))
            common = edge.common(depth - start, remainder) // self._block_size * self._block_size
            if not common:
                break
            depth += common
            points.append(FuturePosition(node, depth))
            if depth < node.depth:
                break
        return points


# ------------------------------------------------------------------------------
# The contract of an eviction order: candidates for eviction among leaves and among states,
# updated by the store.
# ------------------------------------------------------------------------------

RankedT = TypeVar("RankedT", bound=Ranked)


class Candidates(Protocol[RankedT]):
    """Stored entries of one kind, and the choice of the next one to evict.

    A path is used from its end to its start, so that a leaf counts as used before its ancestors.
    """

    def add(self, items: Sequence[RankedT]) -> None:
        """Add new entries."""
        ...

    def used(self, items: Iterable[RankedT]) -> None:
        """Record that a request uses these entries."""
        ...

    def renewed(self, items: Iterable[RankedT]) -> None:
        """Refresh the age of entries without a use: tokens were stored behind them, or a request
        released them."""
        ...

    def offer(self, item: RankedT) -> None:
        """Make an entry a candidate for eviction, unless it is locked or no longer stored."""
        ...

    def removed(self, item: RankedT) -> None:
        """Forget an entry that was removed from the store. The tree reports removed leaves: see
        `watched`."""
        ...

    def lowest(self) -> tuple[Key, RankedT] | None:
        """Return the next entry to evict as (rank, entry) without removing it; None where none can
        be evicted.

        The store compares the ranks of leaves and states where it may evict either.
        """
        ...


class WatchingCandidates(Candidates[RankedT], Protocol):
    """Candidates of a kind that may be leaves, which the tree notifies of split edges."""

    def split(self, upper: RankedT, lower: RankedT) -> None:
        """Record that the tree has split an edge: the new node `upper` was the top of `lower`."""
        ...


@dataclass(frozen=True)
class PinRules:
    """Rules by which entries stay locked for `ttl_ns` nanoseconds, independent of the eviction
    order.

    `on`         end: the entries that a request with a successor has used or stored, from its end
                 until the successor is admitted; read: the entries that any request reuses, from
                 its admission
    `continued`  ids of the requests that are followed by another request of their session
    """

    ttl_ns: int
    on: str
    continued: frozenset[int]


@dataclass(frozen=True)
class EvictionOrder:
    """The eviction order of one store.

    `whole_leaves`  a state at an unused leaf is evicted with the leaf's KV; else a state is evicted
                    alone
    `by_block`      the order depends on the sizes of leaves: each block of a leaf is evicted by a
                    decision of its own
    `pins`          entries that stay locked for some time though no request uses them; None: no
                    pins
    `admitted`      called with each admitted request, before memory is freed for it
    """

    leaves: Candidates[Node]
    states: Candidates[State]
    whole_leaves: bool = False
    by_block: bool = False
    pins: PinRules | None = None
    admitted: Callable[[Request], None] = lambda request: None  # most orders read entries only


def ranked(
    leaf: Callable[[Node], Key],
    state: Callable[[State], Key],
    *,
    whole_leaves: bool = False,
    by_block: bool = False,
) -> EvictionOrder:
    """Return the order by two ranks, lowest first.

    A rank must never decrease while its entry is stored, and must end in the entry's serial number.
    """
    leaves, states = EvictionQueue(leaf, leaf_may_leave), EvictionQueue(state, state_may_leave)
    return EvictionOrder(leaves, states, whole_leaves, by_block)


@dataclass(frozen=True)
class EvictionRules:
    """Parameters of a store's eviction order.

    `options`    options of the order, by name
    `cost`       cost of computing tokens, from the name of the order's default cost
    `future`     the requests to come; None where they are not known
    `continued`  ids of the requests that are followed by another request of their session, as after
                 a tool call
    """

    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    cost: CostOf = in_tokens
    future: Future | None = None
    continued: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Kind(Generic[RankedT]):
    """Properties of leaves, or of states, that an order reads.

    `may_leave`  whether an entry can be evicted now: stored and unused
    `num_bytes`  size of an entry without its ancestors
    `work`       cost of recomputing an entry from the entries stored before it
    `name`       identity of an entry, the same when it is evicted and stored again
    `capacity`   bytes of the store for entries of this kind, running requests included
    """

    may_leave: Callable[[RankedT], bool]
    num_bytes: Callable[[RankedT], int]
    work: Callable[[RankedT], float]
    name: Callable[[RankedT], bytes]
    capacity: int


_REMEMBERED = 1 << 16  # costs of one store


@dataclass(eq=False)
class EvictionFacts:
    """Properties of a store that its order may read; `moment` changes with each operation of the
    store.

    `default_cost`  name of the cost that the order uses where the arm names none
    """

    tree: PrefixTree
    budget: Budget
    token_bytes: int
    rules: EvictionRules
    moment: Moment = field(default_factory=Moment)
    default_cost: str = "flops"

    @cached_property
    def _names(self) -> PathNames:
        names = PathNames()
        self.tree.watchers.append(names)
        return names

    @cached_property
    def cost(self) -> Cost:
        """Cost of computing tokens."""
        return self.rules.cost(self.default_cost)

    @cached_property
    def work(self) -> Callable[[int, int], float]:
        """Cost of computing the tokens between two positions, as `cost` returns it.

        Costs are remembered, since orders read those of the same entries at each eviction.
        """
        return lru_cache(_REMEMBERED)(self.cost)

    @property
    def leaves(self) -> Kind[Node]:
        """KV at the ends of paths."""
        token_bytes, work = self.token_bytes, self.work
        return Kind(
            leaf_may_leave,
            lambda node: (node.depth - node.start) * token_bytes,
            lambda node: work(node.start, node.depth),
            lambda node: self._names.of_node(node),
            min(self.budget.kv_bytes, self.budget.total_bytes),
        )

    @property
    def states(self) -> Kind[State]:
        """Recurrent states; a state is recomputed from the next one above it."""
        work = self.work

        def recompute_cost(state: State) -> float:
            above = state.node.deepest_state(state.position - 1) if state.node is not None else None
            return work(above.position if above else 0, state.position)

        capacity = min(self.budget.state_bytes, self.budget.total_bytes)
        return Kind(
            state_may_leave,
            lambda state: state.num_bytes,
            recompute_cost,
            lambda state: self._names.of_state(state),
            capacity,
        )

    def watched(self, leaves: WatchingCandidates[Node]) -> WatchingCandidates[Node]:
        """Return `leaves` after registering them for the tree's split edges and removed nodes."""
        self.tree.watchers.append(leaves)
        return leaves


#: `facts` are the `EvictionFacts` of the store.
EVICTION_ORDERS: Registry[EvictionOrder] = Registry("eviction order", given=("facts",))
#: A need: the order receives the requests to come, in order of arrival.
FUTURE = "future"
#: A need: the store receives the request and the time of each use (`Store.note`), or its policy
#: applies the pins.
REQUESTS = "requests"


# ------------------------------------------------------------------------------
# Orders by one rank per entry, which never decreases.
#
# Ranks of leaves by length or depth: SGLang's forks and studies of prefix caches.
# ------------------------------------------------------------------------------

_BY_USE = attrgetter("used", "serial")


def _by(*names: str, **options: Any) -> EvictionOrder:
    key = attrgetter(*names, "serial")
    return ranked(key, key, **options)


@EVICTION_ORDERS.register("fifo")
def fifo() -> EvictionOrder:
    """The oldest entry first."""
    return _by("created")


@EVICTION_ORDERS.register("lru")
def lru() -> EvictionOrder:
    """The least recently used entry first."""
    return _by("used")


@EVICTION_ORDERS.register("lru_whole_leaves")
def lru_whole_leaves() -> EvictionOrder:
    """As `lru`; a state at an unused leaf is evicted with the leaf's KV."""
    return _by("used", whole_leaves=True)


@EVICTION_ORDERS.register("lfu")
def lfu() -> EvictionOrder:
    """The entry with fewest uses first; ties by least recent use."""
    return _by("uses", "used")


@EVICTION_ORDERS.register("longest")
def longest() -> EvictionOrder:
    """The longest leaf first, which frees most memory at once; ties, and states, by least recent
    use."""
    return ranked(
        lambda node: (node.start - node.depth, node.used, node.serial), _BY_USE, by_block=True
    )


@EVICTION_ORDERS.register("shallowest")
def shallowest() -> EvictionOrder:
    """The leaf at the smallest depth first, whose tokens attend to fewest others; else as
    `longest`."""
    return ranked(attrgetter("depth", "used", "serial"), _BY_USE)


# ------------------------------------------------------------------------------
# A heap of entries by a rank that may fall at a use, so that each is offered again at every
# use.
# ------------------------------------------------------------------------------


class RankedHeap(Generic[RankedT]):
    """Entries by lowest rank; one may be in the heap several times. Stale ranks are corrected at
    the top."""

    def __init__(self, kind: Kind[RankedT], rank: Callable[[RankedT], Key]) -> None:
        self._may_leave, self._rank = kind.may_leave, rank
        self._heap: list[tuple[Key, int, RankedT]] = []
        self._pushed = 0

    def offer(self, item: RankedT) -> None:
        """Add an entry by its current rank, unless it is locked or no longer stored."""
        if self._may_leave(item):
            self._pushed += 1
            heapq.heappush(self._heap, (self._rank(item), self._pushed, item))

    def lowest(self) -> tuple[Key, RankedT] | None:
        """Return (rank, entry) of the lowest rank without removing it; None where none can be
        evicted."""
        while self._heap:
            rank, pushed, item = self._heap[0]
            if not self._may_leave(item):
                heapq.heappop(self._heap)
            elif (current := self._rank(item)) != rank:
                heapq.heapreplace(self._heap, (current, pushed, item))
            else:
                return rank, item
        return None


# ------------------------------------------------------------------------------
# Common parts of orders over lists, and the adaptation of list algorithms to a tree of
# prefixes.
#
# The published algorithms have entries of equal size, each of which can be evicted at any time.
# Here
#
# - every node of the tree, inner nodes included, is an entry of the list of leaves; sizes are
# bytes;
# - a request uses all nodes of its matched path, the deepest one first;
# - an entry that is locked or has child nodes is skipped and keeps its position in the list;
# - when an edge is split, the upper node follows the lower one in the list and copies its marks;
# - a prompt that is stored behind a node refreshes the age of the path, which does not count as a
# use.
#
# With entries of one block and no common prefixes this is the published algorithm.
# ------------------------------------------------------------------------------


def both(
    facts: EvictionFacts,
    make: Callable[[Kind[Any]], WatchingCandidates[Any]],
    by_block: bool = False,
) -> EvictionOrder:
    """Return an order that applies one algorithm to leaves and, separately, to states."""
    return EvictionOrder(facts.watched(make(facts.leaves)), make(facts.states), by_block=by_block)


class ListOrder(ABC, Generic[RankedT]):
    """Defaults of `Candidates` for a list algorithm.

    Where the store may evict a leaf or a state, it evicts the least recently used of the two
    victims.
    """

    def __init__(self, kind: Kind[RankedT]) -> None:
        self.kind = kind

    def renewed(self, items: Iterable[RankedT]) -> None:
        """Do nothing: the default is an order of arrival."""

    def offer(self, item: RankedT) -> None:
        """Do nothing: `victim` checks which entries can be evicted."""

    def lowest(self) -> tuple[Key, RankedT] | None:
        """The victim, ranked by its last use."""
        item = self.victim()
        return None if item is None else ((item.used, item.serial), item)

    @abstractmethod
    def victim(self) -> RankedT | None:
        """Return the next entry to evict; repeated calls before its removal return the same one."""


# ------------------------------------------------------------------------------
# A doubly linked list of entries, oldest first, with the sum of their bytes.
# ------------------------------------------------------------------------------

T = TypeVar("T")


class Chain(Generic[T]):
    """A linked list of entries, the oldest first; None is the sentinel before the oldest and after
    the newest.

    `bytes`  the sum of `num_bytes` of all entries; the two nodes of a split edge have the bytes of
             the edge
    """

    def __init__(self, num_bytes: Callable[[T], int]) -> None:
        self._num_bytes = num_bytes
        self._newer: dict[T | None, T | None] = {None: None}
        self._older: dict[T | None, T | None] = {None: None}
        self.bytes = 0

    def __contains__(self, item: T) -> bool:
        return item in self._newer

    def __iter__(self) -> Iterator[T]:
        item = self._newer[None]
        while item is not None:
            following = self._newer[item]  # the caller may move or remove `item`
            yield item
            item = following

    def newer(self, item: T | None) -> T | None:
        """The next younger entry; the oldest one for None."""
        return self._newer[item]

    def append(self, item: T) -> None:
        """Add an entry at the newest end."""
        self._link(item, None)
        self.bytes += self._num_bytes(item)

    def split(self, upper: T, lower: T) -> None:
        """Insert the upper node of a split edge right after the lower one, which is evicted
        first."""
        self._link(upper, self._newer[lower])

    def remove(self, item: T) -> None:
        """Remove an entry."""
        self._unlink(item)
        self.bytes -= self._num_bytes(item)

    def renew(self, item: T) -> None:
        """Move an entry to the newest end."""
        self._unlink(item)
        self._link(item, None)

    def first(self, condition: Callable[[T], bool]) -> T | None:
        """The oldest entry that meets a condition; None without one."""
        return next((item for item in self if condition(item)), None)

    def _link(self, item: T, newer: T | None) -> None:
        older = self._older[newer]
        self._newer[older], self._older[item] = item, older
        self._newer[item], self._older[newer] = newer, item

    def _unlink(self, item: T) -> None:
        older, newer = self._older.pop(item), self._newer.pop(item)
        self._newer[older], self._older[newer] = newer, older


# ------------------------------------------------------------------------------
# Ghost lists: names of evicted entries, which are recognised when they are stored again.
# ------------------------------------------------------------------------------


class GhostList:
    """Names of evicted entries, the oldest first, with the bytes of each."""

    def __init__(self) -> None:
        self._bytes_of = OrderedDict[bytes, int]()
        self.bytes = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._bytes_of

    def append(self, name: bytes, num_bytes: int) -> None:
        """Add an entry that has just been evicted."""
        self.discard(name)
        self._bytes_of[name] = num_bytes
        self.bytes += num_bytes

    def discard(self, name: bytes) -> None:
        """Remove an entry, if it is in the list."""
        self.bytes -= self._bytes_of.pop(name, 0)

    def shrink(self, max_bytes: int) -> None:
        """Remove the oldest entries until at most `max_bytes` remain."""
        while self._bytes_of and self.bytes > max_bytes:
            self.bytes -= self._bytes_of.popitem(last=False)[1]


class Names(Generic[T]):
    """Names of stored entries, computed while each is in the store."""

    def __init__(self, name: Callable[[T], bytes]) -> None:
        self._name = name
        self._names: dict[T, bytes] = {}

    def add(self, item: T) -> bytes:
        """Compute the name of a new entry."""
        self._names[item] = name = self._name(item)
        return name

    def split(self, upper: T, lower: T) -> None:
        """Give the upper node of a split edge the name of the edge, and the lower node a new
        one."""
        self._names[upper] = self._names[lower]
        self.add(lower)

    def pop(self, item: T) -> bytes:
        """Return and forget the name of a removed entry."""
        return self._names.pop(item)
