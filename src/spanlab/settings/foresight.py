"""What a clairvoyant arm is told of the requests to come."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.cache_spans import Layout, without_tails
from spanlab.core.cost import CostOf
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionRules, Future
from spanlab.core.placement import CacheForm, Departures
from spanlab.core.prefix_index import shared_name
from spanlab.core.request import Request
from spanlab.core.reuse_rules import ReuseRules
from spanlab.model_spec import ModelSpec
from spanlab.settings.arms import Strategy


def eviction_rules(strategy: Strategy, cost: CostOf, rules: ReuseRules, future: Sequence[Request]) -> EvictionRules:
    """What an arm's eviction order is given; the future where it needs it."""
    if strategy.eviction not in EVICTION_ORDERS.needing(FUTURE):
        goes_on = frozenset(earlier for request in future for earlier in request.after)
        return EvictionRules(strategy.eviction_options, cost, goes_on=goes_on)
    known = Future(future, _stored(rules), shared_name, strategy.block_size)
    return EvictionRules(strategy.eviction_options, cost, known)


def departures(strategy: Strategy, model: ModelSpec, rules: ReuseRules, future: Sequence[Request]) -> Departures | None:
    """Where requests leave what is known by then, in the units in which states are stored; None for a blind one."""
    if not strategy.placement.foresees:
        return None
    unit = max(strategy.block_size, model.grid)
    return Departures(future, CacheForm(_stored(rules), shared_name, unit, rules.last_token))


def _stored(rules: ReuseRules) -> Layout:
    """The cache spans of a prompt that a tree stores."""
    return rules.layout if rules.repair.by_span else without_tails(rules.layout)
