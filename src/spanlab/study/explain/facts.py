"""A log's paths and spans, and the tokens that each arm would reuse."""

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
    """A log with ids of blocks or contents, and its derived paths and spans."""

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
    def in_logged_order(self) -> ReplayRequests:
        """The requests with passages in the order of the log."""
        return ReplayRequests(self.paths, self.log.output_lens.astype(np.int64), self._first_spans())

    @cached_property
    def reordered(self) -> ReplayRequests:
        """The requests with passages in the order in which they are cached."""
        return ReplayRequests(
            in_cached_order(self.contents).paths(), self.in_logged_order.output_lens, self.in_logged_order.boundaries
        )

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.paths.prompt_tokens.sum())

    @property
    def names_contents(self) -> bool:
        """Whether ids name contents, so that reuse at any position can be computed."""
        return self.log.ids == Ids.CONTENT

    def _first_spans(self) -> list[tuple[int, ...]]:
        """Return the end of the first span of each prompt that has several: the end of a system prompt."""
        log = self.log
        upto = np.concatenate([[0], np.cumsum(log.lengths, dtype=np.int64)])
        begins = np.append(np.flatnonzero(log.opens), len(log.opens))
        second = begins[np.minimum(np.searchsorted(begins, log.starts[:-1], side="right"), len(begins) - 1)]
        ends = np.minimum(second, log.starts[1:])
        lengths = upto[ends] - upto[log.starts[:-1]]
        inside = ends < log.starts[1:]
        return [(length,) if more else () for length, more in zip(lengths.tolist(), inside.tolist(), strict=True)]

    def reused(self, rules: Rules) -> ReplayResult:
        """Return reused tokens of an arm by request, and the causes to which the others were lost."""
        if rules is None:
            nothing = np.zeros(self.paths.requests, dtype=np.int64)
            return ReplayResult(nothing, {"never_stored": self.paths.prompt_tokens})
        return self._replay_spans(rules) if isinstance(rules, SpanRules) else replay(self.in_logged_order, rules)

    def _replay_spans(self, rules: SpanRules) -> ReplayResult:
        """Return reuse of spans at any position; tokens that an infinite cache would miss count as never seen."""
        spans, n = self.spans, self.paths.requests
        matched, matched_unlimited = spans.reused(rules.capacity_tokens), spans.reused(np.inf)
        reused = spans.repaired(matched, rules.first, rules.share)
        never_seen = spans.paths.prompt_tokens - matched_unlimited

        def by_request(values: Ints) -> Ints:
            return np.bincount(spans.request, values, n).astype(np.int64)

        lost = {"never_seen": never_seen, "kv_evicted": matched_unlimited - matched, "repair": matched - reused}
        return ReplayResult(by_request(reused), {cause: by_request(values) for cause, values in lost.items()})

    def offline_optimum(self, rules: CacheRules) -> int:
        """Return the most tokens that a cache of these blocks and memory can reuse if states take no memory."""
        n = self.paths.requests
        order = np.arange(n)
        reuses = find_reuses(
            self.paths.forest(rules.block), ServiceOrder(order, order, order, np.ones(n, dtype=np.bool_))
        )
        capacity_tokens = rules.capacity_bytes // rules.block_bytes * rules.block - reuses.prompt_tokens
        return most_reused_tokens(reuses, capacity_tokens)


@dataclass(frozen=True)
class Curve:
    """Hit rates of an LRU cache by size in blocks.

    `block`     tokens per block
    `from_log`  whether these are the log's own blocks, otherwise prompts are cut into blocks
    """

    distances: Distances
    paths: Paths
    block: int
    from_log: bool

    @property
    def sizes(self) -> list[int]:
        """Round sizes, up to the size that finds all reusable blocks."""
        largest = self.distances.largest
        powers = (10**power for power in range(len(str(max(largest, 1)))))
        ladder = sorted({step * power for power in powers for step in _LADDER})
        return [*(size for size in ladder if size < largest), largest] if largest else []

    def tokens(self, size: float) -> int:
        """Return the tokens that a cache of `size` blocks reuses."""
        blocks_found = self.distances.resident_blocks(size)
        if self.from_log:  # ids match as a whole, also the last block of a prompt, which may have fewer tokens
            complete = blocks_found == self.distances.blocks
            return int(np.where(complete, self.paths.tokens[self.paths.nodes], blocks_found * self.block).sum())
        most = (self.paths.prompt_tokens - 1) // self.block * self.block
        return int(np.minimum(self.paths.per_request(blocks_found) * self.block, most).sum())


def curve_of(facts: Facts, block: int) -> Curve:
    """Return the curve over blocks of the log, or over blocks of `block` tokens where the log has none."""
    paths, from_log = facts.paths, facts.log.block is not None
    weights = paths.pieces if from_log else paths.blocks(block)
    private = np.zeros(paths.requests, dtype=np.int64)
    return Curve(stack_distances(paths, weights, private), paths, facts.log.block or block, from_log)


def rates(replayed: ReplayResult, prompt: Ints) -> dict[str, Any]:
    """Return hit rates by token and by request, and the causes of lost tokens.

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
