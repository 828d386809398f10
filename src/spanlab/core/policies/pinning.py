"""A tree policy with pins: the eviction order locks recently used entries until their time to live is over.

Pinned memory counts as memory in use: a waiting request is not admitted while pins leave too little memory. Pins are
released early, in order of their end, in two cases: if no request runs, so that the server never stalls, and if a
running request needs memory, so that no other running request is preempted for it.
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
    """Locked paths and states of one request; `number` counts pins in order of creation."""

    number: int
    nodes: list[Node]
    states: list[State]


class Pins:
    """Pins of a store, by their end time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pin_of: dict[int, Pin] = {}
        self._num_created = 0
        self._end_heap: list[tuple[int, int, int]] = []  # heap of (end, number, request); may contain released pins

    def pin(self, request: Request, nodes: list[Node], ends: int) -> None:
        """Lock paths, and the deepest state of each, until `ends`; replace an earlier pin of the request."""
        states = [state for node in nodes if (state := node.deepest_state(node.depth)) is not None]
        self._num_created += 1
        new = Pin(self._num_created, list(nodes), states)
        for node in new.nodes:
            self._store.lock(node)
        for state in states:
            self._store.lock_state(state)
        self.release(request.id)
        self._pin_of[request.id] = new
        heapq.heappush(self._end_heap, (ends, self._num_created, request.id))

    def release(self, request: int) -> None:
        """Release the pin of a request, if it has one."""
        pin = self._pin_of.pop(request, None)
        if pin is None:
            return
        for state in pin.states:
            self._store.unlock_state(state)
        for node in pin.nodes:
            self._store.unlock(node)

    def expire(self, now: int) -> None:
        """Release all pins that have ended."""
        while self._end_heap and self._end_heap[0][0] <= now:
            self._release_first()

    def release_earliest(self) -> bool:
        """Release the pin that ends first; return False where there is none."""
        while self._end_heap:
            if self._release_first():
                return True
        return False

    def _release_first(self) -> bool:
        """Remove the first entry of the heap; return False where its pin was released already."""
        _, number, request = heapq.heappop(self._end_heap)
        pin = self._pin_of.get(request)
        if pin is None or pin.number != number:
            return False
        self.release(request)
        return True


class PinningPolicy(AdmittingPolicy):
    """The policy `tree` for a store whose eviction order has pins."""

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
        assert store.pins is not None, "this policy needs an eviction order with pins"
        self._pin_rules, self._pins, self._num_running = store.pins, Pins(store), 0
        self.retries_each_step = True  # a pin may have ended

    def start_step(self, now: int) -> None:
        """Release expired pins."""
        super().start_step(now)
        self._pins.expire(now)

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0) -> TreeAllocation | None:
        """Allocate as without pins; release pins while no request runs and this one does not fit."""
        allocation = super().allocate(plan, now, generated, drafts)
        while allocation is None and not self._num_running and self._pins.release_earliest():
            allocation = super().allocate(plan, now, generated, drafts)
        if allocation is None:
            return None
        self._num_running += 1
        for earlier in plan.request.after:
            self._pins.release(earlier)
        if self._pin_rules.on == "read":
            self._pins.pin(plan.request, allocation.nodes, now + self._pin_rules.ttl_ns)
        return allocation

    def append(self, allocation: TreeAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve KV of output tokens; release pins while it does not fit."""
        granted = super().append(allocation, start, stop, drafts)
        while not granted and self._pins.release_earliest():
            granted = super().append(allocation, start, stop, drafts)
        return granted

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Store the output, and pin the entries of a request with a successor."""
        super().finish(allocation, generated, now)
        if allocation.plan.request.id in self._pin_rules.continued:
            self._pins.pin(allocation.plan.request, allocation.nodes, now + self._pin_rules.ttl_ns)

    def free(self, allocation: TreeAllocation, now: int) -> None:
        """Free an allocation; its pin remains."""
        super().free(allocation, now)
        self._num_running -= 1
