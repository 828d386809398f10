"""Every arm's answers and divergences as one row each, beside the floor of full recompute against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.analysis.answers import best, exact_match, stated, token_f1
from spanlab.analysis.divergence import Divergence
from spanlab.analysis.intervals import McNemar, bootstrap_interval, mcnemar, share_interval
from spanlab.stats import Interval


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What one arm did with the prompts of a study, in their order.

    `answers`      its texts; empty where accuracy is not asked for (random weights).
    `divergences`  from full recompute (M0), one per prompt; empty where none were taken.
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
    """One arm of the table; None stands for what was not measured. `floor` is M0 against M0, the same in every row."""

    arm: str
    n: int
    accuracy: Accuracy | None
    agreement: Agreement | None
    floor: Agreement | None


def arm_rows(
    arms: Sequence[ArmResult], golds: Sequence[Sequence[str]], floor: Sequence[Divergence], reference: str = "M0"
) -> list[ArmRow]:
    """One row per arm, in the order given.

    `golds`      the prompts' gold answers; a prompt may have several.
    `floor`      divergences of a second full recompute from the first: what the device alone changes; may be empty.
    `reference`  the arm that McNemar's test compares with.
    """
    below = _agreement(floor)
    for arm in arms:
        _check(arm, len(golds))
    right = next((_right(arm, golds) for arm in arms if arm.arm == reference and arm.answers), None)
    if right is None and any(arm.answers for arm in arms):
        raise ValueError(f"reference={reference}: expected an arm with answers among {[arm.arm for arm in arms]}")
    return [
        ArmRow(arm.arm, len(golds), _accuracy(arm, golds, right), _agreement(arm.divergences), below) for arm in arms
    ]


def _accuracy(arm: ArmResult, golds: Sequence[Sequence[str]], reference: list[bool] | None) -> Accuracy | None:
    if not arm.answers or reference is None:
        return None
    pairs = list(zip(arm.answers, golds, strict=True))
    exact = sum(int(best(exact_match, answer, gold)) for answer, gold in pairs)
    right = _right(arm, golds)
    return Accuracy(
        exact=share_interval(exact, len(pairs)),
        stated=share_interval(sum(right), len(pairs)),
        f1=bootstrap_interval([best(token_f1, answer, gold) for answer, gold in pairs]),
        against_reference=mcnemar(reference, right),
    )


def _right(arm: ArmResult, golds: Sequence[Sequence[str]]) -> list[bool]:
    return [best(stated, answer, gold) == 1 for answer, gold in zip(arm.answers, golds, strict=True)]


def _agreement(divergences: Sequence[Divergence]) -> Agreement | None:
    if not divergences:
        return None
    decoded = [found.greedy for found in divergences if found.greedy is not None]
    return Agreement(
        kl=bootstrap_interval([found.kl for found in divergences]),
        top1=bootstrap_interval([found.top1 for found in divergences]),
        greedy=share_interval(sum(decoded), len(decoded)) if len(decoded) == len(divergences) else None,
    )


def _check(arm: ArmResult, prompts: int) -> None:
    for name, values in (("answers", arm.answers), ("divergences", arm.divergences)):
        if values and len(values) != prompts:
            raise ValueError(f"{arm.arm}.{name}: {len(values)} of them, expected one for each of {prompts} prompts")
