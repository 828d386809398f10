"""Settings of the arrival process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spanlab.checks import not_negative, one_of, positive
from spanlab_sim.arrivals import ARRIVALS, ORDERS
from spanlab_sim.sessions import THINKS


@dataclass
class ArrivalSettings:
    """The arrival process.

    `kind`        the arrival process
    `rate_rps`    mean arrival rate, requests per second: of all requests, or of each group for poisson_per_group; for
                  sessions the rate of session starts, null: when the session's first request arrives
    `burstiness`  shape of gamma; the squared coefficient of variation of the gaps is 1 / burstiness
    `order`       order of requests: shuffled, as_given (the workload's) or by_group; null: by_group for closed_loop,
                  else shuffled; poisson, gamma, deterministic, saturating and closed_loop only
    `clients`     maximum requests in flight: the next one arrives when one finishes; closed_loop and novel_stream only
    `known_first` number of requests before the first novel one; novel_stream only
    `think_s`     mean seconds between an answer and the session's next request; null: the workload's; sessions only
    `think`       distribution of think times: exponential or constant; null: exponential; sessions only
    `options`     options of an arrival process from a plugin, by name
    """

    kind: str = "poisson"
    rate_rps: float | None = None
    burstiness: float | None = None
    order: str | None = None
    clients: int | None = None
    known_first: int | None = None
    think_s: float | None = None
    think: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("arrivals.kind", self.kind, ARRIVALS)
        positive("arrivals.rate_rps", self.rate_rps)
        positive("arrivals.clients", self.clients)
        positive("arrivals.known_first", self.known_first)
        positive("arrivals.burstiness", self.burstiness)
        not_negative("arrivals.think_s", self.think_s)
        if self.think is not None:
            one_of("arrivals.think", self.think, THINKS)
            if self.think_s is None:
                raise ValueError(
                    f"arrivals.think={self.think} with arrivals.think_s=null: expected arrivals.think_s too"
                )
        if self.order is not None:
            one_of("arrivals.order", self.order, ORDERS)
        ARRIVALS.check("arrivals", self.kind, self.keys, self.options)

    @property
    def keys(self) -> dict[str, Any]:
        """Options that are keys of this schema."""
        return {key: value for key, value in vars(self).items() if key not in ("kind", "options")}
