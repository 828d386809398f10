"""A drafter with separate keys and values: its share of a store, and the remaining reuse of its arms."""

import numpy as np
import pytest

from spanlab.analyses.base import caveats
from spanlab.build import build_policy
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.settings import Study

EAGLE = ("batch.speculation.draft_tokens=3", "batch.speculation.method=eagle", "batch.speculation.draft_layers=1")


def study(*changes: str) -> Study:
    arms = ("arms=attention", "only=[none,vllm_0_32,block_hash_16]", "store.total_gib=1.0")
    return compose("rag_sim", ["model=llama-3.2-1b", *arms, *changes])


def policy(name: str, *changes: str):
    made = study(*changes)
    return build_policy(made, made.arms[name], 0, 1000)


def test_a_drafters_layer_takes_what_one_of_the_models_does():
    """vLLM 0.32.0 makes 481 blocks of the memory of 512 where one layer comes to 16; one is the null block."""
    plain, drafted = policy("vllm_0_32").store, policy("vllm_0_32", *EAGLE).store
    assert study().model.attention_layers == 16
    assert drafted.block_bytes * 16 == plain.block_bytes * 17
    assert drafted.pool.num_blocks + 1 == (plain.pool.num_blocks + 1) * 16 // 17
    assert policy("none", *EAGLE).store.token_bytes * 16 == policy("none").store.token_bytes * 17


@pytest.mark.parametrize(("length", "reused"), [(64, 32), (65, 48), (70, 48), (17, 0), (16, 0)])
def test_block_hash_drops_the_last_block_of_a_match_too(length: int, reused: int):
    made = policy("block_hash_16", *EAGLE)
    stored = Request(0, 0, (Span(np.arange(64, dtype=np.int32)),))
    held = made.allocate(made.match(stored, 0), 0)
    made.insert(held, 64, 0)
    made.free(held, 0)
    plan = made.match(Request(1, 0, (Span(np.arange(length, dtype=np.int32)),)), 0)
    assert (plan.resume, plan.losses.kv_evicted) == (reused, 0)
    assert plan.resume + sum(plan.losses) == length


def test_the_size_of_the_drafter_is_reported():
    assert any("layers of the drafter (1) are as large as the model's" in one for one in caveats(study(*EAGLE), [], {}))


def test_a_drafter_that_drafts_nothing_takes_no_memory_and_is_reported():
    changes = (*EAGLE[1:], "batch.speculation.draft_tokens=0")
    assert policy("vllm_0_32", *changes).store.block_bytes == policy("vllm_0_32").store.block_bytes
    assert any(
        "nothing is drafted, and no layer of a drafter is loaded" in one for one in caveats(study(*changes), [], {})
    )
