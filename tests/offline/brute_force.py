"""Exhaustive search over all cache contents, for traces of a few units."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations

from spanlab.core.request import Request
from spanlab.core.rules import StorageRules
from spanlab.core.token_string import TokenString
from spanlab.offline.bound import CacheMemory

Item = tuple[str, Hashable, TokenString]  # "kv" or "state", the cache span's key, the prefix that it ends


@dataclass(frozen=True)
class Exhaustive:
    """Search for the best sequence of contents: after each prompt any subset of the contents may stay."""

    requests: tuple[Request, ...]
    rules: StorageRules
    memory: CacheMemory

    def most_reused(self) -> int:
        """Return the tokens reused by the best of all sequences."""

        @cache
        def best(index: int, content: frozenset[Item]) -> int:
            if index == len(self.requests):
                return 0
            request = self.requests[index]
            later = max(best(index + 1, remaining) for remaining in self._contents(index, content))
            return self._reused(request, content) + later

        return best(0, frozenset())

    def _prefixes(self, request: Request) -> list[list[tuple[Hashable, TokenString]]]:
        """Return, by cache span, its prefixes of whole units."""
        step = self.rules.unit
        return [
            [
                (self.rules.key(request, cache_span), cache_span.tokens.cut(0, stop))
                for stop in range(step, len(cache_span.tokens) + 1, step)
            ]
            for cache_span in self.rules.layout(request)
        ]

    def _reused(self, request: Request, content: frozenset[Item]) -> int:
        total, resident = 0, set(content)
        prefixes = self._prefixes(request)
        for index, cache_span in enumerate(self.rules.layout(request)):
            last = index == len(prefixes) - 1 and not self.rules.last_token
            limit = cache_span.stop - cache_span.start - last
            total += self._longest(prefixes[index], resident, limit)
            resident |= {("kv", *prefix) for prefix in prefixes[index]}
        return total

    def _longest(self, prefixes: list[tuple[Hashable, TokenString]], resident: set[Item], limit: int) -> int:
        longest = 0
        for prefix in prefixes:
            length = len(prefix[1])
            if length > limit or ("kv", *prefix) not in resident:
                break
            if not self.memory.state_bytes or ("state", *prefix) in resident:
                longest = length
        return longest

    def _items(self, index: int) -> set[Item]:
        """Return all items of a prompt that a cache could store."""
        prefixes = [prefix for cache_span in self._prefixes(self.requests[index]) for prefix in cache_span]
        kinds = ("kv", "state") if self.memory.state_bytes else ("kv",)
        return {(kind, *prefix) for kind in kinds for prefix in prefixes}

    def _contents(self, index: int, content: frozenset[Item]) -> Iterator[frozenset[Item]]:
        """Yield the possible contents after this prompt, limited to items of later prompts."""
        items = self._items(index)
        prompt_items = {item for item in items if item[0] == "kv"}
        later = set().union(*(self._items(other) for other in range(index + 1, len(self.requests))))
        candidates = sorted((content | items) & later, key=repr)
        sizes = range(len(candidates) + 1)
        for chosen in chain.from_iterable(combinations(candidates, size) for size in sizes):
            remaining = frozenset(chosen)
            during = prompt_items | (remaining & content)
            if self._fits(during, bool(self.memory.state_bytes)) and self._fits(remaining, False):
                yield remaining

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
