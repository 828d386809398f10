"""Which family leads where, and where two families break even."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.settings.analyses import ORDERED, PLAIN, PREFIX, REPAIRED, STEPS
from spanlab.stats import SATURATED, Interval, holm, positive_ratio, positive_ratio_p

# ------------------------------------------------------------------------------
# Comparison of families of arms: the best arm of each, and the lead of the best family.
# ------------------------------------------------------------------------------

# No timing model is accurate to a few percent.
SMALLEST_LEAD = 1.05


@dataclass(frozen=True)
class MeasuredArm:
    """One arm of a study.

    `summary`    its entry in `summary.json`
    `ttft_sums`  seconds of TTFT by seed and group, shape (seeds, groups)
    """

    name: str
    summary: Mapping[str, Any]
    ttft_sums: NDArray[np.float64]

    @property
    def saturated(self) -> bool:
        """Whether its queue grows, so that its mean TTFT depends on the length of the run."""
        return bool(self.summary["stationarity"]["verdict"] == SATURATED)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key of arms that serve the same requests: by mean TTFT, saturated arms last."""
        return self.saturated, float(self.ttft_sums.sum())


@dataclass(frozen=True)
class FamilyEntry:
    """The arm of a family with the lowest mean TTFT.

    `any_position_share`  share of prompt tokens that an infinite cache reuses, with spans matched at any position
    `speedup`             mean TTFT of the first family ÷ that of this one, 95 % interval; None for the first
    """

    family: str
    arm: str
    ttft_mean_s: float
    ttft_mean_s_interval: tuple[float, float] | None
    token_hit_rate: float
    any_position_share: float
    regret_points: float | None
    resident_bytes: float
    speedup: Interval | None


@dataclass(frozen=True)
class Lead:
    """The family with the lowest mean TTFT, and the mean TTFT of the next family ÷ its own, with a 95 % interval.

    `ratio`     of the best arms; its interval ignores that these were chosen on the same seeds
    `held_out`  the same where the arms of each seed were chosen on the other seeds; as `ratio` for one seed
    `p`         two-sided p value of a held-out ratio of `SMALLEST_LEAD`; 1 where it is less, None without an interval
    """

    family: str
    next: str
    ratio: Interval | None
    held_out: Interval | None
    p: float | None

    @property
    def shown(self) -> bool:
        """Whether the whole interval lies above `SMALLEST_LEAD`."""
        return self.ratio is not None and self.ratio.low is not None and self.ratio.low > SMALLEST_LEAD


def compare_families(
    arms: Sequence[MeasuredArm], families: Mapping[str, Sequence[str]]
) -> tuple[list[FamilyEntry], Lead | None]:
    """Return the best arm of each family that has one in `arms`, and the lead; speedups are over the first family.

    The lead is None where fewer than two families have an arm.
    """
    members = {name: [arm for arm in arms if arm.name in names] for name, names in families.items()}
    best = {name: min(candidates, key=lambda arm: arm.rank) for name, candidates in members.items() if candidates}
    reference = next(iter(best.values()), None)
    entries = [_entry(name, arm, reference) for name, arm in best.items()]
    ranked = sorted(best, key=lambda name: best[name].rank)
    if len(ranked) < 2:
        return entries, None
    first, second = ranked[:2]
    ratio = ratio_of(best[second], best[first])
    return entries, Lead(first, second, ratio, *_judged_by_other_seeds(members[second], members[first]))


def _judged_by_other_seeds(
    slower: Sequence[MeasuredArm], faster: Sequence[MeasuredArm]
) -> tuple[Interval | None, float | None]:
    """Return the ratio of the best arms, those of each seed chosen on the others, and the p value of a small lead."""
    chosen = [[_best_on_others(arms, seed) for seed in range(len(arms[0].ttft_sums))] for arms in (slower, faster)]
    if any(arm.saturated for arms in chosen for arm in arms):
        return None, None
    above, below = (np.stack([arm.ttft_sums[seed] for seed, arm in enumerate(arms)]) for arms in chosen)
    ratio, p = positive_ratio(above, below), positive_ratio_p(above, below, SMALLEST_LEAD)
    return ratio, None if np.isnan(p) else p if ratio.mean > SMALLEST_LEAD else 1.0


def _best_on_others(arms: Sequence[MeasuredArm], seed: int) -> MeasuredArm:
    """Return the arm of least TTFT on all seeds but this one, saturated arms last; on the only seed if there is one."""
    others = np.arange(len(arms[0].ttft_sums)) != seed
    return min(arms, key=lambda arm: (arm.saturated, float(arm.ttft_sums[others if others.any() else ~others].sum())))


def shown_together(leads: Sequence[Mapping[str, Any] | None]) -> list[bool]:
    """Return which of several leads, as in `summary.json`, are shown after Holm's correction for their number."""
    return holm([math.nan if lead is None or lead["p"] is None else lead["p"] for lead in leads])


def without_ratios(entries: Sequence[FamilyEntry], lead: Lead | None) -> tuple[list[FamilyEntry], Lead | None]:
    """Return the comparison without speedups and ratio of the lead, for a machine that was too noisy."""
    return [replace(entry, speedup=None) for entry in entries], lead and replace(
        lead, ratio=None, held_out=None, p=None
    )


def plain(entries: Sequence[FamilyEntry], lead: Lead | None) -> dict[str, Any]:
    """Return the comparison as an entry of `summary.json`."""
    ratios = {} if lead is None else {"ratio": lead.ratio, "held_out": lead.held_out}
    return {
        "entries": [asdict(entry) | {"speedup": entry.speedup and entry.speedup._asdict()} for entry in entries],
        "lead": lead
        and {
            **asdict(lead),
            **{name: ratio and ratio._asdict() for name, ratio in ratios.items()},
            "shown": lead.shown,
        },
    }


def ratio_of(slower: MeasuredArm, faster: MeasuredArm) -> Interval | None:
    """Return the mean TTFT of one arm ÷ that of another on the same requests; None where a queue grows."""
    if slower.saturated or faster.saturated:
        return None
    return positive_ratio(slower.ttft_sums, faster.ttft_sums)


def _entry(family: str, arm: MeasuredArm, reference: MeasuredArm | None) -> FamilyEntry:
    summary, sizes = arm.summary, arm.summary["bytes"]
    return FamilyEntry(
        family=family,
        arm=arm.name,
        ttft_mean_s=summary["ttft_s"]["mean"],
        ttft_mean_s_interval=summary["ttft_s_interval"]["mean"],
        token_hit_rate=summary["token_hit_rate"],
        any_position_share=summary["bounds"]["infinite_any_position_tokens"] / summary["tokens"]["prompt"],
        regret_points=summary["bounds"]["regret_points"],
        resident_bytes=sizes["kv_resident_mean"] + sizes["state_resident_mean"] + sizes["copied_mean"],
        speedup=None if reference is None or reference is arm else ratio_of(reference, arm),
    )


# ------------------------------------------------------------------------------
# Whether position-independent caching pays: its best arms compared with the best arm that keeps
# answers unchanged.
# ------------------------------------------------------------------------------

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
