"""Other runs as a fitted twin predicts them: draws of step times and delays, intervals, errors, and
the noise floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.twin_capture import Capture
from spanlab.analyses.twin_fit import (
    BLOCKS,
    MAD,
    Fit,
    Fitting,
    errors,
    measured_times,
    predicted_times,
    predictions_without_model,
    simulated,
    step_seconds,
)
from spanlab.analyses.twin_log import Floats, Outside, ServerFacts, Steps, TimedLog
from spanlab.core.step import StepFeatures
from spanlab.report.table import (
    Field,
    Table,
    count,
    number_format,
    percent,
    seconds,
    signed_percent,
    tabulate,
    word,
)
from spanlab_sim.timing import Nanoseconds
from spanlab_sim.timings import FittedTiming

INTERVAL = 0.05, 0.95  # of the draws of a request
# over which a machine's speed is measured: some seconds, so that single steps do not count
SPEED_STEPS = 31
NAMES = {"ttft": "TTFT", "e2e": "E2E latency"}  # metrics of the tables
PREDICTORS = {
    "twin": "twin",
    "tokens": "tokens",
    "line": "line",
    "mean": "mean",
    "last": "last value",
}


# ------------------------------------------------------------------------------
# Step times vary around their model: measured ones are drawn again, in runs of neighbours, for
# what slows one step down often slows down the next.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepNoise:
    """Measured ÷ modelled duration of fitted steps, in order, and whether each computed a
    prompt."""

    ratios: Floats
    prefills: NDArray[np.bool_]

    def drawn(self, timing: FittedTiming, random: np.random.Generator) -> NoisyTiming:
        """Return the timing model with ratios drawn for one simulation."""
        return NoisyTiming(timing, _Walk(self, random))


def noise_of(fitting: Fitting, fit: Fit) -> StepNoise:
    """Return the noise of fitted steps; without measured steps, one that explains the errors of
    fitted requests.

    The relative error of a request is then that of a sum of independent steps.
    """
    log = fitting.log
    if log.steps is not None:
        trains = np.flatnonzero(log.steps.trains)
        work = [log.steps.work[step] for step in trains]
        ratios = log.steps.seconds[trains] / step_seconds(fitting.timing(fit.rates), work)
        return StepNoise(ratios, np.array([features.num_prefills > 0 for features in work]))
    error = np.log(log.e2e_s / predicted_times(log, fit.times)["e2e"])[log.trains]
    # the relative error of each request's time if that of every step is 1 and independent
    steps = [(run.repeats, run.end_ns - run.start_ns) for run in fit.times.runs]
    squares = np.cumsum([0.0, *(taken**2 / repeats for repeats, taken in steps)])
    ends = np.array([run.end_ns for run in fit.times.runs])
    starts = np.array([run.start_ns for run in fit.times.runs])
    first = np.searchsorted(starts, fit.times.admitted_ns)
    last = np.searchsorted(ends, fit.times.last_ns) + 1
    error_of_sum = np.sqrt(squares[last] - squares[first]) / (
        fit.times.last_ns - fit.times.admitted_ns
    )
    shares = error_of_sum[log.trains]
    deviation = MAD * float(np.median(np.abs(error) / shares))
    quantiles = np.random.default_rng(0).normal(-(deviation**2) / 2, deviation, 1000)
    return StepNoise(np.exp(quantiles), np.arange(1000) % 2 == 0)


class _Walk:
    """Ratios of neighbouring steps, from a random one on; after a tenth of all, from another one
    on."""

    def __init__(self, noise: StepNoise, random: np.random.Generator) -> None:
        self._ratios, self._random, self._left, self._at = noise.ratios, random, 0, 0
        every = np.arange(len(noise.ratios))
        kinds = {prefills: np.flatnonzero(noise.prefills == prefills) for prefills in (True, False)}
        self._steps = {
            prefills: steps if len(steps) else every for prefills, steps in kinds.items()
        }

    def next(self, prefills: bool) -> float:
        """Return the ratio of the next step with, or without, prompt tokens."""
        if not self._left:
            self._left = max(1, len(self._ratios) // BLOCKS)
            self._at = int(self._random.integers(len(self._ratios)))
        self._left -= 1
        steps = self._steps[prefills]
        step = int(steps[int(np.searchsorted(steps, self._at)) % len(steps)])
        self._at = (step + 1) % len(self._ratios)
        return float(self._ratios[step])


class _Speed:
    """Ratios of a run's machine over its steps, in their order, whatever the steps compute."""

    def __init__(self, ratios: Floats) -> None:
        self._ratios, self._at = ratios.tolist(), -1

    def next(self, prefills: bool) -> float:
        """Return the ratio of the next step; the last one from the end on."""
        self._at = min(self._at + 1, len(self._ratios) - 1)
        return float(self._ratios[self._at])


