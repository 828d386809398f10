"""A replay decides as the policies do when nothing else runs; stack distances as a replay at every size."""

from __future__ import annotations

import numpy as np
import pytest

from spanlab import build
from spanlab.core.request import Request, Span
from spanlab.main import compose

from spanlab.offline.paths import Paths, build_paths
from spanlab.offline.replay import Asked, CacheRules, Replayed, replay
from spanlab.offline.reuses import ServiceOrder, find_reuses
from spanlab.offline.stack import stack_distances
from spanlab.study.explain.rules import rules_of

SEEDS = range(12)


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
    starts = np.cumsum([0, *map(len, prompts)])
    return build_paths(flat, np.ones(len(flat), np.int32), starts)


def asked(prompts: list[np.ndarray], output: int) -> Asked:
    return Asked(token_paths(prompts), np.full(len(prompts), output), [()] * len(prompts))


def served(study, arm: str, prompts: list[np.ndarray], output: int) -> list[int]:
    """Reused tokens of each request where a policy serves one after another."""
    policy = build.build_policy(study, study.arms[arm], 0, 10_000)
    reused = []
    for number, tokens in enumerate(prompts):
        request = Request(number, 0, (Span(tokens),), output)
        policy.start_step()
        plan = policy.match(request, number)
        allocation = policy.allocate(plan, number)
        assert allocation is not None, "the store has room for one request"
        at = plan.resume
        while at < len(tokens):  # a chunk ends where the policy wants a state
            stop = policy.chunk_end(plan, at, len(tokens), len(tokens), 0)
            assert policy.append(allocation, at, stop)
            policy.insert(allocation, stop, number)
            at = stop
            policy.start_step()
        for position in range(len(tokens), len(tokens) + output - 1):
            assert policy.append(allocation, position, position + 1)
        policy.finish(allocation, output - 1, number)
        policy.free(allocation, number)
        reused.append(plan.reused)
    return reused


def study_of(arms: str, gib: float | None, model: str = "llama-3.1-8b"):
    memory = "null" if gib is None else f"{gib:.12f}"
    return compose("explain", [f"arms={arms}", f"store.total_gib={memory}", f"model={model}"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("blocks", [20, 40, 1000])
def test_replay_equals_pool_of_blocks(seed: int, blocks: int):
    study = study_of("engines", blocks * 16 * 131_072 / 2**30)
    prompts = random_prompts(seed)
    found = replay(asked(prompts, 5), rules_of(study, "vllm_0_32"))
    assert found.reused.tolist() == served(study, "vllm_0_32", prompts, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_equals_tree_of_blocks(seed: int):
    study = study_of("engines", 4 * 256 * 131_072 / 2**30)
    prompts = random_prompts(seed, longest=500)
    found = replay(asked(prompts, 1), rules_of(study, "blocks_256"))
    assert found.reused.tolist() == served(study, "blocks_256", prompts, 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arm", ["vllm_0_32", "sglang_0_5_23_hybrid", "last", "branch"])
def test_hybrid_replay_equals_policy_without_limit(seed: int, arm: str):
    study = study_of("engines_hybrid", None, "tiny-hybrid")
    prompts = random_prompts(seed)
    found = replay(asked(prompts, 1), rules_of(study, arm))
    assert found.reused.tolist() == served(study, arm, prompts, 1)
