"""Settings of several replicas behind one router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spanlab.checks import not_negative, one_of, positive, share
from spanlab_sim.routing import ROUTERS

_KEYS = ("cache_weight", "load_weight", "events_delay_s", "events_lost")


@dataclass
class ReplicaSettings:
    """Replicas behind one router, each with its own store; simulator only.

    `count`           number of replicas
    `routing`         routing policy: round_robin, random, least_loaded, prefix_aware, prefix_events,
                      session_sticky, weighted; null: a single replica
    `cache_weight`    weight of the cached share of a prompt; null: 1; weighted only
    `load_weight`     weight of a replica's share of the highest number of requests; null: 1; weighted only
    `events_delay_s`  delay of cache events (stored, evicted) to the router, seconds; null: 0; prefix_events only
    `events_lost`     share of the cache events that are lost; null: 0; prefix_events only
    `options`         options of a router from a plugin, by name
    """

    count: int = 1
    routing: str | None = None
    cache_weight: float | None = None
    load_weight: float | None = None
    events_delay_s: float | None = None
    events_lost: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive("replicas.count", self.count)
        for key in ("cache_weight", "load_weight", "events_delay_s"):
            not_negative(f"replicas.{key}", getattr(self, key))
        if self.events_lost is not None:
            share("replicas.events_lost", self.events_lost)
        if self.routing is not None:
            one_of("replicas.routing", self.routing, ROUTERS)
            ROUTERS.check("replicas", self.routing, self.keys, self.options, f"routing={self.routing}")
            return
        unrouted = "with replicas.routing=null: expected"
        if self.count > 1:
            raise ValueError(f"replicas.count={self.count} {unrouted} one of {', '.join(ROUTERS)}")
        for key, value in (*self.keys.items(), ("options", self.options or None)):
            if value is not None:
                raise ValueError(f"replicas.{key}={value} {unrouted} null, or replicas.routing")

    @property
    def keys(self) -> dict[str, Any]:
        """Options that are keys of this schema."""
        return {key: getattr(self, key) for key in _KEYS}
