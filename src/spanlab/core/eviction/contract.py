"""What an eviction order is: two candidates lists, one of leaves and one of states, which the store keeps informed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

T = TypeVar("T", bound=Ranked)


class Candidates(Protocol[T]):
    """Entries of one kind that are stored, and which of them is evicted first.

    A path is used from its end to its start, so that a leaf counts as used before what it hangs on.
    """

    def add(self, items: Sequence[T]) -> None:
        """Entries are new."""
        ...

    def used(self, items: Iterable[T]) -> None:
        """A request has found these entries."""
        ...

    def renewed(self, items: Iterable[T]) -> None:
        """Entries have the age of what is used now, which counts as no use: they were stored behind, or given back."""
        ...

    def offer(self, item: T) -> None:
        """An entry may leave now, unless it has gone or is locked."""
        ...

    def removed(self, item: T) -> None:
        """An entry has left the store. Leaves are reported by the tree: see `watched`."""
        ...

    def lowest(self) -> tuple[Key, T] | None:
        """The entry to evict as (rank, entry), still stored; None where none may leave.

        Ranks of leaves and states are compared where either of them would do.
        """
        ...


class Watching(Candidates[Node], Protocol):
    """Candidates that follow how the tree cuts its edges."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper`, which is new, has just been cut off the top of `lower`."""
        ...


def _unnoticed(request: Request) -> None:
    """Most orders see entries alone."""


@dataclass(frozen=True)
class PinRules:
    """What stays locked for `ttl_ns` nanoseconds, whatever the order says.

    `on`       end: all that a request with a successor has used or stored, from its end on, until that one is
               admitted; read: what any request has found, from its admission on
    `goes_on`  ids of the requests that another one of their session follows
    """

    ttl_ns: int
    on: str
    goes_on: frozenset[int]


@dataclass(frozen=True)
class EvictionOrder:
    """Who leaves first, for one store.

    `whole_leaves`  a state at an unused leaf leaves with the leaf's KV; else a state leaves alone
    `pins`          what does not leave for a while though no request uses it
    `admitted`      called with each request that is admitted, before room is made for it
    """

    leaves: Candidates[Node]
    states: Candidates[State]
    whole_leaves: bool = False
    pins: PinRules | None = None
    admitted: Callable[[Request], None] = _unnoticed


def ranked(leaf: Callable[[Node], Key], state: Callable[[State], Key], *, whole_leaves: bool = False) -> EvictionOrder:
    """The order of two ranks, lowest first, which never decrease while an entry is stored and end in its serial."""
    leaves, states = EvictionQueue(leaf, leaf_may_leave), EvictionQueue(state, state_may_leave)
    return EvictionOrder(leaves, states, whole_leaves)


@dataclass(frozen=True)
class EvictionRules:
    """What a store's order is given beside its name.

    `options`  of the order, by name
    `cost`     what computing tokens costs, from the name of the cost that is usual for the order
    `future`   what will be asked for; None where that is not known
    `goes_on`  ids of the requests that another one of their session follows, as after a call of a tool
    """

    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    cost: CostOf = in_tokens
    future: Future | None = None
    goes_on: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Kind(Generic[T]):
    """Leaves or states, as an order sees them.

    `may_leave`  whether an entry is stored and unused now
    `num_bytes`  its own size
    `work`       cost of computing it again from what is stored before it
    `name`       by which an entry is known again when it is stored a second time
    `capacity`   bytes of the store for entries of this kind, running requests included
    """

    may_leave: Callable[[T], bool]
    num_bytes: Callable[[T], int]
    work: Callable[[T], float]
    name: Callable[[T], bytes]
    capacity: int


@dataclass(eq=False)
class EvictionFacts:
    """What an order may know of its store; `moment` changes with each of its operations.

    `usual`  name of the cost that the order counts where the arm names none
    """

    tree: PrefixTree
    budget: Budget
    token_bytes: int
    rules: EvictionRules
    moment: Moment = field(default_factory=Moment)
    usual: str = "flops"

    @cached_property
    def _names(self) -> PathNames:
        names = PathNames()
        self.tree.watchers.append(names)
        return names

    @cached_property
    def cost(self) -> Cost:
        """What computing tokens costs."""
        return self.rules.cost(self.usual)

    @property
    def leaves(self) -> Kind[Node]:
        """KV at the ends of paths."""
        each, work = self.token_bytes, self.cost
        return Kind(
            leaf_may_leave,
            lambda node: (node.depth - node.start) * each,
            lambda node: work(node.start, node.depth),
            lambda node: self._names.of_node(node),
            min(self.budget.kv_bytes, self.budget.total_bytes),
        )

    @property
    def states(self) -> Kind[State]:
        """Recurrent states; they are computed again from the next one above."""
        work = self.cost

        def again(state: State) -> float:
            above = state.node.deepest_state(state.position - 1) if state.node is not None else None
            return work(above.position if above else 0, state.position)

        capacity = min(self.budget.state_bytes, self.budget.total_bytes)
        return Kind(
            state_may_leave,
            lambda state: state.num_bytes,
            again,
            lambda state: self._names.of_state(state),
            capacity,
        )

    def usually(self, cost: str) -> EvictionFacts:
        """The same facts for an order whose usual cost is another one."""
        return replace(self, usual=cost)

    def watched(self, leaves: Watching) -> Watching:
        """The same leaves, told by the tree which of its edges are cut and which nodes have left."""
        self.tree.watchers.append(leaves)
        return leaves


#: `facts` are those of the store.
EVICTION_ORDERS: Registry[EvictionOrder] = Registry("eviction order", given=("facts",))
#: A need: the order is given the requests to come, in their order of arrival.
FUTURE = "future"
#: A need: the store is told which request uses it, and when (`Store.note`), or its policy pins what the order says.
REQUESTS = "requests"
