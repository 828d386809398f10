"""Every arm starts where its placement says, holds what it says, and computes what a full prefill would."""

from __future__ import annotations

import pytest

from spanlab.checkpoint_bench import rounds
from spanlab.checkpoint_bench.rows import Cell

# states after the cold prompt of 256 tokens; then, for prompts that share 128 and 205 of them, where they start
EXPECTED = {
    "kv_only": (0, [0, 0]),
    "block_64": (4, [128, 192]),
    "block_512": (0, [0, 0]),
    "block_2048": (0, [0, 0]),
    "balanced_3": (3, [128, 192]),
    "balanced_12": (3, [128, 192]),  # 19 apart, floored to 64
    "balanced_30": (3, [128, 192]),
    "sqrt": (4, [128, 192]),
    "log": (0, [0, 0]),
    "dp_1": (1, [128, 128]),
    "dp_3": (2, [128, 192]),
    "last": (1, [0, 0]),
    "tail_1": (1, [0, 192]),
    "tail_3": (2, [128, 192]),  # the third would stand at the very beginning
    "boundary": (2, [128, 192]),
    "branch": (0, [0, 128, 128, 192]),  # each depth twice
}


@pytest.fixture(scope="module")
def rows(folder, read):
    return read(folder)[0]


def test_every_arm_of_the_entry_is_expected(settings):
    assert {"none", *EXPECTED} == set(settings().arms)


@pytest.mark.parametrize("arm", EXPECTED)
def test_an_arm_starts_from_the_checkpoints_that_it_placed(rows, arm: str):
    states, resumes = EXPECTED[arm]
    cold, *again = [row for row in rows if row.arm == arm]
    assert (cold.kind, cold.captured_states, cold.reused_tokens) == ("cold", states, 0)
    assert [row.reused_tokens for row in again] == resumes
    assert [row.matched_tokens for row in again] == [row.shared for row in again]
    assert all(row.reused_tokens + row.computed_tokens == 256 for row in again)


def test_policy_pools_and_formula_agree_on_every_byte(rows):
    assert max(row.state_bytes for row in rows) > 4 * 442_368
    for row in rows:
        assert row.kv_bytes == row.kv_allocated_bytes == row.kv_formula_bytes
        assert row.state_bytes == row.state_allocated_bytes == row.state_formula_bytes
        assert (row.kv_bytes > 0) == (row.arm != "none")


def test_a_cold_prompt_holds_its_tokens_and_its_states(rows):
    for row in rows:
        if row.kind == "cold":
            assert (row.kv_bytes, row.state_bytes) == (256 * 512, row.captured_states * 442_368)


def test_wherever_a_prompt_starts_its_logits_are_those_of_a_full_prefill(rows):
    assert all(row.logit_gap == 0 for row in rows if row.kind == "bare")
    assert max(row.logit_gap for row in rows) < 1e-5
    assert min(row.logit_scale for row in rows) > 0.5


def test_times_are_of_the_same_order_as_their_parts(rows):
    for row in rows:
        assert 0 < row.plan_s + row.load_s + row.prefill_s <= row.ttft_s
        assert (row.load_floor_s > 0) == (row.reused_tokens > 0)
        assert (row.capture_floor_s > 0) == (row.captured_states > 0)


def test_the_baseline_is_every_arms_neighbour(settings):
    toy = settings()
    for number in range(4):
        turns = rounds.turns(toy, Cell("tiny-hybrid", 256, number))
        assert sorted(name for name in turns if name != "none") == sorted(EXPECTED)
        assert turns[0] == turns[-1] == "none"
        for place, name in enumerate(turns):
            assert name == "none" or "none" in turns[place - 1 : place + 2]


def test_arms_come_in_another_order_each_round(settings):
    toy = settings()
    orders = [tuple(rounds.turns(toy, Cell("tiny-hybrid", 256, number))) for number in range(3)]
    assert len(set(orders)) == 3
    assert orders[0] == tuple(rounds.turns(toy, Cell("another", 256, 0)))


def test_a_round_has_as_many_rows_as_are_told_beforehand(rows, settings):
    assert len(rows) == rounds.rows_of(settings())
    assert [row.turn for row in rows] == sorted(row.turn for row in rows)


def test_memory_is_given_back_whole(bed, settings):
    toy = settings("only=[none,block_64,branch]")
    length = rounds.Length(toy, bed, 256)
    rows = list(length.round(Cell("tiny-hybrid", 256, 0)))
    assert len(rows) == rounds.rows_of(toy)
    pool, states = bed.pool(1, 1), bed.states(1)
    assert pool.free_pages == pool.shape.pages
    assert states.used == 0
