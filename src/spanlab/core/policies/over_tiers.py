"""The base of policies over lower memory tiers: it delegates to the policy of device memory, and manages loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from spanlab.core.need import Need
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.tiers.load import Load, LoadNote
from spanlab.core.tiers.tier import Key
from spanlab.core.tiers.tiers import Tiers

#: Nanoseconds of each step of computing prompt tokens [start, stop) alone.
PrefillSteps = Callable[[int, int], Sequence[int]]


P = TypeVar("P", bound=BlockPolicy | TreePolicy)


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that waits for `num_loads` loads, since the time `since` in nanoseconds."""

    allocation: Any
    note: LoadNote
    since: int
    num_loads: int = 1

    def loaded(self, load: Load) -> None:
        """Count a load that has ended; after the last one the request is ready to run."""
        self.num_loads -= 1
        if not self.num_loads:
            self.allocation.loading = False
            self.note.critical_ns += load.ended_at - self.since


class OverTiers(ABC, Generic[P]):
    """The parts of `Policy` that are common to all tiers; evicted entries are written to a tier.

    `steps`  time of computing; None: everything that can be loaded is loaded
    `notes`  transfers for each request, by its id, until `take_note`
    """

    def __init__(self, policy: P, tiers: Tiers, steps: PrefillSteps | None) -> None:
        self._policy, self.tiers, self._steps = policy, tiers, steps
        self._now = 0
        self.notes: dict[int, LoadNote] = {}
        self.retries_each_step, self.stores_when_scheduled = policy.retries_each_step, policy.stores_when_scheduled

    @property
    def rules(self) -> ReuseRules:
        return self._policy.rules

    # -- loading ------------------------------------------------------------------------------------------------------

    def start_step(self, now: int) -> None:
        """Complete transfers, and make requests ready whose loads have ended."""
        self._now = now
        self._policy.start_step(now)
        self.tiers.advance(now)
        self._arrive()

    @abstractmethod
    def _arrive(self) -> None:
        """Make requests ready to run whose loads have ended."""

    @abstractmethod
    def next_arrival(self) -> int | None:
        """Return when the next awaited load ends, if no further transfer begins; None without one."""

    def step_duration(self, duration_ns: int) -> int:
        """Return the nanoseconds of the scheduled step, which computes for `duration_ns`, with the loads it follows."""
        return duration_ns

    def _note(self, request: Request) -> LoadNote:
        """Return the note of a request, which exists from its first admission on."""
        return self.notes.setdefault(request.id, LoadNote([0] * len(self.tiers)))

    def _load(self, keys: Sequence[Key], note: LoadNote, now: int) -> Load:
        """Begin to load entries, and record their bytes."""
        load = self.tiers.load(keys, now)
        for number, num_bytes in load.num_bytes.items():
            note.bytes[number] += num_bytes
        return load

    def take_note(self, request: int) -> LoadNote:
        """Return and forget the note of a finished request."""
        return self.notes.pop(request)

    # -- delegation to the policy of the device -----------------------------------------------------------------------

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Allocate memory for tokens `[start, stop)`; entries evicted for it are written to a tier."""
        granted = self._policy.append(allocation, start, stop, drafts)
        self.tiers.settle(self._now)
        return granted

    def repeat(self, allocations: list[Any], starts: list[int], times: int, before: BeforeChange = unnoticed) -> None:
        """Allocate memory for several equal decode steps; writes to tiers begin at the first of them."""
        self._policy.repeat(allocations, starts, times, before)
        self.tiers.settle(self._now)

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Delegate to the policy."""
        return self._policy.chunk_end(plan, start, stop, most, generated)

    def spare_steps(self, allocations: list[Any]) -> int:
        """Delegate to the policy."""
        return self._policy.spare_steps(allocations)

    def insert(self, allocation: Any, computed: int, now: int, cache_span: int = 0) -> None:
        """Delegate to the policy."""
        self._policy.insert(allocation, computed, now, cache_span)

    def finish(self, allocation: Any, generated: int, now: int) -> None:
        """Delegate to the policy."""
        self._policy.finish(allocation, generated, now)

    def free(self, allocation: Any, now: int) -> None:
        """Delegate to the policy."""
        self._policy.free(allocation, now)

    def need(self, request: Request) -> Need:
        """Delegate to the policy: the memory of a request is on the device."""
        return self._policy.need(request)

    def checkpoints(self, request: Request) -> list[int]:
        """Delegate to the policy: return states on the device."""
        return self._policy.checkpoints(request)

    def check(self) -> None:
        """Verify device and tiers by recounting; slow, for tests."""
        self._policy.check()
        self.tiers.check()
