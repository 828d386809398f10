"""Data of the analysis `methods`: scores, benefits and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.report.table import Ends
from spanlab.stats import (
    POSITIVE,
    SHARE,
    Floats,
    Groups,
    Interval,
    Kind,
    interval_of_ratio,
    mean_interval,
    separated,
)

# ------------------------------------------------------------------------------
# Quality of each arm's answers, paired by question: gold loss, benefit of the context,
# agreement.
# ------------------------------------------------------------------------------

MethodScore = dict[str, Any]


@dataclass(frozen=True)
class ArmAnswers:
    """One arm's answers to the questions of a study, in one order for all arms; arrays of shape
    (questions,).

    `ttft_s`      time to first token, seconds
    `prompt`      prompt tokens
    `computed`    computed prompt tokens
    `scores`      of the gold answer, by name, means over its tokens: `nll`, `kl`, `top1`; empty
                  where not scored
    `right`       by name: `exact`, `f1` and `choice` of the answer that the arm generated; where
                  answers are scored, `likeliest`: whether the right option is the likeliest; NaN
                  where there are no options
    `peak_bytes`  largest number of bytes in the cache
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
class References:
    """The references with which arms are compared.

    `baseline`  full recompute of the whole prompt
    `without`   full recompute without passages; None where no arm has such prompts
    `floor`     a second run of the baseline, in other chunks
    `groups`    the document of each question
    `plain_s`   time to first token of the baseline's prompts in plain transformers, seconds; None
                where they did not run there
    """

    baseline: ArmAnswers
    without: ArmAnswers | None
    floor: ArmAnswers
    groups: Groups
    plain_s: Floats | None = None

    def shown(self, change: Interval) -> bool:
        """Return whether a change of gold loss is shown: its interval excludes zero, and its mean
        exceeds the floor."""
        noise = np.abs(self.floor.scores["nll"] - self.baseline.scores["nll"]).max()
        return separated(change) and abs(change.mean) > float(noise)


def method_entry(arm: ArmAnswers, references: References) -> MethodScore:
    """Return means of one arm with 95 % intervals as {mean, low, high}; None where a measure does
    not apply.

    `gold_loss_change`  gold loss minus the baseline's, question by question, and whether that is
                        `shown`; None for the baseline itself
    `speedup`           summed TTFT of the baseline ÷ the arm's; `bound` is the ratio of the tokens
                        that they computed
    `over_plain`        summed TTFT in plain transformers, of which `plain_s` is the mean, ÷ the
                        arm's; both None for an arm whose prompts have other lengths
    """
    mean = partial(_mean_of_known, groups=references.groups)
    change = (
        None
        if arm is references.baseline or not arm.scores
        else _change(arm, references.baseline, references.groups)
    )
    speedup = (
        None if arm is references.baseline else _ratio(references.baseline.ttft_s, arm, references)
    )
    benefit = benefit_kept(arm, references)
    # an arm that leaves out passages serves other prompts
    is_same = np.array_equal(arm.prompt, references.baseline.prompt)
    plain = references.plain_s if is_same else None
    over_plain = None if plain is None else _ratio(plain, arm, references)
    return {
        "family": arm.family,
        "questions": len(arm.ttft_s),
        "ttft_s": mean(arm.ttft_s),
        "computed_tokens": mean(arm.computed.astype(np.float64)),
        "bytes": Interval(float(arm.peak_bytes), None, None)._asdict(),
        "gold_loss": mean(arm.scores.get("nll")),
        "benefit_kept": benefit and benefit._asdict(),
        "kl": mean(arm.scores.get("kl")),
        "top1": mean(arm.scores.get("top1"), kind=SHARE),
        "gold_loss_change": change and change._asdict(),
        "shown": None if change is None else references.shown(change),
        "speedup": speedup and speedup._asdict(),
        "plain_s": mean(plain),
        "over_plain": over_plain and over_plain._asdict(),
        "bound": float(references.baseline.computed.sum() / arm.computed.sum()),
        **{
            name: mean(arm.right.get(name), kind=SHARE)
            for name in ("exact", "f1", "choice", "likeliest")
        },
    }


def benefit_kept(arm: ArmAnswers, references: References) -> Interval | None:
    """Return the share of the context's benefit that an arm keeps: (L₀ − L) ÷ (L₀ − L*).

    L₀ is the gold loss without passages, L the arm's, L* that of the baseline; means are over the
    same questions. None where no arm has prompts without passages, and where the interval of the
    benefit L₀ − L* includes zero.
    """
    if references.without is None or not arm.scores:
        return None
    without = references.without.scores["nll"]
    benefit = without - references.baseline.scores["nll"]
    if not separated(mean_interval(benefit, references.groups)):
        return None
    return interval_of_ratio(without - arm.scores["nll"], benefit, references.groups)


