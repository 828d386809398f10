"""Value of perfect eviction: the best clairvoyant arm compared with arms without foresight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spanlab.analysis.families import MeasuredArm, ratio_of
from spanlab.stats import Interval


@dataclass(frozen=True)
class EvictionResult:
    """Results of one arm under a budget; regrets as in `summary.json`, `utilisation` None without a timing model."""

    arm: str
    token_hit_rate: float
    regret_points: float
    ttft_mean_s: float | None
    ttft_regret_s: float | None
    utilisation: float | None


@dataclass(frozen=True)
class PerfectEviction:
    """Three arms, and bounds that hold for all of them.

    `usual`       the baseline
    `best`        the arm with the highest token hit rate among those without foresight
    `known`       the clairvoyant arm with the highest token hit rate
    `bound`       upper bound of the token hit rate over all eviction orders
    `least_s`     lower bound of the mean TTFT over all eviction orders; None where it is unknown
    `gain`        mean TTFT of the baseline ÷ that of the clairvoyant; None where a queue grows
    `throughput`  requests per second at full capacity: the clairvoyant's ÷ the baseline's
    """

    usual: EvictionResult
    best: EvictionResult
    known: EvictionResult
    bound: float
    least_s: float | None
    gain: Interval | None
    throughput: float | None

    def plain(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        return asdict(self) | {"gain": self.gain and self.gain._asdict()}


def perfect_eviction(arms: Sequence[MeasuredArm], baseline: str, clairvoyants: Collection[str]) -> PerfectEviction:
    """Compare arms of one study that store the same prefixes; at least one, not the baseline, is a clairvoyant."""
    usual = next(arm for arm in arms if arm.name == baseline)
    best = max((arm for arm in arms if arm.name not in clairvoyants), key=_hits)
    clairvoyant = max((arm for arm in arms if arm.name in clairvoyants), key=_hits)
    usual_busy, clairvoyant_busy = (arm.summary["utilisation"] for arm in (usual, clairvoyant))
    bounds, prompt = usual.summary["bounds"], usual.summary["tokens"]["prompt"]
    return PerfectEviction(
        usual=_eviction_result(usual),
        best=_eviction_result(best),
        known=_eviction_result(clairvoyant),
        bound=bounds["offline_tokens"] / prompt,
        least_s=bounds["least_ttft_s"],
        gain=ratio_of(usual, clairvoyant),
        throughput=usual_busy / clairvoyant_busy if usual_busy and clairvoyant_busy else None,
    )


def _hits(arm: MeasuredArm) -> float:
    return float(arm.summary["token_hit_rate"])


def _eviction_result(arm: MeasuredArm) -> EvictionResult:
    summary = arm.summary
    return EvictionResult(
        arm.name,
        summary["token_hit_rate"],
        summary["bounds"]["regret_points"],
        summary["ttft_s"]["mean"],
        summary["bounds"]["ttft_regret_s"],
        summary["utilisation"],
    )
