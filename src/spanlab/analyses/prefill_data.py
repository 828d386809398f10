"""Data of the analysis `prefill`: speedups and reuse by length of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Clusters, positive_ratio

# ------------------------------------------------------------------------------
# Time to first token of one request at a time, by the workload's labels: its parts, its bound,
# and speedups.
#
# Requests of different arms are paired by seed and number. This assumes a closed loop with one
# client, where a step serves one request.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Label = str | int

#: Parts of the time to first token that steps report, in the order of a step's phases; the
#: remainder is `other_s`.
PHASES = ("plan_s", "copy_s", "fill_s", "repair_s", "prefill_s")
PARTS = (*PHASES, "other_s")

#: The goal for captures: up to FEW_STATES states cost at most the share MOST_OVERHEAD of a cold
#: prefill.
FEW_STATES, MOST_OVERHEAD = 8, 0.05


@dataclass(frozen=True)
class ArmPrefills:
    """The counted requests of one arm, all seeds together; arrays of shape (n,), seconds and prompt
    tokens.

    `parts`      seconds by part; empty where steps were not measured
    `bound_s`    lower bound of the time of the request's steps; None where no rates were measured
    `logit_gap`  largest difference of the first token's logits to the baseline's; None where they
                 were not recorded
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
    """A group of one arm's requests, paired with the same requests of the baseline.

    `rows`, `baseline_rows`  indices of the paired requests in either arm, shape (pairs,)
    """

    arm: ArmPrefills
    baseline: ArmPrefills
    rows: NDArray[np.int64]
    baseline_rows: NDArray[np.int64]

    @staticmethod
    def of(arm: ArmPrefills, baseline: ArmPrefills, rows: NDArray[np.int64]) -> Pairs:
        """Return the pairs of `rows` with the baseline's rows; requests that the baseline lacks are
        left out."""
        baseline_keys = zip(baseline.seed.tolist(), baseline.request.tolist(), strict=True)
        row_of = {key: row for row, key in enumerate(baseline_keys)}
        keys = zip(arm.seed[rows].tolist(), arm.request[rows].tolist(), strict=True)
        pairs = [
            (row, row_of[key])
            for row, key in zip(rows.tolist(), keys, strict=True)
            if key in row_of
        ]
        paired_rows, baseline_rows = np.array(pairs, np.int64).reshape(-1, 2).T
        return Pairs(arm, baseline, paired_rows, baseline_rows)

    def ratio(self, above: Floats, below: Floats) -> dict[str, Any] | None:
        """Return the sum of the baseline's values ÷ that of the arm's with a 95 % interval; None
        without pairs."""
        if not len(self.rows) or below[self.rows].sum() <= 0:
            return None
        clusters = Clusters.of(self.arm.seed[self.rows], self.arm.group[self.rows])
        sums = clusters.sums(above[self.baseline_rows]), clusters.sums(below[self.rows])
        return positive_ratio(*sums)._asdict()


def prefill_entries(
    arms: Sequence[ArmPrefills],
    labels: Mapping[str, Sequence[Label]],
    baseline: str,
    plain: ArmPrefills | None = None,
) -> list[dict[str, Any]]:
    """Return one entry per arm and combination of labels, in the order of the workload's requests.

    `labels`  label values of every request of the workload, by label and number of the request
    `plain`   the same requests in plain transformers; None where they did not run
    """
    names = list(labels)
    combinations = list(dict.fromkeys(zip(*labels.values(), strict=True)))
    of_request = np.array(
        [combinations.index(combination) for combination in zip(*labels.values(), strict=True)],
        np.int64,
    )
    base = next((arm for arm in arms if arm.arm == baseline), None)
    entries = []
    for index, combination in enumerate(combinations):
        for arm in arms:
            rows = np.flatnonzero(of_request[arm.request] == index)
            if not len(rows):
                continue
            labels_entry = {
                "arm": arm.arm,
                "family": arm.family,
                **dict(zip(names, combination, strict=True)),
            }
            beside: dict[str, Any] = {"plain_s": None, "over_plain": None}
            if plain is not None:
                pairs = Pairs.of(arm, plain, rows)
                same = plain.ttft_s[pairs.baseline_rows]
                beside["plain_s"] = float(np.median(same)) if len(same) else None
                beside["over_plain"] = pairs.ratio(plain.ttft_s, arm.ttft_s)
            entries.append(labels_entry | _entry(arm, rows, base) | beside)
    return entries


