"""What perfect eviction is worth: the best of the clairvoyants beside arms that know nothing of what comes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spanlab.analysis.families import MeasuredArm, ratio_of
from spanlab.stats import Interval


@dataclass(frozen=True)
class Kept:
    """One arm under a budget; regrets as in `summary.json`, `utilisation` None without a timing model."""

    arm: str
    token_hit_rate: float
    regret_points: float
    ttft_mean_s: float | None
    ttft_regret_s: float | None
    utilisation: float | None


@dataclass(frozen=True)
class PerfectEviction:
    """Three arms and the bounds of all.

    `usual`       the baseline
    `best`        the arm with the most hits of those that know nothing of what comes
    `known`       the clairvoyant with the most hits
    `bound`       share of prompt tokens that no eviction exceeds
    `least_s`     mean TTFT that no eviction goes below; None where it is not known
    `gain`        mean TTFT of the baseline ÷ that of the clairvoyant; None where a queue grows
    `throughput`  requests per second that fill the capacity: the clairvoyant's ÷ the baseline's
    """

    usual: Kept
    best: Kept
    known: Kept
    bound: float
    least_s: float | None
    gain: Interval | None
    throughput: float | None

    def plain(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        return asdict(self) | {"gain": self.gain and self.gain._asdict()}


def perfect_eviction(arms: Sequence[MeasuredArm], baseline: str, knowing: Collection[str]) -> PerfectEviction:
    """Compare arms of one study that store alike; the baseline is one of them, and at least one is `knowing`."""
    usual = next(arm for arm in arms if arm.name == baseline)
    best = max((arm for arm in arms if arm.name not in knowing), key=_hits)
    known = max((arm for arm in arms if arm.name in knowing), key=_hits)
    busy, less = (arm.summary["utilisation"] for arm in (usual, known))
    bounds, prompt = usual.summary["bounds"], usual.summary["tokens"]["prompt"]
    return PerfectEviction(
        usual=_kept(usual),
        best=_kept(best),
        known=_kept(known),
        bound=bounds["offline_tokens"] / prompt,
        least_s=bounds["least_ttft_s"],
        gain=ratio_of(usual, known),
        throughput=busy / less if busy and less else None,
    )


def _hits(arm: MeasuredArm) -> float:
    return float(arm.summary["token_hit_rate"])


def _kept(arm: MeasuredArm) -> Kept:
    summary = arm.summary
    return Kept(
        arm.name,
        summary["token_hit_rate"],
        summary["bounds"]["regret_points"],
        summary["ttft_s"]["mean"],
        summary["bounds"]["ttft_regret_s"],
        summary["utilisation"],
    )
