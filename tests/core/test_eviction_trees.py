"""Eviction orders on trees with split edges: their entries are those of the tree, and none beats Belady."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.eviction import EvictionFacts, EvictionRules, Future
from spanlab.core.eviction.orders import Chain, PathNames
from spanlab.core.eviction.scores import ALPHAS, Replay
from spanlab.core.placement import balanced
from spanlab.core.store import recount
from spanlab.core.token_string import string_of
from spanlab.core.tree import PrefixTree, shared_name, whole
from spanlab.model_spec import in_tokens

from .factories import BLIND_EVICTIONS, KV, make_budget, make_policy, make_request, make_store, serve_prompt, walk
from .test_tree import encode


def prompts(rng: np.random.Generator, count: int, block: int = 1) -> list[tuple[int, ...]]:
    """Return prompts with common prefixes: each continues a prefix of an earlier one."""
    earlier: list[tuple[int, ...]] = [()]
    for _ in range(count):
        base = earlier[int(rng.integers(len(earlier)))]
        shared = int(rng.integers(len(base) + 1)) // block * block
        earlier.append((base[:shared] + tuple(rng.integers(0, 3, int(rng.integers(1, 9))).tolist()))[:24])
    return earlier[1:]


def serve_all(policy, prompts: list[tuple[int, ...]], after=lambda: None) -> int:
    """Serve prompts one after another; return their reused tokens."""
    reused = 0
    for number, tokens in enumerate(prompts):
        reused += serve_prompt(policy, make_request(tokens, id=number), number).resume
        after()
    return reused


@pytest.mark.parametrize("fixed_blocks", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("eviction", ["slru", "sieve", "s3_fifo", "arc"])
def test_lists_hold_what_the_tree_holds(eviction, hybrid, fixed_blocks):
    block = 2 if fixed_blocks else 1
    policy = make_policy(
        make_budget(tokens=60, states=9),
        hybrid=hybrid,
        placer=balanced(3) if hybrid else None,
        eviction=eviction,
        block_size=block,
        grid=block,
        fixed_blocks=fixed_blocks,
    )

    def check() -> None:
        nodes = {node for root in policy.index.all() for _, node in walk(root)}
        leaves = [chain for chain in vars(policy.store._leaves).values() if isinstance(chain, Chain)]
        states = [chain for chain in vars(policy.store._states).values() if isinstance(chain, Chain)]
        assert sorted(node.serial for chain in leaves for node in chain) == sorted(node.serial for node in nodes)
        assert sum(chain.bytes for chain in leaves) == policy.store.kv_cached
        assert sum(chain.bytes for chain in states) == policy.store.state_cached
        assert {state for chain in states for state in chain} == {state for node in nodes for state in node.states}

    rng = np.random.default_rng([len(eviction), hybrid, fixed_blocks])
    serve_all(policy, prompts(rng, 300), check)
    assert policy.store.evicted_bytes > 100 * KV


def test_names_do_not_depend_on_cuts():
    tree, names = PrefixTree(), PathNames()
    tree.watchers.append(names)
    root = tree.new_root(b"a")
    end = tree.extend(root, string_of([np.arange(9, dtype=np.int32)]), 9, 1)
    first = names.of_node(end)
    upper = tree.split(end, 4)
    lower = names.of_node(end)
    assert names.of_node(upper) == first != lower
    tree.remove(end)
    tree.remove(upper)
    again = tree.extend(root, string_of([np.arange(9, dtype=np.int32)]), 9, 2)
    assert names.of_node(again) == first
    tree.split(again, 4)
    assert names.of_node(again) == lower


def policy_of(eviction: str, prompts: list[tuple[int, ...]], tokens: int, block: int, **options):
    requests = [make_request(prompt, id=number) for number, prompt in enumerate(prompts)]
    future = Future(requests, whole, shared_name, block) if eviction not in BLIND_EVICTIONS else None
    return make_policy(
        make_budget(tokens=tokens),
        eviction=eviction,
        eviction_rules=EvictionRules(future=future),
        block_size=block,
        **options,
    )


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_belady_leads_on_blocks_of_shared_prompts(seed):
    rng = np.random.default_rng(seed)
    drawn = prompts(rng, 200, block=2)
    tokens = int(rng.integers(30, 90))
    best = serve_all(policy_of("belady", drawn, tokens, 2, fixed_blocks=True), drawn)
    for eviction in BLIND_EVICTIONS:
        assert serve_all(policy_of(eviction, drawn, tokens, 2, fixed_blocks=True), drawn) <= best, eviction


@pytest.mark.parametrize("seed", range(20))
def test_future_names_the_next_prompt_that_shares(seed):
    rng = np.random.default_rng(seed)
    drawn = prompts(rng, 30)
    requests = [make_request(prompt, id=number) for number, prompt in enumerate(drawn)]
    future = Future(requests, whole, shared_name, 1)
    now = int(rng.integers(30))
    for request in requests[:now]:
        future.admitted(request)
    tree = PrefixTree()
    root = tree.new_root(shared_name(requests[0], whole(requests[0])[0]))
    for prompt in drawn:
        text = string_of([np.array(prompt, np.int32)])
        start = future.root(root.key)
        end = future.branch_points(start, text)[-1]
        assert end.depth == len(prompt)
        for depth in range(1, len(prompt) + 1):
            users = [user for user in range(now, 30) if drawn[user][:depth] == prompt[:depth]]
            expected = users[0] if users else 1 << 62
            assert future.next_use(future.ancestor_at(end, depth)) == expected


def quadratic(start: int, stop: int) -> float:
    """Work that grows with depth, as attention's does."""
    return stop * stop - start * start


