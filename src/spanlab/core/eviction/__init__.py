"""Eviction orders, each registered in a file of this package."""

from spanlab.core.eviction.arc import Arc
from spanlab.core.eviction.belady import Belady
from spanlab.core.eviction.belady_size import belady_size
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
from spanlab.core.eviction.gdsf import Gdsf
from spanlab.core.eviction.lengths import longest, shallowest
from spanlab.core.eviction.lists import ListOrder, both
from spanlab.core.eviction.marconi import Marconi
from spanlab.core.eviction.marconi_tuned import TunedLeaves
from spanlab.core.eviction.pins import lease, ttl_pins
from spanlab.core.eviction.priority import PriorityCandidates
from spanlab.core.eviction.random_leaf import RandomLeaf
from spanlab.core.eviction.ranks import fifo, lfu, lru, lru_whole_leaves
from spanlab.core.eviction.reuse_value import reuse_value
from spanlab.core.eviction.s3_fifo import S3Fifo
from spanlab.core.eviction.sieve import Sieve
from spanlab.core.eviction.slru import SegmentedLru

__all__ = [
    "EVICTION_ORDERS",
    "FUTURE",
    "REQUESTS",
    "Arc",
    "Belady",
    "Candidates",
    "EvictionFacts",
    "EvictionOrder",
    "EvictionRules",
    "Future",
    "Gdsf",
    "Kind",
    "ListOrder",
    "Marconi",
    "PinRules",
    "PriorityCandidates",
    "RandomLeaf",
    "S3Fifo",
    "SegmentedLru",
    "Sieve",
    "TunedLeaves",
    "belady_size",
    "both",
    "fifo",
    "lease",
    "lfu",
    "longest",
    "lru",
    "lru_whole_leaves",
    "ranked",
    "reuse_value",
    "shallowest",
    "ttl_pins",
]
