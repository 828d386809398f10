"""When requests arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spanlab.checks import one_of, positive
from spanlab_sim.arrivals import ARRIVALS, ORDERS


@dataclass
class ArrivalSettings:
    """When requests arrive.

    `kind`        the arrival process
    `rate_rps`    mean requests per second: of the whole system, or of each group for poisson_per_group
    `burstiness`  shape of gamma; the squared coefficient of variation of the gaps is 1 / burstiness
    `order`       of requests: shuffled, as_given by the workload, or by_group, one group after another; null: by_group
                  for closed_loop, else shuffled; poisson, gamma, deterministic, saturating and closed_loop only
    `clients`     most requests in flight: a further one arrives when one of them finishes; closed_loop only
    `options`     options of an arrival process from a plugin, by name
    """

    kind: str = "poisson"
    rate_rps: float | None = None
    burstiness: float | None = None
    order: str | None = None
    clients: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("arrivals.kind", self.kind, ARRIVALS)
        positive("arrivals.rate_rps", self.rate_rps)
        positive("arrivals.clients", self.clients)
        positive("arrivals.burstiness", self.burstiness)
        if self.order is not None:
            one_of("arrivals.order", self.order, ORDERS)
        ARRIVALS.check("arrivals", self.kind, self.keys, self.options)

    @property
    def keys(self) -> dict[str, Any]:
        """Options that have keys of their own."""
        return {"rate_rps": self.rate_rps, "burstiness": self.burstiness, "order": self.order, "clients": self.clients}