#: Costs by name for an arm that names no cost.
COSTS = {"flops": quadratic, "tokens": in_tokens("tokens")}.__getitem__


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_marconi_evicts_the_lowest_score(alpha):
    rules = EvictionRules({"alpha": alpha}, COSTS)
    policy = make_policy(make_budget(tokens=70), eviction="marconi", eviction_rules=rules)
    compared = []

    def check() -> None:
        leaves = [node for root in policy.index.all() for _, node in walk(root) if not node.children]
        recency = {node: 1 / (1 + max(leaf.used for leaf in leaves) - node.used) for node in leaves}
        saved = {node: quadratic(node.start, node.depth) / (KV * (node.depth - node.start)) for node in leaves}
        score = {node: scaled(recency, node) + alpha * scaled(saved, node) for node in leaves}
        victim = policy.store._leaves.lowest()[1]
        assert score[victim] == pytest.approx(min(score.values()))
        compared.append(victim.used == min(node.used for node in leaves))

    serve_all(policy, prompts(np.random.default_rng(4), 200), check)
    assert all(compared) == (alpha == 0)


@pytest.mark.parametrize("fixed", [0.0, 0.7, 2.0])
def test_replay_saves_what_a_policy_saves(fixed):
    drawn, rules = prompts(np.random.default_rng(5), 150), EvictionRules({"alpha": fixed}, COSTS)
    policy = make_policy(make_budget(tokens=70), eviction="marconi", eviction_rules=rules)
    facts = EvictionFacts(PrefixTree(), make_budget(tokens=70), KV, rules)
    replay = Replay(facts, fixed)
    for number, tokens in enumerate(drawn):
        assert replay.serve(make_request(tokens)) == serve_all(policy, [tokens]), number


@pytest.mark.parametrize("seed", range(3))
def test_tuned_alpha_is_the_best_of_its_window(seed):
    drawn = prompts(np.random.default_rng(seed), 120)
    policy = make_policy(make_budget(tokens=40), eviction="marconi_tuned", eviction_rules=EvictionRules({}, COSTS))
    leaves, tuned = policy.store._leaves, None
    for number, tokens in enumerate(drawn):
        serve_all(policy, [tokens])
        if leaves._chosen and tuned is None:
            tuned = number + 1
    assert tuned == 5 * leaves._first_eviction
    saved = {}
    for alpha in ALPHAS:
        rules = EvictionRules({"alpha": alpha}, COSTS)
        fixed = make_policy(make_budget(tokens=40), eviction="marconi", eviction_rules=rules)
        saved[alpha] = sum(quadratic(0, serve_all(fixed, [tokens])) for tokens in drawn[:tuned])
    assert leaves.alpha == max(saved, key=lambda alpha: (saved[alpha], -alpha))
    assert min(saved.values()) < max(saved.values())


