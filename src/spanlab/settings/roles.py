"""Checks of the roles that an arm chooses by name: what leaves first, and what is kept at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from spanlab.checks import one_of
from spanlab.core.admission import ADMISSIONS, AdmissionFacts
from spanlab.core.budget import Budget
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionFacts, EvictionRules
from spanlab.core.policies.named import POLICIES
from spanlab.core.tree import PrefixTree

T = TypeVar("T")


class Roles(Protocol):
    """The choices of an arm that are checked here."""

    eviction: str
    eviction_options: dict[str, Any]
    admission: str
    admission_options: dict[str, Any]
    sharing: str

    @property
    def policy_name(self) -> str: ...

    @property
    def foresees(self) -> str: ...


def check_eviction(arm: str, roles: Roles) -> None:
    """Refuse an eviction order that makes no sense, naming the arm."""
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


def check_admission(arm: str, roles: Roles) -> None:
    """Refuse an admission that makes no sense, naming the arm."""
    one_of(f"{arm}.admission", roles.admission, ADMISSIONS)
    chosen, options = f"admission={roles.admission}", roles.admission_options
    ADMISSIONS.check(arm, roles.admission, {}, options, chosen, "admission_options")
    _tried(arm, lambda: ADMISSIONS.make(roles.admission, {}, options, facts=AdmissionFacts(Budget(), 1)))
    if roles.admission != "always" and not POLICIES.takes(roles.policy_name, "admission"):
        raise ValueError(f"{arm}.{chosen} with policy={roles.policy_name}: expected admission=always or policy=tree")


def _tried(arm: str, make: Callable[[], T]) -> T:
    """What is made of options; a value that is refused is named with its arm."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{arm}.{error}") from error
