"""Fit of a server's rates to the times of its requests, by repeated simulation of the log."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.gauss_newton import Floats, Linearised, Prior, descend
from spanlab.model_spec import ModelSpec
from spanlab.study.twin.log import TimedLog
from spanlab.study.twin.server import ServerFacts
from spanlab.study.twin.slopes import token_slopes
from spanlab_sim.fitted import FittedTiming
from spanlab_sim.fitted_profile import Parameter, Rates, names_for
from spanlab_sim.fitted_server import Times, serve_lengths
from spanlab_sim.hardware import HardwareSpec

NS = 1e-9
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
            predicted = np.concatenate([self._training_delays(times.first_ns), self._training_delays(times.last_ns)])
            changed = [replace(rates, **{name: getattr(rates, name) * math.exp(CHANGE)}) for name in names]
            slopes_ns = token_slopes(
                self.log, times, [self._timing(changed_rates) for changed_rates in (rates, *changed)]
            )
            slopes = slopes_ns[:, self.log.trains].reshape(-1, len(names)) * NS / CHANGE / predicted[:, None]
            residuals = np.log(predicted / self._measured)
            block_size = len(residuals) / (2 * BLOCKS)
            return Linearised(point, residuals / self._deviations, slopes / self._deviations[:, None], block_size)

        return evaluate

    def _training_delays(self, token_ns: NDArray[np.int64]) -> Floats:
        """Return seconds from arrival of the training requests."""
        delays: Floats = (token_ns * NS - self.log.arrived_s)[self.log.trains]
        return delays


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
