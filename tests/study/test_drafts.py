"""What drafts cost the cache: hits that recompute, throughput over seeds, and the points of a sweep as ways out."""

import numpy as np
import pytest

from spanlab.analyses.base import caveats
from spanlab.analyses.drafts import _recomputed_per_hit, _rows, _throughput, drafts_table
from spanlab.build import build_policy
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.report.sweep import SweepPoint
from spanlab.settings import Study


def test_only_requests_with_a_hit_count_for_what_a_hit_recomputes():
    columns = {"seen_tokens": np.array([100, 90, 0, 50]), "reused_tokens": np.array([64, 80, 0, 0])}
    assert _recomputed_per_hit(columns) == (36 + 10) / 2
    assert _recomputed_per_hit({name: values[2:] for name, values in columns.items()}) is None


def test_throughput_is_a_ratio_of_sums_over_seeds():
    columns = {
        "seed": np.array([0, 0, 1]),
        "output_tokens": np.array([10, 20, 60]),
        "arrived_s": np.array([0.0, 1.0, 5.0]),
        "finished_s": np.array([2.0, 3.0, 6.0]),
    }
    assert _throughput(columns) == 90 / (3 + 1)


def point(drafts: int, blocks: str, **throughput: float) -> SweepPoint:
    settings = {"batch.speculation.draft_tokens": str(drafts), "arms.vllm_0_32.pool.block_size": blocks}
    rate = {"mean": 0.5, "low": 0.4, "high": 0.6}
    common = {"block_size": 800, "token_hit_rate": rate, "recomputed_per_hit": 7.0, "e2e_s": 1.0, "preemptions": 0}
    arms = {arm: {**common, "output_throughput": value} for arm, value in throughput.items()}
    summary = {"drafts": {"draft_tokens": drafts, "acceptance": 0.7, "arms": arms}}
    return SweepPoint("", "", "", summary, settings=settings)


def test_ways_are_ranked_and_compared_with_no_drafts_of_the_same_blocks():
    points = [
        point(0, "null", old=100.0, new=100.0),
        point(3, "null", old=90.0, new=130.0),
        point(0, "1600", old=80.0, new=80.0),
        point(3, "1600", old=40.0, new=84.0),
    ]
    table = drafts_table(_rows(points))
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, (cell.value for cell in row), strict=True)) for row in table.rows]
    ranked = [(row["arm"], row["draft_tokens"], row["output_throughput"], row["against_none"]) for row in rows]
    assert ranked[0] == ("new", 3, 130.0, 1.3)
    assert ranked[-1] == ("old", 3, 40.0, 0.5)
    assert [throughput for *_, throughput, _ in ranked] == sorted((row[2] for row in ranked), reverse=True)


def test_an_arm_without_a_pool_of_blocks_is_refused():
    with pytest.raises(ValueError, match=r"analyses=drafts with arms.none.policy=tree: expected a pool of blocks"):
        compose("rag_sim", ["analyses=[summary,drafts]", "only=[none,radix]"])


# -- A drafter with separate keys and values: its share of a store, and the remaining reuse of its arms. ---


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
