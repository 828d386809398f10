"""One budget of states for all documents, split by the marginal saving of the next state of each.

Each group of prompts (a document, a session) has a separate distribution of match depths. The expected remaining work
with m states is convex in m (`optimal`), so that the savings of a document's states decrease. The greatest savings of
all documents together are therefore the optimal split, which a greedy choice finds. The least of them is the price of a
state. A document with one prompt has no depths yet. It gets the states that pay this price for one document of average
weight with the depths of all documents. Cost: O(K·M) for a document with K depths and prompts since the last split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spanlab.core.budget import UNLIMITED
from spanlab.core.cost import COST, Cost
from spanlab.core.optimal import Placement, place
from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, Floats, PrefillInfo
from spanlab.core.placement.rules import balanced_positions

EVERY, DECAY = 16, 0.998  # observations between two splits; factor on the weight of older observations, per observation
_HEAVIEST = 1e100


def split(savings: Mapping[int, Floats], budget: int) -> tuple[dict[int, int], float]:
    """Return the states of each document, and the price of a state: the least granted saving, 0 where all are granted.

    `savings`  of the first, the second, … state of each document, not increasing
    """
    offers = [(float(saved), name) for name, marginal in savings.items() for saved in marginal if saved > 0.0]
    offers.sort(key=lambda offer: -offer[0])
    granted = dict.fromkeys(savings, 0)
    for _, name in offers[:budget]:
        granted[name] += 1
    return granted, offers[budget - 1][0] if 0 < budget < len(offers) else 0.0


class Depths:
    """Weights of match depths on the grid, in the unit of the weights passed to `add`."""

    def __init__(self) -> None:
        self._mass: dict[int, float] = {}

    def add(self, depth: int, weight: float) -> None:
        """Add an observation."""
        self._mass[depth] = self._mass.get(depth, 0.0) + weight

    def scale(self, factor: float) -> None:
        """Multiply all weights by a factor."""
        self._mass = {depth: mass * factor for depth, mass in self._mass.items()}

    def solve(self, count: int, cost: Cost) -> Placement:
        """Return the optimal positions of up to `count` states."""
        depths = np.array(sorted(self._mass), dtype=np.int64)
        mass = np.array([self._mass[depth] for depth in depths.tolist()])
        return place(depths, mass, count, cost(0, depths))


@PLACEMENTS.register("dp_shared", needs=(COST,))
class SharedBudget:
    """`dp_shared`: the optimum for each document's match depths, weighted by cost, within one budget for all documents.

    `count`  maximum states of one document
    `share`  share of the store's memory for the states of all documents
    """

    def __init__(self, count: int, share: float = 0.25, *, facts: ArmFacts) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"placement.options.share={share}: expected a share above 0 and up to 1")
        self._count, self._share, self._facts, self._cost = count, share, facts, facts.cost("flops")
        self._weight, self._observed, self._memory = 1.0, 0, 0
        self._all, self._documents = Depths(), dict[int, Depths]()
        self._savings: dict[int, Floats] = {}
        self._changed: set[int] = set()
        self._granted: dict[int, int] = {}
        self._default: Placement | None = None

    def observe(self, prefill: PrefillInfo) -> None:
        """Count a match depth for its document and for all documents, and split again when due."""
        self._memory = max(self._memory, prefill.free_bytes())
        depth = min(prefill.seen, prefill.prompt - 1) // self._facts.grid * self._facts.grid
        group = prefill.request.group_id
        document = self._documents.setdefault(group, Depths())
        if depth:
            document.add(depth, self._weight)
            self._all.add(depth, self._weight)
            self._changed.add(group)
        self._observed += 1
        self._age()
        if self._observed % EVERY == 0 and self._changed:
            self._split()

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return the positions of a document's states; for a new document, by the depths of all."""
        group = prefill.request.group_id
        if group in self._granted:
            states = self._granted[group]
            return self._documents[group].solve(states, self._cost).positions_within(prefill.prompt) if states else ()
        if self._default is None:
            return balanced_positions(prefill.prompt, self._count)
        return self._default.positions_within(prefill.prompt)

    def _age(self) -> None:
        """Increase the weight of later observations, instead of decreasing all earlier weights each time."""
        self._weight /= DECAY
        if self._weight > _HEAVIEST:
            for depths in (self._all, *self._documents.values()):
                depths.scale(1.0 / self._weight)
            self._savings = {group: savings / self._weight for group, savings in self._savings.items()}
            self._weight = 1.0

    def _split(self) -> None:
        for group in self._changed:
            self._savings[group] = -np.diff(self._documents[group].solve(self._count, self._cost).cost)
        self._changed.clear()
        budget = UNLIMITED if self._memory >= UNLIMITED else int(self._share * self._memory) // self._facts.state_bytes
        self._granted, price = split(self._savings, budget)
        usual = -np.diff(self._all.solve(self._count, self._cost).cost) / len(self._savings)
        self._default = self._all.solve(max(1, int((usual >= price).sum())), self._cost)
