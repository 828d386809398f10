"""A bound on reuse that needs several resources at once (KV, states, entries), by prices of memory."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.offline.descent import descend
from spanlab.offline.linear_program import best_prices
from spanlab.offline.packing import Gains, Packing, Resource, in_tokens
from spanlab.offline.reuses import Reuses

#: Rows + slots × resources up to which prices come from the linear program: two seconds or less.
LIMIT = 8_000
#: Method of a bound: everything fits, only equal units compete, optimal prices, or prices of a descent.
INFINITE, UNITS, PROGRAM, DESCENT = "infinite", "units", "linear_program", "descent"


@dataclass(frozen=True)
class PricedBound:
    """A proven bound, and the method of its prices."""

    value: float
    method: str


def bound_gain(reuses: Reuses, resources: list[Resource], gains: Gains, limit: int = LIMIT) -> PricedBound:
    """Return an upper bound on the gain of any choice within the resources.

    The bound is evaluated at the solver's prices, so it holds for any tolerance of the solver.
    """
    if not len(reuses.tokens):
        return PricedBound(0.0, INFINITE)
    packing = Packing(reuses, resources, gains)
    if not packing.slots:
        return PricedBound(packing.unlimited_gain(), INFINITE)
    if len(packing.path) + packing.capacity.size > limit:
        return PricedBound(min(descend(packing), packing.unlimited_gain()), DESCENT)
    return PricedBound(min(packing.choose(best_prices(packing)).value, packing.unlimited_gain()), PROGRAM)


def priced_tokens(reuses: Reuses, resources: list[Resource], limit: int = LIMIT) -> tuple[int, str]:
    """Return an upper bound on the tokens of any choice, in whole units, and its method."""
    bound = bound_gain(reuses, resources, in_tokens(reuses), limit)
    return int(bound.value / reuses.unit + 1e-6) * reuses.unit, bound.method
