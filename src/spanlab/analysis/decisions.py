"""Ranks of arms on the engine and in the simulator, and the regret of the simulator's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two scores of the same arms; None for one arm, or where a score is constant."""
    if len(first) < 2:
        return None
    from scipy.stats import kendalltau  # slow to import, and needed by reports only

    tau = float(kendalltau(first, second, variant="b").statistic)
    return None if np.isnan(tau) else tau


def decide(measured: Mapping[str, Sequence[float]], predicted: Mapping[str, float]) -> dict[str, Any]:
    """Return ranks of arms by mean TTFT at one load; `measured` has one mean per repeat, in seconds.

    tau       tau-b of the simulator's means against the means over the engine's repeats; every pair of arms counts,
              also pairs whose order differs between the engine's repeats
    aa_tau    mean over pairs of the engine's repeats of their tau; None for a single repeat
    regret    (measured TTFT of the arm that the simulator puts first − the least measured one) ÷ the latter
    """
    arms = list(measured)
    means = {arm: float(np.mean(measured[arm])) for arm in arms}
    best, choice = min(arms, key=lambda arm: means[arm]), min(arms, key=lambda arm: predicted[arm])
    return {
        "tau": kendall([means[arm] for arm in arms], [predicted[arm] for arm in arms]),
        "aa_tau": _repeats_tau(measured),
        "best": best,
        "choice": choice,
        "regret": means[choice] / means[best] - 1,
        "regret_s": means[choice] - means[best],
        "measured_s": means,
        "predicted_s": {arm: predicted[arm] for arm in arms},
    }


def _repeats_tau(measured: Mapping[str, Sequence[float]]) -> float | None:
    repeats = list(zip(*measured.values(), strict=True))
    taus = [tau for a, b in combinations(repeats, 2) if (tau := kendall(a, b)) is not None]
    return float(np.mean(taus)) if taus else None
