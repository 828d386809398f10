"""A log prepared for questions: its paths, its spans, and what each arm would reuse of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spanlab.offline.belady import most_reused_tokens
from spanlab.offline.forest import Ints
from spanlab.offline.paths import Paths
from spanlab.offline.replay import CacheRules, ReplayRequests, ReplayResult, replay
from spanlab.offline.reuses import ServiceOrder, find_reuses
from spanlab.offline.spans import Contents, SpanReuse, in_cached_order, span_reuse
from spanlab.offline.stack import Distances, stack_distances
from spanlab.study.explain.rules import Rules, SpanRules
from spanlab.workloads.logs import Ids, Log

_LADDER = (1, 2, 3, 5)  # sizes of a curve: these, times the powers of ten


@dataclass(frozen=True)
class Facts:
    """A log whose contents are known."""

    log: Log

    @cached_property
    def contents(self) -> Contents:
        log = self.log
        return Contents(log.pieces, log.lengths, log.opens, log.free, log.starts)

    @cached_property
    def paths(self) -> Paths:
        return self.contents.paths()

    @cached_property
    def spans(self) -> SpanReuse:
        return span_reuse(self.contents)

    @cached_property
    def asked(self) -> ReplayRequests:
        return ReplayRequests(self.paths, self.log.output_lens.astype(np.int64), self._first_spans())

    @cached_property
    def reordered(self) -> ReplayRequests:
        """The same requests with passages in the order in which they are cached."""
        return ReplayRequests(in_cached_order(self.contents).paths(), self.asked.output_lens, self.asked.boundaries)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.paths.prompt_tokens.sum())

    @property
    def names_contents(self) -> bool:
        """Whether reuse at any position can be known."""
        return self.log.ids == Ids.CONTENT

    def _first_spans(self) -> list[tuple[int, ...]]:
        """Where the first span of each prompt ends, if others follow: the end of a system prompt."""
        log = self.log
        upto = np.concatenate([[0], np.cumsum(log.lengths, dtype=np.int64)])
        begins = np.append(np.flatnonzero(log.opens), len(log.opens))
        second = begins[np.minimum(np.searchsorted(begins, log.starts[:-1], side="right"), len(begins) - 1)]
        ends = np.minimum(second, log.starts[1:])
        lengths = upto[ends] - upto[log.starts[:-1]]
        inside = ends < log.starts[1:]
        return [(length,) if more else () for length, more in zip(lengths.tolist(), inside.tolist(), strict=True)]

    def reused(self, rules: Rules) -> ReplayResult:
        """Tokens that an arm reuses, by request, and what the others were lost to."""
        if rules is None:
            nothing = np.zeros(self.paths.requests, dtype=np.int64)
            return ReplayResult(nothing, {"never_stored": self.paths.prompt_tokens})
        return self._of_spans(rules) if isinstance(rules, SpanRules) else replay(self.asked, rules)

    def _of_spans(self, rules: SpanRules) -> ReplayResult:
        """Spans found anywhere; what a cache without limit would not find either was never seen."""
        spans, n = self.spans, self.paths.requests
        found, all_found = spans.reused(rules.capacity_tokens), spans.reused(np.inf)
        kept = spans.repaired(found, rules.first, rules.share)
        never = spans.paths.prompt_tokens - all_found

        def by_request(values: Ints) -> Ints:
            return np.bincount(spans.request, values, n).astype(np.int64)

        lost = {"never_seen": never, "kv_evicted": all_found - found, "repair": found - kept}
        return ReplayResult(by_request(kept), {cause: by_request(values) for cause, values in lost.items()})

    def offline_optimum(self, rules: CacheRules) -> int:
        """Tokens that no cache of these blocks and this memory exceeds, states taking no memory."""
        n = self.paths.requests
        own = np.arange(n)
        reuses = find_reuses(self.paths.forest(rules.block), ServiceOrder(own, own, own, np.ones(n, dtype=np.bool_)))
        room = rules.capacity_bytes // rules.block_bytes * rules.block - reuses.prompt_tokens
        return most_reused_tokens(reuses, room)


@dataclass(frozen=True)
class Curve:
    """Hit rates of an LRU cache by size, in blocks; `tokens` of a block, `known` where the log cuts blocks itself."""

    distances: Distances
    paths: Paths
    block: int
    known: bool

    @property
    def sizes(self) -> list[int]:
        """Round sizes up to the one that finds all that can be found."""
        largest = self.distances.largest
        powers = (10**power for power in range(len(str(max(largest, 1)))))
        ladder = sorted({step * power for power in powers for step in _LADDER})
        return [*(size for size in ladder if size < largest), largest] if largest else []

    def tokens(self, size: float) -> int:
        """Tokens found by a cache of `size` blocks."""
        found = self.distances.resident_blocks(size)
        if self.known:  # an id is found whole, and so is the last block of a prompt, however few tokens it has
            whole = found == self.distances.blocks
            return int(np.where(whole, self.paths.tokens[self.paths.nodes], found * self.block).sum())
        most = (self.paths.prompt_tokens - 1) // self.block * self.block
        return int(np.minimum(self.paths.per_request(found) * self.block, most).sum())


def curve_of(facts: Facts, block: int) -> Curve:
    """The curve of the log's own blocks, or of blocks of `block` tokens where the log has none."""
    paths, known = facts.paths, facts.log.block is not None
    weights = paths.pieces if known else paths.blocks(block)
    private = np.zeros(paths.requests, dtype=np.int64)
    return Curve(stack_distances(paths, weights, private), paths, facts.log.block or block, known)


def rates(replayed: ReplayResult, prompt: Ints) -> dict[str, Any]:
    """Hit rates by token and by request, and causes of the rest.

    `token_hit_rate`       reused ÷ prompt tokens, summed over requests: a ratio of sums
    `mean_token_hit_rate`  the mean over requests of reused ÷ prompt tokens: a mean of ratios
    `request_hit_rate`     requests that reuse at least one token ÷ requests
    """
    total = int(prompt.sum())
    return {
        "token_hit_rate": int(replayed.reused.sum()) / total,
        "mean_token_hit_rate": float((replayed.reused / np.maximum(prompt, 1)).mean()),
        "request_hit_rate": float((replayed.reused > 0).mean()),
        "reused_tokens": int(replayed.reused.sum()),
        "states": replayed.states,
        "lost_by_cause": {cause: int(values.sum()) for cause, values in replayed.lost.items() if values.any()},
    }
