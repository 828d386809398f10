"""Eviction orders, each registered in a file of this package."""

from spanlab.core.eviction import (  # noqa: F401 - registers the orders of these files
    arc,
    belady,
    gdsf,
    marconi,
    marconi_tuned,
    pins,
    priority,
    random_leaf,
    ranks,
    reuse_value,
    s3_fifo,
    sieve,
    slru,
)
from spanlab.core.eviction.contract import (
    EVICTION_ORDERS,
    FUTURE,
    REQUESTS,
    Candidates,
    EvictionFacts,
    EvictionOrder,
    EvictionRules,
    Kind,
    PinRules,
    ranked,
)
from spanlab.core.eviction.future import Future
from spanlab.core.eviction.lists import ListOrder, both

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
