"""How each kind of policy stores prompts, as far as a bound on its reuse must know."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from spanlab.core.budget import Budget
from spanlab.core.cache_spans import whole
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.offline.forest import StorageRules
from spanlab.offline.infinite import prefix_rules, salted_parent


@dataclass(frozen=True)
class Storage:
    """Storage rules, made when they are first needed.

    `name`        equal for policies that store equal units under equal keys
    `reserved`    a request has memory for its whole prompt from its admission on
    `pooled`      KV and states share one pool, whatever each of them was given
    `last_token`  the last prompt token may be reused too
    `map_bytes`   of the map of a span, where reuse of one takes that in place of a state
    `state_bytes` of a state as it is stored; None: as the model has it
    `bounded`     False: a policy from a plugin, or passages in an order of their own, which find what no rule here says
    `view`        which passages of a prompt are served
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

    def budget(self, given: Budget) -> Budget:
        """What the store's budget lets this policy hold."""
        if not self.pooled:
            return given
        return Budget(total_bytes=min(given.total_bytes, given.kv_bytes + given.state_bytes))

    def least_state(self, state_bytes: int) -> int:
        """Bytes that every reuse takes at the least beside its KV, where a state has `state_bytes`."""
        stored = state_bytes if self.state_bytes is None else self.state_bytes
        return stored if self.map_bytes is None else min(stored, self.map_bytes)


@singledispatch
def storage_of(policy: Any) -> Storage:
    """How a policy stores; of a kind that is not known here, every token counts that an infinite cache reuses."""
    return Storage("plugin", lambda: prefix_rules(True, True), reserved=False, last_token=True, bounded=False)


@storage_of.register
def _(policy: TreePolicy) -> Storage:
    rules, block_size = policy.rules, policy.store.tree.block_size
    on_grid = rules.needs_states and rules.maps is None  # maps of spans are not; the page divides the grid
    unit = max(block_size, rules.grid) if on_grid else block_size
    maps = None if rules.maps is None else rules.map_bytes
    layout = rules.layout.__name__, rules.repair.by_span
    outputs = not rules.needs_states or (rules.progress is not None and rules.progress.every > 0)
    name = layout, type(policy.index).__name__, unit, rules.last_token, maps, outputs
    made = StorageRules(policy.layout, policy.index.key, unit, rules.last_token, outputs)
    stored = policy.store.state_bytes
    return Storage(name, lambda: made, last_token=rules.last_token, map_bytes=maps, state_bytes=stored)


@storage_of.register
def _(policy: BlockPolicy) -> Storage:
    made = StorageRules(whole, salted_parent, policy.blocks.size, outputs=True)
    return Storage(("blocks", made.unit), lambda: made, reserved=False, pooled=True)
