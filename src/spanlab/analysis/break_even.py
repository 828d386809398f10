"""Whether position-independent caching pays: its best arms compared with the best arm that keeps answers unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spanlab.analysis.families import MeasuredArm, ratio_of
from spanlab.stats import Interval

#: Families by their effect on answers. The first two leave answers unchanged, up to the order of passages.
PREFIX, ORDERED, REPAIRED, PLAIN = "prefix", "cached_order", "repaired", "plain"
STEPS = (PREFIX, ORDERED, REPAIRED, PLAIN)
EXACT = (PREFIX, ORDERED)
#: A gain below this is not worth another method.
LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Step:
    """The arm of a family with the lowest mean TTFT.

    `gain`  mean TTFT of the reference arm ÷ that of this arm. The reference is the best exact arm; for cached order,
            the best prefix cache. None for prefix caches, and where a queue grows
    """

    family: str
    arm: str
    ttft_mean_s: float
    token_hit_rate: float
    gain: Interval | None

    @property
    def pays(self) -> bool:
        """Whether the whole interval of the gain lies above `LEAST_GAIN`."""
        return self.gain is not None and self.gain.low is not None and self.gain.low > LEAST_GAIN


@dataclass(frozen=True)
class BreakEven:
    """The steps of one study, and the family beyond which no further change of answers pays.

    `verdict`  repaired, where repaired spans pay; else plain, where only spans without repair pay (the repair costs
               the gain); else cached_order, where it pays over the given order; else prefix
    """

    steps: tuple[Step, ...]
    verdict: str

    def plain(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        steps = [asdict(step) | {"gain": step.gain and step.gain._asdict(), "pays": step.pays} for step in self.steps]
        return {"steps": steps, "verdict": self.verdict}


def break_even(arms: Sequence[MeasuredArm], families: Mapping[str, Sequence[str]]) -> BreakEven:
    """Compare the families of STEPS; each must have an arm in `arms`, and all arms served the same requests."""
    best = {name: _best(arms, families[name]) for name in STEPS}
    exact = min((best[name] for name in EXACT), key=lambda arm: arm.rank)
    references = {ORDERED: best[PREFIX], REPAIRED: exact, PLAIN: exact}
    steps = {name: _step(name, best[name], references.get(name)) for name in STEPS}
    verdict = next((name for name in (REPAIRED, PLAIN, ORDERED) if steps[name].pays), PREFIX)
    return BreakEven(tuple(steps.values()), verdict)


def _best(arms: Sequence[MeasuredArm], names: Sequence[str]) -> MeasuredArm:
    return min((arm for arm in arms if arm.name in names), key=lambda arm: arm.rank)


def _step(family: str, arm: MeasuredArm, reference: MeasuredArm | None) -> Step:
    gain = None if reference is None else ratio_of(reference, arm)
    return Step(family, arm.name, arm.summary["ttft_s"]["mean"], arm.summary["token_hit_rate"], gain)
