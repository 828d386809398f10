"""Eviction orders by value: what an entry saves, over the bytes that it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    REQUESTS,
    EvictionFacts,
    EvictionOrder,
    both,
)
from spanlab.core.eviction.scores import (
    Clock,
    Gdsf,
    Learned,
    Marconi,
    ReuseLeaves,
    ReuseStates,
    TunedLeaves,
)
from spanlab.model_spec import COST
from spanlab.registry import Bounds, not_negative


@EVICTION_ORDERS.register("gdsf", needs=(COST,))
def gdsf(facts: EvictionFacts) -> EvictionOrder:
    """The entry with the lowest clock + uses · cost / bytes, with the cost of recomputing the
    entry."""
    clock = Clock()
    leaves, states = Gdsf(facts.leaves, clock), Gdsf(facts.states, clock)
    return EvictionOrder(facts.watched(leaves), states)


Alpha = Annotated[float, not_negative, "weight of the work saved, beside recency; 0 is LRU"]


@EVICTION_ORDERS.register("marconi", needs=(COST,))
def marconi(facts: EvictionFacts, alpha: Alpha = 1.0) -> EvictionOrder:
    """The lowest recency + alpha · FLOPs saved per byte, both scaled to [0, 1] among the
    candidates."""
    return both(facts, lambda kind: Marconi(kind, alpha))


@EVICTION_ORDERS.register("segment_length", needs=(COST,))
def segment_length(facts: EvictionFacts, alpha: Alpha = 1.0) -> EvictionOrder:
    """As `marconi`, with the number of tokens to recompute in place of FLOPs per byte.

    For a state these are the tokens since the state above. Source: a fork of SGLang
    (abdelfattah-lab/sglang, pull request 3).
    """
    return both(
        replace(facts, default_cost="tokens"),
        # entries of size one, so that work is not divided by bytes
        lambda kind: Marconi(replace(kind, num_bytes=lambda item: 1), alpha),
    )


above_one = Bounds("a number above one", lambda value: 1 < value < math.inf)


@EVICTION_ORDERS.register("marconi_tuned", needs=(REQUESTS, COST))
def marconi_tuned(
    facts: EvictionFacts,
    window: Annotated[
        float, above_one, "requests before alpha is chosen ÷ requests before the first eviction"
    ] = 5.0,
) -> EvictionOrder:
    """As `marconi`; alpha is chosen after `window` times as many requests as preceded the first
    eviction."""
    states = Marconi(facts.states, 0.0)
    leaves = TunedLeaves(facts, states, window)
    return EvictionOrder(facts.watched(leaves), states, admitted=leaves.admitted)


@EVICTION_ORDERS.register("reuse_value", needs=(COST,))
def reuse_value(facts: EvictionFacts) -> EvictionOrder:
    """The least expected work saved per byte and time, by past reuses; of a sample of at most 64
    candidates."""
    learned = Learned()
    states = ReuseStates(facts.states, learned)
    return EvictionOrder(facts.watched(ReuseLeaves(facts, learned, states)), states, by_block=True)
