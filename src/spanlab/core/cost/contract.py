"""The contract of a cost: the price of computing tokens of a prompt, which reusing them saves.

Placements and eviction orders compare entries by it. Each has a default cost, that of its source; an arm may name
another one for all its rules. Only ratios of costs decide, so the unit of a cost does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from spanlab.registry import Registry

Positions = NDArray[np.int64]


class Cost(Protocol):
    """The price of computing prompt tokens `[start, stop)` on top of `start` reused ones; elementwise.

    Positive where there is a token, and additive: the prices of [a, b) and [b, c) add up to that of [a, c).
    """

    @overload
    def __call__(self, start: int, stop: int, /) -> float: ...
    @overload
    def __call__(self, start: int, stop: Positions, /) -> NDArray[Any]: ...


#: From the name of a rule's default cost, the cost that the rule uses: the arm's, where it names one.
CostOf = Callable[[str], Cost]
#: `model` is the study's.
COSTS: Registry[Cost] = Registry("cost", given=("model",))
#: A need of placements and eviction orders: they compare entries by the arm's cost.
COST = "cost"


def in_tokens(usual: str) -> Cost:
    """Return the cost that counts tokens, whatever the default."""
    return COSTS.make("tokens", {}, {})
