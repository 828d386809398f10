"""The contract between a scheduler and a cache policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Protocol

from spanlab.core.plan import DecodeBatch, Need, ReusePlan
from spanlab.core.request import Request
from spanlab.core.rules import ReuseRules
from spanlab.registry import one_of

BeforeChange = Callable[[int], None]
"""before_change(step): what is stored is about to change in this step of several equal ones,
counted from 0."""


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


class Policy(Protocol):
    """Decides which tokens prompts reuse and which are stored; positions count prompt and output
    tokens together.

    `stores_when_scheduled`  tokens that a step computes can be matched by requests of the same step
    """

    @property
    def rules(self) -> ReuseRules: ...

    @property
    def store(self) -> StoredBytes: ...

    @property
    def stores_when_scheduled(self) -> bool: ...

    def start_step(self, now: int) -> None:
        """Start the scheduling of another step."""
        ...

    def match(self, request: Request, now: int, generated: int = 0) -> Any:
        """Return a plan of what a request, with `generated` output tokens, can reuse; read-only."""
        ...

    def allocate(self, plan: Any, now: int, generated: int = 0, drafts: int = 0) -> Any:
        """Lock and reserve memory, also for `drafts` behind; None, without a change, where it does
        not fit."""
        ...

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return where a chunk of tokens `[start, stop)` ends; `most` tokens fit into an empty
        step."""
        ...

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve memory for tokens `[start, stop)` and for `drafts` behind them, which may not
        stay.

        Returns False, without a change, where memory is short.
        """
        ...

    def repeat(self, batch: DecodeBatch, times: int, before: BeforeChange) -> None:
        """Extend each allocation of a batch by `times` tokens, one per step; memory must suffice.

        `before`  called before each step that changes what is stored
        """
        ...

    def spare_steps(self, batch: DecodeBatch) -> int:
        """Return the number of further tokens that each allocation of a batch can certainly
        take."""
        ...

    def futile_steps(self, request: Request, batch: DecodeBatch) -> int:
        """Return a number of steps in which a batch decodes and `request`, which does not start
        now, cannot.

        `UNLIMITED`: until a request ends or computes its prompt.
        """
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


# ------------------------------------------------------------------------------
# The selection and the order of a prompt's passages, which a server chooses when a request
# arrives.
#
# A passage is an independent span. A server that orders passages by its cache contents gives
# exact answers for that order, and reuses as prefixes what other requests had in another order.
# Source: CacheWeaver, arXiv 2606.19667, which walks a tree of served prompts greedily; RAGBoost
# (arXiv 2511.03475) orders passages too.
# ------------------------------------------------------------------------------

ORDERS = ("given", "cached")
VIEWS = ("all", "none", "gold")
#: From placed and remaining passages, the rank of each remaining one as the next; 0 or less: not to
#: be placed.
Ranks = Callable[[list[int], list[int]], list[int]]


@dataclass
class PassageRules:
    """Which passages of a prompt are served, and in which order.

    `order`  given: as the workload says; cached: as the cache holds them, when the request arrives
    `view`   all passages; none; or gold, those alone that the answer needs: bounds for measures of
             answers
    """

    order: str = "given"
    view: str = "all"

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        one_of(f"{path}.order", self.order, ORDERS)
        one_of(f"{path}.view", self.view, VIEWS)
        if self.order != "given" and self.view != "all":
            raise ValueError(
                f"{path}.order={self.order} with view={self.view}: expected given, or view=all"
            )

    @property
    def are_default(self) -> bool:
        """Whether prompts stay unchanged."""
        return self == PassageRules()


class Arranger:
    """Orders the passages of one engine's requests as they arrive, by what its policy has
    stored."""

    def __init__(self, rules: PassageRules, policy: Policy) -> None:
        self._rules, self._policy = rules, policy
        self._served: dict[int, list[int]] = {}

    def __call__(self, request: Request, now: int) -> Request:
        """Return the request as it is served."""
        rules = self._rules
        cached = rules.order == "cached"
        numbers = (
            by_cache(request, self._policy, now)
            if cached
            else passages_in_view(request, rules.view)
        )
        self._served[request.id] = numbers
        return with_passages(request, numbers)

    def take_order(self, request_id: int) -> list[int]:
        """Return, and forget, the served order of a finished request: passage numbers of the given
        order."""
        return self._served.pop(request_id)


def passage_indices(request: Request) -> list[int]:
    """Return the indices of a request's passages among its spans."""
    return [index for index, span in enumerate(request.spans) if span.independent]


def novel_requests(requests: Sequence[Request]) -> set[int]:
    """Return the ids of the requests that share no passage with another request."""
    contents = {
        id(span): span.tokens.tobytes()
        for request in requests
        for span in request.spans
        if span.independent
    }
    passages = [
        {contents[id(request.spans[index])] for index in passage_indices(request)}
        for request in requests
    ]
    shared = Counter(content for contents_of in passages for content in contents_of)
    return {
        r.id
        for r, contents_of in zip(requests, passages, strict=True)
        if contents_of and all(shared[content] == 1 for content in contents_of)
    }