class NoisyTiming:
    """A timing model whose steps take longer or shorter by given ratios."""

    def __init__(self, timing: FittedTiming, walk: _Walk | _Speed) -> None:
        self._timing, self._walk = timing, walk

    def step_together(self, ranks: Sequence[StepFeatures]) -> int:
        """Return the nanoseconds of a step, at least one."""
        ratio = self._walk.next(any(rank.num_prefills for rank in ranks))
        return max(1, int(self._timing.exact(ranks) * ratio))

    def span_together(self, ranks: Sequence[StepFeatures], k: int) -> Nanoseconds:
        """Return the durations of k equal decode steps, each with its ratio."""
        ratios = np.array([self._walk.next(False) for _ in range(k)])
        drawn: Nanoseconds = np.maximum(1, self._timing.span_together(ranks, k) * ratios).astype(
            np.int64
        )
        return drawn


# ------------------------------------------------------------------------------
# The prediction of one run: its requests are served again and again with drawn step times and
# delays.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Predicted:
    """A run as predicted.

    `times`     mean seconds over the draws, by metric and request
    `low`, `high`  ends of the 90 % interval of each request
    `reused`    tokens of each prompt that the simulation without noise reused
    """

    capture: Capture
    times: dict[str, Floats]
    low: dict[str, Floats]
    high: dict[str, Floats]
    reused: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Twin:
    """A fitted server: its step times with their noise, and the delays outside of steps.

    `level`  measured ÷ modelled duration of all fitted steps together; 1 where none was measured
    """

    timing: FittedTiming
    noise: StepNoise
    outside: Outside
    level: float

    @classmethod
    def of(cls, fitting: Fitting, fit: Fit) -> Twin:
        """Return the twin of a fit."""
        timing, steps = fitting.timing(fit.rates), fitting.log.steps
        level = 1.0 if steps is None else _level(timing, steps, steps.trains)
        return cls(timing, noise_of(fitting, fit), fitting.log.outside, level)

    def slowness(self, log: TimedLog) -> float | None:
        """Return the duration of all steps of a run ÷ that of equal steps in the fitted run; None
        without steps.

        Queues grow with the sum of the durations, so the ratio is one of sums.
        """
        steps = log.steps
        return (
            None
            if steps is None
            else _level(self.timing, steps, np.ones(len(steps.work), bool)) / self.level
        )

    def at_speed(self, capture: Capture, facts: ServerFacts) -> dict[str, Floats] | None:
        """Return times of a run if its machine's speed over time were known, in seconds by metric;
        None without steps.

        Speed is measured ÷ modelled duration of `SPEED_STEPS` steps together, around each step. It
        is measured in the run itself, so this is no prediction. It tells the model of the server
        apart from the speed of the machine.
        """
        log, steps = capture.log, capture.log.steps
        if steps is None:
            return None
        window = np.ones(SPEED_STEPS)
        measured, modelled = (
            np.convolve(seconds, window, "same")
            for seconds in (steps.seconds, step_seconds(self.timing, steps.work))
        )
        before = np.full(len(log.requests), np.median(self.outside.before))
        times = simulated(log, facts, NoisyTiming(self.timing, _Speed(measured / modelled)), before)
        return predicted_times(
            log, times, np.median(self.outside.after) * np.ones(len(log.requests))
        )


