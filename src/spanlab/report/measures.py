"""Numbers that several figures and the table need, taken from one arm."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.report.data import ArmData, StudyData
from spanlab.stats import t_interval

GIB = 1024**3


def half_width(values: NDArray[Any]) -> float:
    """Half of the 95 % t-interval of the mean of `values`; 0 for a single value."""
    interval = t_interval(values)
    return 0.0 if interval.low is None else interval.mean - interval.low


def ttft_s(arm: ArmData) -> NDArray[np.float64]:
    """Time from arrival to first token of every counted request, in seconds."""
    return np.asarray(arm.columns["first_token_s"] - arm.columns["arrived_s"], dtype=np.float64)


def resident_gib(arm: ArmData) -> float:
    """Mean resident bytes, KV and states together, in GiB."""
    held = arm.summary["bytes"]
    return float(held["kv_resident_mean"] + held["state_resident_mean"]) / GIB


def resident_half_width_gib(arm: ArmData) -> float:
    """95 % half-width of the mean resident bytes over seeds, in GiB."""
    per_seed = [run["kv_resident_mean_bytes"] + run["state_resident_mean_bytes"] for run in arm.runs]
    return half_width(np.asarray(per_seed, dtype=np.float64)) / GIB


def saved_percent(arm: ArmData) -> float:
    """Reused tokens in percent of prompt tokens."""
    return 100.0 * float(arm.summary["token_hit_rate"])


def saved_half_width_percent(arm: ArmData) -> float:
    """95 % half-width of the token hit rate over seeds, in percentage points."""
    seeds, index = np.unique(arm.columns["seed"], return_inverse=True)
    reused = np.bincount(index, weights=arm.columns["reused_tokens"], minlength=len(seeds))
    prompt = np.bincount(index, weights=arm.columns["prompt_tokens"], minlength=len(seeds))
    return 100.0 * half_width(reused / np.maximum(prompt, 1))


def bound_percent(study: StudyData) -> float | None:
    """Infinite-cache bound on the token hit rate in percent; None without prompts."""
    for arm in study.arms:
        tokens = arm.summary["tokens"]
        if tokens["prompt"]:
            return 100.0 * float(tokens["seen"]) / float(tokens["prompt"])
    return None


def interval(low_high: Any) -> tuple[float, float] | None:
    """A (low, high) pair, or None where a single seed left it empty."""
    if not low_high or low_high[0] is None or low_high[1] is None:
        return None
    return float(low_high[0]), float(low_high[1])


def holds_states(arm: ArmData) -> bool:
    """Whether any run of the arm ever kept a recurrent state."""
    return bool(arm.summary["bytes"]["state_resident_peak"])


def reads_nothing(arm: ArmData) -> bool:
    """Whether the arm is the full recompute that others are compared with."""
    return arm.family == "none"
