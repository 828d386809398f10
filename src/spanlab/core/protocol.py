"""What a scheduler asks of a cache: the contract of every policy."""

from __future__ import annotations

from typing import Any, Protocol

from spanlab.core.need import Need
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.work import Work


class StoredBytes(Protocol):
    """What the cache holds, in bytes: findable KV and states, and what has come and gone."""

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
    """What an admitted request holds.

    `work`      what it computes before its next output token
    `captures`  positions of recurrent states that its prefill leaves
    `captured`  states stored for it so far; `captured_maps` of them are maps of spans
    `loading`   KV that it reuses is still on its way from a lower tier, so that it cannot run
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
    """Decides what prompts reuse and what is kept; positions count prompt and output tokens together.

    `stores_when_scheduled`  what a step computes can be found by requests of the same step
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
        """Note that another step is being scheduled."""
        ...

    def match(self, request: Request, now: int, generated: int = 0) -> Any:
        """How much of a request, with `generated` output tokens, can be reused; changes nothing."""
        ...

    def allocate(self, plan: Any, now: int, generated: int = 0, drafts: int = 0) -> Any:
        """What the request holds from now on; None, and no change, where it does not fit, with `drafts` behind it."""
        ...

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Where a chunk of tokens `[start, stop)` ends; `most` tokens fit into an empty step."""
        ...

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Give a request memory for tokens `[start, stop)` and for `drafts` behind them, which may not stay; False, and
        nothing given, where there is not enough."""
        ...

    def repeat(self, allocations: list[Any], starts: list[int], times: int) -> None:
        """Extend each allocation by one token from its start, `times` times over; there must be room."""
        ...

    def spare_steps(self, allocations: list[Any]) -> int:
        """Tokens that each of `allocations` can certainly take."""
        ...

    def insert(self, allocation: Any, computed: int, now: int, cache_span: int = 0) -> None:
        """Keep what has been computed of a cache span, up to prompt token `computed`."""
        ...

    def finish(self, allocation: Any, generated: int, now: int) -> None:
        """Keep `generated` output tokens of a request that has ended; `free` follows."""
        ...

    def free(self, allocation: Any, now: int) -> None:
        """Take back all that a request holds."""
        ...

    def need(self, request: Request) -> Need:
        """What one request may hold by itself."""
        ...

    def checkpoints(self, request: Request) -> list[int]:
        """Positions of the states that are stored along a prompt, increasing."""
        ...