def test_segment_length_evicts_what_is_soon_computed():
    rules = EvictionRules({"alpha": 2.0}, COSTS)
    policy = make_policy(make_budget(tokens=32), eviction="segment_length", eviction_rules=rules)
    long, short, more = tuple(range(20)), (30, 31), tuple(range(40, 52))
    assert serve_all(policy, [long, short, more, long]) == 19


def scaled(values: dict, key) -> float:
    width = max(values.values()) - min(values.values())
    return (values[key] - min(values.values())) / width if width else 0.0


@pytest.mark.parametrize("cost", ["flops", "tokens"])
def test_gdsf_weighs_uses_by_cost(cost):
    policy = make_policy(
        make_budget(tokens=12),
        eviction="gdsf",
        eviction_rules=EvictionRules({}, lambda usual: COSTS(cost)),
        block_size=2,
    )
    deep, shallow = (1, 1, 1, 1, 1, 1, 1, 1), (2, 2)
    serve_all(policy, [deep, shallow, shallow, (3, 3), (4, 4)])
    stored = {path for root in policy.index.all() for path, _ in walk(root)}
    # in FLOPs eight tokens are worth 64 of 16 bytes, two are worth 4 of 4; in tokens all are worth the same
    assert (deep in stored) == (cost == "flops")
    assert shallow in stored  # used twice


# -- A tree with edges of several blocks evicts as a tree with one node per block. ---


BLOCK, ROOM = 2, 6  # tokens, blocks


class PlainTable:
    """Blocks by their prefix, with the time of last use; the oldest block without a successor is evicted."""

    def __init__(self):
        self.used = {}

    def matched(self, tokens):
        return next(n for n in range(len(tokens), -1, -BLOCK) if n == 0 or tokens[:n] in self.used)

    def store(self, tokens, now):
        self.use(tokens, self.matched(tokens), now)
        missing = (len(tokens) - self.matched(tokens)) // BLOCK
        while len(self.used) + missing > ROOM:
            leaves = [key for key in self.used if not any(key == other[:-BLOCK] for other in self.used)]
            del self.used[min(leaves, key=self.used.__getitem__)]
        self.use(tokens, len(tokens), now)

    def use(self, tokens, upto, now):
        self.used |= {tokens[:n]: now for n in range(BLOCK, upto + 1, BLOCK)}


def insert_prompt(store, root, tokens):
    string = encode(tokens)
    node, matched = store.tree.match(root, string)
    store.touch(node, matched)
    missing = (len(tokens) - matched) * KV
    assert store.reserve(missing, 0)
    store.unreserve(missing, 0)
    store.insert(root, string, len(tokens), [], 0)


blocks = st.lists(st.tuples(st.just(0), st.integers(0, 2)), min_size=1, max_size=5).map(lambda pairs: sum(pairs, ()))


@settings(max_examples=120, deadline=None)
@given(st.lists(blocks, max_size=12))
def test_runs_of_blocks_are_evicted_block_by_block(prompts):
    store, table = make_store(make_budget(tokens=ROOM * BLOCK), block_size=BLOCK, fixed_blocks=True), PlainTable()
    root = store.tree.new_root()
    for now, tokens in enumerate(prompts):
        insert_prompt(store, root, tokens)
        table.store(tokens, now)
        ends = [(path, node) for path, node in walk(root)]
        assert {path[:n] for path, _ in ends for n in range(BLOCK, len(path) + 1, BLOCK)} == set(table.used)
        recount(store, [root])


def test_a_long_prompt_is_one_edge_and_loses_its_end():
    store = make_store(make_budget(tokens=8), block_size=BLOCK, fixed_blocks=True)
    root = store.tree.new_root()
    insert_prompt(store, root, (1, 1, 1, 1, 1, 1))
    assert [path for path, _ in walk(root)] == [(1,) * 6]
    insert_prompt(store, root, (2, 2, 2, 2))
    assert sorted(path for path, _ in walk(root)) == [(1,) * 4, (2,) * 4]
