"""Which tokens of reused spans are computed again, in the prompt's full context, and how many that is.

A span that was computed elsewhere has never seen what stands before it now. A repair recomputes some of its tokens with
everything in view, all in one pass, together with the ordered text between the spans. Which tokens is a rule over
lengths (LegoLink, the controls), or is measured while the pass runs (CacheBlend); how many is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["none", "first", "last", "strided", "random", "deviation", "deviation_gradual"]
MEASURED = ("deviation", "deviation_gradual")


class Reused(NamedTuple):
    """Prompt tokens `[start, stop)` of a span that a repair may choose from; the first `found` came from the store."""

    start: int
    stop: int
    found: int


@dataclass(frozen=True, slots=True)
class Repair:
    """A rule for choosing tokens, in every span or over all of them.

    `kind`         none; first or last `k` of each span (LegoLink, arXiv 2410.15332, and a control); strided or random:
                   controls of the same budget, `k` per span or `ratio` of all; deviation: the `ratio` whose keys and
                   values differ most after `check_layers` layers (CacheBlend as coded, arXiv 2405.16444), or ever
                   fewer of them from layer to layer with that mean (as written)
    `check_layers` layers that a measured repair computes for every token before it chooses, at least 2
    `seed`         of `random`; with a request's id it gives the same tokens in every backend
    """

    kind: Kind = "none"
    k: int = 0
    ratio: float = 0.0
    check_layers: int = 2
    seed: int = 0

    @property
    def measured(self) -> bool:
        """Whether the tokens are known only while the pass runs."""
        return self.kind in MEASURED

    @property
    def by_span(self) -> bool:
        """Whether a span alone decides which of its tokens are computed again: not the request, nor other spans."""
        return self.kind in ("none", "first", "last") or (self.kind == "strided" and self.k > 0)

    def count(self, spans: Sequence[Reused]) -> int:
        """Tokens that will be computed again at full depth: sum of min(k, length), or floor(ratio · all)."""
        if self.kind == "none":
            return 0
        if self.k:
            return sum(min(self.k, span.stop - span.start) for span in spans)
        return math.floor(self.ratio * sum(span.stop - span.start for span in spans) + 1e-9)

    def lost(self, spans: Sequence[Reused]) -> int:
        """Of those, the ones that the store had: exact for `first`, in proportion for the others, rounded down."""
        if self.kind == "first":
            return sum(min(self.k, span.found) for span in spans)
        total = sum(span.stop - span.start for span in spans)
        return self.count(spans) * sum(span.found for span in spans) // max(total, 1)

    def private(self, spans: Sequence[Reused], page: int) -> int:
        """Tokens on the pages that the repair writes to, which the request needs for itself: at most `page` a row."""
        lengths = [span.stop - span.start for span in spans]
        if self.kind == "first":
            return sum(min(length, -(-self.k // page) * page) for length in lengths)
        if self.kind == "last":
            return sum(length - max(0, length - self.k) // page * page for length in lengths)
        return min(sum(lengths), self.count(spans) * page)

    def rows(self, spans: Sequence[Reused], request_id: int) -> list[int]:
        """Prompt positions to compute again, increasing; only where they are not measured."""
        assert not self.measured, "a measured repair chooses while it runs"
        if self.kind == "first":
            return [place for span in spans for place in range(span.start, min(span.stop, span.start + self.k))]
        if self.kind == "last":
            return [place for span in spans for place in range(max(span.start, span.stop - self.k), span.stop)]
        if self.k:
            chosen = [self._pick(range(span.start, span.stop), self.k, request_id, span.start) for span in spans]
            return [place for places in chosen for place in places]
        return self._pick([p for span in spans for p in range(span.start, span.stop)], self.count(spans), request_id)

    def _pick(self, places: Sequence[int], count: int, *key: int) -> list[int]:
        count = min(count, len(places))
        if self.kind == "strided":
            return [places[index * len(places) // count] for index in range(count)]
        chosen = np.random.default_rng([self.seed, *key]).choice(len(places), count, replace=False)
        return [places[index] for index in np.sort(chosen)]
