"""Storage rules of each kind of policy, as far as a bound on its reuse depends on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from spanlab.core.budget import Budget
from spanlab.core.cache_spans import whole
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.reuse_rules import StorageRules
from spanlab.offline.infinite import prefix_rules, salted_parent


@dataclass(frozen=True)
class Storage:
    """Storage of a policy.

    `name`        equal for policies that store equal units under equal keys
    `rules`       function that builds the storage rules
    `reserved`    a request has memory for its complete prompt from its admission
    `pooled`      KV and states share one pool of the sum of their budgets
    `last_token`  the last prompt token may be reused too
    `map_bytes`   bytes of a span's map, where reuse reads a map instead of a state
    `state_bytes` bytes of a stored state; None: size of the model's state
    `bounded`     False: these rules do not bound the reuse (a policy from a plugin, or reordered passages)
    `view`        passages of a prompt that are served
    """

    name: Hashable
    rules: Callable[[], StorageRules]
    reserved: bool = True
    pooled: bool = False
    last_token: bool = False
    map_bytes: int | None = None
    bounded: bool = True
    state_bytes: int | None = None
    view: str = "all"

    def budget(self, store_budget: Budget) -> Budget:
        """Return the part of the store's budget that this policy can use."""
        if not self.pooled:
            return store_budget
        return Budget(total_bytes=min(store_budget.total_bytes, store_budget.kv_bytes + store_budget.state_bytes))

    def least_state(self, state_bytes: int) -> int:
        """Least bytes that any reuse needs in addition to its KV, where a model state has `state_bytes`."""
        stored = state_bytes if self.state_bytes is None else self.state_bytes
        return stored if self.map_bytes is None else min(stored, self.map_bytes)


@singledispatch
def storage_of(policy: Any) -> Storage:
    """Return the storage of a policy; for an unknown kind, the rules of an infinite cache apply."""
    return Storage("plugin", lambda: prefix_rules(True, True), reserved=False, last_token=True, bounded=False)


@storage_of.register
def _(policy: TreePolicy) -> Storage:
    rules, block_size = policy.rules, policy.store.tree.block_size
    on_grid = (
        rules.needs_states and rules.maps is None
    )  # maps of spans are not on the grid; the block size divides the grid
    unit = max(block_size, rules.grid) if on_grid else block_size
    maps = None if rules.maps is None else rules.map_bytes
    layout = rules.layout.__name__, rules.repair.by_span
    outputs = not rules.needs_states or (rules.progress is not None and rules.progress.every > 0)
    name = layout, type(policy.index).__name__, unit, rules.last_token, maps, outputs
    storage_rules = StorageRules(policy.layout, policy.index.key, unit, rules.last_token, outputs)
    stored = policy.store.state_bytes
    return Storage(name, lambda: storage_rules, last_token=rules.last_token, map_bytes=maps, state_bytes=stored)


@storage_of.register
def _(policy: BlockPolicy) -> Storage:
    storage_rules = StorageRules(whole, salted_parent, policy.blocks.size, outputs=True)
    return Storage(("blocks", storage_rules.unit), lambda: storage_rules, reserved=False, pooled=True)
