"""Lower bounds of time: a prefill alone, and the least prefill that a run needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spanlab.core.admission import BatchRules
from spanlab.core.rules import ReuseRules
from spanlab.core.step import StepFeatures
from spanlab.model_spec import DeviceRates, HardwareSpec, ModelSpec, causal_pairs
from spanlab_sim.timing import RooflineTiming, TimingModel

# ------------------------------------------------------------------------------
# A lower bound of the time of steps, from their work and a device's measured rates.
#
# The formulas are those of `spanlab_sim.timing.RooflineTiming`, without host time and without
# the extra work of a kernel that reads spans: T >= sum over steps of max(FLOPs / rate, bytes /
# rate).
# ------------------------------------------------------------------------------


class Bound:
    """Lower bounds for one model on a device with these rates."""

    def __init__(self, model: ModelSpec, rates: DeviceRates) -> None:
        hardware = HardwareSpec(
            name="measured",
            peak_flops=rates.flops_per_s,
            bandwidth_bytes_per_s=rates.bytes_per_s,
            memory_gib=1.0,
            compute_efficiency=1.0,
            bandwidth_efficiency=1.0,
            host_s=0.0,
        )
        self._timing = RooflineTiming(model, hardware)

    def seconds(self, steps: Iterable[StepFeatures]) -> float:
        """Return the bound of steps that run one after another."""
        # without the work that depends on the kernel that reads the keys
        needed = (step._replace(span_reads=0, turned_keys=0, num_forwards=1) for step in steps)
        return sum(map(self._timing.step, needed)) * 1e-9


# ------------------------------------------------------------------------------
# The least time from an empty engine to a first token, by the tokens to compute.
# ------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LeastPrefill:
    """Nanoseconds that prompt tokens `[start, stop)` take at least, however they are cut into steps
    and batched.

    `step_ns` is the shortest step. Each step computes its share of the FLOPs besides its host time,
    and the timing model cuts it, half a nanosecond longer, off to a whole number. So one step for
    all tokens takes exactly floor(`computing`) where it computes nothing else, and k steps at least
    that if k - 1 host times exceed the k nanoseconds cut off. A shorter host time is made up for by
    a share of the FLOPs: k is at most time ÷ `step_ns`.
    """

    model: ModelSpec
    hardware: HardwareSpec
    step_ns: int

    def computing(self, start: Ints, stop: Ints) -> Floats:
        """Return FLOPs of the tokens and of one row of logits ÷ rate, plus host time and the half
        to be cut off."""
        flops = self.model.prefill_flops(start, stop) + self.model.head_flops
        host_ns = self.hardware.host_s * 1e9
        share = 1 / (1 + max(0.0, 1 - host_ns) / self.step_ns)
        nanoseconds = flops * (1e9 / self.hardware.flops_per_s) * share + (host_ns + 0.5)
        return np.asarray(nanoseconds, np.float64)


def least_prefill(
    timing: TimingModel, model: ModelSpec, hardware: HardwareSpec
) -> LeastPrefill | None:
    """Return the bound of a timing model; None where its terms are no sums over tokens, or steps
    take 0 ns."""
    if not isinstance(timing, RooflineTiming):
        return None
    token = StepFeatures(prefill_tokens=1, prefill_pairs=1, num_prefills=1, num_first_tokens=1)
    step_ns = timing.step(token)
    return LeastPrefill(model, hardware, step_ns) if step_ns else None


# ------------------------------------------------------------------------------
# The time to compute a part of a prompt alone, by a timing model, in as many steps as the batch
# rules need.
# ------------------------------------------------------------------------------

TOKENS = 1 << 20  # the longest length at which loading is compared with computing


class PrefillTime:
    """Nanoseconds of each step that computes prompt tokens [start, stop) while nothing else
    runs."""

    def __init__(self, timing: TimingModel, batch: BatchRules, rules: ReuseRules) -> None:
        """`batch` cuts the tokens into steps; `rules` are the policy's."""
        self._timing, self._rules = timing, rules
        self._chunk = batch.max_num_batched_tokens if batch.enable_chunked_prefill else TOKENS
        self._steps = lru_cache(1 << 14)(self._compute)  # a waiting request is evaluated repeatedly

    def __call__(self, start: int, stop: int) -> tuple[int, ...]:
        return self._steps(start, stop)

    def _compute(self, start: int, stop: int) -> tuple[int, ...]:
        needs_states, durations = self._rules.needs_states, []
        for first in range(start, stop, self._chunk):
            last = min(first + self._chunk, stop)
            work = StepFeatures(
                prefill_tokens=last - first,
                prefill_pairs=causal_pairs(first, last),
                num_prefills=1,
                num_first_tokens=int(last == stop),
                prefill_context=first,
                num_forwards=1,
                scan_runs=int(needs_states),
                scan_chunks=-(-(last - first) // self._rules.grid) if needs_states else 0,
            )
            durations.append(self._timing.step(work))
        return tuple(durations)


def break_even_tokens(ready_ns: Callable[[int], int], steps: PrefillTime, unit: int) -> int | None:
    """Return the length from which a prefix is ready sooner if it is loaded than if it is computed.

    `ready_ns`  nanoseconds until one token behind a loaded prefix of so many tokens is computed
    `unit`      lengths are multiples of it

    None where loading is not faster for any length up to TOKENS. Between lengths that double, one
    change is assumed.
    """

    def pays(units: int) -> bool:
        return ready_ns(units * unit) < sum(steps(0, units * unit + 1))

    lengths = [1 << power for power in range((TOKENS // unit).bit_length())]
    first = len(lengths)
    while first and pays(lengths[first - 1]):
        first -= 1
    if first == len(lengths):
        return None
    below, length = lengths[first - 1] if first else 0, lengths[first]
    return unit * (below + 1 + bisect_left(range(below + 1, length), True, key=pays))
