"""Time to first token of one request at a time, by the workload's labels: its parts, its bound, and speedups.

Requests of different arms are paired by seed and number. All of it holds for a closed loop with one client, where a
step serves one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bootstrap import Clusters, positive_ratio

Floats = NDArray[np.float64]
Label = str | int

#: Parts of the time to first token that steps report, in the order in which a step does them; the rest is `other_s`.
PHASES = ("plan_s", "copy_s", "fill_s", "repair_s", "prefill_s")
PARTS = (*PHASES, "other_s")

#: The goal for captures: at most so many states cost at most this share of a cold prefill.
FEW_STATES, MOST_OVERHEAD = 8, 0.05


@dataclass(frozen=True)
class ArmPrefills:
    """The counted requests of one arm, all seeds together; arrays of shape (n,), seconds and prompt tokens.

    `parts`      seconds by part; empty where steps were not measured
    `bound_s`    time below which the request's steps cannot take; None where no rates were measured
    `logit_gap`  largest difference of the first token's logits to the baseline's; None where they were not kept
    """

    arm: str
    family: str
    seed: NDArray[np.int64]
    group: NDArray[np.int64]
    request: NDArray[np.int64]
    ttft_s: Floats
    prompt: NDArray[np.int64]
    reused: NDArray[np.int64]
    computed: NDArray[np.int64]
    repaired: NDArray[np.int64]
    captured_states: NDArray[np.int64]
    captured_bytes: NDArray[np.int64]
    parts: Mapping[str, Floats]
    bound_s: Floats | None
    logit_gap: Floats | None = None


@dataclass(frozen=True)
class Pairs:
    """What a group of one arm's requests is compared with: the baseline's same requests."""

    arm: ArmPrefills
    baseline: ArmPrefills
    rows: NDArray[np.int64]
    beside: NDArray[np.int64]

    @staticmethod
    def of(arm: ArmPrefills, baseline: ArmPrefills, rows: NDArray[np.int64]) -> Pairs:
        """The baseline's rows of the same seed and request; those that it has not are left out."""
        place = {key: at for at, key in enumerate(zip(baseline.seed.tolist(), baseline.request.tolist(), strict=True))}
        keys = zip(arm.seed[rows].tolist(), arm.request[rows].tolist(), strict=True)
        found = [(row, place[key]) for row, key in zip(rows.tolist(), keys, strict=True) if key in place]
        own, beside = np.array(found, np.int64).reshape(-1, 2).T
        return Pairs(arm, baseline, own, beside)

    def ratio(self, above: Floats, below: Floats) -> dict[str, Any] | None:
        """Sum of the baseline's values ÷ sum of the arm's, with its 95 % interval; None where there are none."""
        if not len(self.rows) or below[self.rows].sum() <= 0:
            return None
        clusters = Clusters.of(self.arm.seed[self.rows], self.arm.group[self.rows])
        sums = clusters.sums(above[self.beside]), clusters.sums(below[self.rows])
        return positive_ratio(*sums)._asdict()


def prefill_entries(
    arms: Sequence[ArmPrefills], labels: Mapping[str, Sequence[Label]], baseline: str
) -> list[dict[str, Any]]:
    """One entry for each arm and combination of labels, in the order of the workload's requests.

    `labels`  of every request of the workload, by its number
    """
    names = list(labels)
    combinations = list(dict.fromkeys(zip(*labels.values(), strict=True)))
    of_request = np.array([combinations.index(one) for one in zip(*labels.values(), strict=True)], np.int64)
    base = next((arm for arm in arms if arm.arm == baseline), None)
    entries = []
    for at, combination in enumerate(combinations):
        for arm in arms:
            rows = np.flatnonzero(of_request[arm.request] == at)
            if len(rows):
                told = {"arm": arm.arm, "family": arm.family, **dict(zip(names, combination, strict=True))}
                entries.append(told | _entry(arm, rows, base))
    return entries


def _entry(arm: ArmPrefills, rows: NDArray[np.int64], baseline: ArmPrefills | None) -> dict[str, Any]:
    """One arm's requests of one combination of labels; medians, but for the hit rate and the ratios."""
    ttft, bound = arm.ttft_s[rows], arm.bound_s
    entry: dict[str, Any] = {
        "requests": len(rows),
        "prompt_tokens": float(np.median(arm.prompt[rows])),
        "token_hit_rate": float(arm.reused[rows].sum() / arm.prompt[rows].sum()),
        "reused_tokens": float(np.median(arm.reused[rows])),
        "computed_tokens": float(np.median(arm.computed[rows])),
        "repaired_tokens": float(np.median(arm.repaired[rows])),
        "captured_states": float(np.median(arm.captured_states[rows])),
        "captured_bytes": float(np.median(arm.captured_bytes[rows])),
        "ttft_s": quartiles(ttft),
        "parts_s": {part: float(np.median(values[rows])) for part, values in arm.parts.items()},
        "bound_s": None if bound is None else float(np.median(bound[rows])),
        "of_bound": None if bound is None else float(np.median(bound[rows] / ttft)),
        "logit_gap": None if arm.logit_gap is None else float(arm.logit_gap[rows].max()),
    }
    return entry | _ratios(arm, rows, baseline)


def _ratios(arm: ArmPrefills, rows: NDArray[np.int64], baseline: ArmPrefills | None) -> dict[str, Any]:
    if baseline is None or baseline is arm:
        return {"speedup": None, "ratio_of_bounds": None}
    pairs = Pairs.of(arm, baseline, rows)
    bounds = None
    if arm.bound_s is not None and baseline.bound_s is not None:
        bounds = pairs.ratio(baseline.bound_s, arm.bound_s)
    return {
        "speedup": pairs.ratio(baseline.ttft_s, arm.ttft_s),
        "ratio_of_bounds": None if bounds is None else bounds["mean"],
    }


def quartiles(values: Floats) -> dict[str, float]:
    """Median, quartiles and the least."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {"p25": float(low), "p50": float(middle), "p75": float(high), "least": float(values.min())}


def overhead(entry: Mapping[str, Any]) -> tuple[float | None, float, float | None]:
    """Low end, mean and high end of TTFT ÷ the baseline's TTFT − 1, of an entry that has a speedup."""
    speedup = entry["speedup"]
    low, high = (None if speedup[end] is None else 1 / speedup[end] - 1 for end in ("high", "low"))
    return low, 1 / speedup["mean"] - 1, high


def capture_goal(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The dearest capture of few states in a cold prefill, beside the goal; None where nothing tells."""
    cold = [entry for entry in entries if entry["speedup"] and not entry["reused_tokens"]]
    few = [entry for entry in cold if 0 < entry["captured_states"] <= FEW_STATES]
    if not few:
        return None
    worst = max(few, key=lambda entry: overhead(entry)[1])
    low, mean, high = overhead(worst)
    told = {"states": FEW_STATES, "most": MOST_OVERHEAD, "arm": worst["arm"], "prompt_tokens": worst["prompt_tokens"]}
    return told | {"overhead": mean, "low": low, "high": high, "met": mean <= MOST_OVERHEAD}
