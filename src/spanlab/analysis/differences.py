"""Differences between two runs of an arm over paired requests, with intervals and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from spanlab.analysis.bootstrap import positive_ratio, ratio
from spanlab.analysis.pairs import Columns, Pairs
from spanlab.stats import Interval

#: same: every pair is equal; differs: the interval excludes zero difference; not shown: it includes it; no interval:
#: one seed and one group give none.
Verdict = Literal["same", "differs", "not shown", "no interval"]


@dataclass(frozen=True)
class Difference:
    """The second run compared with the first: a difference of shares or a ratio of means, with its 95 % interval."""

    verdict: Verdict
    interval: Interval


@dataclass(frozen=True)
class ArmDifferences:
    """One arm in two runs, over paired requests.

    hit_rates, ttft_means_s  token hit rate and mean TTFT of either run
    ttft, e2e  None where the arm is saturated in a run: its mean delays grow with the run
    """

    requests: int
    seeds: int
    groups: int
    hit_rates: tuple[float, float]
    ttft_means_s: tuple[float, float]
    token_hit_rate: Difference
    ttft: Difference | None
    e2e: Difference | None


def differences(pairs: Pairs, saturated: bool) -> ArmDifferences:
    """Return the differences of one arm; no ratios of delays for a saturated arm."""
    delays = (None, None) if saturated else (mean_ttft(pairs), mean_e2e(pairs))
    first, other = pairs.first, pairs.other
    return ArmDifferences(
        len(first["seed"]),
        pairs.seeds,
        len(np.unique(first["group_id"])),
        (_hit_rate(first), _hit_rate(other)),
        (float(_delay(first, "first_token_s").mean()), float(_delay(other, "first_token_s").mean())),
        token_hit_rate(pairs),
        *delays,
    )


def _hit_rate(columns: Columns) -> float:
    return float(columns["reused_tokens"].sum() / columns["prompt_tokens"].sum())


def token_hit_rate(pairs: Pairs) -> Difference:
    """Return the token hit rate of the other run − that of the first, as a share of prompt tokens."""
    clusters = pairs.clusters()
    gained = clusters.sums(pairs.other["reused_tokens"] - pairs.first["reused_tokens"])
    interval = ratio(gained, clusters.sums(pairs.first["prompt_tokens"]))
    same = np.array_equal(pairs.other["reused_tokens"], pairs.first["reused_tokens"])
    return Difference(_verdict(interval, 0.0, same), interval)


def mean_ttft(pairs: Pairs) -> Difference:
    """Return the mean TTFT of the other run ÷ that of the first."""
    return _mean_delay(pairs, "first_token_s")


def mean_e2e(pairs: Pairs) -> Difference:
    """Return the mean E2E latency of the other run ÷ that of the first."""
    return _mean_delay(pairs, "finished_s")


def _mean_delay(pairs: Pairs, until: str) -> Difference:
    clusters = pairs.clusters()
    first, other = (_delay(columns, until) for columns in (pairs.first, pairs.other))
    interval = positive_ratio(clusters.sums(other), clusters.sums(first))
    return Difference(_verdict(interval, 1.0, np.array_equal(first, other)), interval)


def _delay(columns: Columns, until: str) -> np.ndarray:
    delay: np.ndarray = columns[until] - columns["arrived_s"]
    return delay


def _verdict(interval: Interval, no_difference: float, same: bool) -> Verdict:
    if same:
        return "same"
    if interval.low is None or interval.high is None:
        return "no interval"
    return "not shown" if interval.low <= no_difference <= interval.high else "differs"
