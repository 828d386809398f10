"""The contract between a scheduler and a cache policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from spanlab.core.need import Need
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.work import Work

BeforeChange = Callable[[int], None]
"""before_change(step): what is stored is about to change in this step of several equal ones, counted from 0."""


def unnoticed(step: int) -> None:
    """Do nothing before a change."""


class StoredBytes(Protocol):
    """Bytes of a store: cached KV and states, and bytes inserted and evicted so far."""

    state_bytes: int
    """Bytes of one state."""

    @property
    def kv_cached(self) -> int: ...

    @property
    def state_cached(self) -> int: ...

    @property
    def inserted_bytes(self) -> int: ...

    @property
    def evicted_bytes(self) -> int: ...


class Allocation(Protocol):
    """The memory and the work of an admitted request.

    `work`      computation before its next output token, in order
    `captures`  positions at which its prefill captures recurrent states
    `captured`  states stored for it so far; `captured_maps` of them are maps of spans
    `loading`   KV that it reuses is still being loaded from a lower tier, so that it cannot run
    """

    plan: ReusePlan
    work: tuple[Work, ...]
    captures: list[int]
    captured: int
    captured_maps: int
    loading: bool

    @property
    def loads_state(self) -> bool:
        """Whether its first step starts from a stored state."""
        ...


class Policy(Protocol):
    """Decides which tokens prompts reuse and which are stored; positions count prompt and output tokens together.

    `stores_when_scheduled`  tokens that a step computes can be matched by requests of the same step
    `retries_each_step`      a refused admission may succeed after a step of decoding alone
    """

    @property
    def rules(self) -> ReuseRules: ...

    @property
    def store(self) -> StoredBytes: ...

    @property
    def stores_when_scheduled(self) -> bool: ...

    @property
    def retries_each_step(self) -> bool: ...

    def start_step(self, now: int) -> None:
        """Start the scheduling of another step."""
        ...

    def match(self, request: Request, now: int, generated: int = 0) -> Any:
        """Return a plan of what a request, with `generated` output tokens, can reuse; read-only."""
        ...

    def allocate(self, plan: Any, now: int, generated: int = 0, drafts: int = 0) -> Any:
        """Lock and reserve memory, also for `drafts` behind; None, without a change, where it does not fit."""
        ...

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return where a chunk of tokens `[start, stop)` ends; `most` tokens fit into an empty step."""
        ...

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve memory for tokens `[start, stop)` and for `drafts` behind them, which may not stay.

        Returns False, without a change, where memory is short.
        """
        ...

    def repeat(self, allocations: list[Any], starts: list[int], times: int, before: BeforeChange) -> None:
        """Extend each allocation by `times` tokens from its start, one per step; memory must suffice.

        `before`  called before each step that changes what is stored
        """
        ...

    def spare_steps(self, allocations: list[Any]) -> int:
        """Return the number of tokens that each of `allocations` can certainly take."""
        ...

    def insert(self, allocation: Any, computed: int, now: int, cache_span: int = 0) -> None:
        """Store the computed tokens of a cache span, up to prompt token `computed`."""
        ...

    def finish(self, allocation: Any, generated: int, now: int) -> None:
        """Store `generated` output tokens of a finished request; `free` follows."""
        ...

    def free(self, allocation: Any, now: int) -> None:
        """Free everything that a request holds."""
        ...

    def need(self, request: Request) -> Need:
        """Return the largest memory of one request by itself."""
        ...

    def checkpoints(self, request: Request) -> list[int]:
        """Return the positions of the states that are stored along a prompt, increasing."""
        ...
