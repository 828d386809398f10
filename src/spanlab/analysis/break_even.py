"""Whether position-independent caching pays: its best arms beside the best that leaves answers as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spanlab.analysis.families import MeasuredArm, ratio_of
from spanlab.stats import Interval

#: Families by what they do to answers. The first two leave them as they are, up to the order of passages.
PREFIX, ORDERED, REPAIRED, PLAIN = "prefix", "cached_order", "repaired", "plain"
STEPS = (PREFIX, ORDERED, REPAIRED, PLAIN)
EXACT = (PREFIX, ORDERED)
#: A gain below this is not worth another method.
LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Step:
    """The arm of a family with the lowest mean TTFT.

    `gain`  mean TTFT of the arm that it is compared with ÷ its own: of the best exact arm, for cached order of the
            best prefix cache; None for prefix caches, and where a queue grows
    """

    family: str
    arm: str
    ttft_mean_s: float
    token_hit_rate: float
    gain: Interval | None

    @property
    def pays(self) -> bool:
        """Whether its interval shows a gain that is worth it."""
        return self.gain is not None and self.gain.low is not None and self.gain.low > LEAST_GAIN


@dataclass(frozen=True)
class BreakEven:
    """The steps of one study, and the family with the least change of answers beyond which nothing pays.

    `verdict`  repaired, where repaired spans pay; else plain, where only spans without repair do, so that the repair
               eats the gain; else cached_order, where that pays over the given order; else prefix
    """

    steps: tuple[Step, ...]
    verdict: str

    def plain(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        steps = [asdict(step) | {"gain": step.gain and step.gain._asdict(), "pays": step.pays} for step in self.steps]
        return {"steps": steps, "verdict": self.verdict}


def break_even(arms: Sequence[MeasuredArm], families: Mapping[str, Sequence[str]]) -> BreakEven:
    """Compare the families of STEPS; each must have an arm among `arms`, which served the same requests."""
    best = {name: _best(arms, families[name]) for name in STEPS}
    exact = min((best[name] for name in EXACT), key=lambda arm: arm.rank)
    others = {ORDERED: best[PREFIX], REPAIRED: exact, PLAIN: exact}
    steps = {name: _step(name, best[name], others.get(name)) for name in STEPS}
    verdict = next((name for name in (REPAIRED, PLAIN, ORDERED) if steps[name].pays), PREFIX)
    return BreakEven(tuple(steps.values()), verdict)


def _best(arms: Sequence[MeasuredArm], names: Sequence[str]) -> MeasuredArm:
    return min((arm for arm in arms if arm.name in names), key=lambda arm: arm.rank)


def _step(family: str, arm: MeasuredArm, other: MeasuredArm | None) -> Step:
    gain = None if other is None else ratio_of(other, arm)
    return Step(family, arm.name, arm.summary["ttft_s"]["mean"], arm.summary["token_hit_rate"], gain)
