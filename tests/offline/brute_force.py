"""Exhaustive search over everything that a cache could keep, for traces of a few units."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations

from spanlab.core.request import Request
from spanlab.core.token_string import TokenString
from spanlab.offline.bound import CacheMemory
from spanlab.offline.forest import StorageRules

Item = tuple[str, Hashable, TokenString]  # "kv" or "state", the cache span's key, the prefix that it ends


@dataclass(frozen=True)
class Exhaustive:
    """The best sequence of contents: after each prompt any part of what was there may stay."""

    requests: tuple[Request, ...]
    rules: StorageRules
    memory: CacheMemory

    def most_reused(self) -> int:
        """Tokens reused by the best of all sequences."""

        @cache
        def best(at: int, content: frozenset[Item]) -> int:
            if at == len(self.requests):
                return 0
            request = self.requests[at]
            later = max(best(at + 1, kept) for kept in self._contents(at, content))
            return self._reused(request, content) + later

        return best(0, frozenset())

    def _prefixes(self, request: Request) -> list[list[tuple[Hashable, TokenString]]]:
        """By cache span: its prefixes of whole units."""
        step = self.rules.unit
        return [
            [
                (self.rules.key(request, cache_span), cache_span.tokens.cut(0, stop))
                for stop in range(step, len(cache_span.tokens) + 1, step)
            ]
            for cache_span in self.rules.layout(request)
        ]

    def _reused(self, request: Request, content: frozenset[Item]) -> int:
        total, held = 0, set(content)
        prefixes = self._prefixes(request)
        for at, cache_span in enumerate(self.rules.layout(request)):
            last = at == len(prefixes) - 1 and not self.rules.last_token
            limit = cache_span.stop - cache_span.start - last
            total += self._longest(prefixes[at], held, limit)
            held |= {("kv", *prefix) for prefix in prefixes[at]}
        return total

    def _longest(self, prefixes: list[tuple[Hashable, TokenString]], held: set[Item], limit: int) -> int:
        longest = 0
        for prefix in prefixes:
            length = len(prefix[1])
            if length > limit or ("kv", *prefix) not in held:
                break
            if not self.memory.state_bytes or ("state", *prefix) in held:
                longest = length
        return longest

    def _items(self, at: int) -> set[Item]:
        """Everything of a prompt that a cache could keep."""
        prefixes = [prefix for cache_span in self._prefixes(self.requests[at]) for prefix in cache_span]
        kinds = ("kv", "state") if self.memory.state_bytes else ("kv",)
        return {(kind, *prefix) for kind in kinds for prefix in prefixes}

    def _contents(self, at: int, content: frozenset[Item]) -> Iterator[frozenset[Item]]:
        """What may be in the cache after this prompt, without what no later prompt has."""
        items = self._items(at)
        own = {item for item in items if item[0] == "kv"}
        later = set().union(*(self._items(other) for other in range(at + 1, len(self.requests))))
        candidates = sorted((content | items) & later, key=repr)
        sizes = range(len(candidates) + 1)
        for chosen in chain.from_iterable(combinations(candidates, size) for size in sizes):
            kept = frozenset(chosen)
            during = own | (kept & content)
            if self._fits(during, bool(self.memory.state_bytes)) and self._fits(kept, False):
                yield kept

    def _fits(self, items: set[Item] | frozenset[Item], running: bool) -> bool:
        kv = self.rules.unit * self.memory.token_bytes * sum(item[0] == "kv" for item in items)
        count = sum(item[0] == "state" for item in items) + running
        state, budget = count * self.memory.state_bytes, self.memory.budget
        firsts = {item[1:] for item in items if len(item[2]) == 4 * self.rules.unit}
        return (
            kv <= budget.kv_bytes
            and state <= budget.state_bytes
            and kv + state <= budget.total_bytes
            and len(firsts) <= budget.entries
        )
