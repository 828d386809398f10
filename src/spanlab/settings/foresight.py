"""Future requests, in the form that clairvoyant eviction orders and placements read."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.cache_spans import Layout, without_tails
from spanlab.core.cost import CostOf
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionRules, Future
from spanlab.core.placement import Departures
from spanlab.core.prefix_index import shared_name
from spanlab.core.request import Request
from spanlab.core.reuse_rules import ReuseRules, StorageRules
from spanlab.model_spec import ModelSpec
from spanlab.settings.arms import Strategy


def eviction_rules(strategy: Strategy, cost: CostOf, rules: ReuseRules, future: Sequence[Request]) -> EvictionRules:
    """Return the inputs of an arm's eviction order, with the future requests if it reads them."""
    if strategy.eviction not in EVICTION_ORDERS.needing(FUTURE):
        continued = frozenset(earlier for request in future for earlier in request.after)
        return EvictionRules(strategy.eviction_options, cost, continued=continued)
    requests = Future(future, _stored(rules), shared_name, strategy.block_size)
    return EvictionRules(strategy.eviction_options, cost, requests)


def departures(strategy: Strategy, model: ModelSpec, rules: ReuseRules, future: Sequence[Request]) -> Departures | None:
    """Return where each future request departs from earlier ones, in units of stored states; None if online."""
    if not strategy.placement.foresees:
        return None
    unit = max(strategy.block_size, model.grid)
    return Departures(future, StorageRules(_stored(rules), shared_name, unit, rules.last_token))


def _stored(rules: ReuseRules) -> Layout:
    """Return the layout of the cache spans that a tree stores."""
    return rules.layout if rules.repair.by_span else without_tails(rules.layout)
