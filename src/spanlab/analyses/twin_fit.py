"""Timing of a server from its log: what is fitted, and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.twin_forward import Forwards
from spanlab.analyses.twin_log import Floats, ServerFacts, Steps, TimedLog
from spanlab.analyses.twin_metrics import FITTED, Sums, members, simulated_seconds
from spanlab.core.step import StepFeatures
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.records import NS, e2e, tpot, ttft
from spanlab_sim.lockstep import LockstepTiming, Run, Times, serve_log
from spanlab_sim.timings import FittedTiming, Parameter, Rates, names_for

# ------------------------------------------------------------------------------
# Slopes of first and last token times of a simulation by step times, for a fixed schedule.
#
# Infinitesimal perturbation analysis (Ho and Cao, 1983): a request's number of steps is fixed,
# so its end moves by the sum of their changes. The start of a request that waits for memory or
# for `max_num_seqs` moves with the end of the request that makes room; any other request starts
# at its arrival.
# ------------------------------------------------------------------------------


def token_slopes(log: TimedLog, times: Times, timings: Sequence[FittedTiming]) -> Floats:
    """Return nanoseconds by which first and last tokens come later, shape (2, requests,
    parameters).

    `timings`  the simulated timing, followed by one with each parameter changed
    """
    longer = _cumulative_delays(times.runs, timings)
    starts = np.array([run.start_ns for run in times.runs])
    ends = np.array([run.end_ns for run in times.runs])
    begins, first, last = (
        np.searchsorted(starts, times.admitted_ns),  # the step that computes the first chunk
        np.searchsorted(ends, times.first_ns) + 1,
        np.searchsorted(ends, times.last_ns) + 1,
    )
    # the first step that begins after the arrival
    arrives = np.searchsorted(starts, log.arrived_s * 1e9)
    request_by_end = dict(zip(times.last_ns.tolist(), range(len(times.last_ns)), strict=True))
    moved = np.zeros((2, len(first), longer.shape[1]))
    for index in np.argsort(times.admitted_ns, kind="stable").tolist():
        predecessor = (
            request_by_end.get(int(times.admitted_ns[index]))
            if begins[index] > arrives[index] + 1
            else None
        )
        from_step = arrives[index] if predecessor is None else begins[index]
        before = 0.0 if predecessor is None else moved[1, predecessor]
        moved[0, index] = before + longer[first[index]] - longer[min(from_step, first[index])]
        moved[1, index] = moved[0, index] + longer[last[index]] - longer[first[index]]
    return moved


def prefill_slopes(times: Times, timings: Sequence[FittedTiming]) -> Floats:
    """Return nanoseconds by which the steps from a request's start to its first token take longer,
    by parameter."""
    longer = _cumulative_delays(times.runs, timings)
    starts, ends = (
        np.array(moments)
        for moments in zip(*((run.start_ns, run.end_ns) for run in times.runs), strict=True)
    )
    begins = np.searchsorted(starts, times.admitted_ns)
    first = np.searchsorted(ends, times.first_ns) + 1
    return np.asarray(longer[first] - longer[begins], np.float64)


def _cumulative_delays(runs: Sequence[Run], timings: Sequence[FittedTiming]) -> Floats:
    """Return nanoseconds by which all runs before each run take longer, shape (runs + 1,
    parameters)."""
    took = np.zeros((len(runs), len(timings)))
    for number, run in enumerate(runs):
        # all steps take as long as the middle one, since durations are nearly linear
        middle = (run.repeats - 1) // 2
        ranks = [
            rank._replace(decode_context=rank.decode_context + middle * rank.num_decodes)
            for rank in run.ranks
        ]
        took[number] = [run.repeats * timing.exact(ranks) for timing in timings]
    longer = np.cumsum(took[:, 1:] - took[:, :1], axis=0)
    return np.vstack([np.zeros(longer.shape[1]), longer])


# ------------------------------------------------------------------------------
# Gauss-Newton least squares for simulations: residuals jump between schedules, so the caller
# supplies the slopes.
# ------------------------------------------------------------------------------

SOFT = 3.0  #: standard deviations from which the loss of a residual is linear instead of quadratic
LONGEST = 0.5  #: largest change of a parameter in one iteration
#: iterations with full steps, and then with decreasing steps, which average out the jumps
FULL, AVERAGED = 8, 6


@dataclass(frozen=True)
class Prior:
    """Normal priors of the parameters: means and standard deviations, each of shape
    (parameters,)."""

    mean: Floats
    sd: Floats


@dataclass(frozen=True)
class Linearised:
    """Residuals in standard deviations and their slopes at a point; shapes (d,), (n,) and (n, d).

    `block_size`  residuals that count as one against the prior, since errors of neighbours have a
                  common cause; a number, or one for each residual
    """

    point: Floats
    residuals: Floats
    slopes: Floats
    block_size: float | Floats

    @property
    def _weights(self) -> Floats:
        """Weights of the residuals under a pseudo-Huber loss."""
        weights: Floats = 1 / np.sqrt(1 + (self.residuals / SOFT) ** 2)
        return weights / self.block_size

    def cost(self, prior: Prior) -> float:
        """Return the pseudo-Huber loss of the residuals plus the penalty of the prior."""
        loss = 2 * SOFT**2 * (np.sqrt(1 + (self.residuals / SOFT) ** 2) - 1)
        return float(
            (loss / self.block_size).sum() + (((self.point - prior.mean) / prior.sd) ** 2).sum()
        )

    def _curvature(self, prior: Prior, scatter: float = 1.0) -> Floats:
        weighted = self.slopes * self._weights[:, None] / scatter
        curvature: Floats = weighted.T @ self.slopes + np.diag(prior.sd**-2)
        return curvature

    def step(self, prior: Prior) -> Floats:
        """Return the Gauss-Newton step, each component clipped to ± `LONGEST`."""
        gradient = (
            self.slopes.T @ (self._weights * self.residuals)
            + (self.point - prior.mean) / prior.sd**2
        )
        step = -np.linalg.solve(self._curvature(prior), gradient)
        return np.asarray(np.clip(step, -LONGEST, LONGEST), dtype=np.float64)

    def deviations(self, prior: Prior) -> Floats:
        """Return standard deviations of the parameters, shape (d,), widened by excess scatter of
        residuals."""
        scatter = float((self._weights * self.residuals**2).sum() / self._weights.sum())
        deviations: Floats = np.sqrt(
            np.diag(np.linalg.inv(self._curvature(prior, max(1.0, scatter))))
        )
        return deviations


Evaluate = Callable[[Floats], Linearised]


def both(first: Evaluate, second: Evaluate) -> Evaluate:
    """Return a function with the residuals of two, in this order."""

    def evaluate(point: Floats) -> Linearised:
        points = first(point), second(point)
        sizes = [np.broadcast_to(each.block_size, each.residuals.shape) for each in points]
        residuals, slopes = (
            [getattr(each, name) for each in points] for name in ("residuals", "slopes")
        )
        return Linearised(
            point, np.concatenate(residuals), np.concatenate(slopes), np.concatenate(sizes)
        )

    return evaluate


def descend(evaluate: Evaluate, start: Floats, prior: Prior) -> Linearised:
    """Return the evaluated point of least cost; Gauss-Newton steps, full at first, then ever
    shorter."""
    tried = [evaluate(start)]
    for iteration in range(FULL + AVERAGED):
        gain = 1.0 if iteration < FULL else 1 / (2 + iteration - FULL)
        tried.append(evaluate(tried[-1].point + gain * tried[-1].step(prior)))
    return min(tried, key=lambda candidate: candidate.cost(prior))


# ------------------------------------------------------------------------------
# Fit of a server's rates to the times of its requests, by repeated simulation of the log.
# ------------------------------------------------------------------------------

#: Prior standard deviations of the logarithms: shares of a data sheet are known better than host
#: times.
PRIOR_SD = {"compute": 0.3, "bandwidth": 0.2, "host_s_with_prefill": 0.7}
OTHER_SD = 1.0
CHANGE = 0.01  # of a logarithm, for numerical slopes of step times
#: Relative error of a time that no parameter explains, and the share of a step by which a first
#: token may come earlier or later than modelled: a request arrives anywhere within a step, and
#: waits for its end.
UNEXPLAINED, OF_A_STEP = 0.02, 0.3
#: Relative error of a single step that no parameter explains: at first, and at least once it is
#: known.
UNEXPLAINED_STEP, LEAST_OF_STEP = 0.05, 0.002
PART_OF_STEP = 0.05  # of the median step, where a fit starts again
NEIGHBOURS = 10  # measured steps whose errors count as one: what slows one step down often slows down the next
WIDER = 3.0  # prior standard deviations where steps were measured: they tell small parts of a duration apart
IDENTIFIED = 4.0  # largest ratio of an interval's ends for an identified parameter
Z95 = 1.96
MAD = 1.4826  # standard deviation of a normal distribution ÷ median of its magnitude
BLOCKS = 10  # blocks of requests; errors within a block have a common cause


@dataclass(frozen=True)
class Fit:
    """A server fitted to its log.

    `facts`       facts of the server, with fitted memory and scheduling where these were unknown
    `rates`       every parameter's value
    `parameters`  value, interval, and whether the log identifies it, by name
    `times`       times of all requests at these rates
    `simulations` number of simulations of the fit
    """

    facts: ServerFacts
    rates: Rates
    parameters: dict[str, Parameter]
    times: Times
    simulations: int


@dataclass
class Fitting:
    """The fit of a log: the log, its server, and prior rates of the device."""

    log: TimedLog
    model: ModelSpec
    hardware: HardwareSpec
    facts: ServerFacts
    forwards: Forwards | None = None
    sums: Sums | None = None
    simulations: int = 0

    def __post_init__(self) -> None:
        self._assumed = Rates.assumed(self.hardware)
        if not self.log.has_times:
            return
        trains = self.log.trains
        step = float(np.nanmedian(self.log.tpot_s[trains]))
        self._measured = np.concatenate([self.log.ttft_s[trains], self.log.e2e_s[trains]])
        self._deviations = np.hypot(UNEXPLAINED, OF_A_STEP * step / self._measured)

    def fit(self) -> Fit:
        """Return the parameters of least error on the training requests."""
        names = names_for(self.model, self.facts.deployment)
        start = np.log([getattr(self._assumed, name) for name in names])
        wider = 1.0 if self.log.steps is None else WIDER
        prior = Prior(start, wider * np.array([PRIOR_SD.get(name, OTHER_SD) for name in names]))
        best = self._fit_scheduling(names, prior)
        rates = replace(self._assumed, **_values(names, best.point))
        # values with intervals; if an interval is too wide, the value stays near the prior mean
        factors = np.exp(Z95 * best.deviations(prior)).tolist()
        values = np.exp(best.point).tolist()
        parameters = {
            name: Parameter(value, value / factor, value * factor, factor**2 <= IDENTIFIED)
            for name, value, factor in zip(names, values, factors, strict=True)
        }
        return Fit(self.facts, rates, parameters, self.times(rates), self.simulations)

    def times(self, rates: Rates) -> Times:
        """Simulate the log at these rates, and return the times of its tokens."""
        self.simulations += 1
        return simulated(self.log, self.facts, self.timing(rates))

    def timing(self, rates: Rates) -> FittedTiming:
        """Return the timing model with these rates."""
        return FittedTiming(self.model, self.hardware, self.facts.deployment, rates)

    def _fit_scheduling(self, names: tuple[str, ...], prior: Prior) -> Linearised:
        """Return the best parameters; without known scheduling, those of the mode that fits better.

        Measured steps are fitted directly: requests that queue share the errors of many steps.
        """
        if self.log.steps is not None:
            return self._fit_steps(names, prior, self.log.steps)
        if self.facts.asynchronous is not None:
            return descend(self._evaluation(names), prior.mean, prior)
        tried = []
        for asynchronous in (True, False):
            self.facts = replace(self.facts, asynchronous=asynchronous)
            tried.append((descend(self._evaluation(names), prior.mean, prior), asynchronous))
        best, asynchronous = min(tried, key=lambda pair: pair[0].cost(prior))
        self.facts = replace(self.facts, asynchronous=asynchronous)
        return best

    def _fit_steps(self, names: tuple[str, ...], prior: Prior, steps: Steps) -> Linearised:
        """Return the best parameters of measured steps, whose errors are in units of their own
        spread.

        A part of a duration that is assumed to be very small has no slope to grow by: a second
        start has larger ones.
        """
        host_s = math.log(PART_OF_STEP * float(np.median(steps.seconds[steps.trains])))
        larger = np.array(
            [
                host_s if name.startswith("host_s") else mean
                for name, mean in zip(names, prior.mean, strict=True)
            ]
        )
        evaluate = self._and_forwards(names, self._linearise_steps(names, steps, UNEXPLAINED_STEP))
        starts = [descend(evaluate, start, prior) for start in (prior.mean, larger)]
        first = min(starts, key=lambda candidate: candidate.cost(prior))
        of_steps = first.residuals[: int(steps.trains.sum())]
        error = max(LEAST_OF_STEP, MAD * UNEXPLAINED_STEP * float(np.median(np.abs(of_steps))))
        return descend(
            self._and_forwards(names, self._linearise_steps(names, steps, error)),
            first.point,
            prior,
        )

    def _evaluation(self, names: tuple[str, ...]) -> Evaluate:
        if self.log.has_times:
            return self._and_forwards(names, self._linearise(names))
        assert self.sums is not None, "a log without times is read with sums"
        return self._and_forwards(names, self._linearise_sums(names, self.sums))

    def _and_forwards(self, names: tuple[str, ...], evaluate: Evaluate) -> Evaluate:
        """Return `evaluate` with the errors of timed forwards behind its own, in standard
        deviations."""
        if (forwards := self.forwards) is None:
            return evaluate
        deviations = np.hypot(UNEXPLAINED_STEP, forwards.spreads)

        def evaluate_forwards(point: Floats) -> Linearised:
            logarithms = np.log(
                [self.forward_seconds(forwards, rates) for rates in self._changed(names, point)]
            )
            residuals = (logarithms[0] - np.log(forwards.seconds)) / deviations
            slopes = (logarithms[1:] - logarithms[0]).T / (CHANGE * deviations[:, None])
            return Linearised(point, residuals, slopes, 1.0)

        return both(evaluate, evaluate_forwards)

    def fitted_intervals(self, sums: Sums) -> list[bool]:
        """Return which intervals of scrapes are fitted: none where the log has times of
        requests."""
        return (
            sums.trains(float(self.log.trains.mean()))
            if not self.log.has_times
            else [False] * len(sums.intervals)
        )

    def _linearise_sums(self, names: tuple[str, ...], sums: Sums) -> Evaluate:
        """Return a function of the rates' logarithms: errors of mean times of requests, in standard
        deviations."""
        chosen = [number for number, trains in enumerate(self.fitted_intervals(sums)) if trains]
        outputs = float(self.log.output_lens.mean())

        def evaluate(point: Floats) -> Linearised:
            rates, *changed = self._changed(names, point)
            times = self.times(rates)
            timings = [self.timing(other) for other in (rates, *changed)]
            first_ns, last_ns = token_slopes(self.log, times, timings)
            prefill_ns = prefill_slopes(times, timings)
            slopes_ns = {
                "queue": first_ns - prefill_ns,
                "prefill": prefill_ns,
                "decode": last_ns - first_ns,
            }
            seconds, requests = simulated_seconds(self.log.arrived_s, times), members(sums, times)
            residuals, slopes = [], []
            for number in chosen:
                means, of_interval = sums.intervals[number].means, requests[number]
                step_s = means["decode"] / max(1.0, outputs - 1)
                for name in FITTED:
                    # a queue may be empty, and its error is relative to the whole wait for the
                    # first token
                    measured = means[name] + (means["prefill"] if name == "queue" else 0.0)
                    deviation = math.hypot(
                        UNEXPLAINED, OF_A_STEP * step_s / measured / math.sqrt(len(of_interval))
                    )
                    error = float(seconds[name][of_interval].mean()) - means[name]
                    residuals.append(error / measured / deviation)
                    slopes.append(
                        slopes_ns[name][of_interval].mean(axis=0)
                        * NS
                        / CHANGE
                        / measured
                        / deviation
                    )
            block_size = max(1.0, len(residuals) / (2 * BLOCKS))
            return Linearised(point, np.array(residuals), np.array(slopes), block_size)

        return evaluate

    def forward_seconds(self, forwards: Forwards, rates: Rates) -> Floats:
        """Return the modelled seconds of timed forwards at some rates."""
        return forwards.modelled(self.model, self.hardware, self.facts.deployment, rates)

    def _changed(self, names: tuple[str, ...], point: Floats) -> list[Rates]:
        """Return the rates at a point, and those with each parameter slightly larger."""
        rates = replace(self._assumed, **_values(names, point))
        return [
            rates,
            *(replace(rates, **{name: getattr(rates, name) * math.exp(CHANGE)}) for name in names),
        ]

    def _linearise(self, names: tuple[str, ...]) -> Evaluate:
        """Return a function of the rates' logarithms: errors of first and last tokens, in standard
        deviations."""

        def evaluate(point: Floats) -> Linearised:
            rates, *changed = self._changed(names, point)
            times = self.times(rates)
            predicted = np.concatenate(
                [
                    predicted_times(self.log, times)[name][self.log.trains]
                    for name in ("ttft", "e2e")
                ]
            )
            slopes_ns = token_slopes(
                self.log, times, [self.timing(changed_rates) for changed_rates in (rates, *changed)]
            )
            slopes = (
                slopes_ns[:, self.log.trains].reshape(-1, len(names))
                * NS
                / CHANGE
                / predicted[:, None]
            )
            residuals = np.log(predicted / self._measured)
            block_size = len(residuals) / (2 * BLOCKS)
            return Linearised(
                point, residuals / self._deviations, slopes / self._deviations[:, None], block_size
            )

        return evaluate

    def _linearise_steps(self, names: tuple[str, ...], steps: Steps, error: float) -> Evaluate:
        """Return a function of the rates' logarithms: errors of the durations of steps, in units of
        `error`."""
        work = [
            features for features, trains in zip(steps.work, steps.trains, strict=True) if trains
        ]
        measured = steps.seconds[steps.trains]

        def evaluate(point: Floats) -> Linearised:
            logarithms = np.log(
                [step_seconds(self.timing(rates), work) for rates in self._changed(names, point)]
            )
            residuals = (logarithms[0] - np.log(measured)) / error
            slopes = (logarithms[1:] - logarithms[0]).T / (CHANGE * error)
            return Linearised(point, residuals, slopes, NEIGHBOURS)

        return evaluate


def simulated(
    log: TimedLog, facts: ServerFacts, timing: LockstepTiming, before_s: Floats | None = None
) -> Times:
    """Return the times of a log's tokens in the server.

    `before_s`  seconds from each arrival to the server's queue, shape (requests,); None: the median
                of fitted requests
    """
    if before_s is None:
        before_s = np.full(len(log.requests), np.median(log.outside.before))
    delays = np.rint(before_s * 1e9).astype(np.int64).tolist()
    queued = zip(log.requests, delays, strict=True)
    requests = [
        replace(request, arrived_at=request.arrived_at + delay) for request, delay in queued
    ]
    requests.sort(key=lambda request: request.arrived_at)
    rules = replace(facts.rules, async_scheduling=bool(facts.asynchronous))
    return serve_log(requests, facts.memory, rules, timing, facts.deployment.data_parallel)


def step_seconds(timing: FittedTiming, work: Sequence[StepFeatures]) -> Floats:
    """Return the seconds of single steps of one rank."""
    return np.array([timing.exact([features]) for features in work]) * NS


def _values(names: Sequence[str], logarithms: Floats) -> dict[str, float]:
    return dict(zip(names, np.exp(logarithms).tolist(), strict=True))


# ------------------------------------------------------------------------------
# Errors of predicted times of requests against measured ones, and predictors without a model to
# compare with.
# ------------------------------------------------------------------------------

METRICS = ("ttft", "tpot", "e2e")


def predicted_times(
    log: TimedLog, times: Times, after_s: Floats | None = None
) -> dict[str, Floats]:
    """Return predicted seconds of every request, by metric.

    `after_s`  seconds from the server to the client, shape (requests,); None: the median of fitted
               requests
    """
    outside_s = np.median(log.outside.after) if after_s is None else after_s
    first_s, last_s = (
        np.asarray(ns * NS + outside_s, np.float64) for ns in (times.first_ns, times.last_ns)
    )
    ttft_s, e2e_s = ttft(log.arrived_s, first_s), e2e(log.arrived_s, last_s)
    return {"ttft": ttft_s, "tpot": tpot(ttft_s, e2e_s, log.output_lens), "e2e": e2e_s}


def measured_times(log: TimedLog) -> dict[str, Floats]:
    """Return measured seconds of every request, by metric."""
    return {"ttft": log.ttft_s, "tpot": log.tpot_s, "e2e": log.e2e_s}


def predictions_without_model(
    log: TimedLog, other: TimedLog | None = None, reused: NDArray[np.int64] | None = None
) -> dict[str, dict[str, Floats]]:
    """Return predicted seconds of every request by predictor and metric, each fitted to the
    training requests of a log.

    `other`   the log to predict; None: the same
    `reused`  tokens of its prompts that are expected to be reused; None: as measured

    `line`    least squares over the request's number; for E2E latency, over its number and its
              output tokens
    `mean`    the training requests' mean
    `last`    the value of the last training request
    `tokens`  least squares over computed and reused tokens of the prompt, and output tokens; where
              reuse is known
    A metric without two training requests that have it is predicted as NaN.
    """
    other = log if other is None else other
    pairs = [(log, log.reused), (other, other.reused if reused is None else reused)]
    predictions: dict[str, dict[str, Floats]] = {"line": {}, "mean": {}, "last": {}}
    predictions |= {} if log.reused is None else {"tokens": {}}
    for metric, values in measured_times(log).items():
        trains = log.trains & ~np.isnan(values)
        known = values[trains] if trains.sum() > 1 else np.full(2, np.nan)
        predictions["mean"][metric] = np.full(len(other.trains), known.mean())
        predictions["last"][metric] = np.full(len(other.trains), known[-1])
        for name in predictions.keys() - {"mean", "last"}:
            here, there = (_inputs(name, metric, *pair) for pair in pairs)
            predictions[name][metric] = (
                np.full(len(there), np.nan)
                if np.isnan(known).any()
                else there @ np.linalg.lstsq(here[trains], known, rcond=None)[0]
            )
    return predictions


def _inputs(predictor: str, metric: str, log: TimedLog, reused: NDArray[np.int64] | None) -> Floats:
    """Return what a predictor reads of every request, shape (requests, inputs)."""
    numbers = np.arange(len(log.trains), dtype=np.float64)
    outputs = log.output_lens.astype(np.float64)
    if predictor == "line":
        return np.stack(
            [np.ones_like(numbers), numbers, *([outputs] if metric == "e2e" else [])], axis=1
        )
    assert reused is not None, "a log with prompts has it"
    return np.stack([np.ones_like(numbers), log.prompt_lens - reused, reused, outputs], axis=1)


def errors(
    predicted: Mapping[str, Floats], measured: Mapping[str, Floats], selected: NDArray[np.bool_]
) -> dict[str, dict[str, float | None]]:
    """Return errors over the selected requests by metric: of the mean, and of relative errors per
    request.

    `mean_error`             predicted ÷ measured mean - 1
    `p50_error`, `p95_error` percentiles of |predicted ÷ measured - 1|
    `bias`                   median of predicted ÷ measured - 1
    Requests without the metric or its prediction, such as TPOT of one token, are left out; None
    where all are.
    """
    by_metric: dict[str, dict[str, float | None]] = {}
    for metric in METRICS:
        ours, theirs = predicted[metric][selected], measured[metric][selected]
        defined = ~np.isnan(ours) & ~np.isnan(theirs) & (theirs > 0)
        if not defined.any():
            by_metric[metric] = dict.fromkeys(("mean_error", "p50_error", "p95_error", "bias"))
            continue
        ours, theirs = ours[defined], theirs[defined]
        relative = ours / theirs - 1
        middle, most = np.quantile(np.abs(relative), (0.5, 0.95)).tolist()
        by_metric[metric] = {
            "mean_error": float(ours.mean() / theirs.mean() - 1),
            "p50_error": middle,
            "p95_error": most,
            "bias": float(np.median(relative)),
        }
    return by_metric
