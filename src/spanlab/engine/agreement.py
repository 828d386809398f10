"""Consistency checks on the parts of an engine: model, pools, policy and key layout."""

from __future__ import annotations

from spanlab.core.cache_spans import whole
from spanlab.core.policies.published_study import PublishedStudyPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.spans import SpanSettings
from spanlab.engine.map_check import check_maps
from spanlab.engine.map_pool import SpanMaps
from spanlab.engine.model import SpanModel
from spanlab.engine.pool import PagePool
from spanlab.engine.state_pool import StatePool
from spanlab.models.sizes import SCAN_CHUNK


def check_components(model: SpanModel, pool: PagePool, policy: TreePolicy, key_layout: SpanSettings) -> None:
    """Raise if model, KV pool, policy and key layout do not fit together."""
    rules, repair = policy.rules, policy.rules.repair
    assert policy.store.tree.block_size == pool.shape.page_size, "the policy's pages are not the pool's"
    private = isinstance(policy, PublishedStudyPolicy)
    assert not (private or rules.last_token), "these rules are the simulator's alone"
    assert rules.copies == key_layout.copies, "policy and engine disagree on whether spans are copied"
    moved = rules.layout is not whole and key_layout.positions != "original"
    assert key_layout.keys != "absolute" or not moved, "absolute keys of spans can only be read in place"
    last = repair.last_check_layer(model.layers)
    if repair.rewrites and not 1 <= repair.check_layer <= last:
        # Keys and values of layer 0 depend on no other token: there is nothing to measure yet.
        raise ValueError(f"repair.check_layer={repair.check_layer}: expected a layer from 1 to {last} of {model.name}")
    if repair.probes:
        assert repair.layers and repair.layers[-1] < model.layers, "profiled layers are not the model's"


def check_memory(model: SpanModel, policy: TreePolicy, states: StatePool | None, maps: SpanMaps | None) -> None:
    """Raise if states or maps differ from the model's, or from the sizes that the policy counts."""
    rules = policy.rules
    shape = None if states is None else states.shape
    assert shape == model.state_shape, "the pool of states is not the model's"
    assert rules.needs_states == (states is not None), "policy and model disagree on whether prefixes need states"
    assert states is None or (rules.grid % SCAN_CHUNK == 0), "states lie off the grid that resuming was proven on"
    assert states is None or states.slot_bytes == policy.store.state_bytes, "a state weighs more than it is counted"
    assert (rules.maps is None) == (maps is None), "policy and engine disagree on whether spans have maps"
    assert maps is None or maps.stored.slot_bytes == rules.map_bytes, "a map weighs more than it is counted"
    if maps is not None:
        check_maps(model)
