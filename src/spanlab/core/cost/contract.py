"""What a cost is: the price of computing tokens of a prompt, which is what reusing them saves.

Placements and eviction orders compare entries by it. Each has a usual cost, that of its source; an arm may name another
one, which all its rules then count. Only ratios of costs decide anything, so the unit of a cost does not matter.
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

    Above zero where there is a token, and additive: a price of [a, b) and one of [b, c) make that of [a, c).
    """

    @overload
    def __call__(self, start: int, stop: int, /) -> float: ...
    @overload
    def __call__(self, start: int, stop: Positions, /) -> NDArray[Any]: ...


#: From the name of a rule's usual cost, the cost that the rule counts: another one where the arm names it.
CostOf = Callable[[str], Cost]
#: `model` is the study's.
COSTS: Registry[Cost] = Registry("cost", given=("model",))
#: A need of placements and eviction orders: they compare entries by the arm's cost.
COST = "cost"


def in_tokens(usual: str) -> Cost:
    """Every token costs the same, whatever is usual."""
    return COSTS.make("tokens", {}, {})
