"""A replay decides as the policies do when nothing else runs; the curve is a replay at every size."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from spanlab import build
from spanlab.core.request import Request, Span
from spanlab.main import compose
from spanlab.offline.belady import most_reused_tokens
from spanlab.offline.paths import Paths, build_paths
from spanlab.offline.replay import Asked, CacheRules, replay
from spanlab.offline.reuses import ServiceOrder, find_reuses
from spanlab.offline.spans import Contents, in_cached_order, span_reuse
from spanlab.offline.stack import stack_distances
from spanlab.study.explain.rules import rules_of

SEEDS = range(6)
KV = 131_072  # bytes of a token of llama-3.1-8b


def random_prompts(seed: int, count: int = 60, longest: int = 120) -> list[np.ndarray]:
    """Prompts that extend, repeat and leave earlier ones."""
    draw = np.random.default_rng(seed)
    prompts: list[np.ndarray] = []
    for _ in range(count):
        old = prompts[draw.integers(len(prompts))] if prompts and draw.random() < 0.8 else np.empty(0, np.int32)
        kept = old[: draw.integers(len(old) + 1)]
        fresh = draw.integers(0, 1 << 30, draw.integers(1, longest), dtype=np.int32)
        prompts.append(np.concatenate([kept, fresh])[: 2 * longest] if draw.random() < 0.8 or not len(old) else old)
    return prompts


def token_paths(prompts: list[np.ndarray]) -> Paths:
    """Paths with a piece per token."""
    flat = np.unique(np.concatenate(prompts), return_inverse=True)[1].astype(np.int32)
    return build_paths(flat, np.ones(len(flat), np.int32), np.cumsum([0, *map(len, prompts)]))


def asked(prompts: list[np.ndarray], output: int = 1) -> Asked:
    return Asked(token_paths(prompts), np.full(len(prompts), output), [()] * len(prompts))


def served(study, arm: str, prompts: list[np.ndarray], output: int = 1) -> list[int]:
    """Reused tokens of each request where a policy serves one after another."""
    policy = build.build_policy(study, study.arms[arm], 0, 10_000)
    reused = []
    for number, tokens in enumerate(prompts):
        request = Request(number, 0, (Span(tokens),), output)
        policy.start_step(number)
        plan = policy.match(request, number)
        allocation = policy.allocate(plan, number)
        assert allocation is not None, "the store has room for one request"
        at = plan.resume
        while at < len(tokens):  # a chunk ends where the policy wants a state
            stop = policy.chunk_end(plan, at, len(tokens), len(tokens), 0)
            assert policy.append(allocation, at, stop)
            policy.insert(allocation, stop, number)
            at = stop
            policy.start_step(number)
        for position in range(len(tokens), len(tokens) + output - 1):
            assert policy.append(allocation, position, position + 1)
        policy.finish(allocation, output - 1, number)
        policy.free(allocation, number)
        reused.append(plan.reused)
    return reused


@cache
def study_of(arms: str, tokens: int | None, model: str = "llama-3.1-8b"):
    memory = "null" if tokens is None else f"{tokens * KV / 2**30:.12f}"
    return compose("explain", [f"arms={arms}", f"store.total_gib={memory}", f"model={model}"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("blocks", [20, 40, 1000])
def test_replay_equals_pool_of_blocks(seed: int, blocks: int):
    study, prompts = study_of("engines", 16 * blocks), random_prompts(seed)
    found = replay(asked(prompts, 5), rules_of(study, "vllm_0_32", 1000))
    assert found.reused.tolist() == served(study, "vllm_0_32", prompts, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_equals_tree_of_blocks(seed: int):
    study, prompts = study_of("engines", 4 * 256), random_prompts(seed, longest=500)
    found = replay(asked(prompts), rules_of(study, "blocks_256", 1000))
    assert found.reused.tolist() == served(study, "blocks_256", prompts)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arm", ["vllm_0_32", "sglang_0_5_23_hybrid", "last", "branch"])
def test_hybrid_replay_equals_policy_without_limit(seed: int, arm: str):
    study, prompts = study_of("engines_hybrid", None, "tiny-hybrid"), random_prompts(seed)
    found = replay(asked(prompts), rules_of(study, arm, 1000))
    assert found.reused.tolist() == served(study, arm, prompts)


@pytest.mark.parametrize(("tokens", "points"), [(10_000, 5.0), (40_000, 2.5)])
@pytest.mark.parametrize("arm", ["vllm_0_32", "sglang_0_5_23_hybrid", "branch"])
def test_hybrid_replay_is_near_policy_under_pressure(arm: str, tokens: int, points: float):
    """In points of the token hit rate, for stores of two to three and of ten of the longest prompts with a state."""
    model = study_of("engines_hybrid", None, "tiny-hybrid").model
    memory = f"store.total_gib={tokens * model.kv_bytes_per_token / 2**30:.12f}"
    study = compose("explain", ["arms=engines_hybrid", "model=tiny-hybrid", memory])
    off = []
    for seed in range(2):
        prompts = random_prompts(seed, 50, 3000)
        found, known = replay(asked(prompts), rules_of(study, arm, 10_000)).reused.sum(), served(study, arm, prompts)
        off.append(abs(found - sum(known)) / sum(map(len, prompts)))
        assert sum(known)
    assert max(off) <= points / 100


@pytest.mark.parametrize(("tokens", "points"), [(300, 2.0), (1000, 2.0), (10_000, 0.0)])
def test_replay_is_near_whole_leaf_eviction(tokens: int, points: float):
    study, prompts = study_of("engines", tokens), random_prompts(0, 200)
    found = replay(asked(prompts), rules_of(study, "sglang_0_5_23", 1000)).reused.sum()
    off = found - sum(served(study, "sglang_0_5_23", prompts))
    assert abs(off) <= points / 100 * sum(map(len, prompts))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block", [1, 16])
def test_causes_and_reuse_sum_to_prompts(seed: int, block: int):
    requests = asked(random_prompts(seed), 5)
    found = replay(requests, CacheRules(block, block, 400))
    assert (found.reused + sum(found.lost.values())).tolist() == requests.paths.prompt_tokens.tolist()
    assert found.lost["kv_evicted"].any()


def lru_found(prompts: list[np.ndarray], blocks: int, size: int) -> list[int]:
    """Blocks that each prompt finds in a list of the blocks that were used last, by brute force."""
    kept: list[bytes] = []
    found = []
    for tokens in prompts:
        chain = [tokens[: (at + 1) * size].tobytes() for at in range(len(tokens) // size)]
        found.append(next((at for at, block in enumerate(chain) if block not in kept), len(chain)))
        kept = [block for block in kept if block not in chain] + chain[::-1]
        kept = kept[-blocks:]
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [1, 16])
def test_stack_distances_equal_lru_at_every_size(seed: int, size: int):
    prompts = random_prompts(seed, 30, 60)
    paths = token_paths(prompts)
    distances = stack_distances(paths, paths.blocks(size), np.zeros(len(prompts), np.int64))
    for blocks in (1, 2, 3, 7, 20, 50, 90, 300):
        found = paths.per_request(distances.found(blocks))
        assert found.tolist() == lru_found(prompts, blocks, size)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_cache_exceeds_the_optimum(seed: int):
    requests, own = asked(random_prompts(seed)), np.arange(60)
    reuses = find_reuses(requests.paths.forest(16), ServiceOrder(own, own, own, np.ones(60, bool)))
    for tokens in (300, 600, 1200):
        found = replay(requests, CacheRules(16, 16, tokens)).reused.sum()
        assert found <= most_reused_tokens(reuses, tokens - reuses.prompt_tokens)


def contents(*prompts: tuple[tuple[int, ...], tuple[int, ...]]) -> Contents:
    """Prompts of spans of ten tokens, each given with the indexes of its free ones."""
    pieces = np.array([piece for spans, _ in prompts for piece in spans], np.int32)
    free = np.array([at in loose for spans, loose in prompts for at in range(len(spans))])
    starts = np.cumsum([0, *(len(spans) for spans, _ in prompts)])
    return Contents(pieces, np.full(len(pieces), 10, np.int32), np.ones(len(pieces), bool), free, starts)


def test_spans_are_found_at_any_position():
    log = contents(((0, 1, 2), ()), ((2, 0, 3), ()), ((0, 1, 2), ()))
    assert log.paths().seen_tokens.tolist() == [0, 0, 30]
    assert log.seen_anywhere().tolist() == [0, 20, 30]
    reuse = span_reuse(log)
    assert reuse.reused(np.inf).tolist() == [0, 0, 0, 10, 10, 0, 10, 10, 9]
    assert reuse.reused(20).sum() < reuse.reused(np.inf).sum()


def test_repair_spares_the_first_span():
    reuse = span_reuse(contents(((0, 1), ()), ((0, 1, 2), ())))
    found = reuse.reused(np.inf)
    assert found.tolist() == [0, 0, 10, 10, 0]
    assert reuse.repaired(found, 4, 0.0).tolist() == [0, 0, 10, 6, 0]
    assert reuse.repaired(found, 0, 0.5).tolist() == [0, 0, 10, 5, 0]


def test_cached_order_moves_free_spans_alone():
    log = contents(((9, 1, 2, 8), (1, 2)), ((9, 2, 1, 7), (1, 2)), ((9, 2, 1, 7), ()))
    ordered = in_cached_order(log)
    assert ordered.pieces.tolist() == [9, 1, 2, 8, 9, 1, 2, 7, 9, 2, 1, 7]
    assert log.paths().seen_tokens.tolist() == [0, 10, 40]
    assert ordered.paths().seen_tokens.tolist() == [0, 30, 10]
