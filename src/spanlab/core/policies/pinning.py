"""A tree whose eviction order pins what was just used: it is locked until its time is over.

Pins count as memory in use: a request that is not admitted yet waits where they leave no room for it. Pins give way,
first the one that ends first, where no request runs, so that a server never stands still, and where a request that runs
needs memory, which would else be taken from another one that runs.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from spanlab.core.admission import Admission
from spanlab.core.ledger import Ledger
from spanlab.core.placement import Placer
from spanlab.core.policies.admitting import AdmittingPolicy
from spanlab.core.prefix_index import PrefixIndex
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan, TreeAllocation
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import Node, State


class Pin(NamedTuple):
    """Paths and states that one request has left locked; numbered as they were made."""

    number: int
    nodes: list[Node]
    states: list[State]


class Pins:
    """Pins of a store, by the time at which they end."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[int, Pin] = {}
        self._made = 0
        self._ending: list[tuple[int, int, int]] = []  # a heap of ends, numbers and requests; some are released already

    def pin(self, request: Request, nodes: list[Node], ends: int) -> None:
        """Lock paths, and the deepest state of each, until a time; an earlier pin of the request is replaced."""
        states = [state for node in nodes if (state := node.deepest_state(node.depth)) is not None]
        self._made += 1
        new = Pin(self._made, list(nodes), states)
        for node in new.nodes:
            self._store.lock(node)
        for state in states:
            self._store.lock_state(state)
        self.release(request.id)
        self._of[request.id] = new
        heapq.heappush(self._ending, (ends, self._made, request.id))

    def release(self, request: int) -> None:
        """Unlock what a request has left locked, if it has."""
        pin = self._of.pop(request, None)
        if pin is None:
            return
        for state in pin.states:
            self._store.unlock_state(state)
        for node in pin.nodes:
            self._store.unlock(node)

    def expire(self, now: int) -> None:
        """Unlock what has ended."""
        while self._ending and self._ending[0][0] <= now:
            self._release_first()

    def give_way(self) -> bool:
        """Release the pin that ends first; False where there is none."""
        while self._ending:
            if self._release_first():
                return True
        return False

    def _release_first(self) -> bool:
        """Drop the first of those that end; False where it was released before its time."""
        _, number, request = heapq.heappop(self._ending)
        pin = self._of.get(request)
        if pin is None or pin.number != number:
            return False
        self.release(request)
        return True


class PinningPolicy(AdmittingPolicy):
    """The policy `tree` of a store whose eviction order pins."""

    def __init__(
        self,
        rules: ReuseRules,
        store: Store,
        index: PrefixIndex,
        placer: Placer,
        admission: Admission,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(rules, store, index, placer, admission, ledger)
        assert store.pins is not None, "a policy that pins is made for an order that pins"
        self._pin_rules, self._pins, self._admitted = store.pins, Pins(store), 0
        self.retries_each_step = True  # a pin may have ended

    def start_step(self, now: int) -> None:
        """Release the pins whose time is over."""
        super().start_step(now)
        self._pins.expire(now)

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0) -> TreeAllocation | None:
        """As without pins, which give way where no request runs and this one does not fit beside them."""
        allocation = super().allocate(plan, now, generated, drafts)
        while allocation is None and not self._admitted and self._pins.give_way():
            allocation = super().allocate(plan, now, generated, drafts)
        if allocation is None:
            return None
        self._admitted += 1
        for earlier in plan.request.after:
            self._pins.release(earlier)
        if self._pin_rules.on == "read":
            self._pins.pin(plan.request, allocation.nodes, now + self._pin_rules.ttl_ns)
        return allocation

    def append(self, allocation: TreeAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve KV of output tokens; pins give way."""
        granted = super().append(allocation, start, stop, drafts)
        while not granted and self._pins.give_way():
            granted = super().append(allocation, start, stop, drafts)
        return granted

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Keep output, and pin what is stored of a request that goes on."""
        super().finish(allocation, generated, now)
        if allocation.plan.request.id in self._pin_rules.goes_on:
            self._pins.pin(allocation.plan.request, allocation.nodes, now + self._pin_rules.ttl_ns)

    def free(self, allocation: TreeAllocation, now: int) -> None:
        """Give up an allocation; its pin stays."""
        super().free(allocation, now)
        self._admitted -= 1
