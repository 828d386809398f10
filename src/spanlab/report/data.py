"""Input of a report: counted requests, runs and summary of each arm of one study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.records import ttft
from spanlab.stats import SATURATED, UNSETTLED, Interval, Stationarity, t_interval


@dataclass(frozen=True)
class ArmData:
    """One arm of a study, all its seeds together.

    columns  every Record field plus `seed`; one entry per counted request
    runs     RunRow fields, one dict per seed
    summary  `arms.<name>` of summary.json
    """

    name: str
    family: str
    columns: dict[str, NDArray[Any]]
    runs: list[dict[str, Any]]
    summary: dict[str, Any]


@dataclass(frozen=True)
class LoadPoint:
    """One arm at one offered load, all seeds together.

    utilisation     offered work ÷ capacity; None without a timing model
    busy_fraction   share of the time in which steps run
    queue_s, ttft_s  mean, low, high and p99 in seconds; None where the queue grows, and `unstable`
                     is then the mean over this run, which depends on the length of the run
    """

    arm: str
    family: str
    rate_rps: float
    seeds: int
    requests: int
    state: Stationarity
    utilisation: float | None
    busy_fraction: float
    queue_s: dict[str, float | None]
    ttft_s: dict[str, float | None]

    @property
    def stable(self) -> bool:
        """Whether the run is neither saturated nor unsettled, so that its delays are steady-state
        values."""
        return self.state.verdict not in (SATURATED, UNSETTLED)


@dataclass(frozen=True)
class StudyData:
    """Input of the report for one study.

    `arms`          arms that finished
    `footer`        the provenance line under every figure
    `baseline`      the arm that speedups are relative to
    `count_hit_as`  kind of token that makes a request a hit, from one token: reused or matched
    `notes`         additional notes under the table
    `caveats`       limits of the numbers, for readers of the study
    `load_words`    the load at which the arms were measured, as text: 1/s
    """

    title: str
    footer: str
    arms: list[ArmData]
    load: list[LoadPoint]
    store: str
    baseline: str = "none"
    count_hit_as: str = "reused"
    caveats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    load_words: str = ""

    @property
    def provenance(self) -> str:
        """The line under every figure."""
        return f"{self.title} · {self.footer}"


# ------------------------------------------------------------------------------
# Measures of arms that several figures and tables share.
# ------------------------------------------------------------------------------


def half_width(values: NDArray[Any]) -> float:
    """Half of the 95 % t-interval of the mean of `values`; 0 for a single value."""
    interval = t_interval(values)
    return 0.0 if interval.low is None else interval.mean - interval.low


def ttft_s(arm: ArmData) -> NDArray[np.float64]:
    """Time from arrival to first token of every counted request, in seconds."""
    return ttft(arm.columns["arrived_s"], arm.columns["first_token_s"])


def resident_bytes(arm: ArmData) -> float:
    """Mean resident bytes: cached KV and states, and private copies of running requests."""
    sizes = arm.summary["bytes"]
    return float(sizes["kv_resident_mean"] + sizes["state_resident_mean"] + sizes["copied_mean"])


def resident_half_width(arm: ArmData) -> float:
    """95 % half-width of the mean resident bytes over seeds."""
    per_seed = [
        run["kv_resident_mean_bytes"] + run["state_resident_mean_bytes"] for run in arm.runs
    ]
    return half_width(np.asarray(per_seed, dtype=np.float64))


def category_tokens(tokens: Mapping[str, Any], category: str) -> int:
    """Return the prompt tokens of one category, `reused` or a loss cause, from `tokens` of an arm's
    summary."""
    return int(
        tokens["reused"] if category == "reused" else tokens["lost_by_cause"].get(category, 0)
    )


def saved_percent(arm: ArmData) -> float:
    """Reused tokens in percent of prompt tokens."""
    return 100.0 * float(arm.summary["token_hit_rate"])


def saved_half_width_percent(summary: Mapping[str, Any]) -> float:
    """Half of the 95 % interval of the token hit rate, in percentage points; 0 without one."""
    ends = token_hit_rate(summary).ends
    return 0.0 if ends is None else 50.0 * (ends[1] - ends[0])


def bounds_percent(arms: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the reuse of an infinite cache in percent of the prompt tokens, by the arms' kind of
    lookup.

    Kinds are `prefixes` and `spans anywhere`. Bounds of one kind differ between arms, because
    requests that are still being computed at a lookup cannot be reused; the largest one counts, as
    in the table.
    """
    bounds: dict[str, float] = {}
    for arm in arms:
        percent = 100.0 * float(arm["own_bound_tokens"]) / float(arm["tokens"]["prompt"] or 1)
        bounds[arm["finds"]] = max(percent, bounds.get(arm["finds"], 0.0))
    return dict(sorted(bounds.items(), key=lambda bound: bound[1]))


def token_hit_rate(summary: Mapping[str, Any]) -> Interval:
    """Return the token hit rate of an arm, with its interval, from the arm's entry in
    `summary.json`."""
    return estimate(summary["token_hit_rate"], summary["token_hit_rate_interval"])


def mean_ttft(summary: Mapping[str, Any]) -> Interval:
    """Return the mean TTFT in seconds, as `token_hit_rate`; the mean is None where the queue
    grows."""
    return estimate(summary["ttft_s"]["mean"], summary["ttft_s_interval"]["mean"])


def estimate(mean: Any, low_high: Sequence[float | None] | None) -> Interval:
    """Return a mean with the ends of its interval, if it has one."""
    return Interval(mean, *(low_high or (None, None)))


def saturated(summary: Mapping[str, Any]) -> bool:
    """Whether the queue of this summary's arm grows as long as requests arrive."""
    return bool(summary["stationarity"]["verdict"] == SATURATED)


def unsettled(summary: Mapping[str, Any]) -> bool:
    """Whether the arm's warm-up does not end in the first half of the run."""
    return bool(summary["stationarity"]["verdict"] == UNSETTLED)


def stable(arms: Iterable[ArmData]) -> list[ArmData]:
    """The arms whose queues do not grow."""
    return [arm for arm in arms if not saturated(arm.summary)]


def evicts(arm: ArmData) -> bool:
    """Whether the store was full, so that the budget and not the arm determines the resident
    bytes."""
    return bool(arm.summary["evicted_bytes"])


def bytes_say_little(arms: Sequence[ArmData]) -> bool:
    """Whether the store was full in all, or all but one, of the arms that reuse tokens.

    Resident bytes then equal the budget in these arms, and a Pareto figure has no meaning.
    """
    saving = [arm for arm in arms if arm.summary["tokens"]["reused"]]
    full = [arm for arm in saving if evicts(arm)]
    return bool(full) and len(saving) - len(full) < 2


def holds_states(arm: ArmData) -> bool:
    """Whether any run of the arm stored a recurrent state."""
    return bool(arm.summary["bytes"]["state_resident_peak"])


def is_full_recompute(arm: ArmData) -> bool:
    """Whether the arm is the full recompute that other arms are compared with."""
    return arm.family == "none"


def interval_words(arms: Sequence[ArmData]) -> str:
    """Describe the samples that the intervals of the table are taken over."""
    if not arms:
        return ""
    seeds, groups = len(arms[0].summary["seeds"]), arms[0].summary["groups"]
    levels = [f"{groups} groups (documents)"] * (groups > 1) + [f"{seeds} seeds (arrivals)"] * (
        seeds > 1
    )
    if not levels:
        return "no intervals: one seed and one group"
    return f"[a, b] = 95 % interval over {' and '.join(levels)}, by bootstrap"
