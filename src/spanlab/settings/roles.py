"""Checks of the eviction order, the admission rule and the cost that an arm names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from spanlab.checks import one_of
from spanlab.core.admission import ADMISSIONS, AdmissionFacts
from spanlab.core.budget import Budget
from spanlab.core.cost import COST, COSTS
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionFacts, EvictionRules
from spanlab.core.policies.named import POLICIES
from spanlab.core.tree import PrefixTree
from spanlab.model_spec import ModelSpec

if TYPE_CHECKING:
    from spanlab.settings.arms import Strategy

T = TypeVar("T")


def check_eviction(arm: str, roles: Strategy) -> None:
    """Raise ValueError for an invalid eviction order, naming the arm."""
    one_of(f"{arm}.eviction", roles.eviction, EVICTION_ORDERS)
    chosen, options = f"eviction={roles.eviction}", roles.eviction_options
    EVICTION_ORDERS.check(arm, roles.eviction, {}, options, chosen, "eviction_options")
    if roles.foresees and roles.sharing == "private":
        raise ValueError(f"{arm}.{roles.foresees} with sharing=private: expected sharing=shared")
    if roles.foresees and roles.policy_name == "exact_hash":
        raise ValueError(f"{arm}.{roles.foresees} with policy=exact_hash: expected a policy that shares prefixes")
    if roles.eviction in EVICTION_ORDERS.needing(FUTURE):
        return
    facts = EvictionFacts(PrefixTree(), Budget(), 1, EvictionRules())
    order = _tried(arm, lambda: EVICTION_ORDERS.make(roles.eviction, {}, options, facts=facts))
    if order.pins is not None and roles.policy_name != "tree":
        raise ValueError(f"{arm}.{chosen} with policy={roles.policy_name}: expected policy=tree, which pins")


def check_admission(arm: str, roles: Strategy) -> None:
    """Raise ValueError for an invalid admission rule, naming the arm."""
    one_of(f"{arm}.admission", roles.admission, ADMISSIONS)
    chosen, options = f"admission={roles.admission}", roles.admission_options
    ADMISSIONS.check(arm, roles.admission, {}, options, chosen, "admission_options")
    _tried(arm, lambda: ADMISSIONS.make(roles.admission, {}, options, facts=AdmissionFacts(Budget(), 1)))
    if roles.admission != "always" and not POLICIES.takes(roles.policy_name, "admission"):
        raise ValueError(f"{arm}.{chosen} with policy={roles.policy_name}: expected admission=always or policy=tree")


def check_cost(arm: str, roles: Strategy, model: ModelSpec) -> None:
    """Raise ValueError for an invalid cost, or one that no rule of the arm reads, naming the arm."""
    if roles.cost is None:
        for key in roles.cost_options:
            raise ValueError(
                f"{arm}.cost_options.{key} with {arm}.cost=null: expected a cost, one of {', '.join(COSTS)}"
            )
        return
    one_of(f"{arm}.cost", roles.cost, COSTS)
    chosen = f"cost={roles.cost}"
    COSTS.check(arm, roles.cost, {}, roles.cost_options, chosen, "cost_options")
    _tried(arm, lambda: COSTS.make(str(roles.cost), {}, roles.cost_options, model=model))
    if roles.eviction not in EVICTION_ORDERS.needing(COST) and not roles.placement.compares:
        orders = ", ".join(EVICTION_ORDERS.needing(COST))
        raise ValueError(
            f"{arm}.{chosen} with eviction={roles.eviction}: expected null, for no rule of this arm reads it; "
            f"it goes with eviction={orders}, and with placements that choose by it"
        )


def _tried(arm: str, make: Callable[[], T]) -> T:
    """Return `make()`; a ValueError gets the name of the arm."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{arm}.{error}") from error
