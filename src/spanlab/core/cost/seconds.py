"""The cost in measured seconds: a device does not run attention at the rate of its matrix products."""

from __future__ import annotations

from typing import Any

from spanlab.checks import not_negative
from spanlab.core.cost.contract import COSTS, Cost
from spanlab.model_spec import causal_pairs


@COSTS.register("seconds")
def seconds(token_s: float, pair_s: float) -> Cost:
    """`seconds`: `token_s` per computed token and `pair_s` per query-key pair, as a calibrated profile has them.

    What a step takes however much it computes (weights, launches) is left out: it is paid with or without reuse.
    """
    for key, value in (("token_s", token_s), ("pair_s", pair_s)):
        not_negative(f"cost_options.{key}", value)
    if token_s + pair_s <= 0:
        raise ValueError(f"cost_options.token_s={token_s} with pair_s={pair_s}: expected one of both above 0")

    def cost(start: int, stop: Any, /) -> Any:
        return token_s * (stop - start) + pair_s * causal_pairs(start, stop)

    return cost
