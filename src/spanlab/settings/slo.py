"""Latency targets of the analysis `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spanlab.checks import positive


class Target(NamedTuple):
    """`statistic` (mean, p50, p95, p99) of `delay` (queue, ttft, tpot, e2e) is at most `limit_s` seconds."""

    key: str
    delay: str
    statistic: str
    limit_s: float

    @property
    def words(self) -> str:
        """The target as text."""
        return f"{self.key} ≤ {self.limit_s:g}"


@dataclass
class SloSettings:
    """Latency targets over all requests, in seconds; every target that is set must be met.

    `queue_mean_s`, `queue_p50_s`, `queue_p95_s`, `queue_p99_s`  admission − arrival
    `ttft_mean_s`, `ttft_p50_s`, `ttft_p95_s`, `ttft_p99_s`  first token − arrival
    `tpot_mean_s`, `tpot_p50_s`, `tpot_p95_s`, `tpot_p99_s`  (last − first token) ÷ (output tokens − 1), of each request
    `e2e_mean_s`, `e2e_p50_s`, `e2e_p95_s`, `e2e_p99_s`  last token − arrival
    """

    queue_mean_s: float | None = None
    queue_p50_s: float | None = None
    queue_p95_s: float | None = None
    queue_p99_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    e2e_mean_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p95_s: float | None = None
    e2e_p99_s: float | None = None

    def __post_init__(self) -> None:
        for key, limit in vars(self).items():
            positive(f"slo.{key}", limit)

    @property
    def targets(self) -> list[Target]:
        """The targets that are set."""
        limits = {key: limit for key, limit in vars(self).items() if limit is not None}
        keys = [key.split("_") for key in limits]
        return [
            Target(key, delay, statistic, limit)
            for (key, limit), (delay, statistic, _) in zip(limits.items(), keys, strict=True)
        ]
