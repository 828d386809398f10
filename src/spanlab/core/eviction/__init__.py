"""Eviction orders, each registered in a file of this package."""

from spanlab.core.eviction import (  # noqa: F401 - registers the orders of these files
    clairvoyant,
    lists,
    orders,
    timed,
    value,
)
from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    FUTURE,
    REQUESTS,
    Candidates,
    EvictionFacts,
    EvictionOrder,
    EvictionRules,
    Future,
    Kind,
    ListOrder,
    PinRules,
    both,
    ranked,
)

__all__ = [
    "EVICTION_ORDERS",
    "FUTURE",
    "REQUESTS",
    "Candidates",
    "EvictionFacts",
    "EvictionOrder",
    "EvictionRules",
    "Future",
    "Kind",
    "ListOrder",
    "PinRules",
    "both",
    "ranked",
]