def passages_in_view(request: Request, view: str) -> list[int]:
    """Return the numbers of the passages in a view."""
    numbers = list(enumerate(passage_indices(request)))
    return [
        number
        for number, index in numbers
        if view == "all" or (view == "gold" and index in request.gold)
    ]


def in_view(requests: Sequence[Request], view: str) -> Sequence[Request]:
    """Return the requests with the passages of a view only."""
    return (
        requests
        if view == "all"
        else [with_passages(request, passages_in_view(request, view)) for request in requests]
    )


def with_passages(request: Request, numbers: Sequence[int]) -> Request:
    """Return the request with only these passages, in this order, where the same passages stood
    before."""
    passages = passage_indices(request)
    number_at = dict(zip(sorted(passages[number] for number in numbers), numbers, strict=True))
    dropped = set(passages) - number_at.keys()
    spans = [
        passages[number_at[index]] if index in number_at else index
        for index in range(len(request.spans))
        if index not in dropped
    ]
    if spans == list(range(len(request.spans))):
        return request
    gold = tuple(index for index, span in enumerate(spans) if span in request.gold)
    return replace(request, spans=tuple([request.spans[index] for index in spans]), gold=gold)


def greedy(passages: Sequence[int], ranks: Ranks) -> list[int]:
    """Order passages greedily by rank; among equals the first one is next.

    The order ends where no passage has a rank above zero; the remaining passages follow as given.
    """
    placed: list[int] = []
    remaining = list(passages)
    while remaining:
        scores = ranks(placed, remaining)
        best = max(scores)
        if best <= 0:
            break
        placed.append(remaining.pop(scores.index(best)))
    return placed + remaining


def by_cache(request: Request, policy: Policy, now: int) -> list[int]:
    """Order passages one by one for the longest stored beginning of the prompt; returns their
    numbers."""
    passages = passage_indices(request)

    def ranks(placed: list[int], remaining: list[int]) -> list[int]:
        candidates = []
        for passage in remaining:
            behind = [other for other in remaining if other != passage]
            candidates.append(with_passages(request, [*placed, passage, *behind]))
        before = passages[len(placed)]
        start = sum(len(span.ids) for span in candidates[0].spans[:before])
        return [stored_beginning(policy.match(candidate, now)) - start for candidate in candidates]

    return greedy(range(len(passages)), ranks)


def stored_beginning(plan: ReusePlan) -> int:
    """Return the tokens at the prompt's beginning that are stored exactly, or with a stored
    repair."""
    if not plan.cache_spans:
        return plan.matched
    end = 0
    for plan_of_span in plan.cache_spans:
        if not plan_of_span.cache_span.exact and plan_of_span.link is None:
            break
        end = plan_of_span.cache_span.start + plan_of_span.matched
        if end < plan_of_span.cache_span.stop:
            break
    return end


# ------------------------------------------------------------------------------
# A policy for use by many threads.
#
# A policy is not safe under threads: entries that a plan has matched may be evicted before
# it is allocated. Here planning and allocation are one operation, and one lock is held
# around each operation. So every history is that of a sequence of operations, in the order
# in which they acquired the lock.
# ------------------------------------------------------------------------------


class SharedPolicy:
    """A policy whose operations run one at a time; arguments and results are those of `Policy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._lock = policy, Lock()

    def admit(self, request: Request, now: int, generated: int = 0) -> Any:
        """Plan and allocate; None, and no change, where the request does not fit."""
        with self._lock:
            self._policy.start_step(now)
            plan = self._policy.match(request, now, generated)
            return self._policy.allocate(plan, now, generated)

    def reusable(self, request: Request, now: int) -> int:
        """Return the tokens that a request would reuse now; read-only."""
        with self._lock:
            reused: int = self._policy.match(request, now).reused
            return reused

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve memory for tokens `[start, stop)`; False where memory is short."""
        with self._lock:
            return self._policy.append(allocation, start, stop, drafts)

    def insert(self, allocation: Any, computed: int, now: int, cache_span: int = 0) -> None:
        """Store the computed tokens of a cache span, up to prompt token `computed`."""
        with self._lock:
            self._policy.insert(allocation, computed, now, cache_span)

    def finish(self, allocation: Any, generated: int, now: int) -> None:
        """Store output tokens of a finished request, and free its memory."""
        with self._lock:
            self._policy.finish(allocation, generated, now)
            self._policy.free(allocation, now)

    def free(self, allocation: Any, now: int) -> None:
        """Free the memory of a request that has not finished."""
        with self._lock:
            self._policy.free(allocation, now)
