"""Which passages of a prompt are served, and in which order: a choice that a server makes when a request arrives.

A passage is an independent span. A server that orders passages by what it has cached gives exact answers for that
order, and finds as prefixes what others asked for in another order. Source: CacheWeaver, arXiv 2606.19667, which
walks a tree of served prompts greedily; RAGBoost (arXiv 2511.03475) orders passages too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spanlab.checks import one_of
from spanlab.core.protocol import Policy
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan

ORDERS = ("given", "cached")
VIEWS = ("all", "none", "gold")
#: How good each of the passages that are left is as the next one behind those placed; 0 or less is no good.
Ranks = Callable[[list[int], list[int]], list[int]]


@dataclass
class PassageRules:
    """Which passages of a prompt are served, and in which order.

    `order`  given: as the workload says; cached: as the cache holds them, when the request arrives
    `view`   all passages; none; or gold, those alone that the answer needs: bounds for measures of answers
    """

    order: str = "given"
    view: str = "all"

    def check(self, path: str) -> None:
        """Refuse what makes no sense; `path` is the key of these settings."""
        one_of(f"{path}.order", self.order, ORDERS)
        one_of(f"{path}.view", self.view, VIEWS)
        if self.order != "given" and self.view != "all":
            raise ValueError(f"{path}.order={self.order} with view={self.view}: expected given, or view=all")

    @property
    def are_usual(self) -> bool:
        """Whether prompts stay as they are."""
        return self == PassageRules()


class Arranger:
    """Arranges the requests of one engine as they arrive, by what its policy has stored at that moment."""

    def __init__(self, rules: PassageRules, policy: Policy) -> None:
        self._rules, self._policy = rules, policy
        self._served: dict[int, list[int]] = {}

    def __call__(self, request: Request, now: int) -> Request:
        """The request as it is served."""
        rules = self._rules
        cached = rules.order == "cached"
        numbers = by_cache(request, self._policy, now) if cached else seen(request, rules.view)
        self._served[request.id] = numbers
        return with_passages(request, numbers)

    def take_order(self, request_id: int) -> list[int]:
        """Numbers of the passages of a request that has finished, as they were served, counted as they were given."""
        return self._served.pop(request_id)


def places(request: Request) -> list[int]:
    """Which spans of a request are passages."""
    return [at for at, span in enumerate(request.spans) if span.independent]


def novel_requests(requests: Sequence[Request]) -> set[int]:
    """Ids of the requests of which no other one has any passage."""
    contents = {id(span): span.tokens.tobytes() for request in requests for span in request.spans if span.independent}
    found = [{contents[id(request.spans[at])] for at in places(request)} for request in requests]
    shared = Counter(content for own in found for content in own)
    return {r.id for r, own in zip(requests, found, strict=True) if own and all(shared[one] == 1 for one in own)}


def seen(request: Request, view: str) -> list[int]:
    """Numbers of the passages in a view."""
    numbers = list(enumerate(places(request)))
    return [number for number, at in numbers if view == "all" or (view == "gold" and at in request.gold)]


def in_view(requests: Sequence[Request], view: str) -> Sequence[Request]:
    """The requests with the passages of a view alone."""
    return requests if view == "all" else [with_passages(request, seen(request, view)) for request in requests]


def with_passages(request: Request, numbers: Sequence[int]) -> Request:
    """The request with these passages alone, in this order, at the places of the same ones in the given order."""
    passages = places(request)
    kept = dict(zip(sorted(passages[number] for number in numbers), numbers, strict=True))
    dropped = set(passages) - kept.keys()
    spans = [passages[kept[at]] if at in kept else at for at in range(len(request.spans)) if at not in dropped]
    if spans == list(range(len(request.spans))):
        return request
    gold = tuple(at for at, span in enumerate(spans) if span in request.gold)
    return replace(request, spans=tuple([request.spans[at] for at in spans]), gold=gold)


def greedy(passages: Sequence[int], ranks: Ranks) -> list[int]:
    """The passages, each time the one of the highest rank next, of equal ones the first; the rest as they were given.

    The rest begins where no passage has a rank above zero.
    """
    placed: list[int] = []
    left = list(passages)
    while left:
        found = ranks(placed, left)
        best = max(found)
        if best <= 0:
            break
        placed.append(left.pop(found.index(best)))
    return placed + left


def by_cache(request: Request, policy: Policy, now: int) -> list[int]:
    """Numbers of the passages such that, one after another, the longest stored beginning of the prompt follows."""
    passages = places(request)

    def ranks(placed: list[int], left: list[int]) -> list[int]:
        asked = [with_passages(request, _first(one, placed, left)) for one in left]
        before = passages[len(placed)]
        start = sum(len(span.tokens) for span in asked[0].spans[:before])
        return [stored_beginning(policy.match(one, now)) - start for one in asked]

    return greedy(range(len(passages)), ranks)


def _first(one: int, placed: list[int], left: list[int]) -> list[int]:
    return [*placed, one, *(other for other in left if other != one)]


def stored_beginning(plan: ReusePlan) -> int:
    """Tokens of a prompt's beginning that are stored as computing them here would give them, or repairing them."""
    if not plan.cache_spans:
        return plan.matched
    end = 0
    for part in plan.cache_spans:
        if not part.cache_span.exact and part.link is None:
            break
        end = part.cache_span.start + part.matched
        if end < part.cache_span.stop:
            break
    return end
