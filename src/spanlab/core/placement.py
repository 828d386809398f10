"""Where to put recurrent checkpoints: positions in one prompt, before they are floored to the kernel grid.

A placement is asked once per admitted request, by `observe_and_place`; only `DynamicProgram` uses what it observes.
Depths and positions are prompt tokens; a position p means the state after token p - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from spanlab.core.optimal import Floats, place


class PrefillInfo(NamedTuple):
    """What a placement may know of a request: lengths in tokens."""

    prompt: int  # the prompt
    matched: int  # its longest stored prefix
    seen: int  # its longest prefix that any earlier prompt began with, stored or not
    resume: int  # where its computation starts
    boundaries: tuple[int, ...]  # ends of the spans that the workload promises to ask for again


class Placer(Protocol):
    """Chooses checkpoint positions; `observe_and_place` is called once per admitted request, in order."""

    def observe_and_place(self, visit: PrefillInfo) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A placement that is a plain function of the visit."""

    positions: Callable[[PrefillInfo], Sequence[int]]

    def observe_and_place(self, visit: PrefillInfo) -> Sequence[int]:
        return self.positions(visit)


def no_states() -> Rule:
    """No states: KV alone is kept."""
    return Rule(lambda visit: ())


def every(interval: int) -> Rule:
    """`block`: every `interval` tokens."""
    return Rule(lambda visit: range(interval, visit.prompt + 1, interval))


def balanced_positions(prompt: int, count: int) -> range:
    """The first `count` multiples of prompt // (count + 1) that lie within the prompt."""
    step = max(1, prompt // (count + 1))
    return range(step, min(prompt, step * count) + 1, step)


def balanced(count: int) -> Rule:
    """`balanced`: `count` states at equal distances."""
    return Rule(lambda visit: balanced_positions(visit.prompt, count))


def square_root() -> Rule:
    """`sqrt`: every floor(sqrt(prompt)) tokens."""
    return Rule(lambda visit: range(math.isqrt(visit.prompt), visit.prompt + 1, math.isqrt(visit.prompt)))


def powers_of_two(least: int = 768) -> Rule:
    """`log`: the powers of two from `least` on."""
    first = 1 << (least - 1).bit_length()
    return Rule(lambda visit: [first << k for k in range(max(0, (visit.prompt // first).bit_length()))])


def last() -> Rule:
    """`last`: one state, at the prompt's end."""
    return Rule(lambda visit: (visit.prompt,))


def tail(count: int, offset: int) -> Rule:
    """`tail`: `count` states at offset · 2^k tokens before the prompt's end, k = 0 … count - 1."""
    distances = [offset << k for k in reversed(range(count))]
    return Rule(lambda visit: [visit.prompt - distance for distance in distances if distance < visit.prompt])


def boundary() -> Rule:
    """`boundary`: where the workload says that a shared span ends."""
    return Rule(lambda visit: visit.boundaries)


def branch() -> Rule:
    """`branch`: where this prompt left what is stored, beyond its last state: others are likely to leave there too."""
    return Rule(lambda visit: (visit.matched,) if visit.matched > visit.resume else ())


def branch_else_last(grid: int) -> Rule:
    """`branch_else_last`: one state, where this prompt left what is stored or, where that is no news, at its end.

    A hit ends before the prompt's last token. SGLang 0.5.23 tracks so.
    """

    def positions(visit: PrefillInfo) -> tuple[int]:
        left = min(visit.matched, visit.prompt - 1) // grid * grid
        return (left,) if left > visit.resume else (visit.prompt,)

    return Rule(positions)


class Solution(Protocol):
    """Checkpoint positions in tokens, increasing: for all depths, or for prompts of a length."""

    def positions(self) -> list[int]: ...

    def positions_within(self, limit: int) -> list[int]: ...


#: From the weight of each bin of match depths, the tokens of a bin and the number of states.
Solver = Callable[[Floats, int, int], Solution]


@dataclass(slots=True)
class DynamicProgram:
    """`dp`: the optimum for the match depths observed so far, in bins of `bin_tokens`; `balanced` until it knows any.

    `count`       states per prompt at most
    `warmup`      observations before the first solution
    `resolve_every`  solve again when the number of observations is a multiple of it; 0 never solves again (frozen)
    `decay`       every observation first multiplies the histogram by it; 1 forgets nothing (periodic)
    `smoothing`   added to every bin before solving (Laplace)
    `per_length`  True: the optimum for this prompt, matches beyond its end counted at its end; False: one fixed set,
                  of which a prompt uses what lies within it
    `censored`    observe the stored match instead of the longest prefix ever seen; eviction then biases it downwards
    `work`        w at depths in tokens, shape-preserving; None counts tokens
    `solver`      another way to solve, as that of the published study; None is the exact optimum
    """

    count: int
    bin_tokens: int
    max_tokens: int
    warmup: int = 0
    resolve_every: int = 10
    decay: float = 1.0
    smoothing: float = 0.0
    per_length: bool = True
    censored: bool = False
    work: Callable[[Floats], Floats] | None = None
    solver: Solver | None = None
    _observed: int = 0
    _solution: Solution | None = None
    _fixed: list[int] = field(default_factory=list)
    _histogram: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._histogram = np.zeros(self.max_tokens // self.bin_tokens + 1)

    def observe_and_place(self, visit: PrefillInfo) -> Sequence[int]:
        if self._observed == self.warmup:
            self._solve()
        self._observe(visit.matched if self.censored else visit.seen)
        if self._observed > self.warmup and self.resolve_every and self._observed % self.resolve_every == 0:
            self._solve()
        return self._positions(visit.prompt)

    def _observe(self, depth: int) -> None:
        if self.decay != 1.0:
            self._histogram *= self.decay
        self._histogram[min(depth // self.bin_tokens, len(self._histogram) - 1)] += 1.0
        self._observed += 1

    def _solve(self) -> None:
        histogram = self._histogram + self.smoothing
        solver = self.solver or self._optimum
        self._solution = solver(histogram, self.bin_tokens, self.count)
        self._fixed = self._solution.positions()

    def _optimum(self, histogram: Floats, bin_tokens: int, count: int) -> Solution:
        depths = np.arange(1, len(histogram)) * bin_tokens
        work = None if self.work is None else self.work(depths.astype(np.float64))
        return place(depths, histogram[1:], count, work)

    def _positions(self, prompt: int) -> Sequence[int]:
        if self._solution is None or (not self._fixed and self._observed < self.resolve_every):
            return balanced_positions(prompt, self.count)
        if self.per_length:
            return self._solution.positions_within(prompt)
        return [position for position in self._fixed if position <= prompt]


@dataclass(frozen=True, slots=True)
class Union:
    """Several placements at once: the union of their positions."""

    placers: tuple[Placer, ...]

    def observe_and_place(self, visit: PrefillInfo) -> Sequence[int]:
        return sorted({position for placer in self.placers for position in placer.observe_and_place(visit)})
