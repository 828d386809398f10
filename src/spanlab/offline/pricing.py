"""A bound on reuse that needs several resources at once: KV, states and entries, by the best prices of memory."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.offline.descent import descend
from spanlab.offline.linear_program import best_prices
from spanlab.offline.packing import Gains, Packing, Resource, in_tokens
from spanlab.offline.reuses import Reuses

#: Rows and slots, those times resources, up to which prices come from the linear program: two seconds or less.
LIMIT = 8_000
#: How a bound was found: everything fits, equal units alone compete, the best prices, or those of a descent.
INFINITE, UNITS, PROGRAM, DESCENT = "infinite", "units", "linear_program", "descent"


@dataclass(frozen=True)
class Priced:
    """A proven bound, and how its prices were found."""

    value: float
    method: str


def priced(reuses: Reuses, resources: list[Resource], gains: Gains, limit: int = LIMIT) -> Priced:
    """What no choice within the resources can gain.

    Whatever the solver's tolerance, the bound holds: it is evaluated at its prices.
    """
    if not len(reuses.tokens):
        return Priced(0.0, INFINITE)
    packing = Packing(reuses, resources, gains)
    if not packing.slots:
        return Priced(packing.everything(), INFINITE)
    if len(packing.path) + packing.capacity.size > limit:
        return Priced(min(descend(packing), packing.everything()), DESCENT)
    return Priced(min(packing.choose(best_prices(packing)).value, packing.everything()), PROGRAM)


def priced_tokens(reuses: Reuses, resources: list[Resource], limit: int = LIMIT) -> tuple[int, str]:
    """Tokens that no choice within the resources can exceed, in whole units, and how that was found."""
    found = priced(reuses, resources, in_tokens(reuses), limit)
    return int(found.value / reuses.unit + 1e-6) * reuses.unit, found.method
