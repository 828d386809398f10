"""Modelled retriever: the passages of a question and their order in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ORDERS: dict[str, Callable[[Ints, np.random.Generator], Ints]] = {
    "shuffled": lambda ranked, draw: draw.permutation(ranked),
    "ranked": lambda ranked, draw: ranked,
    "fixed": lambda ranked, draw: np.sort(ranked),
}


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Popularity of documents, and of passages within each document.

    `documents`    shape (documents,), sums to 1.
    `passages`     shape (passages,), sums to 1 within each document.
    `document_of`  int64, shape (passages,).
    """

    documents: Floats
    passages: Floats
    document_of: Ints

    def weights(self, document: int, noise: float) -> Floats:
        """Return the probability that each passage ranks first for a question about `document`, shape (passages,).

        The passage comes from the question's document with probability 1 − noise, else from the whole corpus; documents
        and passages within a document are drawn by popularity.
        """
        from_corpus = noise * self.documents[self.document_of]
        from_document = (1 - noise) * (self.document_of == document)
        shares: Floats = (from_corpus + from_document) * self.passages
        return shares


def zipf(count: int, exponent: float, draw: np.random.Generator) -> Floats:
    """Return shares proportional to rank^−exponent, summing to 1, with random ranks; shape (count,)."""
    shares = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return draw.permutation(shares / shares.sum())


def popularity(sizes: Sequence[int], documents: float, passages: float, draw: np.random.Generator) -> Popularity:
    """Return Zipf shares with exponents `documents` and `passages`, for documents of `sizes` passages."""
    document_shares = zipf(len(sizes), documents, draw)
    passage_shares = [zipf(size, passages, draw) for size in sizes]
    return Popularity(document_shares, np.concatenate(passage_shares), np.repeat(np.arange(len(sizes)), sizes))


def retrieve(weights: Floats, k: int, draw: np.random.Generator) -> Ints:
    """Draw k different passages, one after the other in proportion to `weights`; the first drawn ranks first.

    An exponential race draws all k at once: passage i arrives after Exp(1) / w_i, and the first k arrivals are drawn
    (Efraimidis and Spirakis 2006).
    """
    candidates = np.flatnonzero(weights)
    assert len(candidates) >= k, "at least k passages with a positive weight"
    times = draw.standard_exponential(len(candidates)) / weights[candidates]
    return candidates[np.argsort(times, kind="stable")[:k]]
