"""Rates of a server from the times of its requests: simulate the log, compare, move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.gauss_newton import Floats, Linear, Prior, descend
from spanlab.model_spec import ModelSpec
from spanlab.study.twin.log import TimedLog
from spanlab.study.twin.server import ServerFacts
from spanlab.study.twin.slopes import token_slopes
from spanlab_sim.fitted import FittedTiming
from spanlab_sim.fitted_profile import Parameter, Rates, names_for
from spanlab_sim.fitted_server import Times, serve_lengths
from spanlab_sim.hardware import HardwareSpec

NS = 1e-9
#: Standard deviations of the logarithms of what is assumed: shares of a data sheet are known better than host times.
PRIOR_SD = {"compute": 0.3, "bandwidth": 0.2, "host_s_with_prefill": 0.7}
OTHER_SD = 1.0
CHANGE = 0.01  # of a logarithm, by which slopes of step times are taken
#: Relative error of a time that no parameter explains, and the part of a step by which a first token may come sooner
#: or later than modelled: a request waits for the end of a step, anywhere within it.
UNEXPLAINED, OF_A_STEP = 0.02, 0.3
IDENTIFIED = 4.0  # an interval whose ends differ by more says nothing
Z95 = 1.96
BLOCKS = 10  # of requests, within which errors have a common cause


@dataclass(frozen=True)
class Fit:
    """What a log says of its server.

    `facts`       with the memory and the scheduling that were fitted, where they were
    `rates`       every parameter's value
    `parameters`  by name: value, interval, and whether the log identifies it
    `times`       of all requests at these rates
    `simulations` how many it took
    """

    facts: ServerFacts
    rates: Rates
    parameters: dict[str, Parameter]
    times: Times
    simulations: int


@dataclass
class Fitting:
    """A log, the server that it comes from, and what is assumed of the device."""

    log: TimedLog
    model: ModelSpec
    hardware: HardwareSpec
    facts: ServerFacts
    simulations: int = 0

    def __post_init__(self) -> None:
        self._assumed = Rates.assumed(self.hardware)
        trains, step = self.log.trains, float(np.nanmedian(self.log.tpot_s))
        self._measured = np.concatenate([self.log.ttft_s[trains], self.log.e2e_s[trains]])
        self._deviations = np.hypot(UNEXPLAINED, OF_A_STEP * step / self._measured)

    def fit(self) -> Fit:
        """Parameters of least error on the requests that train."""
        names = names_for(self.model, self.facts.deployment)
        start = np.log([getattr(self._assumed, name) for name in names])
        prior = Prior(start, np.array([PRIOR_SD.get(name, OTHER_SD) for name in names]))
        best = self._scheduled(names, prior)
        rates = replace(self._assumed, **_values(names, best.point))
        return Fit(self.facts, rates, _parameters(names, best, prior), self.times(rates), self.simulations)

    def times(self, rates: Rates) -> Times:
        """When tokens come at these rates."""
        self.simulations += 1
        facts = self.facts
        rules = replace(facts.rules, async_scheduling=bool(facts.asynchronous))
        ranks = facts.deployment.data_parallel
        return serve_lengths(self.log.requests, facts.memory, rules, self._timing(rates), ranks)

    def _timing(self, rates: Rates) -> FittedTiming:
        return FittedTiming(self.model, self.hardware, self.facts.deployment, rates)

    def _scheduled(self, names: tuple[str, ...], prior: Prior) -> Linear:
        """The best parameters; where nothing says how steps are planned, of the two ways the one that fits better."""
        if self.facts.asynchronous is not None:
            return descend(self._linear(names), prior.mean, prior)
        tried = []
        for way in (True, False):
            self.facts = replace(self.facts, asynchronous=way)
            tried.append((descend(self._linear(names), prior.mean, prior), way))
        best, way = min(tried, key=lambda one: one[0].cost(prior))
        self.facts = replace(self.facts, asynchronous=way)
        return best

    def _linear(self, names: tuple[str, ...]) -> Callable[[Floats], Linear]:
        """Errors of first and last tokens of requests that train, in standard deviations, by logarithms of rates."""

        def evaluate(point: Floats) -> Linear:
            rates = replace(self._assumed, **_values(names, point))
            times = self.times(rates)
            both = np.concatenate([self._of_training(times.first_ns), self._of_training(times.last_ns)])
            changed = [replace(rates, **{name: getattr(rates, name) * math.exp(CHANGE)}) for name in names]
            slopes_ns = token_slopes(self.log, times, [self._timing(one) for one in (rates, *changed)])
            slopes = slopes_ns[:, self.log.trains].reshape(-1, len(names)) * NS / CHANGE / both[:, None]
            residuals = np.log(both / self._measured)
            alike = len(residuals) / (2 * BLOCKS)
            return Linear(point, residuals / self._deviations, slopes / self._deviations[:, None], alike)

        return evaluate

    def _of_training(self, at_ns: NDArray[np.int64]) -> Floats:
        """Seconds from arrival, of requests that train."""
        waited: Floats = (at_ns * NS - self.log.arrived_s)[self.log.trains]
        return waited


def _parameters(names: tuple[str, ...], best: Linear, prior: Prior) -> dict[str, Parameter]:
    """Values with intervals; where an interval is too wide, the prior holds the value near what was assumed."""
    factors = np.exp(Z95 * best.deviations(prior)).tolist()
    values = np.exp(best.point).tolist()
    return {
        name: Parameter(value, value / factor, value * factor, factor**2 <= IDENTIFIED)
        for name, value, factor in zip(names, values, factors, strict=True)
    }


def _values(names: Sequence[str], logarithms: Floats) -> dict[str, float]:
    return dict(zip(names, np.exp(logarithms).tolist(), strict=True))
