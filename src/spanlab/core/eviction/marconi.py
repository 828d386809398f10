"""Marconi's score: recency of the last use plus weighted FLOPs saved per byte.

Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025, arXiv 2411.19379; from its formula. The
paper tunes alpha on-line, as `marconi_tuned` does. There an entry is a state with the KV of its edge; here states and
edges have separate scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from spanlab.checks import not_negative
from spanlab.core.cost import COST
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.lists import both
from spanlab.core.eviction_queue import Key


@EVICTION_ORDERS.register("marconi", needs=(COST,))
def marconi(facts: EvictionFacts, alpha: float = 1.0) -> EvictionOrder:
    """The lowest recency + alpha · FLOPs saved per byte, both scaled to [0, 1] among the candidates."""
    not_negative("eviction_options.alpha", alpha)
    return both(facts, lambda kind: Marconi(kind, alpha))


@EVICTION_ORDERS.register("segment_length", needs=(COST,))
def segment_length(facts: EvictionFacts, alpha: float = 1.0) -> EvictionOrder:
    """As `marconi`, with the number of tokens to recompute in place of FLOPs per byte.

    For a state these are the tokens since the state above. Source: a fork of SGLang (abdelfattah-lab/sglang, pull
    request 3).
    """
    not_negative("eviction_options.alpha", alpha)
    return both(replace(facts, default_cost="tokens"), lambda kind: Marconi(replace(kind, num_bytes=_unit_size), alpha))


def _unit_size(item: object) -> int:
    """A size of one for every entry, so that work is not divided by bytes."""
    return 1


class Marconi(Generic[RankedT]):
    """Entries by a score that depends on all candidates; each eviction scores all of them.

    `alpha`  weight of the FLOPs; 0 is LRU
    """

    def __init__(self, kind: Kind[RankedT], alpha: float) -> None:
        self.kind, self.alpha = kind, alpha
        self._free: dict[RankedT, None] = {}

    def add(self, items: Sequence[RankedT]) -> None:
        self._free.update(dict.fromkeys(items))

    def used(self, items: Iterable[RankedT]) -> None:
        """Do nothing: the score reads the last use from the entry."""

    def renewed(self, items: Iterable[RankedT]) -> None:
        """Do nothing: the score reads the last use from the entry."""

    def offer(self, item: RankedT) -> None:
        if self.kind.may_leave(item):
            self._free[item] = None

    def split(self, upper: RankedT, lower: RankedT) -> None:
        """Do nothing: the upper node is offered when the lower one is removed."""

    def removed(self, item: RankedT) -> None:
        self._free.pop(item, None)

    def lowest(self) -> tuple[Key, RankedT] | None:
        candidates = [item for item in self._free if self.kind.may_leave(item)]
        self._free = dict.fromkeys(candidates)
        if not candidates:
            return None
        scores = self._scores(candidates)
        score, _, item = min(zip(scores.tolist(), [item.serial for item in candidates], candidates, strict=True))
        return (score, item.serial), item

    def _scores(self, items: list[RankedT]) -> NDArray[np.float64]:
        used = np.array([item.used for item in items], dtype=np.float64)
        saved = np.array([self.kind.work(item) / max(1, self.kind.num_bytes(item)) for item in items])
        return _scaled(1.0 / (used.max() - used + 1.0)) + self.alpha * _scaled(saved)


def _scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale values to [0, 1]; 0 where all are equal."""
    width = np.ptp(values)
    return (values - values.min()) / width if width else np.zeros_like(values)
