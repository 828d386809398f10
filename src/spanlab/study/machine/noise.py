"""Noise of a machine that runs an engine study: readings, limits, and the texts for a report.

Every measure grows with the noise, so that a noisier machine does not pass more easily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AA_LIMIT = 0.10  # of the spread of A/A ratios
DRIFT_LIMIT = 0.10  # of the fixed step's time
STEAL_LIMIT = 0.05  # of all processor time


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine's state before a run.

    `step_ns`  time of the fixed step
    `load`     load average of the last minute
    `ticks`    processor time since boot; `stolen` is the time of it that other virtual machines used
    """

    step_ns: int
    load: float
    ticks: int
    stolen: int


@dataclass(frozen=True)
class Noise:
    """Measured noise of a study's machine; None where a measure has no data.

    `aa`          mean TTFT of the repeated baseline ÷ that of the baseline, by repeat
    `drift`       95th percentile of the fixed step's relative distance from its median
    `load`        mean load average, to compare with `cores`
    `steal`       share of processor time that other virtual machines used
    `alternates`  arms took turns request by request, so that drift affects their ratios as it affects the A/A ratios
    """

    aa: tuple[float, ...]
    drift: float | None
    load: float | None
    steal: float | None
    cores: int
    alternates: bool = False

    @staticmethod
    def of(aa: Sequence[float], readings: Sequence[Reading], cores: int, alternates: bool = False) -> Noise:
        """Compute the noise of a study from its A/A ratios and readings."""
        return Noise(
            aa=tuple(aa),
            drift=drift([reading.step_ns for reading in readings]),
            load=float(np.mean([reading.load for reading in readings])) if readings else None,
            steal=steal(readings),
            cores=cores,
            alternates=alternates and bool(aa),
        )

    @property
    def spread(self) -> float | None:
        """Root mean square of the A/A ratios' logarithms, as a relative difference; None without a ratio."""
        if not self.aa:
            return None
        return math.expm1(math.sqrt(float(np.mean(np.log(self.aa) ** 2))))

    def reasons(self) -> list[str]:
        """Describe every exceeded limit."""
        reasons = []
        if self.spread is not None and self.spread > AA_LIMIT:
            ratios = f"{min(self.aa):.3g} to {max(self.aa):.3g}" if len(self.aa) > 1 else f"{self.aa[0]:.3g}"
            reasons.append(f"A/A of the baseline {ratios}, spread {self.spread:.0%} (limit {AA_LIMIT:.0%})")
        if self.drift is not None and self.drift > DRIFT_LIMIT and not self.alternates:
            reasons.append(f"a fixed step drifted by {self.drift:.0%} (limit {DRIFT_LIMIT:.0%})")
        if self.load is not None and self.load > self.cores:
            reasons.append(f"load average {self.load:.1f} (limit {self.cores} cores)")
        if self.steal is not None and self.steal > STEAL_LIMIT:
            reasons.append(f"stolen processor time {self.steal:.0%} (limit {STEAL_LIMIT:.0%})")
        return reasons

    @property
    def description(self) -> str:
        """Text with all measures, within their limits or not."""
        parts = [f"A/A ratios {', '.join(f'{ratio:.3g}' for ratio in self.aa)}"] if self.aa else []
        for name, value in (("spread", self.spread), ("step drift", self.drift), ("stolen time", self.steal)):
            parts += [f"{name} {value:.1%}"] if value is not None else []
        parts += [f"load average {self.load:.1f} on {self.cores} cores"] if self.load is not None else []
        return f"noise: {'; '.join(parts) or 'not measured'}"

    def sentence(self, refused: str) -> str:
        """Sentence why a study reports no `refused`, such as speedups; empty on a calm machine."""
        reasons = self.reasons()
        return f"noisy machine, no {refused}: {'; '.join(reasons)}" if reasons else ""

    def summary(self) -> dict[str, Any]:
        """`machine_noise` of a summary."""
        return {
            "aa_ratios": list(self.aa),
            "aa_spread": self.spread,
            "step_drift": self.drift,
            "load_average": self.load,
            "steal": self.steal,
            "cores": self.cores,
            "noisy": bool(self.reasons()),
            "limits": {"aa_spread": AA_LIMIT, "step_drift": DRIFT_LIMIT, "load_average": self.cores}
            | {"steal": STEAL_LIMIT},
        }


def drift(steps_ns: Sequence[int]) -> float | None:
    """95th percentile of |step ÷ median − 1|; None for fewer than two steps."""
    if len(steps_ns) < 2:
        return None
    steps = np.asarray(steps_ns, np.float64)
    return float(np.percentile(np.abs(steps / np.median(steps) - 1), 95))


def steal(readings: Sequence[Reading]) -> float | None:
    """Stolen share of the processor time between the first and the last reading; None without elapsed time."""
    if len(readings) < 2 or readings[-1].ticks == readings[0].ticks:
        return None
    return (readings[-1].stolen - readings[0].stolen) / (readings[-1].ticks - readings[0].ticks)


def successive(values: Sequence[float]) -> list[float]:
    """A/A ratios of each repeat to the previous one."""
    return ratios(values[:-1], values[1:])


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """A/A ratios of two runs of one arm by repeat; a repeat that only one run has is ignored."""
    pairs = zip(first, second, strict=False)
    return [after / before for before, after in pairs if before > 0 and after > 0]
