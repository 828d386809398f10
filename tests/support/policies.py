"""Tree policies for tests."""

from spanlab.core.eviction import EvictionRules
from spanlab.core.placement import Placer, no_states
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Budget
from spanlab.core.rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import PrefixIndex, PrefixTree, SharedIndex


def make_tree_policy(
    rules: ReuseRules | None = None,
    *more: object,
    budget: Budget | None = None,
    placer: Placer | None = None,
    kind: type[TreePolicy] = TreePolicy,
    index: type[PrefixIndex] = SharedIndex,
    kv_bytes: int = 1,
    state_bytes: int = 10,
    block_size: int = 1,
    fixed_blocks: bool = False,
    eviction: str = "lru",
    eviction_rules: EvictionRules | None = None,
) -> TreePolicy:
    """A policy over a new store; `more` are further arguments of its kind.

    `kv_bytes` are those of a token, `state_bytes` those of a state where the rules need states.
    """
    rules, tree = rules or ReuseRules(), PrefixTree(block_size, fixed_blocks)
    state = state_bytes if rules.needs_states else 0
    store = Store(tree, kv_bytes, state, budget or Budget(), eviction, eviction_rules)
    return kind(rules, store, index(tree), placer or no_states(), *more)
