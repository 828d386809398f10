"""Coverage of 95 % intervals: how often they hold the true value of drawn data.

    .venvs/sim/bin/python benchmarks/coverage/measure.py
    .venvs/sim/bin/python benchmarks/publish.py coverage

Every design draws STUDIES tables of values with effects of seeds, documents and questions, and counts the intervals
that hold the mean of the distribution. Writes `results.json` beside this file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, facts, write_results

from spanlab.stats import Interval, positive_ratio, ratio, t_interval

Floats = NDArray[np.float64]
STUDIES = 10_000
SEED = 0
MEAN = 10.0  # of normal values, so that their ratio is positive


@dataclass(frozen=True)
class Design:
    """Numbers of seeds, documents and questions per document, and standard deviations of their effects.

    `spreads`  of seeds, documents and questions; of the logarithm for lognormal values
    `unequal`  whether documents have 1 to 2 · questions - 1 questions, each number equally often
    """

    seeds: int
    documents: int
    questions: int
    spreads: tuple[float, float, float]
    lognormal: bool
    unequal: bool = False

    @property
    def truth(self) -> float:
        """Mean of the distribution."""
        return math.exp(sum(spread**2 for spread in self.spreads) / 2) if self.lognormal else MEAN

    def draw(self, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Return sums of values and numbers of questions by seed and document, shape (seeds, documents)."""
        most = 2 * self.questions - 1 if self.unequal else self.questions
        shapes = (self.seeds, 1, 1), (1, self.documents, 1), (self.seeds, self.documents, most)
        effects = sum(spread * rng.standard_normal(shape) for spread, shape in zip(self.spreads, shapes, strict=True))
        values = np.exp(effects) if self.lognormal else MEAN + effects
        sizes = np.full((1, self.documents), self.questions)
        if self.unequal:
            sizes = rng.integers(1, most + 1, (1, self.documents))
        asked = np.broadcast_to(np.arange(most) < sizes[..., None], values.shape)
        return (values * asked).sum(2), asked.sum(2).astype(np.float64)


QUESTIONS = (0.0, 0.5, 0.5)
NORMAL = (0.0, 1.0, 1.0)
DESIGNS = (
    Design(1, 25, 4, NORMAL, False),
    Design(1, 25, 4, QUESTIONS, True),
    Design(1, 25, 4, QUESTIONS, True, unequal=True),
    Design(1, 25, 4, (0.0, 0.8, 0.8), True),
    Design(1, 10, 10, NORMAL, False),
    Design(1, 10, 10, QUESTIONS, True),
    Design(1, 100, 4, QUESTIONS, True),
    Design(1, 4, 10, NORMAL, False),
    Design(1, 4, 10, QUESTIONS, True),
    Design(5, 30, 4, (0.2, 1.0, 1.0), False),
    Design(5, 30, 4, (1.0, 1.0, 1.0), False),
    Design(5, 30, 4, (0.15, 0.4, 0.3), True),
    Design(4, 30, 4, (1.0, 1.0, 1.0), False),
    Design(3, 30, 4, (1.0, 1.0, 1.0), False),
    Design(2, 30, 4, (1.0, 1.0, 1.0), False),
)


def _over_seeds(above: Floats, below: Floats) -> Interval:
    """Student's t over seeds."""
    return t_interval(above.sum(1) / below.sum(1))


Method = Callable[[Floats, Floats], Interval]
METHODS: dict[str, Method] = {"of any sign": ratio, "positive": positive_ratio}
OVER_SEEDS = tuple(Design(seeds, 1, 1, (1.0, 0.0, 0.0), False) for seeds in (2, 3, 5))


def measure(design: Design, methods: dict[str, Method]) -> dict[str, Any]:
    """Return shares of intervals that hold the truth, lie below it, and lie above it, by method."""
    rng = np.random.default_rng(SEED)
    missed = {name: [0, 0] for name in methods}
    for _ in range(STUDIES):
        above, below = design.draw(rng)
        for name, method in methods.items():
            _, low, high = method(above, below)
            assert low is not None, "every design has two clusters"
            assert high is not None, "every design has two clusters"
            missed[name][0] += high < design.truth
            missed[name][1] += low > design.truth
    return {
        name: {"covered": 1 - (below + above) / STUDIES, "below": below / STUDIES, "above": above / STUDIES}
        for name, (below, above) in missed.items()
    }


def rows() -> Iterator[dict[str, Any]]:
    """Yield one entry per design, with its numbers and its coverage by method."""
    groups = ((DESIGNS, METHODS), (OVER_SEEDS, {"Student's t over seeds": _over_seeds}))
    for designs, methods in groups:
        for design in designs:
            yield {**vars(design), "intervals": measure(design, methods)}


def main() -> None:
    """Measure every design."""
    commit = clean_commit()
    results = {"studies": STUDIES, "seed": SEED, "designs": list(rows()), **facts(), "commit": commit}
    print(write_results(HERE / "results.json", results))


if __name__ == "__main__":
    main()
