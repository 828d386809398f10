"""A planner of marked, remembered and learned positions: it places the states with the highest expected net saving.

Later prompts may diverge from a prompt at an *anchor*: a marked boundary, the point where this prompt diverged from an
earlier one, a cue (`cues`), or its end. Divergence that no anchor explains is expected at the depths of earlier such
cases. The uses of each kind of anchor are learned from the traffic, whether or not a state was placed there: prefixes
up to anchors are stored by hash, and each prompt counts as a use of its deepest known anchor. The expected uses of an
anchor are the uses of its kind per anchor of its kind, with one added to both.

The planner places the chain of anchors c_1 < c_2 < … after the resume position c_0 with the highest value

    sum over i of  (w(c_i) - w(c_{i-1})) · U(c_i) - price · (state bytes + KV bytes of a token · (c_i - c_{i-1})),

with U(c) the uses of all anchors at c and deeper, and w(c) the cost of c tokens, by default in FLOPs. The value of a
state is its saving beyond its neighbours; a state whose value does not cover its price is omitted. Exact, O(A²) for A
anchors. The price of a byte is a quarter of the geometric mean of the expected saving per byte of the states placed so
far. The geometric mean keeps a few very popular prefixes from excluding all others.
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

Anchor = tuple[str | Run, ...]  # kind of an anchor: all reasons at its position, and "known" or "new"
SHARE = 0.25
_REMEMBERED, _DEPTHS = 1 << 17, 32


@PLACEMENTS.register("planned", needs=(COST,))
def planned(*, facts: ArmFacts) -> Planner:
    """`planned`: states that save more than their price, at marks, branches, cues, ends and frequent depths."""
    return Planner(facts, marks=True)


@PLACEMENTS.register("learned", needs=(COST,))
def learned(*, facts: ArmFacts) -> Planner:
    """`learned`: as `planned` without marks, for traffic without marked boundaries."""
    return Planner(facts, marks=False)


@dataclass(frozen=True, slots=True)
class Offers:
    """Candidate positions of states; arrays of shape (anchors + 1,), whose first entry is the resume position.

    `positions`  increasing
    `work`       cost of computing the tokens up to each position
    `uses`       expected uses of a state at this position or deeper
    """

    positions: Floats
    work: Floats
    uses: Floats

    def saving(self, start: int, stop: int) -> float:
        """Return the expected work that a state at entry `stop` saves beyond one at entry `start`."""
        return float((self.work[stop] - self.work[start]) * self.uses[stop])

    def chain(self, state_cost: float, token_cost: float) -> list[int]:
        """Return the entries, increasing, with the highest total saving less the price of states and tokens."""
        best, before = np.zeros(len(self.positions)), np.zeros(len(self.positions), dtype=np.intp)
        for stop in range(1, len(self.positions)):
            saved = (self.work[stop] - self.work[:stop]) * self.uses[stop]
            values = best[:stop] + saved - state_cost - token_cost * (self.positions[stop] - self.positions[:stop])
            before[stop] = values.argmax()
            best[stop] = values[before[stop]]
        entry, chosen = int(best.argmax()), list[int]()
        while entry:
            chosen.append(entry)
            entry = int(before[entry])
        return chosen[::-1]


class Planner:
    """Learns the uses of each kind of anchor, and places the best chain of anchors."""

    def __init__(self, facts: ArmFacts, *, marks: bool) -> None:
        self._facts, self._marks, self._cost = facts, marks, facts.cost("flops")
        self._cues = Cues()
        self._remembered: OrderedDict[int, Anchor] = OrderedDict()
        self._anchors: Counter[Anchor] = Counter()
        self._uses: Counter[Anchor] = Counter()
        self._depths: deque[int] = deque(maxlen=_DEPTHS)  # of divergence that no anchor explained
        self._new = self._unexplained = 0
        self._placed, self._logarithms = 0, 0.0  # of the expected saving per byte of each state
        self._tokens: Tokens = np.empty(0, np.int32)
        self._names: list[int] = []  # prefix names of the current prompt

    def observe(self, prefill: PrefillInfo) -> None:
        """Count a use of the deepest known anchor of this prompt, and record where it diverges from earlier ones."""
        self._tokens = prefill.request.tokens
        self._names = prefix_names(self._tokens, self._facts.unit)
        divergence = self._divergence(prefill)
        self._new += self._floor(divergence) <= prefill.resume
        if divergence < self._facts.unit:
            return
        deepest = self._floor(divergence) // self._facts.unit
        units = next((units for units in range(deepest, 0, -1) if self._names[units - 1] in self._remembered), 0)
        if units:
            self._uses[self._remembered[self._names[units - 1]]] += 1
        if units < deepest:
            self._unexplained += 1
            self._depths.append(self._floor(divergence))
        self._cues.add(self._tokens, divergence, self._names[deepest - 1])

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return the best chain of this prompt's anchors."""
        anchors = self._find_anchors(prefill)
        uses = {position: (self._uses[kind] + 1) / (self._anchors[kind] + 1) for position, kind in anchors.items()}
        for position, kind in anchors.items():
            self._remember(self._names[position // self._facts.unit - 1], kind)
        if self._floor(self._divergence(prefill)) <= prefill.resume:
            self._add_frequent_depths(prefill, uses)
        return self._choose(prefill.resume, uses) if uses else ()

    def _floor(self, position: int) -> int:
        return position // self._facts.unit * self._facts.unit

    def _divergence(self, prefill: PrefillInfo) -> int:
        """Return the position where a prompt diverges from earlier ones, before its last token."""
        return min(prefill.seen, prefill.prompt - 1)

    def _find_anchors(self, prefill: PrefillInfo) -> dict[int, Anchor]:
        """Return anchors after the resume position, by position on the grid; of several cues, that of most points."""
        reasons: defaultdict[int, list[str | Run]] = defaultdict(list)
        marks = sorted(set(map(self._floor, prefill.boundaries))) if self._marks else []
        for mark in marks:
            reasons[mark].append("boundary" if mark == marks[-1] else "inner boundary")
        reasons[self._floor(self._divergence(prefill))].append("branch")
        reasons[self._floor(prefill.prompt)].append("end")
        cues: dict[int, Run] = {}
        for position, run in self._cues.find(self._tokens, prefill.resume):
            cues.setdefault(self._floor(position), run)
        for position, run in cues.items():
            reasons[position].append(run)
        return {
            position: (*kind, "known" if position <= prefill.seen else "new")
            for position, kind in reasons.items()
            if position > prefill.resume
        }

    def _remember(self, name: int, kind: Anchor) -> None:
        self._remembered[name] = kind
        self._remembered.move_to_end(name)
        self._anchors[kind] += 1
        if len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)

    def _add_frequent_depths(self, prefill: PrefillInfo, uses: dict[int, float]) -> None:
        """Add the unexplained uses of a new prompt, spread over the depths of earlier unexplained divergence."""
        share = min(1.0, (self._unexplained + 1) / (self._new + 1)) / max(1, len(self._depths))
        for depth in self._depths:
            if prefill.resume < depth <= prefill.prompt:
                uses[depth] = uses.get(depth, 0.0) + share

    def _choose(self, resume: int, uses: dict[int, float]) -> list[int]:
        facts, order = self._facts, sorted(uses)
        positions = np.array([resume, *order])
        deeper_uses = np.cumsum([uses[position] for position in reversed(order)])[::-1]
        offers = Offers(positions.astype(np.float64), self._cost(0, positions), np.concatenate([[0.0], deeper_uses]))
        price = self._price()
        chain = offers.chain(price * facts.state_bytes, price * facts.token_bytes)
        for start, stop in zip([0, *chain], chain, strict=False):
            num_bytes = facts.state_bytes + facts.token_bytes * float(positions[stop] - positions[start])
            self._placed += 1
            self._logarithms += math.log(offers.saving(start, stop) / num_bytes)
        return [order[entry - 1] for entry in chain]

    def _price(self) -> float:
        """Return the price of a byte: the saving that is expected of it at least."""
        return SHARE * math.exp(self._logarithms / self._placed) if self._placed else 0.0
