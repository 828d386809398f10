"""Pins with a time to live on top of any other order: recently used entries stay locked for some time.

`ttl_pins`: Continuum, arXiv 2511.02230, pins the KV of a request that ends in a call of a tool, until the call has
returned or a time to live is over. Here the time is an option; there it is chosen from the history of each tool.
`lease`: Mooncake's store leases the entries that a request reads, by default for 10 seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spanlab.checks import one_of, positive
from spanlab.core.cost import COST
from spanlab.core.eviction.contract import (
    EVICTION_ORDERS,
    FUTURE,
    REQUESTS,
    EvictionFacts,
    EvictionOrder,
    PinRules,
)

NS = 1e9


@EVICTION_ORDERS.register("ttl_pins", needs=(REQUESTS, COST))
def ttl_pins(
    facts: EvictionFacts, seconds: float = 10.0, order: str = "lru", order_options: dict[str, Any] | None = None
) -> EvictionOrder:
    """The order `order`; a request with a successor is pinned from its end until the successor, at most `seconds`."""
    return _pinned(facts, PinRules(_ns(seconds), "end", facts.rules.continued), order, order_options or {})


@EVICTION_ORDERS.register("lease", needs=(REQUESTS, COST))
def lease(
    facts: EvictionFacts, seconds: float = 10.0, order: str = "lru", order_options: dict[str, Any] | None = None
) -> EvictionOrder:
    """The order `order`; the entries that a request reads are pinned from its admission, for `seconds`."""
    return _pinned(facts, PinRules(_ns(seconds), "read", frozenset()), order, order_options or {})


def _ns(seconds: float) -> int:
    positive("eviction_options.seconds", seconds)
    return round(seconds * NS)


def _pinned(facts: EvictionFacts, pins: PinRules, order: str, options: dict[str, Any]) -> EvictionOrder:
    pinning = ("ttl_pins", "lease", *EVICTION_ORDERS.needing(FUTURE))
    one_of("eviction_options.order", order, [name for name in EVICTION_ORDERS if name not in pinning])
    EVICTION_ORDERS.check("eviction_options", order, {}, options, f"order={order}", "order_options")
    return replace(EVICTION_ORDERS.make(order, {}, options, facts=facts), pins=pins)