def _level(timing: FittedTiming, steps: Steps, chosen: NDArray[np.bool_]) -> float:
    work = [steps.work[step] for step in np.flatnonzero(chosen)]
    return float(steps.seconds[chosen].sum() / step_seconds(timing, work).sum())


def predict(twin: Twin, capture: Capture, facts: ServerFacts, draws: int) -> Predicted:
    """Predict a run from its prompts and arrivals; of its times, nothing is read.

    `facts`  the predicted run's server
    """
    log, shape, outside = capture.log, len(capture.log.requests), twin.outside
    random = np.random.default_rng(0)
    drawn: dict[str, list[Floats]] = {}
    for _ in range(draws):
        before, after = random.choice(outside.before, shape), random.choice(outside.after, shape)
        times = simulated(log, facts, twin.noise.drawn(twin.timing, random), before)
        for metric, values in predicted_times(log, times, after).items():
            drawn.setdefault(metric, []).append(values)
    plain = simulated(log, facts, twin.timing, np.full(shape, np.median(outside.before)))
    low, high = (
        {name: np.quantile(values, end, axis=0) for name, values in drawn.items()}
        for end in INTERVAL
    )
    means = {name: np.mean(values, axis=0) for name, values in drawn.items()}
    return Predicted(capture, means, low, high, plain.reused)


def summary_of(
    fitted: Capture,
    predicted: Predicted,
    at_speed: dict[str, Floats] | None,
    slowness: float | None,
    others: Sequence[Capture],
) -> dict[str, Any]:
    """Return the numbers of a predicted run.

    `at_speed`, `slowness`  of `Twin`
    `others`    further captures; those with equal settings are its repeats, whose differences are
                the noise floor
    """
    log, every = predicted.capture.log, np.ones(len(predicted.capture.log.requests), bool)
    measured, reused = measured_times(log), log.reused
    assert reused is not None, "a capture has it"
    without = predictions_without_model(fitted.log, log, predicted.reused)
    repeats = [other for other in others if other.differs_from(predicted.capture) == "repeat"]
    repeated = [errors(measured_times(other.log), measured, every) for other in repeats]
    tokens = int(log.prompt_lens.sum())
    covered = {}
    for metric in NAMES:
        low, high = predicted.low[metric], predicted.high[metric]
        covered[metric] = float(np.mean((low <= measured[metric]) & (measured[metric] <= high)))
    floor = {}  # the mean magnitude of each error over the repeats
    for metric in NAMES if repeated else ():
        noise = [each[metric] for each in repeated]
        floor[metric] = {
            name: float(
                np.mean([abs(error) for each in noise if (error := each[name]) is not None])
            )
            for name in noise[0]
        }
    return {
        "run": predicted.capture.name,
        "differs": predicted.capture.differs_from(fitted),
        "requests": len(every),
        "same_reuse": int((reused == predicted.reused).sum()),
        "hit_rate": float(reused.sum()) / tokens,
        "our_hit_rate": float(predicted.reused.sum()) / tokens,
        "means_s": {metric: float(np.nanmean(measured[metric])) for metric in NAMES},
        "our_means_s": {metric: float(np.nanmean(predicted.times[metric])) for metric in NAMES},
        "errors": {"twin": errors(predicted.times, measured, every)}
        | {name: errors(values, measured, every) for name, values in without.items()},
        "covered": covered,
        "slowness": slowness,
        "at_speed": None if at_speed is None else errors(at_speed, measured, every),
        "repeats": len(repeats),
        "floor": floor or None,
    }


# ------------------------------------------------------------------------------
# Tables.
# ------------------------------------------------------------------------------


