"""Which tokens of reused spans are computed again, in the prompt's full context, and how many that is.

A span that was computed elsewhere has never seen what stands before it now. A repair recomputes some of its tokens with
everything in view, all in one pass, together with the ordered text between the spans. Which tokens is a rule over
lengths (LegoLink, the controls), or is measured while the pass runs (CacheBlend); how many is known beforehand.

Sources of the measured rules: CacheBlend, arXiv 2405.16444; its published code, YaoJiayi/CacheBlend
(`vllm_blend/vllm/attention/backends/xformers.py`); LMCache (`lmcache/v1/compute/blend/blender.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["none", "first", "last", "strided", "random", "deviation", "deviation_gradual"]
Base = Literal["spans", "prompt"]
Score = Literal["values", "keys", "both"]
Filter = Literal["queries", "layers"]
Writes = Literal["all", "chosen"]
MEASURED = ("deviation", "deviation_gradual")


class Reused(NamedTuple):
    """Prompt tokens `[start, stop)` of a span that a repair may choose from; the first `found` came from the store."""

    start: int
    stop: int
    found: int


@dataclass(frozen=True, slots=True)
class Check:
    """How a measured repair scores and filters tokens; the defaults are those of CacheBlend's published code.

    `layer`   the first layer whose keys and values are compared with the stored ones, counted from 0, at least 1: in
              layer 0 they depend on no other token
    `score`   the sum of squared differences of values, of keys, or of both
    `filter`  queries: tokens that are not chosen leave `layer` once it has their keys and values, before its attention
              and MLP; layers: they pass it whole and leave before the next one
    `writes`  whose new keys and values `layer` keeps: those of all tokens, or of the chosen ones (LMCache)
    """

    layer: int = 1
    score: Score = "values"
    filter: Filter = "queries"
    writes: Writes = "all"


@dataclass(frozen=True, slots=True)
class Repair:
    """A rule for choosing tokens, in every span or over all of them.

    `kind`         none; first or last `k` of each span (LegoLink, arXiv 2410.15332, and a control); strided or random:
                   controls of the same budget, `k` per span or `ratio` of all; deviation: the `ratio` that differ
                   most from what is stored, at one layer (CacheBlend as coded), or ever fewer of them from layer to
                   layer with that mean, always filtered between layers (as written)
    `seed`         of `random`; with a request's id it gives the same tokens in every backend
    `base`         what `ratio` is a share of: the tokens of the reused spans, or all of the prompt up to the end of the
                   last of them
    `check`        of a measured repair
    `chunked`      whether a repair whose tokens are known beforehand is cut into chunks like a prefill; a measured one
                   never is, for it chooses among all of its tokens at once
    """

    kind: Kind = "none"
    k: int = 0
    ratio: float = 0.0
    seed: int = 0
    base: Base = "spans"
    check: Check = Check()
    chunked: bool = True

    @property
    def measured(self) -> bool:
        """Whether the tokens are known only while the pass runs."""
        return self.kind in MEASURED

    @property
    def cuts(self) -> bool:
        """Whether the token budget may cut the repair."""
        return self.chunked and not self.measured

    @property
    def filters_queries(self) -> bool:
        """Whether tokens that are not chosen leave the check layer before its attention."""
        return self.kind == "deviation" and self.check.filter == "queries"

    @property
    def shallow_layers(self) -> int:
        """Layers that every token of a measured repair passes whole."""
        return self.check.layer if self.filters_queries else self.check.layer + 1

    @property
    def by_span(self) -> bool:
        """Whether a span alone decides which of its tokens are computed again: not the request, nor other spans."""
        return self.kind in ("none", "first", "last") or (self.kind == "strided" and self.k > 0)

    def count(self, spans: Sequence[Reused]) -> int:
        """Tokens that will be computed again at full depth: sum of min(k, length), or floor(ratio · base)."""
        if self.kind == "none":
            return 0
        if self.k:
            return sum(min(self.k, span.stop - span.start) for span in spans)
        total = sum(span.stop - span.start for span in spans)
        base = total if self.base == "spans" or not spans else spans[-1].stop
        return min(total, math.floor(self.ratio * base + 1e-9))

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
