"""One planner of marked, remembered and learned positions: a state is paid for with what it is expected to save.

Where may later prompts leave this one? At an *anchor*: a marked boundary, the point where this prompt has left an
earlier one, a cue (`cues`), or its end; and where none of those explained it, at depths at which earlier prompts were
left. What an anchor of a kind is worth is learned from the traffic, whether or not a state was placed there: prefixes
up to anchors are remembered by hash, and each prompt counts as a use of the deepest one that it begins with. The uses
of an anchor are those of its kind per anchor of its kind, one of each added to both.

Placed is the chain of anchors c_1 < c_2 < … behind the resume position c_0 that is worth most,

    sum over i of  (w(c_i) - w(c_{i-1})) · U(c_i) - price · (state bytes + KV bytes of a token · (c_i - c_{i-1})),

with U(c) the uses of all anchors at c and deeper, and w(c) the cost of c tokens, usually in FLOPs. A state is worth
what it saves beyond its neighbours, and is left out where a neighbour makes it worthless. Exact, O(A²) for A anchors.
A byte costs a quarter of what those of the states placed so far were expected to save, in the geometric mean: a few
very popular prefixes must not forbid all others.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanlab.core.cost import COST
from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, Floats, PrefillInfo
from spanlab.core.placement.cues import Cues, Run
from spanlab.core.placement.prefix_names import prefix_names
from spanlab.core.request import Tokens

Anchor = tuple[str | Run, ...]  # its kind: all that stands at its position, and whether an earlier prompt went so far
SHARE = 0.25
_REMEMBERED, _DEPTHS = 1 << 17, 32


@PLACEMENTS.register("planned", needs=(COST,))
def planned(*, facts: ArmFacts) -> Planner:
    """`planned`: states that are worth their bytes, at marked boundaries, branches, cues, ends and usual depths."""
    return Planner(facts, marks=True)


@PLACEMENTS.register("learned", needs=(COST,))
def learned(*, facts: ArmFacts) -> Planner:
    """`learned`: the same without marks, for traffic whose boundaries nobody names."""
    return Planner(facts, marks=False)


@dataclass(frozen=True, slots=True)
class Offers:
    """Where states could be put; arrays of shape (anchors + 1,), the first entry being the resume position.

    `positions`  increasing
    `work`       cost of so many tokens
    `uses`       expected, of a state at this position or deeper
    """

    positions: Floats
    work: Floats
    uses: Floats

    def worth(self, start: int, stop: int) -> float:
        """Work that a state at entry `stop` is expected to save beyond one at entry `start`."""
        return float((self.work[stop] - self.work[start]) * self.uses[stop])

    def chain(self, state_cost: float, token_cost: float) -> list[int]:
        """The entries that are worth most together, less what each state and the tokens up to it cost; increasing."""
        best, before = np.zeros(len(self.positions)), np.zeros(len(self.positions), dtype=np.intp)
        for stop in range(1, len(self.positions)):
            saved = (self.work[stop] - self.work[:stop]) * self.uses[stop]
            values = best[:stop] + saved - state_cost - token_cost * (self.positions[stop] - self.positions[:stop])
            before[stop] = values.argmax()
            best[stop] = values[before[stop]]
        at, chosen = int(best.argmax()), list[int]()
        while at:
            chosen.append(at)
            at = int(before[at])
        return chosen[::-1]


class Planner:
    """Learns what anchors of each kind are worth, and places the best chain of them."""

    def __init__(self, facts: ArmFacts, *, marks: bool) -> None:
        self._facts, self._marks, self._cost = facts, marks, facts.cost("flops")
        self._cues = Cues()
        self._remembered: OrderedDict[int, Anchor] = OrderedDict()
        self._anchors: Counter[Anchor] = Counter()
        self._uses: Counter[Anchor] = Counter()
        self._depths: deque[int] = deque(maxlen=_DEPTHS)  # at which prompts were left, unexplained
        self._new = self._unexplained = 0
        self._placed, self._logarithms = 0, 0.0  # of what the bytes of each were expected to save
        self._tokens: Tokens = np.empty(0, np.int32)
        self._names: list[int] = []  # of the prompt that is placed

    def observe(self, prefill: PrefillInfo) -> None:
        """Count a use of the deepest anchor that this prompt begins with, and learn where it left earlier ones."""
        self._tokens = prefill.request.tokens
        self._names = prefix_names(self._tokens, self._facts.unit)
        left = self._left(prefill)
        self._new += self._floor(left) <= prefill.resume
        if left < self._facts.unit:
            return
        deepest = self._floor(left) // self._facts.unit
        found = next((at for at in range(deepest, 0, -1) if self._names[at - 1] in self._remembered), 0)
        if found:
            self._uses[self._remembered[self._names[found - 1]]] += 1
        if found < deepest:
            self._unexplained += 1
            self._depths.append(self._floor(left))
        self._cues.parted(self._tokens, left, self._names[deepest - 1])

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """The best chain of this prompt's anchors."""
        anchors = self._find(prefill)
        uses = {position: (self._uses[kind] + 1) / (self._anchors[kind] + 1) for position, kind in anchors.items()}
        for position, kind in anchors.items():
            self._remember(self._names[position // self._facts.unit - 1], kind)
        if self._floor(self._left(prefill)) <= prefill.resume:
            self._add_usual_depths(prefill, uses)
        return self._choose(prefill.resume, uses) if uses else ()

    def _floor(self, position: int) -> int:
        return position // self._facts.unit * self._facts.unit

    def _left(self, prefill: PrefillInfo) -> int:
        """Where a prompt leaves the earlier ones; its last token is always computed."""
        return min(prefill.seen, prefill.prompt - 1)

    def _find(self, prefill: PrefillInfo) -> dict[int, Anchor]:
        """Anchors behind the resume position, by position on the grid; of several cues there, the best known."""
        names: defaultdict[int, list[str | Run]] = defaultdict(list)
        marks = sorted(set(map(self._floor, prefill.boundaries))) if self._marks else []
        for mark in marks:
            names[mark].append("boundary" if mark == marks[-1] else "inner boundary")
        names[self._floor(self._left(prefill))].append("branch")
        names[self._floor(prefill.prompt)].append("end")
        cues: dict[int, Run] = {}
        for position, run in self._cues.find(self._tokens, prefill.resume):
            cues.setdefault(self._floor(position), run)
        for position, run in cues.items():
            names[position].append(run)
        return {
            at: (*kind, "known" if at <= prefill.seen else "new") for at, kind in names.items() if at > prefill.resume
        }

    def _remember(self, name: int, kind: Anchor) -> None:
        self._remembered[name] = kind
        self._remembered.move_to_end(name)
        self._anchors[kind] += 1
        if len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)

    def _add_usual_depths(self, prefill: PrefillInfo, uses: dict[int, float]) -> None:
        """Spread the unexplained uses of a new prompt over the depths at which earlier ones were left."""
        share = min(1.0, (self._unexplained + 1) / (self._new + 1)) / max(1, len(self._depths))
        for depth in self._depths:
            if prefill.resume < depth <= prefill.prompt:
                uses[depth] = uses.get(depth, 0.0) + share

    def _choose(self, resume: int, uses: dict[int, float]) -> list[int]:
        facts, order = self._facts, sorted(uses)
        positions = np.array([resume, *order])
        behind = np.cumsum([uses[position] for position in reversed(order)])[::-1]
        offers = Offers(positions.astype(np.float64), self._cost(0, positions), np.concatenate([[0.0], behind]))
        price = self._price()
        chain = offers.chain(price * facts.state_bytes, price * facts.token_bytes)
        for start, stop in zip([0, *chain], chain, strict=False):
            num_bytes = facts.state_bytes + facts.token_bytes * float(positions[stop] - positions[start])
            self._placed += 1
            self._logarithms += math.log(offers.worth(start, stop) / num_bytes)
        return [order[at - 1] for at in chain]

    def _price(self) -> float:
        """What a byte must be expected to save."""
        return SHARE * math.exp(self._logarithms / self._placed) if self._placed else 0.0
