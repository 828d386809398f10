"""The learning placement: optimal positions of states for the match depths observed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spanlab.checks import not_negative, one_of, positive
from spanlab.core.cost import COST, Cost
from spanlab.core.optimal import place
from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, Floats, PrefillInfo
from spanlab.core.placement.rules import balanced_positions
from spanlab.registry import Registry

EVERY, DECAY = 10, 0.99


class Solution(Protocol):
    """Checkpoint positions in tokens, increasing: for all depths, or for prompts of a length."""

    def positions(self) -> list[int]: ...

    def positions_within(self, limit: int) -> list[int]: ...


#: A solver receives the weight of each bin of match depths, the tokens of a bin, the number of states and the cost.
SOLVERS: Registry[Solution] = Registry("solver", given=("histogram", "bin_tokens", "count", "cost"))


@dataclass
class Dp:
    """How `placement.kind=dp` learns; see `spanlab.core.placement.DynamicProgram`.

    `update`      frozen: solve once, after the warm-up; periodic: solve again, forget nothing; decayed: solve again,
                  with older observations weighted less
    `every`       observations between two solutions; not where frozen; null: 10
    `decay`       factor on older observations, per observation; decayed only; null: 0.99
    `warmup`      observations before the first solution; null: the study's warm-up
    `max_tokens`  largest depth of the histogram; null: the longest prompt of the workload
    `smoothing`   count added to every bin before solving (Laplace)
    `backtrack`   per_length: the optimum for the prompt's length; fixed: one set of positions for all lengths
    `observe`     seen: longest prefix of any earlier prompt; matched: longest stored prefix
    `solver`      optimal, or published: the recurrence of arXiv 2605.05219 with its rounding
    """

    update: str = "decayed"
    every: int | None = None
    decay: float | None = None
    warmup: int | None = None
    max_tokens: int | None = None
    smoothing: float = 0.0
    backtrack: str = "per_length"
    observe: str = "seen"
    solver: str = "optimal"

    def check(self, path: str) -> None:
        """Raise ValueError for invalid values; `path` is the key of these settings."""
        one_of(f"{path}.update", self.update, ("frozen", "periodic", "decayed"))
        one_of(f"{path}.backtrack", self.backtrack, ("per_length", "fixed"))
        one_of(f"{path}.observe", self.observe, ("seen", "matched"))
        one_of(f"{path}.solver", self.solver, SOLVERS)
        positive(f"{path}.every", self.every)
        not_negative(f"{path}.warmup", self.warmup)
        positive(f"{path}.max_tokens", self.max_tokens)
        not_negative(f"{path}.smoothing", self.smoothing)
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ValueError(f"{path}.decay={self.decay}: expected a share above 0 and up to 1")
        self._check_ignored(path)

    def _check_ignored(self, path: str) -> None:
        """Raise ValueError for keys that would have no effect."""
        if self.every is not None and self.update == "frozen":
            raise ValueError(f"{path}.every={self.every} with dp.update=frozen: expected null, for it solves once")
        if self.decay is not None and self.update != "decayed":
            raise ValueError(
                f"{path}.decay={self.decay} with dp.update={self.update}: expected null, or update=decayed"
            )
        if self.solver != "optimal" and self.backtrack != "fixed":
            raise ValueError(f"{path}.backtrack={self.backtrack} with dp.solver={self.solver}: expected fixed")


@SOLVERS.register("optimal")
def solve_exactly(histogram: Floats, bin_tokens: int, count: int, cost: Cost) -> Solution:
    """Minimise the expected cost of the tokens between a match and the last state before it."""
    depths = np.arange(1, len(histogram)) * bin_tokens
    return place(depths, histogram[1:], count, cost(0, depths))


@PLACEMENTS.register("dp", needs=(COST,))
class DynamicProgram:
    """`dp`: the optimum for the match depths observed so far, in bins of the grid; `balanced` before any solution.

    `count`  maximum states per prompt
    `dp`     parameters of learning; eviction biases the depths of `observe=matched` downwards
    """

    def __init__(self, count: int, dp: Dp, *, facts: ArmFacts) -> None:
        self._count, self._dp, self._bin_tokens = count, dp, facts.grid
        self._warmup = facts.warmup if dp.warmup is None else dp.warmup
        self._every = 0 if dp.update == "frozen" else EVERY if dp.every is None else dp.every
        self._decay = 1.0 if dp.update != "decayed" else DECAY if dp.decay is None else dp.decay
        self._cost = facts.cost("tokens")
        self._histogram = np.zeros((dp.max_tokens or facts.max_tokens) // facts.grid + 1)
        self._observed = 0
        self._solution: Solution | None = None
        self._fixed: list[int] = []

    def observe(self, prefill: PrefillInfo) -> None:
        """Count a match depth, and solve again when due."""
        if self._observed == self._warmup:
            self._solve()
        self._count_depth(prefill.matched if self._dp.observe == "matched" else prefill.seen)
        if self._observed > self._warmup and self._every and self._observed % self._every == 0:
            self._solve()

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return positions for a prompt by the last solution."""
        if self._solution is None or (not self._fixed and self._observed < self._every):
            return balanced_positions(prefill.prompt, self._count)
        if self._dp.backtrack == "per_length":
            return self._solution.positions_within(prefill.prompt)
        return [position for position in self._fixed if position <= prefill.prompt]

    def _count_depth(self, depth: int) -> None:
        if self._decay != 1.0:
            self._histogram *= self._decay
        self._histogram[min(depth // self._bin_tokens, len(self._histogram) - 1)] += 1.0
        self._observed += 1

    def _solve(self) -> None:
        histogram = self._histogram + self._dp.smoothing
        self._solution = SOLVERS[self._dp.solver](histogram, self._bin_tokens, self._count, self._cost)
        self._fixed = self._solution.positions()
