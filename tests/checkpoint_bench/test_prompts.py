"""Later prompts leave the sequence, and each other, exactly where they should."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from spanlab.checkpoint_bench.prompts import Prompts

SHARED = (50, 75, 199)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(seed=0, vocabulary=3, length=200, shared=SHARED)  # so few ids that equal ones follow by chance


def common(a: np.ndarray, b: np.ndarray) -> int:
    differ = np.nonzero(a != b)[0]
    return int(differ[0]) if len(differ) else len(a)


def test_a_later_prompt_shares_so_many_tokens_and_not_one_more(prompts):
    sequence = prompts.cold.tokens
    for shared in SHARED:
        for visit in (0, 1):
            again = prompts.again(shared, visit)
            assert again.num_tokens == len(sequence) == 200
            assert common(again.tokens, sequence) == shared


def test_two_visits_of_one_depth_part_where_they_leave_the_sequence(prompts):
    assert [common(prompts.again(s, 0).tokens, prompts.again(s, 1).tokens) for s in SHARED] == list(SHARED)


def test_prompts_of_two_depths_part_at_the_lesser_one(prompts):
    for a, b in combinations(SHARED, 2):
        assert common(prompts.again(a, 0).tokens, prompts.again(b, 0).tokens) == a


def test_the_workload_marks_the_depths_that_it_knows(prompts):
    assert prompts.cold.boundaries == SHARED
    assert [prompts.again(shared, 0).boundaries for shared in SHARED] == [SHARED[:1], SHARED[:2], SHARED]


def test_every_request_has_a_number_of_its_own(prompts):
    again = [prompts.again(shared, visit).id for visit in (0, 1) for shared in SHARED]
    assert [prompts.cold.id, *again] == list(range(7))


def test_prompts_are_the_same_each_time(prompts):
    twin = Prompts(seed=0, vocabulary=3, length=200, shared=SHARED)
    assert (prompts.again(75, 1).tokens == twin.again(75, 1).tokens).all()


def test_placements_are_told_of_every_depth_in_turns(prompts):
    assert [visit.seen for visit in prompts.visits(2)] == [*SHARED, *SHARED]
    assert {visit.prompt for visit in prompts.visits(2)} == {200}
