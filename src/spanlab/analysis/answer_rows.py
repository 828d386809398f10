"""Answers and divergences of each arm as one row, with the noise floor of full recompute against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanlab.analysis.answers import best_score, exact_match, stated, token_f1
from spanlab.analysis.clustered import POSITIVE, SHARE, Kind, mean_interval
from spanlab.analysis.divergence import Divergence
from spanlab.analysis.intervals import McNemar, mcnemar, share_interval
from spanlab.stats import Interval


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Results of one arm for the prompts of a study, in their order.

    `answers`      generated texts; empty where accuracy is not measured (random weights).
    `divergences`  from full recompute (M0), one per prompt; empty where none were measured.
    """

    arm: str
    answers: tuple[str, ...] = ()
    divergences: tuple[Divergence, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Closeness to full recompute: means over prompts with 95 % bootstrap intervals; KL in nats per prediction."""

    kl: Interval
    top1: Interval
    greedy: Interval | None  # None unless every prompt was decoded


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of right answers with exact 95 % intervals, mean token F1, and the test against the reference arm."""

    exact: Interval
    stated: Interval
    f1: Interval
    against_reference: McNemar  # on `stated`; first is the reference arm


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm of the table; None marks an unmeasured value. `floor` is M0 against M0, the same in every row."""

    arm: str
    n: int
    accuracy: Accuracy | None
    agreement: Agreement | None
    floor: Agreement | None


def arm_rows(
    arms: Sequence[ArmResult], golds: Sequence[Sequence[str]], floor: Sequence[Divergence], reference: str = "M0"
) -> list[ArmRow]:
    """Return one row per arm, in the order given.

    `golds`      the prompts' gold answers; a prompt may have several.
    `floor`      divergences of a second full recompute from the first: noise of the device alone; may be empty.
    `reference`  the arm that McNemar's test compares with.
    """
    floor_agreement = _agreement(floor)
    for arm in arms:
        _check_lengths(arm, len(golds))
    reference_correct = next(
        (_correct_answers(arm, golds) for arm in arms if arm.arm == reference and arm.answers), None
    )
    if reference_correct is None and any(arm.answers for arm in arms):
        raise ValueError(f"reference={reference}: expected an arm with answers among {[arm.arm for arm in arms]}")
    return [
        ArmRow(
            arm.arm, len(golds), _accuracy(arm, golds, reference_correct), _agreement(arm.divergences), floor_agreement
        )
        for arm in arms
    ]


def _accuracy(arm: ArmResult, golds: Sequence[Sequence[str]], reference: list[bool] | None) -> Accuracy | None:
    if not arm.answers or reference is None:
        return None
    pairs = list(zip(arm.answers, golds, strict=True))
    exact = sum(int(best_score(exact_match, answer, gold)) for answer, gold in pairs)
    correct = _correct_answers(arm, golds)
    return Accuracy(
        exact=share_interval(exact, len(pairs)),
        stated=share_interval(sum(correct), len(pairs)),
        f1=_mean([best_score(token_f1, answer, gold) for answer, gold in pairs], SHARE),
        against_reference=mcnemar(reference, correct),
    )


def _correct_answers(arm: ArmResult, golds: Sequence[Sequence[str]]) -> list[bool]:
    return [best_score(stated, answer, gold) == 1 for answer, gold in zip(arm.answers, golds, strict=True)]


def _agreement(divergences: Sequence[Divergence]) -> Agreement | None:
    if not divergences:
        return None
    decoded = [divergence.greedy for divergence in divergences if divergence.greedy is not None]
    return Agreement(
        kl=_mean([divergence.kl for divergence in divergences], POSITIVE),
        top1=_mean([divergence.top1 for divergence in divergences], SHARE),
        greedy=share_interval(sum(decoded), len(decoded)) if len(decoded) == len(divergences) else None,
    )


def _mean(values: Sequence[float], kind: Kind) -> Interval:
    """Return the mean over prompts with its 95 % interval; a prompt is one cluster."""
    sample = np.array(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        raise ValueError(f"values={values}: expected finite numbers")
    return mean_interval(sample, np.arange(len(sample)), kind)


def _check_lengths(arm: ArmResult, prompts: int) -> None:
    for name, values in (("answers", arm.answers), ("divergences", arm.divergences)):
        if values and len(values) != prompts:
            raise ValueError(f"{arm.arm}.{name}: {len(values)} of them, expected one for each of {prompts} prompts")
