"""Measurements of the probe: points of its training, scores of its answers, norms of its transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval, percentile, positive_ratio, ratio, share

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SEEN = 1e-3  # singular values and norms up to here count as zero
KEPT = 0.1  # heads with a larger norm preserve a state across a span


@dataclass(frozen=True)
class TrainingPoint:
    """Means over the steps since the last point.

    `step`   number of training steps so far
    `read`   way in which the questions of these steps read the memory
    `steps`  number of steps in the mean
    `loss`   of the gold answers, nats
    """

    step: int
    read: str
    steps: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class StateError:
    """Relative error of the states that an arm composes in one layer, against those of the full view.

    `source`  the weights: trained, published, slow
    """

    source: str
    arm: str
    layer: int
    error: float


@dataclass(frozen=True)
class HeadNorm:
    """Norm of one head's transition, as means over spans of one length.

    `source`  the weights: trained, published, slow
    `norm`    spectral norm of A
    `decay`   γ, the factor of forgetting alone
    `rank`    singular values of A above SEEN
    """

    source: str
    layer: int
    head: int
    tokens: int
    norm: float
    decay: float
    rank: float


@dataclass(frozen=True)
class NormSummary:
    """All heads of one model at one length.

    `above_seen, above_kept`  shares of the heads whose norm is above SEEN, KEPT
    `rank_of_kept`            mean rank of the heads above KEPT; None without any
    """

    source: str
    tokens: int
    median: float
    p90: float
    largest: float
    above_seen: float
    above_kept: float
    decay: float
    rank_of_kept: float | None


@dataclass(frozen=True)
class Answers:
    """Answers of one arm.

    `correct`  [N, Q]
    `loss`     [N, Q]: minus the logarithm of the gold answer's probability, nats
    `updated`  [N, Q]: the key has more than one value
    `first`    [N, Q]: the key has one value, in the first document
    `nbytes`   bytes of the stored transitions of one document in all layers; None where none is stored
    """

    correct: Bools
    loss: Floats
    updated: Bools
    first: Bools
    nbytes: int | None


@dataclass(frozen=True)
class Score:
    """Accuracy and loss of one arm; 95 % intervals from resampled sequences.

    `updated, first`          accuracy on these questions alone; None where there are none
    `minus_full, minus_exact`  accuracy minus that of the reference, by sequence
    """

    arm: str
    accuracy: Interval
    updated: Interval | None
    first: Interval | None
    loss: Interval
    minus_full: Interval
    minus_exact: Interval
    nbytes: int | None


def scores(answers: Mapping[str, Answers], full: str, exact: str) -> list[Score]:
    """Return the score of every arm; the references `full` and `exact` are arms too."""
    return [_score(arm, arm_answers, answers[full], answers[exact]) for arm, arm_answers in answers.items()]


def _score(arm: str, answers: Answers, full: Answers, exact: Answers) -> Score:
    all_questions = np.ones_like(answers.correct)
    minus_full, minus_exact = (answers.correct.astype(float) - reference.correct for reference in (full, exact))
    return Score(
        arm,
        _accuracy(answers.correct, all_questions),
        _accuracy(answers.correct, answers.updated) if answers.updated.any() else None,
        _accuracy(answers.correct, answers.first) if answers.first.any() else None,
        positive_ratio(*_sums(answers.loss, all_questions)),
        ratio(*_sums(minus_full, all_questions)),
        ratio(*_sums(minus_exact, all_questions)),
        answers.nbytes,
    )


def _accuracy(correct: Bools, counted: Bools) -> Interval:
    return share(*_sums(correct, counted))


def _sums(values: NDArray[np.floating] | Bools, counted: Bools) -> tuple[Floats, Floats]:
    """Return sums over the counted questions, and numbers of these, by sequence: [1, N] each."""
    return (values * counted).sum(1, dtype=np.float64)[None], counted.sum(1, dtype=np.float64)[None]


def summarise(norms: Sequence[HeadNorm]) -> list[NormSummary]:
    """Return summaries of the heads by source and length, in order of measurement."""
    by_source: dict[tuple[str, int], list[HeadNorm]] = {}
    for head in norms:
        by_source.setdefault((head.source, head.tokens), []).append(head)
    return [_summary(*key, heads) for key, heads in by_source.items()]


def _summary(source: str, tokens: int, heads: list[HeadNorm]) -> NormSummary:
    norms = np.array([head.norm for head in heads])
    ranks = [head.rank for head in heads if head.norm > KEPT]
    return NormSummary(
        source,
        tokens,
        float(np.median(norms)),
        percentile(norms, 90),
        float(norms.max()),
        float((norms > SEEN).mean()),
        float((norms > KEPT).mean()),
        float(np.median([head.decay for head in heads])),
        float(np.mean(ranks)) if ranks else None,
    )
