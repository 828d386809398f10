"""How far two runs of an arm differ, over paired requests, and whether the difference is shown."""

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
    """The other run against the first: a difference of shares, or a ratio of means; with its 95 % interval."""

    verdict: Verdict
    interval: Interval


@dataclass(frozen=True)
class ArmDifferences:
    """One arm in two runs, over paired requests.

    ttft, e2e  None where the arm is saturated in a run: its mean delays grow with the run
    """

    requests: int
    seeds: int
    token_hit_rate: Difference
    ttft: Difference | None
    e2e: Difference | None


def differences(pairs: Pairs, saturated: bool) -> ArmDifferences:
    """Every difference of an arm."""
    delays = (None, None) if saturated else (mean_ttft(pairs), mean_e2e(pairs))
    return ArmDifferences(len(pairs.first["seed"]), pairs.seeds, token_hit_rate(pairs), *delays)


def token_hit_rate(pairs: Pairs) -> Difference:
    """Token hit rate of the other run − that of the first, as a share of prompt tokens."""
    clusters = pairs.clusters()
    gained = clusters.sums(pairs.other["reused_tokens"] - pairs.first["reused_tokens"])
    found = ratio(gained, clusters.sums(pairs.first["prompt_tokens"]))
    same = np.array_equal(pairs.other["reused_tokens"], pairs.first["reused_tokens"])
    return Difference(_verdict(found, 0.0, same), found)


def mean_ttft(pairs: Pairs) -> Difference:
    """Mean TTFT of the other run ÷ that of the first."""
    return _mean_delay(pairs, "first_token_s")


def mean_e2e(pairs: Pairs) -> Difference:
    """Mean E2E latency of the other run ÷ that of the first."""
    return _mean_delay(pairs, "finished_s")


def _mean_delay(pairs: Pairs, until: str) -> Difference:
    clusters = pairs.clusters()
    first, other = (_delay(columns, until) for columns in (pairs.first, pairs.other))
    found = positive_ratio(clusters.sums(other), clusters.sums(first))
    return Difference(_verdict(found, 1.0, np.array_equal(first, other)), found)


def _delay(columns: Columns, until: str) -> np.ndarray:
    delay: np.ndarray = columns[until] - columns["arrived_s"]
    return delay


def _verdict(found: Interval, nothing: float, same: bool) -> Verdict:
    if same:
        return "same"
    if found.low is None or found.high is None:
        return "no interval"
    return "not shown" if found.low <= nothing <= found.high else "differs"
