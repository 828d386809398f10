"""Differences of two runs: errors, equivalence, decisions and goals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.step import ScheduledStep, StepResult, finished_after
from spanlab.stats import t_interval
from spanlab.study.logs import LoggedStep
from spanlab_sim.run import serve

# ------------------------------------------------------------------------------
# Equivalence tests of a predicted and a measured mean; more noise never makes equivalence
# easier to show.
# ------------------------------------------------------------------------------

#: Two one-sided tests at 5 % each correspond to a two-sided 90 % interval (Schuirmann, 1987).
LEVEL = 0.90

Ends = tuple[float, float]


def bias_interval(means: NDArray[np.float64], predicted: float) -> Ends | None:
    """Return the 90 % interval of predicted ÷ true mean − 1, from the means of repeats, shape
    (repeats,).

    Student's t over repeats, which serve the same arrivals and differ only in noise of the machine.
    The upper end is infinite where the interval of the mean reaches zero. None for a single repeat.
    """
    ends = t_interval(means, LEVEL).ends
    if ends is None:
        return None
    low, high = ends
    return predicted / high - 1, predicted / low - 1 if low > 0 else math.inf


def equivalent(interval: Ends | None, margin: float) -> bool:
    """Return whether two one-sided tests show that the error is within ± margin (TOST).

    True where the whole interval lies within the margin. The interval contains the observed error
    and widens with the spread of the repeats, so noise can hide equivalence but never create it.
    """
    return interval is not None and -margin < interval[0] and interval[1] < margin


# ------------------------------------------------------------------------------
# Errors of predicted delays against measured ones, and the spread of the engine's own repeats
# (A/A).
# ------------------------------------------------------------------------------

#: Predicted delays of each request, with the names of `spanlab.study.numbers.summary.delays`.
METRICS = ("ttft_s", "tpot_s", "e2e_s")

Delays = dict[str, NDArray[np.float64]]
Repeats = NDArray[np.float64]


def errors(measured: list[Delays], predicted: Delays) -> dict[str, Any]:
    """Return gap, spread and interval of the bias by metric; `measured` has the repeats of the
    predicted cell."""
    by_metric: dict[str, Any] = dict.fromkeys(METRICS)
    for metric in METRICS:
        runs = np.stack([repeat[metric] for repeat in measured])
        defined = ~np.isnan(predicted[metric])
        runs, values = runs[:, defined], predicted[metric][defined]
        if values.size:
            interval = bias_interval(runs.mean(axis=1), float(values.mean()))
            by_metric[metric] = {
                **gap(runs, values),
                "spread": spread(runs),
                "bias_interval": interval,
            }
    return by_metric


def gap(measured: Repeats, predicted: NDArray[np.float64]) -> dict[str, float]:
    """Return errors of `predicted`, shape (n,), against `measured`, shape (repeats, n), both in
    seconds.

    bias      (mean predicted − mean measured) ÷ mean measured, over requests and repeats; `bias_s`
              undivided
    p95_bias  the same of the 95th percentile, that of each repeat and then their mean
    request   of |predicted − measured| ÷ measured over every request of every repeat: median and
              95th percentile; names ending in `_s` are mean, median and 95th percentile of the
              undivided
    """
    distance = np.abs(predicted - measured)
    relative = distance / measured
    mean, p95 = float(measured.mean()), float(np.percentile(measured, 95, axis=1).mean())
    predicted_mean, predicted_p95 = float(predicted.mean()), float(np.percentile(predicted, 95))
    return {
        "measured_mean_s": mean,
        "predicted_mean_s": predicted_mean,
        "bias": predicted_mean / mean - 1,
        "bias_s": predicted_mean - mean,
        "measured_p95_s": p95,
        "predicted_p95_s": predicted_p95,
        "p95_bias": predicted_p95 / p95 - 1,
        "p95_bias_s": predicted_p95 - p95,
        "request_p50": float(np.median(relative)),
        "request_p95": float(np.percentile(relative, 95)),
        "request_mean_s": float(distance.mean()),
        "request_p50_s": float(np.median(distance)),
        "request_p95_s": float(np.percentile(distance, 95)),
    }


def spread(measured: Repeats) -> dict[str, float] | None:
    """Return differences between the engine's repeats (A/A), `measured` of shape (repeats, n); None
    for one repeat.

    Over all pairs of repeats a, b: `mean` is the mean of |mean a − mean b| ÷ their mean,
    `request_p50` and `request_p95` are percentiles of |a − b| ÷ (a + b) · 2 over all requests;
    names ending in `_s` are undivided.
    """
    pairs = list(combinations(measured, 2))
    if not pairs:
        return None
    distance = np.array([np.abs(a - b) for a, b in pairs])
    relative = distance / np.array([(a + b) / 2 for a, b in pairs])
    means = np.array([[a.mean(), b.mean()] for a, b in pairs])
    mean_distance = np.abs(means[:, 0] - means[:, 1])
    return {
        "mean": float((mean_distance / means.mean(axis=1)).mean()),
        "mean_s": float(mean_distance.mean()),
        "request_p50": float(np.median(relative)),
        "request_p95": float(np.percentile(relative, 95)),
        "request_p50_s": float(np.median(distance)),
        "request_p95_s": float(np.percentile(distance, 95)),
    }


# ------------------------------------------------------------------------------
# Ranks of arms on the engine and in the simulator, and the regret of the simulator's choice.
# ------------------------------------------------------------------------------


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two scores of the same arms; None for one arm, or where a score is
    constant."""
    if len(first) < 2:
        return None
    from scipy.stats import kendalltau  # slow to import, and needed by reports only

    tau = float(kendalltau(first, second, variant="b").statistic)
    return None if np.isnan(tau) else tau


