"""Divergence between a model's predictions under full recompute and under another way of computing the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Divergence:
    """One prompt's divergence from its reference, over the predictions of the same answer tokens.

    `kl`      mean of KL(reference ‖ other) over the predictions, nats.
    `top1`    share of predictions whose likeliest token is the same.
    `greedy`  whether greedy decoding gave the same tokens; None where nothing was decoded.
    """

    predictions: int
    kl: float
    top1: float
    greedy: bool | None = None


def divergence(reference: Logits, other: Logits, greedy: bool | None = None) -> Divergence:
    """Compare two [T, V] logits of one prompt, row t of both predicting after the same T tokens of text.

    Feed both arms the reference's tokens (teacher forcing), otherwise their predictions are for different texts.
    """
    kl, same = kl_rows(reference, other), top1_rows(reference, other)
    return Divergence(len(kl), float(kl.mean()), float(same.mean()), greedy)


def kl_rows(reference: Logits, other: Logits) -> NDArray[np.float64]:
    """Return KL(p ‖ q) = Σ p · (log p − log q) per row, nats, float64, shape [T]; p is the reference.

    Inputs are [T, V] logits of any float kind; the softmax is taken in float64 with the row's maximum subtracted.
    """
    _check(reference, other)
    return np.array([_kl(_log_softmax(p), _log_softmax(q)) for p, q in zip(reference, other, strict=True)])


def top1_rows(reference: Logits, other: Logits) -> NDArray[np.bool_]:
    """Return whether each row has its largest logit at the same index, shape [T]; ties count by the first index."""
    _check(reference, other)
    same: NDArray[np.bool_] = reference.argmax(axis=1) == other.argmax(axis=1)
    return same


def greedy_match(reference: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two greedy decodings are equal in all tokens."""
    return list(reference) == list(other)


def _log_softmax(row: Logits) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = row.astype(np.float64) - float(row.max())
    normaliser: np.float64 = np.log(np.exp(shifted).sum())
    return shifted - normaliser


def _kl(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> float:
    kl = float(np.exp(log_p) @ (log_p - log_q))
    assert math.isfinite(kl), "logits that a float32 holds have a finite divergence"
    return max(0.0, kl)  # KL is never negative (Gibbs), but rounding can make it so


def _check(reference: Logits, other: Logits) -> None:
    for name, logits in (("reference", reference), ("other", other)):
        if logits.ndim != 2 or not logits.size:
            raise ValueError(f"{name} logits have shape {logits.shape}, expected [tokens, vocabulary], both from 1 up")
        bad = ~np.isfinite(logits).all(axis=1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"{name} logits hold NaN or infinity, first in row {row}, expected finite numbers")
    if reference.shape != other.shape:
        raise ValueError(f"other logits have shape {other.shape}, expected {reference.shape} as the reference has")
