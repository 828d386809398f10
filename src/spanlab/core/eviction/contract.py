"""The contract of an eviction order: candidates for eviction among leaves and among states, updated by the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from spanlab.core.budget import Budget
from spanlab.core.cost import Cost, CostOf, in_tokens
from spanlab.core.eviction.path_names import PathNames
from spanlab.core.eviction_queue import EvictionQueue, Key, Ranked, leaf_may_leave, state_may_leave
from spanlab.core.moment import Moment
from spanlab.core.request import Request
from spanlab.core.tree import Node, PrefixTree, State
from spanlab.registry import Registry

if TYPE_CHECKING:
    from spanlab.core.eviction.future import Future

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
        """Refresh the age of entries without a use: tokens were stored behind them, or a request released them."""
        ...

    def offer(self, item: RankedT) -> None:
        """Make an entry a candidate for eviction, unless it is locked or no longer stored."""
        ...

    def removed(self, item: RankedT) -> None:
        """Forget an entry that was removed from the store. The tree reports removed leaves: see `watched`."""
        ...

    def lowest(self) -> tuple[Key, RankedT] | None:
        """Return the next entry to evict as (rank, entry) without removing it; None where none can be evicted.

        The store compares the ranks of leaves and states where it may evict either.
        """
        ...


class WatchingCandidates(Candidates[RankedT], Protocol):
    """Candidates of a kind that may be leaves, which the tree notifies of split edges."""

    def split(self, upper: RankedT, lower: RankedT) -> None:
        """Record that the tree has split an edge: the new node `upper` was the top of `lower`."""
        ...


def _ignore_request(request: Request) -> None:
    """Do nothing: most orders read entries only."""


@dataclass(frozen=True)
class PinRules:
    """Rules by which entries stay locked for `ttl_ns` nanoseconds, independent of the eviction order.

    `on`         end: the entries that a request with a successor has used or stored, from its end until the successor
                 is admitted; read: the entries that any request reuses, from its admission
    `continued`  ids of the requests that are followed by another request of their session
    """

    ttl_ns: int
    on: str
    continued: frozenset[int]


@dataclass(frozen=True)
class EvictionOrder:
    """The eviction order of one store.

    `whole_leaves`  a state at an unused leaf is evicted with the leaf's KV; else a state is evicted alone
    `by_block`      the order depends on the sizes of leaves: each block of a leaf is evicted by a decision of its own
    `pins`          entries that stay locked for some time though no request uses them; None: no pins
    `admitted`      called with each admitted request, before memory is freed for it
    """

    leaves: Candidates[Node]
    states: Candidates[State]
    whole_leaves: bool = False
    by_block: bool = False
    pins: PinRules | None = None
    admitted: Callable[[Request], None] = _ignore_request


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
    `continued`  ids of the requests that are followed by another request of their session, as after a tool call
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


@dataclass(eq=False)
class EvictionFacts:
    """Properties of a store that its order may read; `moment` changes with each operation of the store.

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

    @property
    def leaves(self) -> Kind[Node]:
        """KV at the ends of paths."""
        token_bytes, work = self.token_bytes, self.cost
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
        work = self.cost

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
#: A need: the store receives the request and the time of each use (`Store.note`), or its policy applies the pins.
REQUESTS = "requests"