def decide(
    measured: Mapping[str, Sequence[float]], predicted: Mapping[str, float]
) -> dict[str, Any]:
    """Return ranks of arms by mean TTFT at one load; `measured` has one mean per repeat, in
    seconds.

    tau       tau-b of the simulator's means against the means over the engine's repeats; every pair
              of arms counts, also pairs whose order differs between the engine's repeats
    aa_tau    mean over pairs of the engine's repeats of their tau; None for a single repeat
    regret    (measured TTFT of the arm that the simulator puts first − the least measured one) ÷
              the latter
    """
    arms = list(measured)
    means = {arm: float(np.mean(measured[arm])) for arm in arms}
    best, choice = min(arms, key=lambda arm: means[arm]), min(arms, key=lambda arm: predicted[arm])
    repeats = list(zip(*measured.values(), strict=True))
    taus = [tau for a, b in combinations(repeats, 2) if (tau := kendall(a, b)) is not None]
    return {
        "tau": kendall([means[arm] for arm in arms], [predicted[arm] for arm in arms]),
        "aa_tau": float(np.mean(taus)) if taus else None,
        "best": best,
        "choice": choice,
        "regret": means[choice] / means[best] - 1,
        "regret_s": means[choice] - means[best],
        "measured_s": means,
        "predicted_s": {arm: predicted[arm] for arm in arms},
    }


# ------------------------------------------------------------------------------
# Accuracy goals of the simulator: counts of cells within a goal, and a verdict where noise
# allows one.
# ------------------------------------------------------------------------------

#: No verdict where the engine's own repeats differ (A/A) by more than this multiple of a goal.
NOISE_LIMIT = 2.0


class Goal(NamedTuple):
    """The goal that `error` of `metric` is at most `limit`; `spread` names the same difference
    between repeats."""

    label: str
    metric: str
    error: str
    spread: str
    limit: float