def loss_by(
    arm: ArmAnswers, bucket: NDArray[np.str_], groups: Groups
) -> dict[str, dict[str, float | None]]:
    """Return the gold loss of the questions of each bucket, in order of the bucket names."""
    return {
        str(name): mean_interval(
            arm.scores["nll"][bucket == name], groups[bucket == name], POSITIVE
        )._asdict()
        for name in np.unique(bucket)
    }


def floor_entry(references: References) -> MethodScore:
    """Return the scores of the noise floor, as in `method_entry`; empty where answers are not
    scored."""
    floor = references.floor
    if not floor.scores:
        return {}
    change = _change(floor, references.baseline, references.groups)
    return {
        "gold_loss": _mean_of_known(floor.scores["nll"], references.groups),
        "kl": _mean_of_known(floor.scores["kl"], references.groups),
        "top1": _mean_of_known(floor.scores["top1"], references.groups, SHARE),
        "gold_loss_change": change._asdict(),
    }


def pair_changes(arms: list[ArmAnswers], references: References) -> list[MethodScore]:
    """Return the gold loss of the second arm minus that of the first for every pair, and whether it
    is shown."""
    entries = []
    for first, second in combinations(arms, 2):
        change = _change(second, first, references.groups)
        entries.append(
            {
                "first": first.arm,
                "second": second.arm,
                **change._asdict(),
                "shown": references.shown(change),
            }
        )
    return entries


def _change(arm: ArmAnswers, other: ArmAnswers, groups: Groups) -> Interval:
    return mean_interval(arm.scores["nll"] - other.scores["nll"], groups)


def _ratio(ttft_s: Floats, arm: ArmAnswers, references: References) -> Interval:
    return interval_of_ratio(ttft_s, arm.ttft_s, references.groups, POSITIVE)


def _mean_of_known(
    values: Floats | None, groups: Groups, kind: Kind = POSITIVE
) -> dict[str, float | None] | None:
    """Return the mean over the questions with a value; None where none has one."""
    if values is None or np.isnan(values).all():
        return None
    defined = ~np.isnan(values)
    return mean_interval(values[defined], groups[defined], kind)._asdict()


# ------------------------------------------------------------------------------
# Input of the tables and figures of the analysis `methods`.
# ------------------------------------------------------------------------------

MethodEntry = Mapping[str, Any]
Line = list[tuple[str, MethodEntry]]
UNREPAIRED = "pic"  # reuse without repair: the start of every line of budgets


@dataclass(frozen=True)
class MethodData:
    """Scores by arm.

    `floor`      entry of the second run of the baseline, with prompts in other chunks
    `baseline`   arm that recomputes everything
    `without`    arm without passages; None where there is none
    `gold_only`  arm with the gold passage alone; None where there is none
    `footer`     the provenance line under every figure
    """

    entries: Mapping[str, MethodEntry]
    floor: MethodEntry
    baseline: str
    without: str | None
    gold_only: str | None
    footer: str

    @property
    def views(self) -> tuple[str, ...]:
        """The arms that are no methods of reuse: the baseline, and arms with other prompts."""
        return tuple(
            name
            for name in (self.baseline, self.without, self.gold_only)
            if name is not None and name in self.entries
        )

    @property
    def methods(self) -> dict[str, MethodEntry]:
        """Entries of the arms that are methods of reuse."""
        return {name: entry for name, entry in self.entries.items() if name not in self.views}


def ends(estimate: Mapping[str, float | None]) -> Ends | None:
    """Return (low, high) of {mean, low, high}, or None where either is missing."""
    low, high = estimate["low"], estimate["high"]
    return None if low is None or high is None else (low, high)


def budgets(methods: dict[str, MethodEntry]) -> dict[str, Line]:
    """Group arms by method, fewest computed tokens first: lego_link_4 and lego_link_16 are budgets
    of one method."""
    named = sorted((name.rpartition("_"), entry) for name, entry in methods.items())
    lines: dict[str, Line] = {}
    for method, group in groupby(
        (item for item in named if item[0][2].isdigit()), key=lambda item: item[0][0]
    ):
        line = [(budget, entry) for (_, _, budget), entry in group]
        if len(line) > 1:
            lines[method] = sorted(line, key=lambda item: item[1]["computed_tokens"]["mean"])
    return lines