_PREDICTIONS = (
    Field("run", "run", word, left=True),
    Field("differs", "differs in", word, left=True),
    Field("requests", "requests", count),
    Field("same_reuse", "reuse\nequal", count),
    Field("hit_rate", "token\nhit rate", percent, keep=3),
    Field("our_hit_rate", "of the\nsimulator", percent, keep=2),
    Field("metric", "metric", word, left=True),
    Field("mean_s", "measured\nmean", seconds),
    Field("our_mean_s", "predicted\nmean", seconds),
    Field("mean_error", "error of\nthe mean", signed_percent),
    Field("p50_error", "median\n|error|", percent),
    Field("p95_error", "p95\n|error|", percent),
    Field("covered", "in 90 %\ninterval", percent),
    Field("slowness", "its steps\n÷ modelled", number_format(".2f")),
    Field("at_speed_mean", "at its speed:\nmean", signed_percent, "at_speed.mean_error"),
    Field("at_speed_p50", "at its speed:\nmedian", percent, "at_speed.p50_error"),
    Field("at_speed_p95", "at its speed:\np95", percent, "at_speed.p95_error"),
    Field("floor_mean", "repeats:\nmean", percent, "floor.mean_error"),
    Field("floor_p50", "repeats:\nmedian", percent, "floor.p50_error"),
    Field("floor_p95", "repeats:\np95", percent, "floor.p95_error"),
)
_OTHERS = (
    Field("run", "run", word, left=True),
    Field("metric", "metric", word, left=True),
    Field("predictor", "predictor", word, left=True),
    Field("mean_error", "error of\nthe mean", signed_percent),
    Field("p50_error", "median\n|error|", percent),
    Field("p95_error", "p95\n|error|", percent),
    Field("bias", "bias", signed_percent),
)
_OF_RUN = ("run", "differs", "requests", "same_reuse", "hit_rate", "our_hit_rate")


def tables_of(
    predictions: Sequence[Mapping[str, Any]], title: str, draws: int
) -> tuple[Table, Table]:
    """Return the table of predicted runs, and that of predictors without a model of the server."""
    notes = (
        "the fitted run is never among the predicted ones; of a predicted run, prompts and arrivals are read",
        f"prediction: mean of {draws} simulations with step times and delays drawn from the fitted run; "
        "interval: from 5 % to 95 % of them, per request",
        "reuse equal: requests whose reused tokens are equal in server and simulation",
        "its steps ÷ modelled: ratio of their sums, ÷ that of the fitted steps",
        f"at its speed: errors if the speed of the machine over time were known, from {SPEED_STEPS} steps around each; "
        "it is measured in the predicted run and is no prediction",
        "repeats: the same errors between runs with equal settings, the noise floor",
    )
    heading = f"{title}\nother runs, as predicted"
    rows = []
    for run in predictions:
        of_run = {name: run[name] for name in _OF_RUN}
        for metric, name in NAMES.items():
            rows.append(
                of_run
                | {
                    "metric": name,
                    "mean_s": run["means_s"][metric],
                    "our_mean_s": run["our_means_s"][metric],
                    "covered": run["covered"][metric],
                    "slowness": run["slowness"],
                    "at_speed": run["at_speed"] and run["at_speed"][metric],
                    "floor": run["floor"] and run["floor"][metric],
                }
                | run["errors"]["twin"][metric]
            )
    predicted = tabulate("predictions", heading, _PREDICTIONS, rows, notes)
    others = [
        {"run": run["run"], "metric": name, "predictor": PREDICTORS[predictor]} | errors[metric]
        for run in predictions
        for metric, name in NAMES.items()
        for predictor, errors in run["errors"].items()
    ]
    note = (
        "tokens, line, mean, last value: fitted to the same requests as the twin; tokens: least squares over computed, "
        "reused and output tokens, whose reuse is that of the simulation"
    )
    return predicted, tabulate(
        "predictors", "Other runs without a model of the server", _OTHERS, others, (note,)
    )