GOALS = tuple(
    Goal(f"{error_label} of {name}", metric, error, spread, limit)
    for metric, name in (("ttft_s", "TTFT"), ("e2e_s", "E2E"))
    for error_label, error, spread, limit in (
        ("mean", "bias", "mean", 0.05),
        ("median request's error", "request_p50", "request_p50", 0.05),
        ("95th percentile of requests' errors", "request_p95", "request_p95", 0.15),
    )
)

TAU_GOAL = 0.9


class Verdict(NamedTuple):
    """One number compared with its goal.

    within  the number itself is at most the limit
    met     this is shown by the test; None where the engine's own spread is unknown or too large
            for a verdict
    """

    error: float
    spread: float | None
    within: bool
    met: bool | None

    @staticmethod
    def of(error: float, spread: float | None, limit: float, shown: bool = True) -> Verdict:
        """Return a verdict: met where within the limit and `shown` by a test; None where noise is
        too large."""
        within = abs(error) <= limit
        quiet = spread is not None and spread <= NOISE_LIMIT * limit
        return Verdict(error, spread, within, within and shown if quiet else None)


def judge(
    cells: Iterable[dict[str, Any]], decisions: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Judge every goal over all cells (an arm at a load): plain count, count shown, and the largest
    error.

    cells_within_goal  cells whose error is within the goal, whatever the noise
    cells_met          cells for which that is shown: of means by two one-sided tests
    cells_noisy        cells without a verdict: one repeat, or A/A above twice the goal
    met                of every cell; False where one fails, None where none fails and one is noisy

    `cells` hold `arm`, `load`, `rate_rps` and `errors`, as `errors.errors` makes them; `decisions`
    hold `load`, `rate_rps` and, of two arms or more, the fields of `decisions.decide`.
    """
    cells, judged = list(cells), []
    for goal in GOALS:
        verdicts = []
        for cell in cells:
            values = cell["errors"][goal.metric]
            spread = values["spread"][goal.spread] if values["spread"] else None
            shown = goal.error != "bias" or equivalent(values["bias_interval"], goal.limit)
            verdict = Verdict.of(values[goal.error], spread, goal.limit, shown)
            verdicts.append(
                (verdict, f"{cell['arm']} at {load_words(cell['load'], cell['rate_rps'])}")
            )
        judged.append(_judged(goal.label, goal.limit, verdicts) | {"signed": goal.error == "bias"})
    # tau by its distance from 1, in the same way as errors
    limit, verdicts = round(1 - TAU_GOAL, 9), []
    for decision in decisions:
        if decision.get("tau") is not None:
            spread = None if decision["aa_tau"] is None else round(1 - decision["aa_tau"], 9)
            verdict = Verdict.of(round(1 - decision["tau"], 9), spread, limit)
            verdicts.append((verdict, load_words(decision["load"], decision["rate_rps"])))
    ranks = _judged("1 − Kendall tau of arms by mean TTFT", limit, verdicts)
    return [*judged, ranks | {"signed": False}]


def _judged(label: str, limit: float, verdicts: list[tuple[Verdict, str]]) -> dict[str, Any]:
    worst, worst_cell = max(verdicts, key=lambda pair: abs(pair[0].error), default=(None, ""))
    met = [verdict.met for verdict, _ in verdicts]
    return {
        "goal": label,
        "limit": limit,
        "met": False if False in met else None if None in met or not met else True,
        "cells_within_goal": sum(verdict.within for verdict, _ in verdicts),
        "cells_met": sum(verdict.met is True for verdict, _ in verdicts),
        "cells_noisy": sum(verdict.met is None for verdict, _ in verdicts),
        "cells": len(verdicts),
        "worst": worst_cell,
        "worst_error": None if worst is None else worst.error,
        "worst_spread": None if worst is None else worst.spread,
    }


def load_words(share: float | None, rate_rps: float | None) -> str:
    """Return a label of a cell's load: a share of saturation, or the rate that the study set."""
    if share is not None:
        return f"load {share:g}"
    return "the given arrivals" if rate_rps is None else f"{rate_rps:g} requests/s"


# ------------------------------------------------------------------------------
# Engine compared with simulator: measured and predicted delays of the same requests, by arm and
# load.
# ------------------------------------------------------------------------------


class ScheduleMatch(NamedTuple):
    """Steps of equal composition before the first difference, all steps of the engine, and that
    difference as text."""

    equal: int
    steps: int
    difference: str | None

    @property
    def share(self) -> float:
        """Share of matching steps; 1 where all match or there are none."""
        return self.equal / self.steps if self.steps else 1.0

    @staticmethod
    def of_all(runs: Sequence[ScheduleMatch]) -> ScheduleMatch:
        """Return the match of several runs together, with the first difference of any."""
        difference = next((run.difference for run in runs if run.difference), None)
        return ScheduleMatch(
            sum(run.equal for run in runs), sum(run.steps for run in runs), difference
        )


@dataclass(frozen=True)
class ArmComparison:
    """One arm at one load: delays of every request, measured in each repeat and predicted once.

    share           load as a share of saturation; None where the study sets a rate
    measured        delays by metric of each repeat, all seeds in a row
    schedule_match  over the steps of all runs
    outside         simulated steps outside the range that the profile was fitted to, of
                    `simulated`; a run of equal decode steps counts once
    """

    arm: str
    family: str
    share: float | None
    rate_rps: float | None
    measured: list[Delays]
    predicted: Delays
    schedule_match: ScheduleMatch
    outside: int
    simulated: int

    def row(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        return {
            "arm": self.arm,
            "load": self.share,
            "rate_rps": self.rate_rps,
            "repeats": len(self.measured),
            "requests": len(self.predicted[METRICS[0]]),
            "parity": self.schedule_match._asdict(),
            "steps_outside_hull": self.outside,
            "simulated_steps": self.simulated,
            "errors": errors(self.measured, self.predicted),
        }


def summarise(comparisons: Sequence[ArmComparison]) -> dict[str, Any]:
    """Return cells by load and arm, pooled errors and ranks by load, and goals where runs are
    repeated."""
    loads = by_load(comparisons)
    cells = [arm.row() for arms in loads for arm in arms]
    rates = []
    for arms in loads:
        entry = {"load": arms[0].share, "rate_rps": arms[0].rate_rps, "errors": pooled_errors(arms)}
        rates.append(entry | (ranks(arms) if len(arms) > 1 else {}))
    repeated = any(len(arm.measured) > 1 for arm in comparisons)
    return {"cells": cells, "rates": rates} | ({"goals": judge(cells, rates)} if repeated else {})


def by_load(comparisons: Sequence[ArmComparison]) -> list[list[ArmComparison]]:
    """Return the arms of each load, in increasing order of load."""
    rates = sorted({arm.rate_rps for arm in comparisons}, key=lambda rate: rate or 0.0)
    return [[arm for arm in comparisons if arm.rate_rps == rate] for rate in rates]


def ranks(comparisons: Sequence[ArmComparison]) -> dict[str, Any]:
    """Return ranks of the arms at one load by mean TTFT, on the engine and in the simulator."""
    means = {comparison.arm: mean_ttft(comparison) for comparison in comparisons}
    measured = {arm: repeats for arm, (repeats, _) in means.items()}
    return decide(measured, {arm: predicted for arm, (_, predicted) in means.items()})


def pooled_errors(comparisons: Sequence[ArmComparison]) -> dict[str, Any]:
    """Return errors over the requests of all arms together, repeat by repeat."""
    repeats = min(len(arm.measured) for arm in comparisons)
    measured = [
        concatenate_delays([arm.measured[repeat] for arm in comparisons])
        for repeat in range(repeats)
    ]
    return errors(measured, concatenate_delays([arm.predicted for arm in comparisons]))


def concatenate_delays(runs: Sequence[Delays]) -> Delays:
    """Concatenate the delays of several runs."""
    return {metric: np.concatenate([run[metric] for run in runs]) for metric in METRICS}


def mean_ttft(comparison: ArmComparison) -> tuple[list[float], float]:
    """Return mean TTFT in seconds: one per repeat on the engine, and the predicted one."""
    return [float(np.mean(repeat["ttft_s"])) for repeat in comparison.measured], float(
        np.mean(comparison.predicted["ttft_s"])
    )


# ------------------------------------------------------------------------------
# Schedule match: with the engine's step times, the simulator must schedule the same steps.
# ------------------------------------------------------------------------------


class ScheduleMismatchError(Exception):
    """The simulator scheduled another step than the engine; later step times are not comparable."""


class Replay:
    """Backend that runs every step in the engine's time; a different step ends the run."""

    def __init__(self, log: Sequence[LoggedStep]) -> None:
        self._log = log
        self.equal = 0

    def resume(self) -> None:
        """Do nothing: the log has no idle time."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Compare a step with the engine's; ScheduleMismatchError describes a difference."""
        index, key = self.equal, step.key()
        if index == len(self._log):
            raise ScheduleMismatchError(
                f"step {index}: the engine had finished, the simulator {_describe_key(key)}"
            )
        if key != self._log[index].key:
            raise ScheduleMismatchError(
                f"step {index}: {_describe_difference(self._log[index].key, key)}"
            )
        self.equal = index + 1
        return StepResult(self._log[index].took_ns, finished_after(step))

    def completed(self, step: ScheduledStep) -> None:
        """Do nothing: this backend stores no KV."""

    def close(self) -> None:
        """Do nothing: this backend has no resources."""


def schedule_match(
    requests: Sequence[Request],
    policy: TreePolicy,
    rules: BatchRules,
    log: Sequence[LoggedStep],
    clients: int | None = None,
) -> ScheduleMatch:
    """Replay a run's arrivals with the step times of its log. `policy` is a new policy of the same
    arm."""
    replay = Replay(log)

    def compare_times(step: ScheduledStep, now: int, result: StepResult) -> None:
        index = replay.equal - 1
        if late := log[index].started_ns - now:
            replay.equal = index
            raise ScheduleMismatchError(
                f"step {index}: the engine began it {abs(late)} ns {'later' if late > 0 else 'earlier'}"
            )

    try:
        serve(
            requests,
            policy,
            rules,
            replay,
            lambda record: None,
            clients=clients,
            on_step=compare_times,
        )
    except ScheduleMismatchError as mismatch:
        return ScheduleMatch(replay.equal, len(log), str(mismatch))
    if replay.equal < len(log):
        difference = (
            f"step {replay.equal}: the engine {_describe_key(log[replay.equal].key)}, the "
            "simulator had finished"
        )
        return ScheduleMatch(replay.equal, len(log), difference)
    return ScheduleMatch(replay.equal, len(log), None)


def _describe_difference(engine: tuple[Any, ...], simulator: tuple[Any, ...]) -> str:
    """Describe the first chunk that differs, or else the decoding requests."""
    for engine_chunk, simulator_chunk in zip_longest(engine[0], simulator[0]):
        if engine_chunk != simulator_chunk:
            return f"the engine {_describe_chunk(engine_chunk)}, the simulator {_describe_chunk(simulator_chunk)}"
    return f"the engine decodes for {_join_ids(engine[1])}, the simulator for {_join_ids(simulator[1])}"


def _describe_key(key: tuple[Any, ...]) -> str:
    """Describe `ScheduledStep.key()`: its first chunk, or the decoding requests."""
    return _describe_chunk(key[0][0]) if key[0] else f"decodes for {_join_ids(key[1])}"


def _describe_chunk(chunk: tuple[Any, ...] | None) -> str:
    if chunk is None:
        return "computes no further prompt"
    request, start, stop, captures = chunk[:4]
    states = f", states kept at {_join_ids(captures)}" if captures else ""
    return f"computes [{start}, {stop}) of request {request}{states}"


def _join_ids(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) or "nobody"
