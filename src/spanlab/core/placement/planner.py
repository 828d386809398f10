"""A planner of marked, remembered and learned positions: it places the states with the highest
expected net saving.

Later prompts may diverge from a prompt at an *anchor*: a marked boundary, the point where this
prompt diverged from an earlier one, a cue (`cues`), or its end. Divergence that no anchor explains
is expected at the depths of earlier such cases. The uses of each kind of anchor are learned from
the traffic, whether or not a state was placed there: prefixes up to anchors are stored by hash, and
each prompt counts as a use of its deepest known anchor. The expected uses of an anchor are the uses
of its kind per anchor of its kind, with one added to both.

The planner places the chain of anchors c_1 < c_2 < … after the resume position c_0 with the highest
value

    sum over i of  (w(c_i) - w(c_{i-1})) · U(c_i) - price · (state bytes + KV bytes of a token · (c_i - c_{i-1})),

with U(c) the uses of all anchors at c and deeper, and w(c) the cost of c tokens, by default in
FLOPs. The value of a state is its saving beyond its neighbours; a state whose value does not cover
its price is omitted. Exact, O(A²) for A anchors. The price of a byte is a quarter of the geometric
mean of the expected saving per byte of the states placed so far. The geometric mean keeps a few
very popular prefixes from excluding all others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from spanlab.core.eviction.orders import FUTURE
from spanlab.core.placement.dynamic_program import Placement, place
from spanlab.core.placement.rules import (
    PLACEMENTS,
    ArmFacts,
    Floats,
    PrefillInfo,
    balanced_positions,
)
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.rules import StorageRules
from spanlab.core.token_string import Tokens
from spanlab.core.tree import Node, PrefixTree
from spanlab.model_spec import COST, Cost
from spanlab.registry import positive, share_above_zero

# ------------------------------------------------------------------------------
# Cues: short runs of tokens before the points where prompts diverge, such as a template between
# document and question.
#
# A new document is followed by the same template as earlier ones. Runs of `LENGTH` tokens that
# end at most `REACH`
# tokens before a point of divergence are counted, once for each point. A run that preceded two
# different points is a cue.
# Cues also work where prompts happen to share the first tokens after the template, because of
# `REACH`.
# ------------------------------------------------------------------------------

Run = tuple[int, ...]
LENGTH, REACH = 3, 6
_CUES, _CUE_POINTS = 16, 4096


class Cues:
    """The cues of one traffic, and their positions in a prompt."""

    def __init__(self) -> None:
        # points of divergence by run, oldest first
        self._points: OrderedDict[Run, set[int]] = OrderedDict()
        self._cues: dict[Run, int] = {}

    def add(self, tokens: Tokens, position: int, name: int) -> None:
        """Count the runs before a position where a prompt diverges from earlier ones; `name`
        identifies the point."""
        tail = tokens[max(0, position - REACH - LENGTH) : position].tolist()
        for start in range(len(tail) - LENGTH + 1):
            run = tuple(tail[start : start + LENGTH])
            points = self._points.setdefault(run, set())
            if len(points) < _CUE_POINTS:
                points.add(name)
            self._points.move_to_end(run)
            if len(points) > 1:
                self._cues[run] = len(points)
                if len(self._cues) > _CUES:
                    del self._cues[min(self._cues, key=self._cues.__getitem__)]
        while len(self._points) > _CUE_POINTS:
            self._points.popitem(last=False)

    def find(self, tokens: Tokens, start: int) -> Iterator[tuple[int, Run]]:
        """Yield positions after `start` at which a cue ends, each with its cue; cues with most
        points first."""
        suffix = tokens[start:]
        for run in sorted(self._cues, key=self._cues.__getitem__, reverse=True):
            heads = np.flatnonzero(suffix[: len(suffix) - LENGTH + 1] == run[0])
            for index in heads[
                np.all([suffix[heads + k] == run[k] for k in range(1, LENGTH)], axis=0)
            ].tolist():
                yield start + index + LENGTH, run


# ------------------------------------------------------------------------------
# Names of a prompt's prefixes, by which a later prompt with the same prefix is recognised
# without its tokens.
# ------------------------------------------------------------------------------

# odd, with pseudo-random bits
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def prefix_names(tokens: Tokens, unit: int) -> list[int]:
    """Return 64-bit hashes of the first unit, 2 · unit, … tokens: sums over tokens, each mixed with
    its position.

    They guide placement and never identify stored content, so a collision costs at most one badly
    placed state.
    """
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _FIRST
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.arange(1, 2 * len(tokens), 2, dtype=np.uint64) * _SECOND
    mixed ^= mixed >> np.uint64(32)
    names: list[int] = np.cumsum(mixed, dtype=np.uint64)[unit - 1 :: unit].tolist()
    return names


# kind of an anchor: all reasons at its position, and "known" or "new"
Anchor = tuple[str | Run, ...]
SHARE = 0.25
_REMEMBERED, _DEPTHS = 1 << 17, 32


@PLACEMENTS.register("planned", needs=(COST,))
def planned(*, facts: ArmFacts) -> Planner:
    """`planned`: states that save more than their price, at marks, branches, cues, ends and
    frequent depths."""
    return Planner(facts, marks=True)


@PLACEMENTS.register("learned", needs=(COST,))
def learned(*, facts: ArmFacts) -> Planner:
    """`learned`: as `planned` without marks, for traffic without marked boundaries."""
    return Planner(facts, marks=False)


@dataclass(frozen=True, slots=True)
class Offers:
    """Candidate positions of states; arrays of shape (anchors + 1,), whose first entry is the
    resume position.

    `positions`  increasing
    `work`       cost of computing the tokens up to each position
    `uses`       expected uses of a state at this position or deeper
    """

    positions: Floats
    work: Floats
    uses: Floats

    def saving(self, start: int, stop: int) -> float:
        """Return the expected work that a state at entry `stop` saves beyond one at entry
        `start`."""
        return float((self.work[stop] - self.work[start]) * self.uses[stop])

    def chain(self, state_cost: float, token_cost: float) -> list[int]:
        """Return the entries, increasing, with the highest total saving less the price of states
        and tokens."""
        best, before = np.zeros(len(self.positions)), np.zeros(len(self.positions), dtype=np.intp)
        for stop in range(1, len(self.positions)):
            saved = (self.work[stop] - self.work[:stop]) * self.uses[stop]
            values = (
                best[:stop]
                + saved
                - state_cost
                - token_cost * (self.positions[stop] - self.positions[:stop])
            )
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
        """Count a use of the deepest known anchor of this prompt, and record where it diverges from
        earlier ones."""
        self._tokens = prefill.request.tokens
        self._names = prefix_names(self._tokens, self._facts.unit)
        divergence = self._divergence(prefill)
        self._new += self._floor(divergence) <= prefill.resume
        if divergence < self._facts.unit:
            return
        deepest = self._floor(divergence) // self._facts.unit
        units = next(
            (
                units
                for units in range(deepest, 0, -1)
                if self._names[units - 1] in self._remembered
            ),
            0,
        )
        if units:
            self._uses[self._remembered[self._names[units - 1]]] += 1
        if units < deepest:
            self._unexplained += 1
            self._depths.append(self._floor(divergence))
        self._cues.add(self._tokens, divergence, self._names[deepest - 1])

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return the best chain of this prompt's anchors."""
        anchors = self._find_anchors(prefill)
        uses = {
            position: (self._uses[kind] + 1) / (self._anchors[kind] + 1)
            for position, kind in anchors.items()
        }
        for position, kind in anchors.items():
            name = self._names[position // self._facts.unit - 1]
            self._remembered[name] = kind
            self._remembered.move_to_end(name)
            self._anchors[kind] += 1
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        if self._floor(self._divergence(prefill)) <= prefill.resume:
            share = min(1.0, (self._unexplained + 1) / (self._new + 1)) / max(1, len(self._depths))
            for depth in self._depths:
                if prefill.resume < depth <= prefill.prompt:
                    uses[depth] = uses.get(depth, 0.0) + share
        if not uses:
            return ()
        facts, order = self._facts, sorted(uses)
        positions = np.array([prefill.resume, *order])
        deeper_uses = np.cumsum([uses[position] for position in reversed(order)])[::-1]
        offers = Offers(
            positions.astype(np.float64),
            self._cost(0, positions),
            np.concatenate([[0.0], deeper_uses]),
        )
        price = SHARE * math.exp(self._logarithms / self._placed) if self._placed else 0.0
        chain = offers.chain(price * facts.state_bytes, price * facts.token_bytes)
        for start, stop in zip([0, *chain], chain, strict=False):
            num_bytes = facts.state_bytes + facts.token_bytes * float(
                positions[stop] - positions[start]
            )
            self._placed += 1
            self._logarithms += math.log(offers.saving(start, stop) / num_bytes)
        return [order[entry - 1] for entry in chain]

    def _floor(self, position: int) -> int:
        return position // self._facts.unit * self._facts.unit

    def _divergence(self, prefill: PrefillInfo) -> int:
        """Return the position where a prompt diverges from earlier ones, before its last token."""
        return min(prefill.seen, prefill.prompt - 1)

    def _find_anchors(self, prefill: PrefillInfo) -> dict[int, Anchor]:
        """Return anchors after the resume position, by position on the grid; of several cues, that
        of most points."""
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


# ------------------------------------------------------------------------------
# One budget of states for all documents, split by the marginal saving of the next state of
# each.
#
# Each group of prompts (a document, a session) has a separate distribution of match depths. The
# expected remaining work with m states is convex in m (`optimal`), so that the savings of a
# document's states decrease. The greatest savings of all documents together are therefore the
# optimal split, which a greedy choice finds. The least of them is the price of a state. A
# document with one prompt has no depths yet. It gets the states that pay this price for one
# document of average weight with the depths of all documents. Cost: O(K·M) for a document with
# K depths and prompts since the last split.
# ------------------------------------------------------------------------------

# observations between two splits; factor on the weight of older observations, per observation
EVERY, DECAY = 16, 0.998
_HEAVIEST = 1e100


def split(savings: Mapping[int, Floats], budget: int) -> tuple[dict[int, int], float]:
    """Return the states of each document, and the price of a state: the least granted saving, 0
    where all are granted.

    `savings`  of the first, the second, … state of each document, not increasing
    """
    offers = [
        (float(saved), name)
        for name, marginal in savings.items()
        for saved in marginal
        if saved > 0.0
    ]
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
    """`dp_shared`: the optimum for each document's match depths, weighted by cost, within one
    budget for all."""

    def __init__(
        self,
        count: Annotated[int, positive, "most states of one document"],
        share: Annotated[
            float, share_above_zero, "share of the store's memory for the states of all documents"
        ] = 0.25,
        *,
        facts: ArmFacts,
    ) -> None:
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
        # increase the weight of later observations, instead of decreasing all earlier weights each
        # time
        self._weight /= DECAY
        if self._weight > _HEAVIEST:
            for depths in (self._all, *self._documents.values()):
                depths.scale(1.0 / self._weight)
            self._savings = {
                group: savings / self._weight for group, savings in self._savings.items()
            }
            self._weight = 1.0
        if self._observed % EVERY == 0 and self._changed:
            self._split()

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return the positions of a document's states; for a new document, by the depths of all."""
        group = prefill.request.group_id
        if group in self._granted:
            states = self._granted[group]
            return (
                self._documents[group].solve(states, self._cost).positions_within(prefill.prompt)
                if states
                else ()
            )
        if self._default is None:
            return balanced_positions(prefill.prompt, self._count)
        return self._default.positions_within(prefill.prompt)

    def _split(self) -> None:
        for group in self._changed:
            self._savings[group] = -np.diff(
                self._documents[group].solve(self._count, self._cost).cost
            )
        self._changed.clear()
        budget = (
            UNLIMITED
            if self._memory >= UNLIMITED
            else int(self._share * self._memory) // self._facts.state_bytes
        )
        self._granted, price = split(self._savings, budget)
        usual = -np.diff(self._all.solve(self._count, self._cost).cost) / len(self._savings)
        self._default = self._all.solve(max(1, int((usual >= price).sum())), self._cost)


# ------------------------------------------------------------------------------
# The clairvoyant placement: states where future requests diverge from all requests before them.
# ------------------------------------------------------------------------------


@PLACEMENTS.register("clairvoyant", needs=(FUTURE, COST))
class Clairvoyant:
    """`clairvoyant`: where future requests diverge from the longest prefix of any request before
    them.

    Fewer states than departures are those that save most if no later prompt places any.

    The first request with a prefix computes its end. With unlimited memory, one request at a time
    and `count` no less than the departures along a prompt, every request therefore reuses as much
    as from an infinite cache with a state at every position, which is optimal. With fewer states,
    or where KV and states compete for memory, the choice is NP-hard. This placement is then greedy,
    and only the offline bound is a limit for all placements.
    """

    def __init__(
        self,
        count: Annotated[
            int | None, positive, "most states per prompt; null: one at each departure"
        ] = None,
        *,
        facts: ArmFacts,
    ) -> None:
        if facts.departures is None:
            raise ValueError(
                "placement.kind=clairvoyant: expected a simulated run, whose requests are known beforehand"
            )
        self._count, self._departures, self._cost = count, facts.departures, facts.cost("tokens")

    def observe(self, prefill: PrefillInfo) -> None:
        """Do nothing: the future is known."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return the positions that this prompt computes and later ones need."""
        users = self._departures.along(prefill.request)
        needed = sorted(position for position in users if position > prefill.resume)
        if self._count is None or len(needed) <= self._count:
            return needed
        weights = np.array([users[position] for position in needed], np.float64)
        return place(
            np.array(needed), weights, self._count, self._cost(prefill.resume, np.array(needed))
        ).positions()


# ------------------------------------------------------------------------------
# Departures: positions where a future request diverges from all requests before it.
# ------------------------------------------------------------------------------


class _Path(NamedTuple):
    """A cache span of a request, from `start` in the prompt to its last node `end`.

    `shared`  length of its longest prefix that an earlier request has, in tokens
    """

    request: int
    start: int
    end: Node
    shared: int


class Departures:
    """For each request of a run, in order of arrival, the longest prefix of an earlier one, in
    whole units.

    The request can reuse this prefix if an earlier request, which computes it, leaves a state at
    its end.
    """

    def __init__(self, requests: Sequence[Request], rules: StorageRules) -> None:
        self._rules, self._tree = rules, PrefixTree(rules.unit)
        self._roots: dict[Hashable, Node] = {}
        self._number = {request.id: number for number, request in enumerate(requests)}
        self._paths = [self._add(number, request) for number, request in enumerate(requests)]
        self._leaving: dict[Node, dict[int, list[int]]] = {}
        for path in (path for paths in self._paths for path in paths if path.shared):
            node = next(node for node in path.end.path() if node.start < path.shared)
            self._leaving.setdefault(node, {}).setdefault(path.shared, []).append(path.request)

    def _add(self, number: int, request: Request) -> list[_Path]:
        """Add a request to the tree; return its cache spans."""
        rules, tree, paths = self._rules, self._tree, []
        cache_spans = rules.layout(request)
        for cache_span in cache_spans:
            if not cache_span.storable:
                continue
            root = self._roots.setdefault(rules.key(request, cache_span), tree.new_root())
            computes_last = cache_span is cache_spans[-1] and not rules.last_token
            usable = len(cache_span.tokens) - computes_last
            shared = min(tree.match(root, cache_span.tokens)[1], usable) // rules.unit * rules.unit
            end = tree.extend(
                root, cache_span.tokens, len(cache_span.tokens) // rules.unit * rules.unit, 0
            )
            paths.append(_Path(number, cache_span.start, end, shared))
        return paths

    def along(self, request: Request) -> dict[int, int]:
        """Return, by position of a request's prompt, the number of later requests that depart
        there."""
        assert request.id in self._number, "a clairvoyant placement needs all requests of its run"
        counts: dict[int, int] = {}
        for path in self._paths[self._number[request.id]]:
            for node in path.end.path():
                for depth, users in self._leaving.get(node, {}).items():
                    later = len(users) - bisect_right(users, path.request)
                    if later:
                        counts[path.start + depth] = counts.get(path.start + depth, 0) + later
        return counts
