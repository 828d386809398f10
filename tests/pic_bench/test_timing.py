"""Cold is cold, warm reuses exactly what is there, and every request leaves its row."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

from spanlab.pic_bench import timing
from spanlab.pic_bench.rows import Cell, Row
from spanlab.pic_bench.timing import trial_of

SYSTEM, DOCUMENT, QUESTION = 13, 15, 12
PROMPT = SYSTEM + 4 * DOCUMENT + QUESTION
PIC = ("pic", "pic_raw", "pic_turned", "ape", "as_seen")
PREFIX = {"radix": 1, "block_hash_16": 16}


@pytest.fixture(scope="module")
def rows(folder, read):
    return read(folder)[0]


@pytest.fixture(scope="module")
def of(rows):
    """Warm rows of an arm."""

    def select(arm: str, order: str = "shuffled", kind: str = "warm"):
        return [row for row in rows if (row["arm"], row["order"], row["kind"]) == (arm, order, kind)]

    return select


def test_every_arm_has_one_cold_request_and_its_repeats(rows, settings):
    wanted = Counter(dict.fromkeys(timing.arms(settings()), 4))
    assert Counter((row["arm"], row["order"]) for row in rows) == wanted
    assert [row["index"] for row in rows] == [0, 1, 2, 3] * len(wanted)
    assert all((row["kind"] == "cold") == (row["index"] == 0) for row in rows)
    assert {row["prompt_tokens"] for row in rows} == {PROMPT}


def test_cold_requests_compute_everything(rows):
    for row in rows:
        if row["kind"] == "cold" or row["arm"] == "none":
            assert (row["reused_tokens"], row["computed_tokens"]) == (0, PROMPT)


@pytest.mark.parametrize("arm", PIC)
def test_spans_are_reused_whole_wherever_they_stand(of, arm: str):
    assert [row["reused_tokens"] for row in of(arm)] == [SYSTEM + 4 * DOCUMENT] * 3


def test_repairs_compute_again_what_they_say(of):
    """LegoLink the first 16 tokens, here whole documents; CacheBlend floor(0.15 · 73), of the system prompt too."""
    assert [row["repaired_tokens"] for row in of("lego_link_16")] == [4 * DOCUMENT] * 3
    assert [row["reused_tokens"] for row in of("lego_link_16")] == [SYSTEM] * 3
    assert [row["repaired_tokens"] for row in of("cache_blend_15")] == [10] * 3
    assert [row["copied_tokens"] for row in of("cache_blend_15")] == [4 * DOCUMENT] * 3
    assert [row["copied_tokens"] for row in of("pic_turned")] == [4 * DOCUMENT] * 3
    assert [row["copied_tokens"] for row in of("pic")] == [0] * 3


@pytest.mark.parametrize("order", ["same", "shuffled"])
@pytest.mark.parametrize("arm", PREFIX)
def test_prefix_caches_reuse_the_longest_prefix_that_was_asked_before(of, ground, settings, arm: str, order: str):
    trial = trial_of(settings(), ground.texts, ground.tokenizer, "xs", 0)
    asked = [request.tokens for request in trial.requests(order)]
    for index, row in enumerate(of(arm, order), 1):
        longest = max(common_prefix(asked[index], earlier) for earlier in asked[:index])
        assert row["reused_tokens"] == longest // PREFIX[arm] * PREFIX[arm]
        assert order == "shuffled" or row["reused_tokens"] >= SYSTEM + 4 * DOCUMENT - PREFIX[arm]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    same = a[: len(b)] == b[: len(a)]
    return len(same) if same.all() else int(np.argmin(same))


def test_times_add_up_and_begin_at_admission(rows):
    parts = ("plan_s", "copy_s", "fill_s", "repair_s", "prefill_s", "other_s")
    for row in rows:
        assert sum(row[part] for part in parts) == pytest.approx(row["ttft_s"])
        assert min(row[part] for part in parts) > -1e-6
        assert row["finished_s"] == pytest.approx(row["ttft_s"])  # one token


def test_arms_take_turns_within_a_trial_and_prefix_caches_run_in_both_orders(settings):
    toy = settings("trials=2", "only=[none,radix,pic]", "sizes=[xs,sm]")
    expected = [("none", "shuffled"), ("radix", "same"), ("radix", "shuffled"), ("pic", "shuffled")]
    cells = timing.cells(toy)
    assert cells == [
        Cell("tiny", size, trial, arm, order) for size in ("xs", "sm") for trial in (0, 1) for arm, order in expected
    ]


def test_preparing_is_told_apart_and_leaves_no_cold_request(ground, settings):
    toy = settings("prepare=true", "repeats=1")
    trial = timing.make_trial(toy, ground, "xs", 0)
    rows = list(timing.run_cell(toy, ground, Cell("tiny", "xs", 0, "pic", "shuffled"), trial))
    assert [row.kind for row in rows] == ["prepare"] * 4 + ["warm"] * 2
    assert [row.index for row in rows] == [0, 1, 2, 3, 0, 1]
    assert [row.reused_tokens for row in rows[4:]] == [SYSTEM + 4 * DOCUMENT] * 2
    assert len(rows) == timing.rows_of(toy, rows[0].cell)
    cold = list(timing.run_cell(toy, ground, Cell("tiny", "xs", 0, "none", "shuffled"), trial))
    assert [row.kind for row in cold] == ["cold", "warm"]
    assert [row.reused_tokens for row in cold] == [0, 0]


def test_more_output_and_small_steps_change_no_first_token(ground, settings):
    """The time to the first token is that of all steps with chunks, and none that only decodes."""
    toy = settings("output_tokens=3", "token_budget=32", "repeats=1")
    trial = timing.make_trial(toy, ground, "xs", 0)
    cold, warm = timing.run_cell(toy, ground, Cell("tiny", "xs", 0, "pic", "shuffled"), trial)
    assert (cold.output_tokens, warm.output_tokens) == (3, 3)
    assert cold.ttft_s < cold.finished_s
    assert warm.ttft_s < warm.finished_s
    assert cold.other_s > -1e-6


def test_a_pool_is_given_back_whole_and_used_again(ground, settings):
    toy = settings("repeats=1")
    trial = timing.make_trial(toy, ground, "xs", 0)
    pools = set()
    for arm in ("pic", "cache_blend_15", "as_seen"):
        list(timing.run_cell(toy, ground, Cell("tiny", "xs", 0, arm, "shuffled"), trial))
        pool = ground.pool(1, 1)
        assert pool.free_pages == pool.shape.pages
        pools.add(id(pool))
    assert len(pools) == 1


def test_threads_are_one_per_core_of_this_process_where_none_are_asked_for(settings):
    import torch

    from spanlab.bench.machine import use_threads

    try:
        assert use_threads(settings("engine.threads=null").engine) == len(os.sched_getaffinity(0))
        assert use_threads(settings("engine.threads=1").engine) == 1
    finally:
        torch.set_num_threads(1)


def test_repeats_of_the_baseline_are_grouped_by_cell(settings):
    told = dict.fromkeys([field.name for field in fields(Row)], 0)
    told |= {"model": "tiny", "size": "xs", "arm": "none", "order": "shuffled"}
    one = Row(**told | {"kind": "cold", "ttft_s": 2.0})
    rows = [one, replace(one, kind="warm", ttft_s=3.0), replace(one, kind="prepare"), replace(one, arm="pic")]
    rows.append(replace(one, trial=1, ttft_s=4.0))
    assert timing.baseline_repeats(settings(), rows) == [[2.0, 3.0], [4.0]]
