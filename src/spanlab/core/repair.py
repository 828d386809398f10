"""The tokens of reused spans that are recomputed in the prompt's full context: their selection and
their number.

A span that was computed elsewhere has not attended to the text that stands before it now. A repair
recomputes some of its tokens with the whole prompt in view, in one pass, together with the ordered
text between the spans. The tokens are selected by a rule over lengths (LegoLink, the controls), by
measurements during the pass (CacheBlend, neighbours) or by a pass before it (the query's
attention). Their number is known beforehand.

Sources of the measured rules: CacheBlend, arXiv 2405.16444; its published code, YaoJiayi/CacheBlend
(`vllm_blend/vllm/attention/backends/xformers.py`); LMCache (`lmcache/v1/compute/blend/blender.py`).
A pass of the query alone that ranks tokens: ProphetKV, arXiv 2602.02579. Attention between chunks:
Cache-Craft, arXiv 2502.15734.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from spanlab.model_spec import ModelSpec
from spanlab.registry import not_negative, one_of, positive, share

DEVIATIONS = ("deviation", "deviation_gradual")
MEASURED = (*DEVIATIONS, "neighbours", "attention")
REPAIRS = ("none", "first", "last", "strided", "random", *MEASURED)
CHOICES = {
    "base": ("spans", "prompt"),
    "score": ("values", "keys", "both"),
    "filter": ("queries", "layers"),
    "writes": ("all", "chosen"),
}
#: Keys that these kinds do not read.
UNREAD = {
    "neighbours": ("score", "filter", "writes"),
    "attention": ("check_layer", "score", "filter", "writes"),
}


class ReusedSpan(NamedTuple):
    """Prompt tokens `[start, stop)` of a span that a repair may recompute; the first `stored` were
    in the store."""

    start: int
    stop: int
    stored: int


@dataclass
class Repair:
    """Which tokens of reused spans are computed again, in full view of the prompt.

    The defaults of a measured repair are those of CacheBlend's published code (arXiv 2405.16444).

    `kind`         none; first or last tokens of each span (LegoLink, arXiv 2410.15332, and a
                   control); strided or random (controls); deviation or deviation_gradual: tokens
                   whose keys or values differ most, chosen at one layer, or ever fewer from layer
                   to layer; neighbours: tokens that attend most to the spans before their own;
                   attention: tokens that the query attends to most
    `k`            tokens per span; first and last need it, strided, random, neighbours and
                   attention take it or `ratio`; the two last choose as many among all spans
                   together
    `ratio`        share of the tokens in `base`
    `seed`         of random; with a request's id it gives the same tokens in every backend
    `base`         what `ratio` is a share of: spans, the reused spans; prompt, all tokens before
                   the suffix
    `check_layer`  first layer whose keys and values are compared, or whose attention neighbours
                   measures, counted from 0; in layer 0 keys and values depend on no other token
    `score`        what is compared, by the sum of squared differences: values, keys or both
    `filter`       where tokens that are not chosen leave: queries, before the attention of
                   `check_layer`; layers, after that layer
    `writes`       whose new keys and values `check_layer` keeps: all, or chosen (LMCache)
    `chunked`      whether the token budget cuts the repair; null: yes where its tokens are known
                   beforehand
    `layers`       layers whose attention the query is profiled on, counted from 0; null: the middle
                   third; attention only
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
    layers: list[int] | None = None

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid settings; `arm` is the prefix of their keys."""
        one_of(f"{arm}.kind", self.kind, REPAIRS)
        positive(f"{arm}.k", self.k)
        for key, choices in CHOICES.items():
            one_of(f"{arm}.{key}", getattr(self, key), choices)
        # measurements without effect, and contradictory rules
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
        # keys that the kind does not read, and an invalid list of layers
        defaults = Repair()
        for key in UNREAD.get(self.kind, ()):
            value, expected = getattr(self, key), getattr(defaults, key)
            if value != expected:
                raise ValueError(f"{arm}.{key}={value} with kind={self.kind}: expected {expected}")
        layers = self.layers
        if layers is not None and not self.probes:
            raise ValueError(
                f"{arm}.layers={layers} with kind={self.kind}: expected null, or kind=attention"
            )
        if layers is not None and (
            not layers or min(layers) < 0 or sorted(set(layers)) != list(layers)
        ):
            raise ValueError(
                f"{arm}.layers={layers}: expected layers from 0 on, each once and in order"
            )
        not_negative(f"{arm}.seed", self.seed)
        if self.ratio is not None:
            share(f"{arm}.ratio", self.ratio)
        by_length = self.kind in ("first", "last")
        by_share = self.compares
        num_required = {"none": 0}.get(self.kind, 1)
        num_set = (self.k is not None) + (self.ratio is not None)
        if (
            num_set != num_required
            or (by_length and self.k is None)
            or (by_share and self.ratio is None)
        ):
            expected = (
                "neither k nor ratio"
                if not num_required
                else "k"
                if by_length
                else "ratio"
                if by_share
                else "k or ratio"
            )
            raise ValueError(
                f"{arm}.kind={self.kind} with k={self.k}, ratio={self.ratio}: expected {expected}"
            )

    def last_check_layer(self, layers: int) -> int:
        """Return the last of `layers` layers that can be the check layer and still leave out
        tokens."""
        return layers - (1 if self.filter == "queries" else 2)

    @property
    def tokens(self) -> int:
        """Tokens per span; 0 where `ratio` decides."""
        return self.k or 0

    @property
    def measured(self) -> bool:
        """Whether measurements select the tokens, so that they are unknown before the pass or its
        probe."""
        return self.kind in MEASURED

    @property
    def compares(self) -> bool:
        """Whether new keys and values of all tokens are compared with the stored ones, even if few
        are chosen."""
        return self.kind in DEVIATIONS

    @property
    def probes(self) -> bool:
        """Whether a forward of the query, before the pass, chooses the tokens."""
        return self.kind == "attention"

    @property
    def rewrites(self) -> bool:
        """Whether its first layers write new keys and values for every token of the spans."""
        return self.measured and not self.probes

    @property
    def cuts(self) -> bool:
        """Whether the token budget may cut the repair."""
        return self.chunked is not False and not self.measured

    @property
    def filters_queries(self) -> bool:
        """Whether tokens that are not chosen are dropped in the check layer, before its
        attention."""
        return self.kind == "neighbours" or (self.kind == "deviation" and self.filter == "queries")

    @property
    def projects(self) -> bool:
        """Whether shallow rows end within a layer, which computes only their query, key and
        value."""
        return self.filters_queries or self.probes

    @property
    def shallow_layers(self) -> int:
        """Number of layers that every shallow row of a measured repair passes in full."""
        if self.probes:
            assert self.layers, "the layers of a profile are named once the model is known"
            return self.layers[-1]
        return self.check_layer if self.filters_queries else self.check_layer + 1

    def of_model(self, layers: int) -> Repair:
        """Return the rule for a model of `layers` attention layers, with the profiled layers set.

        The middle third is the default: layers before it attend to words, and it costs a third less
        than all.
        """
        if not self.probes or self.layers:
            return self
        first = layers // 3
        return replace(self, layers=list(range(first, max(first + 1, layers - layers // 3))))

    @property
    def by_span(self) -> bool:
        """Whether a span alone determines its recomputed tokens, not the request nor other
        spans."""
        return self.kind in ("none", "first", "last") or (
            self.kind == "strided" and self.tokens > 0
        )

    def count(self, spans: Sequence[ReusedSpan]) -> int:
        """Return the number of tokens recomputed at full depth: sum of min(k, length), or
        floor(ratio · base)."""
        if self.kind == "none":
            return 0
        if self.tokens:
            return sum(min(self.tokens, span.stop - span.start) for span in spans)
        total = sum(span.stop - span.start for span in spans)
        base = total if self.base == "spans" or not spans else spans[-1].stop
        return min(total, math.floor((self.ratio or 0.0) * base + 1e-9))

    def num_stored(self, spans: Sequence[ReusedSpan]) -> int:
        """Return how many of these tokens were stored: exact for `first`, else in proportion,
        rounded down."""
        if self.kind == "first":
            return sum(min(self.tokens, span.stored) for span in spans)
        total = sum(span.stop - span.start for span in spans)
        return self.count(spans) * sum(span.stored for span in spans) // max(total, 1)

    def private(self, spans: Sequence[ReusedSpan], block_size: int) -> int:
        """Return the tokens of the blocks that the repair writes, which must be private: at most a
        block a row."""
        lengths = [span.stop - span.start for span in spans]
        if self.kind == "first":
            return sum(
                min(length, -(-self.tokens // block_size) * block_size) for length in lengths
            )
        if self.kind == "last":
            return sum(
                length - max(0, length - self.tokens) // block_size * block_size
                for length in lengths
            )
        return min(sum(lengths), self.count(spans) * block_size)

    def rows(self, spans: Sequence[ReusedSpan], request_id: int) -> list[int]:
        """Return the prompt positions to recompute, increasing; only for repairs that are not
        measured."""
        assert not self.measured, "a measured repair chooses while it runs"
        if self.kind == "first":
            return [
                p
                for span in spans
                for p in range(span.start, min(span.stop, span.start + self.tokens))
            ]
        if self.kind == "last":
            return [
                p
                for span in spans
                for p in range(max(span.start, span.stop - self.tokens), span.stop)
            ]
        if self.tokens:
            chosen = [
                self._pick(range(span.start, span.stop), self.tokens, request_id, span.start)
                for span in spans
            ]
            return [p for positions in chosen for p in positions]
        return self._pick(
            [p for span in spans for p in range(span.start, span.stop)],
            self.count(spans),
            request_id,
        )

    def _pick(self, positions: Sequence[int], count: int, *key: int) -> list[int]:
        count = min(count, len(positions))
        if self.kind == "strided":
            return [positions[index * len(positions) // count] for index in range(count)]
        chosen = np.random.default_rng([self.seed, *key]).choice(
            len(positions), count, replace=False
        )
        return [positions[index] for index in np.sort(chosen)]


# ------------------------------------------------------------------------------
# Affine maps of the recurrent state, which let recurrent layers reuse a span anywhere in a
# prompt.
#
# With its inputs fixed, a span of a GatedDeltaNet layer takes the state S to A · S + B, per
# value head. A span that is computed alone, from an empty state, yields A [d_k, d_k], B [d_k,
# d_v] and the last inputs of its short convolution. Where the first tokens of every span are
# repaired, the state passes through these tokens again. The stored map then covers the tokens
# behind them; B of the whole span is stored with it, to resume inside the span and to begin a
# prompt with the span. Composing spans in any order is known for diagonal state space models:
# PICASO, arXiv 2502.17605.
# ------------------------------------------------------------------------------

FORMS = ("exact", "scalar", "low_rank", "sum", "last")
ITEMSIZES = {"float32": 4, "bfloat16": 2}
_FACTOR_BYTES = 4  # γ is stored in float32: bfloat16 has no number between 0.996 and 1


@dataclass
class MapRules:
    """How the map S → A · S + B of a span is kept; it is computed and composed in float32.

    `form`   exact: A and B; scalar: A = γ · I, γ being the product of the span's decays; low_rank:
             γ · I and the best `rank` directions of the rest; sum: A = I; last: A = 0, so that only
             the last span is remembered
    `rank`   of low_rank
    `dtype`  of A and B where they are kept: float32 or bfloat16
    `interval`  tokens between maps within a span, which spans that begin alike go on from; null:
                one, at its end
    """

    form: str = "exact"
    rank: int | None = None
    dtype: str = "float32"
    interval: int | None = None

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        one_of(f"{path}.form", self.form, FORMS)
        one_of(f"{path}.dtype", self.dtype, ITEMSIZES)
        positive(f"{path}.rank", self.rank)
        positive(f"{path}.interval", self.interval)
        if (self.rank is not None) != (self.form == "low_rank"):
            expected = "a rank" if self.form == "low_rank" else "null"
            raise ValueError(f"{path}.rank={self.rank} with form={self.form}: expected {expected}")

    def positions(self, length: int) -> tuple[int, ...]:
        """Return the positions in a span behind which a map is stored, increasing."""
        inside = range(self.interval, length, self.interval) if self.interval else ()
        return *inside, length

    @property
    def transitions(self) -> bool:
        """Whether A is computed along with B; in other forms A is fixed or follows from the
        decays."""
        return self.form in ("exact", "low_rank")


def map_bytes(rules: MapRules, model: ModelSpec, repaired: bool = False) -> int:
    """Bytes of one stored map: A and B of every recurrent layer and value head, and the conv state
    of a checkpoint.

    A: exact d_k · d_k numbers; scalar γ; low_rank γ and 2 · rank · d_k numbers; sum and last none.
    B: d_k · d_v.

    `repaired`  the first tokens of spans are recomputed, so that there is a second B
    """
    size, key_dim = ITEMSIZES[rules.dtype], model.recurrent_key_dim
    transition = {
        "exact": key_dim * key_dim * size,
        "scalar": _FACTOR_BYTES,
        "low_rank": _FACTOR_BYTES + 2 * (rules.rank or 0) * key_dim * size,
    }
    head = (
        transition.get(rules.form, 0) + (1 + repaired) * key_dim * model.recurrent_value_dim * size
    )
    return model.recurrent_layers * model.recurrent_value_heads * head + model.conv_state_bytes


def working_map_bytes(model: ModelSpec, repaired: bool = False) -> int:
    """Bytes of the map of a span during its computation: exact, in float32."""
    return map_bytes(MapRules(), model, repaired)


# ------------------------------------------------------------------------------
# Settings of position-independent reuse of spans: the independent choices behind every
# published method.
#
# Policies read the settings that decide what is stored, the engine those that decide how keys
# are read. The study checks them, since it has the arm's name.
# ------------------------------------------------------------------------------

PROVENANCES = ("isolated", "conditioned", "as_seen")
KEYS_OF_KERNEL = {
    "rotate_keys": ("raw",),
    "rotate_queries": ("local",),
    "pre_rotated": ("local", "absolute"),
}


@dataclass
class SpanSettings:
    """One point of the grid of position-independent methods.

    `provenance`   isolated: a span is computed alone; conditioned: after the prompt's opening text;
                   as_seen: after the text that preceded it in its first prompt
    `keys`         stored raw (not rotated), local (rotated by the position in the span) or absolute
                   (by the position in the first prompt)
    `positions`    sequential: as in the prompt; overlapping: all spans begin at one position;
                   original: where they were first computed, a control that must be worse
    `repair`       tokens that are recomputed in full view of the prompt
    `sharing`      canonical: stored pages are shared, and copied before a write; private: every
                   request copies the spans that it reads
    `kernel`       rotate_keys: as they are loaded; rotate_queries: once per span; pre_rotated: keys
                   were rotated before
    `temperature`, `scale`  of the attention to spans (APE's T and S); 1 and 1 change nothing
    `maps`         how recurrent layers keep a span, for hybrid models; null: there are none
    """

    provenance: str = "isolated"
    keys: str = "local"
    positions: str = "sequential"
    repair: Repair = field(default_factory=Repair)
    sharing: str = "canonical"
    kernel: str = "rotate_queries"
    temperature: float = 1.0
    scale: float = 1.0
    maps: MapRules | None = None

    @property
    def copies(self) -> bool:
        """Whether a request reads private copies of spans."""
        return self.sharing == "private"

    @property
    def rotates_copies(self) -> bool:
        """Whether copied keys are rotated to their positions in the prompt."""
        return self.copies and self.kernel == "pre_rotated"

    @property
    def reweighs(self) -> bool:
        """Whether attention to spans is changed at all."""
        return (self.temperature, self.scale) != (1.0, 1.0)

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid settings; `arm` is the prefix of their keys."""
        one_of(f"{arm}.provenance", self.provenance, PROVENANCES)
        one_of(f"{arm}.positions", self.positions, ("sequential", "overlapping", "original"))
        one_of(f"{arm}.sharing", self.sharing, ("canonical", "private"))
        one_of(f"{arm}.kernel", self.kernel, KEYS_OF_KERNEL)
        expected_keys = KEYS_OF_KERNEL[self.kernel]
        if self.keys not in expected_keys:
            expected = f"expected {' or '.join(expected_keys)}"
            raise ValueError(f"{arm}.keys={self.keys} with kernel={self.kernel}: {expected}")
        positive(f"{arm}.temperature", self.temperature)
        positive(f"{arm}.scale", self.scale)
        self.repair.check(f"{arm}.repair")
        self._check_pages(arm)
        if self.reweighs and self.repair.measured and not self.repair.compares:
            weights = f"temperature={self.temperature}, scale={self.scale}"
            raise ValueError(
                f"{arm}.repair.kind={self.repair.kind} with {weights}: expected 1 and 1"
            )
        if self.maps is not None:
            self.maps.check(f"{arm}.maps")
            # a map is of a span computed alone, read where it is stored
            for key, value in {"provenance": "isolated", "sharing": "canonical"}.items():
                if getattr(self, key) != value:
                    raise ValueError(
                        f"{arm}.{key}={getattr(self, key)} with {arm}.maps: expected {value}"
                    )
            # recomputed rows come before the rows of the map
            if self.repair.kind not in ("none", "first"):
                reason = (
                    f"with {arm}.maps, which are of what follows a repair: expected none or first"
                )
                raise ValueError(f"{arm}.repair.kind={self.repair.kind} {reason}")

    def _check_pages(self, arm: str) -> None:
        """Raise ValueError for contradictory keys and positions, and for writes to shared pages.

        A rule that writes into pages needs private copies. Keys at original positions have nothing
        to write.
        """
        if self.positions == "original" and (self.kernel, self.keys) != ("pre_rotated", "absolute"):
            setting = f"kernel={self.kernel}, keys={self.keys}"
            raise ValueError(
                f"{arm}.positions=original with {setting}: expected kernel=pre_rotated, keys=absolute"
            )
        if self.keys == "absolute" and self.positions != "original":
            raise ValueError(
                f"{arm}.keys=absolute with positions={self.positions}: expected keys=local"
            )
        # the opening text's distance counts
        if self.provenance == "conditioned" and self.positions != "overlapping":
            raise ValueError(
                f"{arm}.provenance=conditioned with positions={self.positions}: expected overlapping"
            )
        rotates = self.kernel == "pre_rotated" and self.positions != "original"
        if (rotates or self.repair.rewrites) and self.sharing != "private":
            reason = "kernel=pre_rotated" if rotates else f"repair.kind={self.repair.kind}"
            raise ValueError(
                f"{arm}.sharing={self.sharing} with {reason}, which writes to spans: expected private"
            )


#: Settings of arms that reuse prefixes only: keys are stored rotated by their final positions.
PREFIXES_ALONE = SpanSettings(keys="absolute", kernel="pre_rotated")
