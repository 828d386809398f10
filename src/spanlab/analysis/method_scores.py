"""What each arm's answers are worth, paired by question: loss of the gold answer, benefit of the context, agreement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.clustered import POSITIVE, SHARE, Floats, Groups, Kind, mean_interval, ratio_interval, separated
from spanlab.stats import Interval

Entry = dict[str, Any]


@dataclass(frozen=True)
class ArmAnswers:
    """One arm's answers to the questions of a study, in one order for all arms; arrays of shape (questions,).

    `ttft_s`      time to first token, seconds
    `prompt`      prompt tokens
    `computed`    prompt tokens that were computed
    `scores`      of the gold answer, by name, means over its tokens: `nll`, `kl`, `top1`; empty where not scored
    `right`       by name: of the answer that the arm wrote `exact`, `f1`, `choice`; where answers are scored
                  `likeliest`, whether the right option is the likeliest; NaN where there are no options
    `peak_bytes`  most bytes that the cache held
    """

    arm: str
    family: str
    ttft_s: Floats
    prompt: NDArray[np.int64]
    computed: NDArray[np.int64]
    peak_bytes: int
    scores: Mapping[str, Floats] = field(default_factory=dict)
    right: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """What arms are compared with.

    `baseline`  full recompute of the whole prompt
    `without`   full recompute without passages; None where no arm has such prompts
    `floor`     the baseline once more, in other chunks
    `groups`    the document of each question
    """

    baseline: ArmAnswers
    without: ArmAnswers | None
    floor: ArmAnswers
    groups: Groups

    def shown(self, change: Interval) -> bool:
        """Whether a change of the gold loss is one: its interval leaves zero out, and it exceeds all of the floor's."""
        noise = np.abs(self.floor.scores["nll"] - self.baseline.scores["nll"]).max()
        return separated(change) and abs(change.mean) > float(noise)


def method_entry(arm: ArmAnswers, beside: Compared) -> Entry:
    """Means of one arm with 95 % intervals as {mean, low, high}; None where a measure does not apply.

    `gold_loss_change`  gold loss minus the baseline's, question by question, and whether that is `shown`; None of the
                        baseline itself
    `speedup`           summed TTFT of the baseline ÷ the arm's, beside `bound`: the ratio of the tokens they computed
    """
    mean = partial(_known, groups=beside.groups)
    change = None if arm is beside.baseline or not arm.scores else _change(arm, beside.baseline, beside.groups)
    speedup = None if arm is beside.baseline else _speedup(arm, beside)
    return {
        "family": arm.family,
        "questions": len(arm.ttft_s),
        "ttft_s": mean(arm.ttft_s),
        "computed_tokens": mean(arm.computed.astype(np.float64)),
        "bytes": Interval(float(arm.peak_bytes), None, None)._asdict(),
        "gold_loss": mean(arm.scores.get("nll")),
        "benefit_kept": _dict(benefit_kept(arm, beside)),
        "kl": mean(arm.scores.get("kl")),
        "top1": mean(arm.scores.get("top1"), kind=SHARE),
        "gold_loss_change": _dict(change),
        "shown": None if change is None else beside.shown(change),
        "speedup": _dict(speedup),
        "bound": float(beside.baseline.computed.sum() / arm.computed.sum()),
        **{name: mean(arm.right.get(name), kind=SHARE) for name in ("exact", "f1", "choice", "likeliest")},
    }


def benefit_kept(arm: ArmAnswers, beside: Compared) -> Interval | None:
    """Share of the context's benefit that an arm keeps: (loss without − its loss) ÷ (loss without − loss in full view).

    A ratio of means over the same questions. None without an arm without passages, and where the interval of the
    benefit itself does not leave zero out: a share of nothing says nothing.
    """
    if beside.without is None or not arm.scores:
        return None
    without = beside.without.scores["nll"]
    benefit = without - beside.baseline.scores["nll"]
    if not separated(mean_interval(benefit, beside.groups)):
        return None
    return ratio_interval(without - arm.scores["nll"], benefit, beside.groups)


def loss_by(arm: ArmAnswers, bucket: NDArray[np.str_], groups: Groups) -> dict[str, dict[str, float | None]]:
    """Gold loss of the questions of each bucket, in the order of the buckets' names."""
    return {
        str(name): mean_interval(arm.scores["nll"][bucket == name], groups[bucket == name], POSITIVE)._asdict()
        for name in np.unique(bucket)
    }


def floor_entry(beside: Compared) -> Entry:
    """How far the baseline's own numerics move its scores, as in `method_entry`; nothing where it is not scored."""
    floor = beside.floor
    if not floor.scores:
        return {}
    change = _change(floor, beside.baseline, beside.groups)
    return {
        "gold_loss": _known(floor.scores["nll"], beside.groups),
        "kl": _known(floor.scores["kl"], beside.groups),
        "top1": _known(floor.scores["top1"], beside.groups, SHARE),
        "gold_loss_change": change._asdict(),
    }


def pair_changes(arms: list[ArmAnswers], beside: Compared) -> list[Entry]:
    """Gold loss of the second arm minus that of the first, for every pair, and whether the difference is shown."""
    found = []
    for first, second in combinations(arms, 2):
        change = _change(second, first, beside.groups)
        found.append({"first": first.arm, "second": second.arm, **change._asdict(), "shown": beside.shown(change)})
    return found


def _change(arm: ArmAnswers, other: ArmAnswers, groups: Groups) -> Interval:
    return mean_interval(arm.scores["nll"] - other.scores["nll"], groups)


def _speedup(arm: ArmAnswers, beside: Compared) -> Interval:
    return ratio_interval(beside.baseline.ttft_s, arm.ttft_s, beside.groups, POSITIVE)


def _known(values: Floats | None, groups: Groups, kind: Kind = POSITIVE) -> dict[str, float | None] | None:
    """Mean of what is known of each question; None where nothing is."""
    if values is None or np.isnan(values).all():
        return None
    known = ~np.isnan(values)
    return mean_interval(values[known], groups[known], kind)._asdict()


def _dict(found: Interval | None) -> dict[str, float | None] | None:
    return None if found is None else found._asdict()
