"""A modelled retriever: which passages a question gets, and in which order they stand in its prompt."""

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
    """How often things are wanted.

    `documents`    shape (documents,), sums to 1.
    `passages`     shape (passages,), sums to 1 within each document.
    `document_of`  int64, shape (passages,).
    """

    documents: Floats
    passages: Floats
    document_of: Ints

    def weights(self, document: int, noise: float) -> Floats:
        """Probability that a question about `document` wants each passage most, shape (passages,).

        It comes from the own document with probability 1 − noise, else from the whole corpus; within a document, and
        among documents, by popularity.
        """
        at_large = noise * self.documents[self.document_of]
        at_home = (1 - noise) * (self.document_of == document)
        shares: Floats = (at_large + at_home) * self.passages
        return shares


def zipf(count: int, exponent: float, draw: np.random.Generator) -> Floats:
    """Shares proportional to rank^−exponent, summing to 1, with the ranks dealt at random; shape (count,)."""
    shares = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return draw.permutation(shares / shares.sum())


def popularity(sizes: Sequence[int], documents: float, passages: float, draw: np.random.Generator) -> Popularity:
    """Zipf shares with these two exponents, for documents of `sizes` passages."""
    among = zipf(len(sizes), documents, draw)
    within = [zipf(size, passages, draw) for size in sizes]
    return Popularity(among, np.concatenate(within), np.repeat(np.arange(len(sizes)), sizes))


def retrieve(weights: Floats, k: int, draw: np.random.Generator) -> Ints:
    """Draw k different passages, one after the other in proportion to `weights`; the first drawn ranks first.

    An exponential race does it at once: passage i arrives after Exp(1) / w_i, and the first k arrivals are the draw
    (Efraimidis and Spirakis 2006).
    """
    wanted = np.flatnonzero(weights)
    assert len(wanted) >= k, "as many passages as are asked for"
    times = draw.standard_exponential(len(wanted)) / weights[wanted]
    return wanted[np.argsort(times, kind="stable")[:k]]
