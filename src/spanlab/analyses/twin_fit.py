"""Timing of a server from its log: what is fitted, and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.build import GIB
from spanlab.core.admission import BatchRules
from spanlab.core.policies.block_pool import BLOCK
from spanlab.core.request import Request, Span
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.records import NS, e2e, tpot, ttft
from spanlab.registry import positive
from spanlab.settings.study import Study
from spanlab.typed_json import from_json, of_kind, reading
from spanlab.workloads.logs.log import Log, Observed
from spanlab.workloads.logs.source import Row
from spanlab_sim.lockstep import Memory, Run, Times, serve_lengths
from spanlab_sim.timings import Deployment, FittedTiming, Parameter, Rates, names_for

# ------------------------------------------------------------------------------
# The server of a log: facts from meta.json, from the study's settings, and estimated ones.
# ------------------------------------------------------------------------------

UTILIZATION = 0.9  # vLLM's default
#: GiB of one device without weights and KV: activations, captured graphs, the driver's context. Least, usual and
#: most; 1.4 GiB where a published log of vLLM 0.19 names blocks and memory both (8B on 24 GB).
WORKSPACE_GIB = (0.5, 1.5, 4.0)
_LIMITS = ("max_num_batched_tokens", "max_num_seqs")
_FORMATS = {"auto": "model", "bfloat16": "model", "float16": "model"}
_QUANTIZED = {"fp8": "fp8", "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4"}


@dataclass(frozen=True)
class ServerFacts:
    """A server as the twin simulates it.

    `asynchronous`  whether a step is scheduled while the previous one runs; None: unknown
    `memory`        of one rank; `blocks_between` has the least and the most blocks where the number is estimated
    `sources`       value and source of each setting, by its name
    """

    rules: BatchRules
    deployment: Deployment
    asynchronous: bool | None
    memory: Memory
    blocks_between: tuple[int, int] | None
    sources: dict[str, str]


class _Settings:
    """Settings by name from the study, else from meta.json, else defaults; `sources` records the origin."""

    def __init__(self, study: Study, meta: Mapping[str, Any]) -> None:
        self._study, self._meta = study, Row(dict(meta))
        self.sources: dict[str, str] = {}

    def choose(self, name: str, kind: type, study_value: Any, default: Any, *paths: str) -> Any:
        """Return the setting `name`, of type `kind`.

        `study_value`  None where the study sets none
        `paths`        keys of meta.json
        """
        path = next((path for path in paths if self._meta.get(path) is not None), None)
        logged = None if path is None else of_kind(self._meta.get(path), kind, f"meta.json: {path}")
        if kind in (int, float):
            positive(f"meta.json: {path}", logged)
        value, source = (
            (study_value, "set")
            if study_value is not None
            else (logged, "meta.json")
            if logged is not None
            else (default, "")
        )
        self.sources[name] = f"{value} ({source or 'default'})"
        return value

    def limit(self, name: str) -> int:
        """Return a limit of a step; a value that the study changed has priority over meta.json."""
        study_value, usual = getattr(self._study.batch, name), getattr(BatchRules(), name)
        paths = f"engine_kwargs.{name}", f"resolved_config.scheduler_config.{name}"
        return int(self.choose(f"batch.{name}", int, None if study_value == usual else study_value, usual, *paths))


def server_of(study: Study) -> ServerFacts:
    """Return the server of the study's log."""
    settings = _Settings(study, _meta(Path(study.workload.path or "")))
    deployment = _deployment(study, settings)
    deployment.check("twin", study.model)
    tokens, seqs = (settings.limit(name) for name in _LIMITS)
    rules = replace(study.batch, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    paths = ("resolved_config.scheduler_config.async_scheduling", "engine_kwargs.async_scheduling")
    asynchronous = settings.choose("twin.async_scheduling", bool, study.analyses.twin.async_scheduling, None, *paths)
    if asynchronous is None:
        settings.sources["twin.async_scheduling"] = "what fits better"
    memory, between = _memory(study, settings, deployment)
    return ServerFacts(rules, deployment, asynchronous, memory, between, settings.sources)


def _meta(log: Path) -> dict[str, Any]:
    path = log / "meta.json"
    if not path.is_file():
        return {}
    with reading(f"log={path}", "vLLM's settings as JSON"):
        return from_json(path.read_bytes(), dict[str, Any])


def _deployment(study: Study, settings: _Settings) -> Deployment:
    twin = study.analyses.twin
    formats = {"weights": settings.choose("quantization", str, None, None, "engine_kwargs.quantization")}
    formats["kv"] = settings.choose("kv_cache_dtype", str, None, None, "engine_kwargs.kv_cache_dtype")
    for name in ("quantization", "kv_cache_dtype"):
        settings.sources.pop(name)
    return Deployment(
        tensor_parallel=settings.choose(
            "twin.tensor_parallel", int, twin.tensor_parallel, 1, "engine_kwargs.tensor_parallel_size"
        ),
        data_parallel=settings.choose(
            "twin.data_parallel", int, twin.data_parallel, 1, "engine_kwargs.data_parallel_size"
        ),
        weights=settings.choose(
            "twin.weights", str, twin.weights or _format("quantization", formats["weights"]), "model"
        ),
        kv=settings.choose("twin.kv", str, twin.kv or _format("kv_cache_dtype", formats["kv"]), "model"),
        cuda_graphs=settings.choose("twin.cuda_graphs", bool, twin.cuda_graphs, True),
    )


def _format(name: str, vllm_format: str | None) -> str | None:
    """Return vLLM's format under the name of `Deployment`; None for the model's own format."""
    if vllm_format is None or vllm_format in _FORMATS:
        return None
    deployment_format = _QUANTIZED.get(vllm_format, "fp8" if vllm_format.startswith("fp8") else None)
    if deployment_format is None:
        choices = ", ".join((*_FORMATS, *_QUANTIZED))
        raise ValueError(f"{name}={vllm_format} in meta.json: expected one of {choices}")
    return deployment_format


def _memory(study: Study, settings: _Settings, deployment: Deployment) -> tuple[Memory, tuple[int, int] | None]:
    """Return the blocks of one rank: as set, as logged, or estimated from the memory of the device."""
    arm = study.chosen()[0]
    pool = study.arms[arm].pool
    assert pool is not None, "checked with the settings"
    usual = deployment.block_tokens(study.model, BLOCK)
    size = settings.choose(f"arms.{arm}.pool.block_size", int, pool.block_size, usual, "kv_cache.block_size")
    paths = "engine_kwargs.enable_prefix_caching", "resolved_config.cache_config.enable_prefix_caching"
    caching = settings.choose("twin.prefix_caching", bool, study.analyses.twin.prefix_caching, True, *paths)
    block_bytes = int(size * deployment.kv_bytes_per_token(study.model))
    own_blocks, between = study.analyses.twin.num_gpu_blocks, None
    if own_blocks is None and study.store.kv_gib is not None:
        own_blocks = int(study.store.kv_gib * GIB) // block_bytes
    blocks = settings.choose("twin.num_gpu_blocks", int, own_blocks, None, "kv_cache.num_gpu_blocks")
    if blocks is None:
        paths = "kv_cache.gpu_memory_utilization", "engine_kwargs.gpu_memory_utilization"
        own_share = study.analyses.twin.gpu_memory_utilization
        share = settings.choose("twin.gpu_memory_utilization", float, own_share, UTILIZATION, *paths)
        free = share * study.hardware.memory_gib * GIB - deployment.weight_bytes(study.model)
        least, blocks, most = sorted(int((free - gib * GIB) // block_bytes) for gib in WORKSPACE_GIB)
        between = max(least, 1), most
        settings.sources["twin.num_gpu_blocks"] = f"{blocks} (estimated: from {between[0]} to {most})"
        if blocks < 2:
            raise ValueError(
                f"hardware.memory_gib={study.hardware.memory_gib}: expected more than {study.model.name} takes on each "
                f"of {deployment.devices} devices, {deployment.weight_bytes(study.model) / GIB:.3g} GiB"
            )
    null_block = 1
    return Memory(int(blocks) - null_block, int(size), block_bytes, study.model.state_groups, bool(caching)), between


# ------------------------------------------------------------------------------
# A log as input of a fit: requests without tokens, times of their tokens, and the split into
# training and test.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]
LEAST_REQUESTS = 15  # on either side of the split


@dataclass(frozen=True, eq=False)
class TimedLog:
    """Requests in order of arrival.

    `requests`     with ids 0, 1, and so on
    `arrived_s`, `ttft_s`, `e2e_s`  float64 seconds, shape (requests,)
    `output_lens`  int64
    `trains`       whether a request is in the training set
    `notes`        notes about changes to the clocks
    """

    requests: tuple[Request, ...]
    arrived_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    output_lens: NDArray[np.int64]
    trains: NDArray[np.bool_]
    notes: tuple[str, ...] = ()

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first; NaN for outputs of one token."""
        return tpot(self.ttft_s, self.e2e_s, self.output_lens)


def read_timed_log(log: Log, path: str, train_share: float) -> TimedLog:
    """Return the log with its times; ValueError where it lacks the data that a fit needs."""
    prompts, outputs = log.prompt_tokens, log.output_lens.astype(np.int64)
    arrived_s = np.asarray(log.arrived_ns * 1e-9, np.float64)
    trains = np.arange(log.requests) < round(train_share * log.requests)
    observed = _checked(log, path, arrived_s, trains)
    if min(trains.sum(), (~trains).sum()) < LEAST_REQUESTS:
        raise ValueError(
            f"twin.train_share={train_share} of {log.requests} requests in log={path}: expected {LEAST_REQUESTS} "
            "requests or more on either side"
        )
    tokens = np.zeros(int(prompts.max()), dtype=np.int32)  # one array for all requests, since token ids are never read
    columns = zip(prompts.tolist(), outputs.tolist(), log.arrived_ns.tolist(), strict=True)
    requests = tuple(
        Request(number, number, (Span(tokens[:prompt]),), output, arrived, cache_salt=str(number))
        for number, (prompt, output, arrived) in enumerate(columns)
    )
    waits = ttft(arrived_s, observed.first_token), e2e(arrived_s, observed.last_token)
    return TimedLog(requests, arrived_s, *waits, outputs, trains, observed.notes)


def _checked(log: Log, path: str, arrived_s: Floats, trains: NDArray[np.bool_]) -> Observed:
    """Return the observed times, with clocks aligned by training requests; ValueError where one is missing or wrong."""
    if log.observed is None:
        raise ValueError(
            f"log={path}: expected times of arrival, first and last token of every request, as in requests.jsonl with "
            "arrival_time, first_token_ts and last_token_ts"
        )
    observed = log.observed.aligned_by(arrived_s, trains)
    for name, values in (("first_token_ts", observed.first_token), ("last_token_ts", observed.last_token)):
        _check_no_row(np.isnan(values), log, path, f"{name}: expected a time, and it is missing")
    _check_no_row(
        observed.first_token <= arrived_s, log, path, "first_token_ts: expected a time after the request's arrival"
    )
    _check_no_row(
        observed.last_token < observed.first_token,
        log,
        path,
        "last_token_ts: expected a time at first_token_ts or later",
    )
    _check_no_row(log.output_lens < 1, log, path, "output_toks: expected 1 or more")
    _check_no_row(log.prompt_tokens < 1, log, path, "input_toks: expected 1 or more")
    if log.output_lens[trains].max() < 2:
        raise ValueError(f"output_toks=1 of all fitted requests in log={path}: expected 2 or more for one of them")
    return observed


def _check_no_row(bad: NDArray[np.bool_], log: Log, path: str, problem: str) -> None:
    assert log.observed is not None, "called for logs with times"
    if bad.any():
        raise ValueError(f"{path}:{log.observed.lines[int(np.argmax(bad))]}: {problem}")


def check_memory(timed_log: TimedLog, memory: Memory, path: str) -> None:
    """Raise ValueError where the server has too few blocks for the longest request alone."""
    tokens = [request.num_tokens + request.output_len - 1 for request in timed_log.requests]
    longest = int(np.argmax(tokens))
    need = memory.blocks_for(timed_log.requests[longest])
    if need > memory.blocks:
        raise ValueError(
            f"twin.num_gpu_blocks={memory.blocks + 1}: expected at least {need + 1}, for request {longest} of "
            f"log={path} alone holds {tokens[longest]:,} tokens"
        )


# ------------------------------------------------------------------------------
# Slopes of first and last token times of a simulation by step times, for a fixed schedule.
#
# Infinitesimal perturbation analysis (Ho and Cao, 1983): a request's number of steps is fixed,
# so its end moves by the sum of their changes. The start of a request that waits for memory or
# for `max_num_seqs` moves with the end of the request that makes room; any other request starts
# at its arrival.
# ------------------------------------------------------------------------------


def token_slopes(log: TimedLog, times: Times, timings: Sequence[FittedTiming]) -> Floats:
    """Return nanoseconds by which first and last tokens come later, shape (2, requests, parameters).

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
    arrives = np.searchsorted(starts, log.arrived_s * 1e9)  # the first step that begins after the arrival
    request_by_end = dict(zip(times.last_ns.tolist(), range(len(times.last_ns)), strict=True))
    moved = np.zeros((2, len(first), longer.shape[1]))
    for index in np.argsort(times.admitted_ns, kind="stable").tolist():
        predecessor = request_by_end.get(int(times.admitted_ns[index])) if begins[index] > arrives[index] + 1 else None
        from_step = arrives[index] if predecessor is None else begins[index]
        before = 0.0 if predecessor is None else moved[1, predecessor]
        moved[0, index] = before + longer[first[index]] - longer[min(from_step, first[index])]
        moved[1, index] = moved[0, index] + longer[last[index]] - longer[first[index]]
    return moved


def _cumulative_delays(runs: Sequence[Run], timings: Sequence[FittedTiming]) -> Floats:
    """Return nanoseconds by which all runs before each run take longer, shape (runs + 1, parameters)."""
    took = np.array([[_duration(timing, run) for timing in timings] for run in runs], dtype=np.float64)
    longer = np.cumsum(took[:, 1:] - took[:, :1], axis=0)
    return np.vstack([np.zeros(longer.shape[1]), longer])


def _duration(timing: FittedTiming, run: Run) -> float:
    """Return nanoseconds of all steps of a run, approximated by its middle step, since durations are nearly linear."""
    middle = (run.repeats - 1) // 2
    ranks = [rank._replace(decode_context=rank.decode_context + middle * rank.num_decodes) for rank in run.ranks]
    return run.repeats * timing.exact(ranks)


# ------------------------------------------------------------------------------
# Gauss-Newton least squares for simulations: residuals jump between schedules, so the caller
# supplies the slopes.
# ------------------------------------------------------------------------------

SOFT = 3.0  #: standard deviations from which the loss of a residual is linear instead of quadratic
LONGEST = 0.5  #: largest change of a parameter in one iteration
FULL, AVERAGED = 8, 6  #: iterations with full steps, and then with decreasing steps, which average out the jumps


@dataclass(frozen=True)
class Prior:
    """Normal priors of the parameters: means and standard deviations, each of shape (parameters,)."""

    mean: Floats
    sd: Floats


@dataclass(frozen=True)
class Linearised:
    """Residuals in standard deviations and their slopes at a point; shapes (d,), (n,) and (n, d).

    `block_size`  residuals that count as one against the prior, since errors of neighbours have a common cause
    """

    point: Floats
    residuals: Floats
    slopes: Floats
    block_size: float

    @property
    def _weights(self) -> Floats:
        """Weights of the residuals under a pseudo-Huber loss."""
        weights: Floats = 1 / np.sqrt(1 + (self.residuals / SOFT) ** 2)
        return weights / self.block_size

    def cost(self, prior: Prior) -> float:
        """Return the pseudo-Huber loss of the residuals plus the penalty of the prior."""
        loss = 2 * SOFT**2 * (np.sqrt(1 + (self.residuals / SOFT) ** 2) - 1)
        return float(loss.sum() / self.block_size + (((self.point - prior.mean) / prior.sd) ** 2).sum())

    def _curvature(self, prior: Prior, scatter: float = 1.0) -> Floats:
        weighted = self.slopes * self._weights[:, None] / scatter
        curvature: Floats = weighted.T @ self.slopes + np.diag(prior.sd**-2)
        return curvature

    def step(self, prior: Prior) -> Floats:
        """Return the Gauss-Newton step, each component clipped to ± `LONGEST`."""
        gradient = self.slopes.T @ (self._weights * self.residuals) + (self.point - prior.mean) / prior.sd**2
        step = -np.linalg.solve(self._curvature(prior), gradient)
        return np.asarray(np.clip(step, -LONGEST, LONGEST), dtype=np.float64)

    def deviations(self, prior: Prior) -> Floats:
        """Return standard deviations of the parameters, shape (d,), widened by excess scatter of residuals."""
        scatter = float((self._weights * self.residuals**2).sum() / self._weights.sum())
        deviations: Floats = np.sqrt(np.diag(np.linalg.inv(self._curvature(prior, max(1.0, scatter)))))
        return deviations


def descend(evaluate: Callable[[Floats], Linearised], start: Floats, prior: Prior) -> Linearised:
    """Return the evaluated point of least cost; Gauss-Newton steps, full at first, then ever shorter."""
    tried = [evaluate(start)]
    for iteration in range(FULL + AVERAGED):
        gain = 1.0 if iteration < FULL else 1 / (2 + iteration - FULL)
        tried.append(evaluate(tried[-1].point + gain * tried[-1].step(prior)))
    return min(tried, key=lambda candidate: candidate.cost(prior))


# ------------------------------------------------------------------------------
# Fit of a server's rates to the times of its requests, by repeated simulation of the log.
# ------------------------------------------------------------------------------

#: Prior standard deviations of the logarithms: shares of a data sheet are known better than host times.
PRIOR_SD = {"compute": 0.3, "bandwidth": 0.2, "host_s_with_prefill": 0.7}
OTHER_SD = 1.0
CHANGE = 0.01  # of a logarithm, for numerical slopes of step times
#: Relative error of a time that no parameter explains, and the share of a step by which a first token may come earlier
#: or later than modelled: a request arrives anywhere within a step, and waits for its end.
UNEXPLAINED, OF_A_STEP = 0.02, 0.3
IDENTIFIED = 4.0  # largest ratio of an interval's ends for an identified parameter
Z95 = 1.96
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
    simulations: int = 0

    def __post_init__(self) -> None:
        self._assumed = Rates.assumed(self.hardware)
        trains = self.log.trains
        step = float(np.nanmedian(self.log.tpot_s[trains]))
        self._measured = np.concatenate([self.log.ttft_s[trains], self.log.e2e_s[trains]])
        self._deviations = np.hypot(UNEXPLAINED, OF_A_STEP * step / self._measured)

    def fit(self) -> Fit:
        """Return the parameters of least error on the training requests."""
        names = names_for(self.model, self.facts.deployment)
        start = np.log([getattr(self._assumed, name) for name in names])
        prior = Prior(start, np.array([PRIOR_SD.get(name, OTHER_SD) for name in names]))
        best = self._fit_scheduling(names, prior)
        rates = replace(self._assumed, **_values(names, best.point))
        return Fit(self.facts, rates, _parameters(names, best, prior), self.times(rates), self.simulations)

    def times(self, rates: Rates) -> Times:
        """Simulate the log at these rates, and return the times of its tokens."""
        self.simulations += 1
        facts = self.facts
        rules = replace(facts.rules, async_scheduling=bool(facts.asynchronous))
        ranks = facts.deployment.data_parallel
        return serve_lengths(self.log.requests, facts.memory, rules, self._timing(rates), ranks)

    def _timing(self, rates: Rates) -> FittedTiming:
        return FittedTiming(self.model, self.hardware, self.facts.deployment, rates)

    def _fit_scheduling(self, names: tuple[str, ...], prior: Prior) -> Linearised:
        """Return the best parameters; without known scheduling, those of the mode that fits better."""
        if self.facts.asynchronous is not None:
            return descend(self._linearise(names), prior.mean, prior)
        tried = []
        for asynchronous in (True, False):
            self.facts = replace(self.facts, asynchronous=asynchronous)
            tried.append((descend(self._linearise(names), prior.mean, prior), asynchronous))
        best, asynchronous = min(tried, key=lambda pair: pair[0].cost(prior))
        self.facts = replace(self.facts, asynchronous=asynchronous)
        return best

    def _linearise(self, names: tuple[str, ...]) -> Callable[[Floats], Linearised]:
        """Return a function of the rates' logarithms: errors of first and last tokens, in standard deviations."""

        def evaluate(point: Floats) -> Linearised:
            rates = replace(self._assumed, **_values(names, point))
            times = self.times(rates)
            predicted = np.concatenate(
                [predicted_times(self.log, times)[name][self.log.trains] for name in ("ttft", "e2e")]
            )
            changed = [replace(rates, **{name: getattr(rates, name) * math.exp(CHANGE)}) for name in names]
            slopes_ns = token_slopes(
                self.log, times, [self._timing(changed_rates) for changed_rates in (rates, *changed)]
            )
            slopes = slopes_ns[:, self.log.trains].reshape(-1, len(names)) * NS / CHANGE / predicted[:, None]
            residuals = np.log(predicted / self._measured)
            block_size = len(residuals) / (2 * BLOCKS)
            return Linearised(point, residuals / self._deviations, slopes / self._deviations[:, None], block_size)

        return evaluate


def _parameters(names: tuple[str, ...], best: Linearised, prior: Prior) -> dict[str, Parameter]:
    """Return values with intervals; if an interval is too wide, the value stays near the prior mean."""
    factors = np.exp(Z95 * best.deviations(prior)).tolist()
    values = np.exp(best.point).tolist()
    return {
        name: Parameter(value, value / factor, value * factor, factor**2 <= IDENTIFIED)
        for name, value, factor in zip(names, values, factors, strict=True)
    }


def _values(names: Sequence[str], logarithms: Floats) -> dict[str, float]:
    return dict(zip(names, np.exp(logarithms).tolist(), strict=True))


# ------------------------------------------------------------------------------
# Errors of predicted times of requests against measured ones, and predictors without a model to
# compare with.
# ------------------------------------------------------------------------------

METRICS = ("ttft", "tpot", "e2e")


def predicted_times(log: TimedLog, times: Times) -> dict[str, Floats]:
    """Return predicted seconds of every request, by metric."""
    first_s, last_s = (np.asarray(ns * NS, np.float64) for ns in (times.first_ns, times.last_ns))
    ttft_s, e2e_s = ttft(log.arrived_s, first_s), e2e(log.arrived_s, last_s)
    return {"ttft": ttft_s, "tpot": tpot(ttft_s, e2e_s, log.output_lens), "e2e": e2e_s}


def measured_times(log: TimedLog) -> dict[str, Floats]:
    """Return measured seconds of every request, by metric."""
    return {"ttft": log.ttft_s, "tpot": log.tpot_s, "e2e": log.e2e_s}


def predictions_without_model(log: TimedLog) -> dict[str, dict[str, Floats]]:
    """Return predicted seconds of every request by predictor and metric, each fitted to the training requests.

    `line`  least squares over the request's number; for E2E latency, over its number and its output tokens
    `mean`  the training requests' mean
    `last`  the value of the last training request
    A metric without two training requests that have it is predicted as NaN.
    """
    numbers = np.arange(len(log.trains), dtype=np.float64)
    inputs = {"ttft": [numbers], "tpot": [numbers], "e2e": [numbers, log.output_lens.astype(np.float64)]}
    predictions: dict[str, dict[str, Floats]] = {"line": {}, "mean": {}, "last": {}}
    for metric, values in measured_times(log).items():
        trains = log.trains & ~np.isnan(values)
        known = values[trains] if trains.sum() > 1 else np.full(2, np.nan)
        columns = np.stack([np.ones_like(numbers), *inputs[metric]], axis=1)
        predictions["line"][metric] = _least_squares(columns, trains, known)
        predictions["mean"][metric] = np.full_like(numbers, known.mean())
        predictions["last"][metric] = np.full_like(numbers, known[-1])
    return predictions


def _least_squares(columns: Floats, trains: NDArray[np.bool_], known: Floats) -> Floats:
    """Return the fitted values of all requests; NaN if `known` is."""
    if np.isnan(known).any():
        return np.full(len(columns), np.nan)
    fitted: Floats = columns @ np.linalg.lstsq(columns[trains], known, rcond=None)[0]
    return fitted


def errors(
    predicted: Mapping[str, Floats], measured: Mapping[str, Floats], selected: NDArray[np.bool_]
) -> dict[str, dict[str, float | None]]:
    """Return errors over the selected requests by metric: of the mean, and of relative errors per request.

    `mean_error`             predicted ÷ measured mean - 1
    `p50_error`, `p95_error` percentiles of |predicted ÷ measured - 1|
    `bias`                   median of predicted ÷ measured - 1
    Requests without the metric or its prediction, such as TPOT of one token, are left out; None where all are.
    """
    return {metric: _errors_of_metric(predicted[metric][selected], measured[metric][selected]) for metric in METRICS}


def _errors_of_metric(predicted: Floats, measured: Floats) -> dict[str, float | None]:
    defined = ~np.isnan(predicted) & ~np.isnan(measured) & (measured > 0)
    if not defined.any():
        return dict.fromkeys(("mean_error", "p50_error", "p95_error", "bias"))
    predicted, measured = predicted[defined], measured[defined]
    relative = predicted / measured - 1
    middle, most = np.quantile(np.abs(relative), (0.5, 0.95)).tolist()
    return {
        "mean_error": float(predicted.mean() / measured.mean() - 1),
        "p50_error": middle,
        "p95_error": most,
        "bias": float(np.median(relative)),
    }
