"""Small makers and naive oracles that the core's tests share.

Byte sizes are toys: a KV token weighs `KV`, a state `STATE`, the map of a span `MAP` where it is stored and
`WORKING_MAP` while it is computed, so that budgets can be counted by hand.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionRules
from spanlab.core.ledger import Ledger
from spanlab.core.placement import ArmFacts, Dp, DynamicProgram, Placer, PrefillInfo, Rule, every_n, no_states
from spanlab.core.plan import ReusePlan, TreeAllocation
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.policies.tree_variants import PrivateIndex, PublishedStudyPolicy
from spanlab.core.repair import MapRules, Repair
from spanlab.core.request import UNLIMITED, Budget, Request, Span
from spanlab.core.rules import CacheRules, Progress, Replay, ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import Layout, Node, PrefixTree, State, composable, whole
from spanlab.model_spec import CostOf, in_tokens

from ..support.policies import make_tree_policy

KV, STATE, MAP, WORKING_MAP = 2, 7, 11, 13
#: Orders that do not need future requests.
BLIND_EVICTIONS = sorted(set(EVICTION_ORDERS) - set(EVICTION_ORDERS.needing(FUTURE)))


def make_request(
    tokens: Sequence[int], *, id: int = 0, group: int = 0, output: int = 1, cache_salt: str = ""
) -> Request:
    """A request of one span."""
    return Request(id, group, (Span(np.array(tokens, np.int32)),), output_len=output, cache_salt=cache_salt)


def text(*tokens: int) -> Span:
    """An ordered span."""
    return Span(np.array(tokens, np.int32))


def doc(*tokens: int) -> Span:
    """An independent span."""
    return Span(np.array(tokens, np.int32), independent=True)


def make_prompt(*spans: Span, id: int = 0, group: int = 0, output: int = 1, cache_salt: str = "") -> Request:
    """A request of several spans."""
    return Request(id, group, spans, output_len=output, cache_salt=cache_salt)


def make_budget(
    tokens: int | None = None, states: int | None = None, total: int | None = None, entries: int | None = None
) -> Budget:
    """A budget in KV tokens, states, bytes and entries."""
    return Budget(
        UNLIMITED if tokens is None else tokens * KV,
        UNLIMITED if states is None else states * STATE,
        UNLIMITED if total is None else total,
        UNLIMITED if entries is None else entries,
    )


def make_store(
    budget: Budget | None = None, *, eviction: str = "lru", block_size: int = 1, fixed_blocks: bool = False
) -> Store:
    """A store over a new tree."""
    return Store(PrefixTree(block_size, fixed_blocks), KV, STATE, budget or Budget(), eviction)


def make_policy(
    budget: Budget | None = None,
    *,
    hybrid: bool = False,
    placer: Placer | None = None,
    grid: int = 1,
    block_size: int = 1,
    fixed_blocks: bool = False,
    eviction: str = "lru",
    private: bool = False,
    last_token: bool = False,
    keeps: bool = True,
    layout: Layout = whole,
    repair: Repair | None = None,
    copies: bool = False,
    ledger: Ledger | None = None,
    maps: MapRules | None = None,
    eviction_rules: EvictionRules | None = None,
    cache: CacheRules | None = None,
    progress: Progress | None = None,
    replay: Replay | None = None,
    state_bytes_saved: int = 0,
) -> TreePolicy:
    """A policy; attention-only with shared roots and one cache span by default."""
    rules = ReuseRules(
        keeps,
        hybrid,
        grid,
        last_token,
        layout,
        repair or Repair(),
        copies,
        cache or CacheRules(),
        maps=maps,
        map_bytes=MAP if maps else 0,
        working_map_bytes=WORKING_MAP if maps else 0,
        progress=progress,
        replay=replay,
        state_bytes_saved=state_bytes_saved,
    )
    kind = {"kind": PublishedStudyPolicy, "index": PrivateIndex} if private else {}
    return make_tree_policy(
        rules,
        ledger,
        budget=budget,
        placer=placer or (every_n(grid) if hybrid else no_states()),
        kv_bytes=KV,
        state_bytes=STATE,
        block_size=block_size,
        fixed_blocks=fixed_blocks,
        eviction=eviction,
        eviction_rules=eviction_rules,
        **kind,
    )


def make_map_policy(budget: Budget | None = None, **options) -> TreePolicy:
    """A policy of a hybrid model that keeps maps of spans, and states in ordered text."""
    return make_policy(budget, **{"hybrid": True, "layout": composable, "maps": MapRules()} | options)


def at(*positions: int) -> Rule:
    """States at fixed positions, within the prompt."""
    return Rule(lambda visit: [position for position in positions if position <= visit.prompt])


def make_facts(
    grid: int, *, max_tokens: int = 80, warmup: int = 0, cost: CostOf = in_tokens, state_bytes: int = 1
) -> ArmFacts:
    """Facts of an arm for a placement; a token costs one, and its KV one byte."""
    return ArmFacts(grid, grid, warmup, max_tokens, cost, state_bytes=state_bytes)


def make_dp(count: int = 1, *, grid: int = 10, max_tokens: int = 80, cost: CostOf = in_tokens, **dp) -> DynamicProgram:
    """The placement that learns; it weighs all observations alike by default."""
    return DynamicProgram(
        count, Dp(**{"update": "periodic", **dp}), facts=make_facts(grid, max_tokens=max_tokens, cost=cost)
    )


def make_info(prompt: int, *, matched: int = 0, seen: int = 0, resume: int = 0, boundaries: tuple[int, ...] = ()):
    """Facts of a prefill for a placement."""
    return PrefillInfo(prompt, matched, seen, resume, boundaries)


def begin(policy: TreePolicy, request: Request, now: int) -> tuple[ReusePlan, TreeAllocation]:
    """Plan and admit; there must be room."""
    plan = policy.match(request, now)
    allocation = policy.allocate(plan, now)
    assert allocation is not None, "the test's budget is too small for its request"
    return plan, allocation


def serve(policy: TreePolicy, tokens: Sequence[int], now: int, *, group: int = 0, cache_salt: str = "") -> ReusePlan:
    """Serve one prompt alone, from arrival to the end: match, allocate, insert, free."""
    plan, allocation = begin(policy, make_request(tokens, group=group, cache_salt=cache_salt), now)
    policy.insert(allocation, plan.prompt, now)
    policy.free(allocation, 0)
    policy.check()
    return plan


def finish(policy: TreePolicy, allocation: TreeAllocation, now: int) -> None:
    """Store all work that an allocation lists, in its order, as a scheduler would, and free it."""
    for work in allocation.work:
        for cache_span, _, stop in work.cache_span_rows(allocation.plan, work.start, work.stop):
            policy.insert(allocation, stop, now, cache_span)
    policy.free(allocation, 0)
    policy.check()


def serve_prompt(policy: TreePolicy, request: Request, now: int) -> ReusePlan:
    """Serve one prompt of spans alone, from arrival to the end."""
    plan, allocation = begin(policy, request, now)
    finish(policy, allocation, now)
    return plan


def resumes(plan: ReusePlan) -> list[int]:
    """Where each cache span of a plan resumes."""
    return [span_plan.resume for span_plan in plan.cache_spans]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Longest common prefix, token by token."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def walk(root: Node) -> Iterator[tuple[tuple[int, ...], Node]]:
    """Every node below a root with the tokens that lead to its end, read off the edges."""
    waiting: list[tuple[tuple[int, ...], Node]] = [((), root)]
    while waiting:
        prefix, node = waiting.pop()
        for child in node.children.values():
            path = prefix + tuple(np.frombuffer(child.edge.tobytes(), np.int32).tolist())
            yield path, child
            waiting.append((path, child))


def states_in(root: Node) -> Iterator[tuple[tuple[int, ...], State]]:
    """Every state below a root with the tokens that it has read."""
    for path, node in walk(root):
        for state in node.states:
            yield path[: state.position], state


def held(policy: TreePolicy) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The content of a policy: the prefixes of all nodes and states, sorted."""
    roots = list(policy.index.all())
    nodes = sorted(path for root in roots for path, _ in walk(root))
    return nodes, sorted(path for root in roots for path, _ in states_in(root))


def counters(store: Store) -> tuple[int, ...]:
    """Everything a store counts."""
    return (
        *(store.kv_cached, store.kv_reserved, store.kv_locked),
        *(store.state_cached, store.state_reserved, store.state_locked),
        *(store.entries, store.inserted_bytes, store.evicted_bytes),
    )


def assert_within_budget(store: Store) -> None:
    """Used bytes and entries do not exceed any budget."""
    kv, state = store.kv_cached + store.kv_reserved, store.state_cached + store.state_reserved
    assert kv <= store.budget.kv_bytes
    assert state <= store.budget.state_bytes
    assert kv + state <= store.budget.total_bytes
    assert store.entries <= store.budget.entries


def assert_drained(policy: TreePolicy) -> None:
    """Nothing is locked or reserved."""
    store = policy.store
    assert (store.kv_reserved, store.kv_locked, store.state_reserved, store.state_locked) == (0, 0, 0, 0)
    for root in policy.index.all():
        assert not any(node.locks for _, node in walk(root))
        assert not any(state.locks for _, state in states_in(root))
