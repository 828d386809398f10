"""Rates of a server from the times of its requests: simulate the log, compare, move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.response_surface import Z95, Floats, Prior, Surface, descend
from spanlab.model_spec import ModelSpec
from spanlab.study.twin.log import TimedLog
from spanlab.study.twin.server import ServerFacts
from spanlab_sim.fitted import FittedTiming
from spanlab_sim.fitted_profile import Parameter, Rates, names_for
from spanlab_sim.fitted_server import Times, serve_lengths
from spanlab_sim.hardware import HardwareSpec

NS = 1e-9
#: Standard deviations of the logarithms of what is assumed: shares of a data sheet are known better than host times.
PRIOR_SD = {"compute": 0.3, "bandwidth": 0.2}
OTHER_SD = 1.0
REACHES = (0.3, 0.15, 0.08, 0.04)  # of logarithms, round by round
#: Relative error of a time that no parameter explains, and the part of a step by which a first token may come sooner
#: or later than modelled: a request waits for the end of a step, anywhere within it.
UNEXPLAINED, OF_A_STEP = 0.01, 0.5
IDENTIFIED = 4.0  # an interval whose ends differ by more says nothing
BLOCKS = 10  # of time, within which errors depend on each other


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

    def fit(self) -> Fit:
        """Parameters of least error on the requests that train."""
        names = names_for(self.model, self.facts.deployment)
        start = np.log([getattr(self._assumed, name) for name in names])
        prior = Prior(start, np.array([PRIOR_SD.get(name, OTHER_SD) for name in names]))
        best, surface = self._descend(names, start, prior)
        kept = self._identified(surface, prior)
        free = tuple(name for name, own in zip(names, kept, strict=True) if own)
        if not kept.all():
            self._assumed = replace(self._assumed, **_values(names, np.where(kept, best, start)))
            best, surface, _ = descend(self._residuals(free), best[kept], prior.of(kept), REACHES[1:])
        rates = replace(self._assumed, **_values(free, best))
        parameters = self._parameters(names, free, rates, surface.deviations(prior.of(kept), self._blocks), prior)
        return Fit(self.facts, rates, parameters, self.times(rates), self.simulations)

    def __post_init__(self) -> None:
        self._assumed = Rates.assumed(self.hardware)

    def times(self, rates: Rates) -> Times:
        """When tokens come at these rates."""
        self.simulations += 1
        facts = self.facts
        rules = replace(facts.rules, async_scheduling=bool(facts.asynchronous))
        timing = FittedTiming(self.model, self.hardware, facts.deployment, rates)
        return serve_lengths(self.log.requests, facts.memory, rules, timing, facts.deployment.data_parallel)

    def _descend(self, names: tuple[str, ...], start: Floats, prior: Prior) -> tuple[Floats, Surface]:
        """The best parameters; where nothing says how steps are planned, of the two ways the one that fits better."""
        residuals = self._residuals(names)
        if self.facts.asynchronous is not None:
            best, surface, _ = descend(residuals, start, prior, REACHES)
            return best, surface
        tried = []
        for way in (True, False):
            self.facts = replace(self.facts, asynchronous=way)
            best, _, cost = descend(residuals, start, prior, REACHES[:3])
            tried.append((cost, way, best))
        _, way, best = min(tried, key=lambda one: one[0])
        self.facts = replace(self.facts, asynchronous=way)
        best, surface, _ = descend(residuals, best, prior, REACHES[3:])
        return best, surface

    def _residuals(self, names: Sequence[str]) -> _Residuals:
        return _Residuals(self, tuple(names))

    def _identified(self, surface: Surface, prior: Prior) -> NDArray[np.bool_]:
        """Which parameters the log identifies: the one of the widest interval is fixed until none is too wide."""
        kept = np.full(len(prior.mean), True)
        while kept.sum() > 1:
            deviations = np.zeros(len(kept))
            deviations[kept] = surface.of(kept).deviations(prior.of(kept), self._blocks)
            if 2 * Z95 * deviations.max() <= math.log(IDENTIFIED):
                break
            kept[int(np.argmax(deviations))] = False
        return kept

    def _parameters(
        self, names: tuple[str, ...], free: tuple[str, ...], rates: Rates, deviations: Floats, prior: Prior
    ) -> dict[str, Parameter]:
        widths = dict(zip(free, deviations.tolist(), strict=True))
        assumed = dict(zip(names, prior.sd.tolist(), strict=True))
        found = {}
        for name, value in _fields(rates, names).items():
            factor = math.exp(Z95 * widths.get(name, assumed[name]))
            found[name] = Parameter(value, value / factor, value * factor, name in free)
        return found

    @property
    def _blocks(self) -> NDArray[np.int64]:
        """The block of time of every residual."""
        count = int(self.log.trains.sum())
        return np.tile(np.arange(count) * min(BLOCKS, count) // count, 2)


@dataclass
class _Residuals:
    """Errors of first and last tokens of requests that train, in standard deviations, for logarithms of rates."""

    fitting: Fitting
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        log = self.fitting.log
        step = OF_A_STEP * float(np.nanmedian(log.tpot_s[log.trains])) if (log.output_lens > 1).any() else 0.0
        measured = np.concatenate([log.ttft_s[log.trains], log.e2e_s[log.trains]])
        self._measured, self._deviations = measured, np.hypot(UNEXPLAINED, step / measured)

    def __call__(self, x: Floats) -> Floats:
        fitting, log = self.fitting, self.fitting.log
        times = fitting.times(replace(fitting._assumed, **_values(self.names, x)))
        both = times.first_ns * NS - log.arrived_s, times.last_ns * NS - log.arrived_s
        predicted = np.concatenate([one[log.trains] for one in both])
        residuals: Floats = np.log(predicted / self._measured) / self._deviations
        return residuals


def _values(names: Sequence[str], logarithms: Floats) -> dict[str, float]:
    return dict(zip(names, np.exp(logarithms).tolist(), strict=True))


def _fields(rates: Rates, names: Sequence[str]) -> dict[str, float]:
    every = asdict(rates)
    return {name: every[name] for name in names}
