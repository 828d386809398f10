"""A replay decides as the policies do without concurrency; stack distances equal an LRU list at every size."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from spanlab.analyses.fixes import rules_of
from spanlab.build import build_policy
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.offline.bound import most_reused_tokens
from spanlab.offline.forest import ServiceOrder, find_reuses
from spanlab.offline.replay import (
    CacheRules,
    Contents,
    Paths,
    ReplayRequests,
    build_paths,
    in_cached_order,
    replay,
    span_reuse,
    stack_distances,
)

SEEDS = range(6)
KV = 131_072  # bytes of a token of llama-3.1-8b


def random_prompts(seed: int, count: int = 60, longest: int = 120) -> list[np.ndarray]:
    """Return prompts that extend, repeat and diverge from earlier ones."""
    draw = np.random.default_rng(seed)
    prompts: list[np.ndarray] = []
    for _ in range(count):
        old = prompts[draw.integers(len(prompts))] if prompts and draw.random() < 0.8 else np.empty(0, np.int32)
        prefix = old[: draw.integers(len(old) + 1)]
        fresh = draw.integers(0, 1 << 30, draw.integers(1, longest), dtype=np.int32)
        prompts.append(np.concatenate([prefix, fresh])[: 2 * longest] if draw.random() < 0.8 or not len(old) else old)
    return prompts


def token_paths(prompts: list[np.ndarray]) -> Paths:
    """Return paths with one piece per token."""
    flat = np.unique(np.concatenate(prompts), return_inverse=True)[1].astype(np.int32)
    return build_paths(flat, np.ones(len(flat), np.int32), np.cumsum([0, *map(len, prompts)]))


def requests_of(prompts: list[np.ndarray], output: int = 1) -> ReplayRequests:
    return ReplayRequests(token_paths(prompts), np.full(len(prompts), output), [()] * len(prompts))


def served(study, arm: str, prompts: list[np.ndarray], output: int = 1) -> list[int]:
    """Return the reused tokens of each request where a policy serves one after another."""
    policy = build_policy(study, study.arms[arm], 0, 10_000)
    reused = []
    for number, tokens in enumerate(prompts):
        request = Request(number, 0, (Span(tokens),), output)
        policy.start_step(number)
        plan = policy.match(request, number)
        allocation = policy.allocate(plan, number)
        assert allocation is not None, "the store has room for one request"
        position = plan.resume
        while position < len(tokens):  # a chunk may end at a state
            stop = policy.chunk_end(plan, position, len(tokens), len(tokens), 0)
            assert policy.append(allocation, position, stop)
            policy.insert(allocation, stop, number)
            position = stop
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
    result = replay(requests_of(prompts, 5), rules_of(study, "vllm_0_32", 1000))
    assert result.reused.tolist() == served(study, "vllm_0_32", prompts, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_equals_tree_of_blocks(seed: int):
    study, prompts = study_of("engines", 4 * 256), random_prompts(seed, longest=500)
    result = replay(requests_of(prompts), rules_of(study, "blocks_256", 1000))
    assert result.reused.tolist() == served(study, "blocks_256", prompts)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arm", ["vllm_0_32", "sglang_0_5_23_hybrid", "last", "branch"])
def test_hybrid_replay_equals_policy_without_limit(seed: int, arm: str):
    study, prompts = study_of("engines_hybrid", None, "tiny-hybrid"), random_prompts(seed)
    result = replay(requests_of(prompts), rules_of(study, arm, 1000))
    assert result.reused.tolist() == served(study, arm, prompts)


@pytest.mark.parametrize(("tokens", "points"), [(10_000, 5.0), (40_000, 2.5)])
@pytest.mark.parametrize("arm", ["vllm_0_32", "sglang_0_5_23_hybrid", "branch"])
def test_hybrid_replay_is_near_policy_under_pressure(arm: str, tokens: int, points: float):
    """Compare token hit rates, with memory for two to three and for ten of the longest prompts with a state."""
    model = study_of("engines_hybrid", None, "tiny-hybrid").model
    memory = f"store.total_gib={tokens * model.kv_bytes_per_token / 2**30:.12f}"
    study = compose("explain", ["arms=engines_hybrid", "model=tiny-hybrid", memory])
    errors = []
    for seed in range(2):
        prompts = random_prompts(seed, 50, 3000)
        replayed = replay(requests_of(prompts), rules_of(study, arm, 10_000)).reused.sum()
        expected = sum(served(study, arm, prompts))
        errors.append(abs(replayed - expected) / sum(map(len, prompts)))
        assert expected
    assert max(errors) <= points / 100


@pytest.mark.parametrize(("tokens", "points"), [(300, 2.0), (1000, 2.0), (10_000, 0.0)])
def test_replay_is_near_whole_leaf_eviction(tokens: int, points: float):
    study, prompts = study_of("engines", tokens), random_prompts(0, 200)
    replayed = replay(requests_of(prompts), rules_of(study, "sglang_0_5_23", 1000)).reused.sum()
    error = replayed - sum(served(study, "sglang_0_5_23", prompts))
    assert abs(error) <= points / 100 * sum(map(len, prompts))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block", [1, 16])
def test_causes_and_reuse_sum_to_prompts(seed: int, block: int):
    requests = requests_of(random_prompts(seed), 5)
    result = replay(requests, CacheRules(block, block, 400))
    assert (result.reused + sum(result.lost.values())).tolist() == requests.paths.prompt_tokens.tolist()
    assert result.lost["kv_evicted"].any()


def lru_matches(prompts: list[np.ndarray], blocks: int, size: int) -> list[int]:
    """Return the blocks of each prompt in a list of the most recently used blocks, by brute force."""
    resident: list[bytes] = []
    matches = []
    for tokens in prompts:
        chain = [tokens[: (index + 1) * size].tobytes() for index in range(len(tokens) // size)]
        matches.append(next((index for index, block in enumerate(chain) if block not in resident), len(chain)))
        resident = [block for block in resident if block not in chain] + chain[::-1]
        resident = resident[-blocks:]
    return matches


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [1, 16])
def test_stack_distances_equal_lru_at_every_size(seed: int, size: int):
    prompts = random_prompts(seed, 30, 60)
    paths = token_paths(prompts)
    distances = stack_distances(paths, paths.blocks(size), np.zeros(len(prompts), np.int64))
    for blocks in (1, 2, 3, 7, 20, 50, 90, 300):
        matches = paths.per_request(distances.resident_blocks(blocks))
        assert matches.tolist() == lru_matches(prompts, blocks, size)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("multiple", [1, 16])
def test_no_cache_exceeds_the_optimum(seed: int, multiple: int):
    prompts = [prompt[: max(len(prompt) // multiple, 1) * multiple] for prompt in random_prompts(seed)]
    requests, slots = requests_of(prompts), np.arange(len(prompts))
    order = ServiceOrder(slots, slots, slots, np.ones(len(prompts), bool))
    reuses = find_reuses(requests.paths.forest(16), order)
    for tokens in (300, 600, 1200):
        reused = replay(requests, CacheRules(16, 16, tokens)).reused.sum()
        assert reused <= most_reused_tokens(reuses, tokens - reuses.prompt_tokens)
    assert reuses.infinite_tokens == replay(requests, CacheRules(16, 16, 10**9, outputs=False)).reused.sum()


@pytest.mark.parametrize("seed", range(8))
def test_paths_do_not_depend_on_sessions(seed: int):
    draw = np.random.default_rng(seed)
    prompts = [np.zeros(0, np.int64), *random_prompts(seed), np.zeros(0, np.int64)]
    flat = np.unique(np.concatenate(prompts), return_inverse=True)[1].astype(np.int32)
    lengths, starts = draw.integers(1, 30, len(flat))[flat], np.cumsum([0, *map(len, prompts)])
    paths, numbers = build_paths(flat, lengths, starts), draw.integers(0, 5, len(prompts))
    of_sessions = build_paths(flat, lengths, starts, numbers)
    for name in ("nodes", "starts", "node_start", "node_stop", "pieces", "prompt_tokens"):
        assert getattr(paths, name).tolist() == getattr(of_sessions, name).tolist()
    # each prompt's nodes hold its tokens end to end, and an earlier prompt has a node with it or nobody does
    seen, ends = set[tuple[int, ...]](), np.concatenate([[0], np.cumsum(lengths)])
    for prompt, (first, stop) in enumerate(pairwise(starts.tolist())):
        path = paths.nodes[paths.starts[prompt] : paths.starts[prompt + 1]]
        assert paths.node_stop[path].tolist() == (ends[first + np.cumsum(paths.pieces[path])] - ends[first]).tolist()
        prefixes = [tuple(flat[first:end].tolist()) for end in range(first + 1, stop + 1)]
        shared = sum(prefix in seen for prefix in prefixes)
        assert paths.seen_tokens[prompt] == ends[first + shared] - ends[first]
        seen |= set(prefixes)


def contents(*prompts: tuple[tuple[int, ...], tuple[int, ...]]) -> Contents:
    """Return prompts of spans of ten tokens; each argument has the spans and the indices of free ones."""
    pieces = np.array([piece for spans, _ in prompts for piece in spans], np.int32)
    free = np.array([index in loose for spans, loose in prompts for index in range(len(spans))])
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
    reused = reuse.reused(np.inf)
    assert reused.tolist() == [0, 0, 10, 10, 0]
    assert reuse.repaired(reused, 4, 0.0).tolist() == [0, 0, 10, 6, 0]
    assert reuse.repaired(reused, 0, 0.5).tolist() == [0, 0, 10, 5, 0]


def test_cached_order_moves_free_spans_alone():
    log = contents(((9, 1, 2, 8), (1, 2)), ((9, 2, 1, 7), (1, 2)), ((9, 2, 1, 7), ()))
    ordered = in_cached_order(log)
    assert ordered.pieces.tolist() == [9, 1, 2, 8, 9, 1, 2, 7, 9, 2, 1, 7]
    assert log.paths().seen_tokens.tolist() == [0, 10, 40]
    assert ordered.paths().seen_tokens.tolist() == [0, 30, 10]
