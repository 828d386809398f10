"""Costs: the price of computing tokens of a prompt, which reusing them saves.

Placements and eviction orders compare entries by it. Each has a default cost, that of its source; an arm may name
another one for all its rules. Only ratios of costs decide, so the unit of a cost does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from spanlab.checks import not_negative
from spanlab.model_spec import ModelSpec, causal_pairs
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
    return tokens()


@COSTS.register("flops")
def flops(*, model: ModelSpec) -> Cost:
    """`flops`: the model's FLOPs, those of attention by depth; without the output head."""
    return model.prefill_flops


@COSTS.register("seconds")
def seconds(token_s: float, pair_s: float) -> Cost:
    """`seconds`: `token_s` per computed token and `pair_s` per query-key pair, as a calibrated profile has them.

    A device does not run attention at the rate of its matrix products. What a step takes however much it computes
    (weights, launches) is left out: it is paid with or without reuse.
    """
    for key, value in (("token_s", token_s), ("pair_s", pair_s)):
        not_negative(f"cost_options.{key}", value)
    if token_s + pair_s <= 0:
        raise ValueError(f"cost_options.token_s={token_s} with pair_s={pair_s}: expected one of both above 0")

    def cost(start: int, stop: Any, /) -> Any:
        return token_s * (stop - start) + pair_s * causal_pairs(start, stop)

    return cost


@COSTS.register("tokens")
def tokens() -> Cost:
    """`tokens`: computing any token costs the same, as in hit rates."""
    return _length


def _length(start: int, stop: Any, /) -> Any:
    return stop - start