def _entry(
    arm: ArmPrefills, rows: NDArray[np.int64], baseline: ArmPrefills | None
) -> dict[str, Any]:
    """Return the entry of one arm and combination of labels; medians, except for the hit rate and
    the ratios."""
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
        "parts_s": {phase: float(np.median(values[rows])) for phase, values in arm.parts.items()},
        "bound_s": None if bound is None else float(np.median(bound[rows])),
        "of_bound": None if bound is None else float(np.median(bound[rows] / ttft)),
        "logit_gap": None if arm.logit_gap is None else float(arm.logit_gap[rows].max()),
    }
    if baseline is None or baseline is arm:
        ratios: dict[str, Any] = {"speedup": None, "ratio_of_bounds": None}
    else:
        pairs = Pairs.of(arm, baseline, rows)
        bounds = None
        if arm.bound_s is not None and baseline.bound_s is not None:
            bounds = pairs.ratio(baseline.bound_s, arm.bound_s)
        ratios = {
            "speedup": pairs.ratio(baseline.ttft_s, arm.ttft_s),
            "ratio_of_bounds": None if bounds is None else bounds["mean"],
        }
    return entry | ratios


def quartiles(values: Floats) -> dict[str, float]:
    """Return median, quartiles and the least value."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {
        "p25": float(low),
        "p50": float(middle),
        "p75": float(high),
        "least": float(values.min()),
    }


def overhead(entry: Mapping[str, Any]) -> tuple[float | None, float, float | None]:
    """Return low end, mean and high end of TTFT ÷ the baseline's TTFT − 1, for an entry with a
    speedup."""
    speedup = entry["speedup"]
    low, high = (None if speedup[end] is None else 1 / speedup[end] - 1 for end in ("high", "low"))
    return low, 1 / speedup["mean"] - 1, high


def capture_goal(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the most expensive capture of few states in a cold prefill and its goal; None without
    such an entry."""
    cold = [entry for entry in entries if entry["speedup"] and not entry["reused_tokens"]]
    captures = [entry for entry in cold if 0 < entry["captured_states"] <= FEW_STATES]
    if not captures:
        return None
    worst = max(captures, key=lambda entry: overhead(entry)[1])
    low, mean, high = overhead(worst)
    goal = {
        "states": FEW_STATES,
        "most": MOST_OVERHEAD,
        "arm": worst["arm"],
        "prompt_tokens": worst["prompt_tokens"],
    }
    return goal | {"overhead": mean, "low": low, "high": high, "met": mean <= MOST_OVERHEAD}


# ------------------------------------------------------------------------------
# Input of the figures of prefills.
# ------------------------------------------------------------------------------

Entry = dict[str, Any]


@dataclass(frozen=True)
class PrefillData:
    """Entries of one study, or of all points of a sweep.

    `labels`    names of the label columns
    `baseline`  the arm that speedups are relative to
    `footer`    the provenance line under every figure
    """

    entries: list[Entry]
    labels: tuple[str, ...]
    baseline: str
    footer: str

    def name(self, entry: Entry) -> str:
        """Return the labels of an entry as text, without empty ones."""
        return ", ".join(
            value if isinstance(value, str) else f"{label} {value}"
            for label in self.labels
            if (value := entry[label]) != ""
        )

    def lengths(self) -> list[float]:
        """Prompt lengths, short to long."""
        return sorted({entry["prompt_tokens"] for entry in self.entries})

    def without_baseline(self) -> list[Entry]:
        """Return the entries of all arms except the baseline."""
        return [entry for entry in self.entries if entry["arm"] != self.baseline]

    def families(self) -> dict[str, str]:
        """The family of each arm."""
        return {entry["arm"]: entry["family"] for entry in self.entries}


def curve(entries: list[Entry]) -> list[Entry]:
    """Entries by prompt length, short to long."""
    return sorted(entries, key=lambda entry: float(entry["prompt_tokens"]))
