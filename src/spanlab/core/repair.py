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
from typing import NamedTuple

import numpy as np

from spanlab.checks import not_negative, one_of, positive, share

REPAIRS = ("none", "first", "last", "strided", "random", "deviation", "deviation_gradual")
CHOICES = {
    "base": ("spans", "prompt"),
    "score": ("values", "keys", "both"),
    "filter": ("queries", "layers"),
    "writes": ("all", "chosen"),
}
MEASURED = ("deviation", "deviation_gradual")


class Reused(NamedTuple):
    """Prompt tokens `[start, stop)` of a span that a repair may choose from; the first `found` came from the store."""

    start: int
    stop: int
    found: int


@dataclass
class Repair:
    """Which tokens of reused spans are computed again, in full view of the prompt.

    The defaults of a measured repair are those of CacheBlend's published code (arXiv 2405.16444).

    `kind`         none; first or last tokens of each span (LegoLink, arXiv 2410.15332, and a control); strided or
                   random (controls); deviation or deviation_gradual: tokens whose keys or values differ most, chosen
                   at one layer, or ever fewer from layer to layer
    `k`            tokens per span; first and last need it, strided and random take it or `ratio`
    `ratio`        share of the tokens in `base`
    `seed`         of random; with a request's id it gives the same tokens in every backend
    `base`         what `ratio` is a share of: spans, the reused spans; prompt, all tokens before the suffix
    `check_layer`  first layer whose keys and values are compared, counted from 0; in layer 0 they depend on no other
                   token
    `score`        what is compared, by the sum of squared differences: values, keys or both
    `filter`       where tokens that are not chosen leave: queries, before the attention of `check_layer`; layers, after
                   that layer
    `writes`       whose new keys and values `check_layer` keeps: all, or chosen (LMCache)
    `chunked`      whether the token budget cuts the repair; null: yes where its tokens are known beforehand
    """

    kind: str = "none"
    k: int | None = None
    ratio: float | None = None
    seed: int = 0
    base: str = "spans"
    check_layer: int = 1
    score: str = "values"
    filter: str = "queries"
    writes: str = "all"
    chunked: bool | None = None

    def check(self, arm: str) -> None:
        """Refuse what makes no sense, naming the arm."""
        one_of(f"{arm}.kind", self.kind, REPAIRS)
        positive(f"{arm}.k", self.k)
        for key, choices in CHOICES.items():
            one_of(f"{arm}.{key}", getattr(self, key), choices)
        self._check_check(arm)
        not_negative(f"{arm}.seed", self.seed)
        if self.ratio is not None:
            share(f"{arm}.ratio", self.ratio)
        by_length = self.kind in ("first", "last")
        by_share = self.measured
        wanted = {"none": 0}.get(self.kind, 1)
        given = (self.k is not None) + (self.ratio is not None)
        if given != wanted or (by_length and self.k is None) or (by_share and self.ratio is None):
            expected = (
                "neither k nor ratio" if not wanted else "k" if by_length else "ratio" if by_share else "k or ratio"
            )
            raise ValueError(f"{arm}.kind={self.kind} with k={self.k}, ratio={self.ratio}: expected {expected}")

    def _check_check(self, arm: str) -> None:
        """Refuse measurements that say nothing, and rules that contradict one another."""
        if self.check_layer < 1:
            raise ValueError(f"{arm}.check_layer={self.check_layer}: expected 1 or more")
        if self.kind == "deviation_gradual" and self.filter == "queries":
            raise ValueError(f"{arm}.filter=queries with kind=deviation_gradual: expected layers")
        if self.writes == "chosen" and self.filter == "layers":
            raise ValueError(f"{arm}.writes=chosen with filter=layers: expected all")
        if self.chunked and self.measured:
            raise ValueError(
                f"{arm}.chunked=true with kind={self.kind}, which compares all tokens: expected false or null"
            )
        if self.base == "prompt" and self.ratio is None and self.kind != "none":
            raise ValueError(f"{arm}.base=prompt with k={self.k}: expected ratio")

    def last_check_layer(self, layers: int) -> int:
        """The last layer of so many that this rule can check and still leave out tokens of."""
        return layers - (1 if self.filter == "queries" else 2)

    @property
    def tokens(self) -> int:
        """Tokens per span; 0 where a share decides."""
        return self.k or 0

    @property
    def measured(self) -> bool:
        """Whether the tokens are known only while the pass runs."""
        return self.kind in MEASURED

    @property
    def cuts(self) -> bool:
        """Whether the token budget may cut the repair."""
        return self.chunked is not False and not self.measured

    @property
    def filters_queries(self) -> bool:
        """Whether tokens that are not chosen leave the check layer before its attention."""
        return self.kind == "deviation" and self.filter == "queries"

    @property
    def shallow_layers(self) -> int:
        """Layers that every token of a measured repair passes whole."""
        return self.check_layer if self.filters_queries else self.check_layer + 1

    @property
    def by_span(self) -> bool:
        """Whether a span alone decides which of its tokens are computed again: not the request, nor other spans."""
        return self.kind in ("none", "first", "last") or (self.kind == "strided" and self.tokens > 0)

    def count(self, spans: Sequence[Reused]) -> int:
        """Tokens that will be computed again at full depth: sum of min(k, length), or floor(ratio · base)."""
        if self.kind == "none":
            return 0
        if self.tokens:
            return sum(min(self.tokens, span.stop - span.start) for span in spans)
        total = sum(span.stop - span.start for span in spans)
        base = total if self.base == "spans" or not spans else spans[-1].stop
        return min(total, math.floor((self.ratio or 0.0) * base + 1e-9))

    def lost(self, spans: Sequence[Reused]) -> int:
        """Of those, the ones that the store had: exact for `first`, in proportion for the others, rounded down."""
        if self.kind == "first":
            return sum(min(self.tokens, span.found) for span in spans)
        total = sum(span.stop - span.start for span in spans)
        return self.count(spans) * sum(span.found for span in spans) // max(total, 1)

    def private(self, spans: Sequence[Reused], block_size: int) -> int:
        """Tokens on the blocks that the repair writes to, which the request needs for itself: at most a block a row."""
        lengths = [span.stop - span.start for span in spans]
        if self.kind == "first":
            return sum(min(length, -(-self.tokens // block_size) * block_size) for length in lengths)
        if self.kind == "last":
            return sum(length - max(0, length - self.tokens) // block_size * block_size for length in lengths)
        return min(sum(lengths), self.count(spans) * block_size)

    def rows(self, spans: Sequence[Reused], request_id: int) -> list[int]:
        """Prompt positions to compute again, increasing; only where they are not measured."""
        assert not self.measured, "a measured repair chooses while it runs"
        if self.kind == "first":
            return [place for span in spans for place in range(span.start, min(span.stop, span.start + self.tokens))]
        if self.kind == "last":
            return [place for span in spans for place in range(max(span.start, span.stop - self.tokens), span.stop)]
        if self.tokens:
            chosen = [self._pick(range(span.start, span.stop), self.tokens, request_id, span.start) for span in spans]
            return [place for places in chosen for place in places]
        return self._pick([p for span in spans for p in range(span.start, span.stop)], self.count(spans), request_id)

    def _pick(self, places: Sequence[int], count: int, *key: int) -> list[int]:
        count = min(count, len(places))
        if self.kind == "strided":
            return [places[index * len(places) // count] for index in range(count)]
        chosen = np.random.default_rng([self.seed, *key]).choice(len(places), count, replace=False)
        return [places[index] for index in np.sort(chosen)]
