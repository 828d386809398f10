"""Designed shapes cover their ranges and depend on the seed only."""

from itertools import pairwise

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request
from spanlab.settings.analyses import DesignSettings
from spanlab.workloads.synthetic import Shape, design

RULES = BatchRules(max_num_batched_tokens=512, max_num_seqs=8, prefill_first=True)
SETTINGS = DesignSettings(shapes=40, repeats=1, longest=1024, outputs=4)


def waves(shape: Shape) -> list[list[Request]]:
    """The requests of each wave, by time of arrival."""
    times = sorted({request.arrived_at for request in shape.requests})
    return [[request for request in shape.requests if request.arrived_at == time] for time in times]


@pytest.fixture(scope="module")
def shapes() -> list[Shape]:
    return design(SETTINGS, {"none": False, "pic": True}, RULES, 100)


def test_arms_take_turns_under_the_rules_of_the_study(shapes):
    assert [shape.arm for shape in shapes] == ["none", "pic"] * 20
    for shape in shapes:
        assert shape.rules.prefill_first
        assert 8 <= shape.rules.max_num_batched_tokens <= 512


def test_they_reach_the_longest_prompts_the_largest_batches_and_one_alone(shapes):
    prompts = sorted(request.num_tokens for shape in shapes for request in shape.requests)
    assert prompts[0] <= 16
    assert prompts[-1] == 1024
    assert {len(waves(shape)[0]) for shape in shapes} >= {1, 2, 8}
    assert {request.output_len for shape in shapes for request in shape.requests} == {1, 2, 3, 4}
    assert max(token for shape in shapes for r in shape.requests for token in r.tokens) < 100


def test_the_first_is_as_large_as_any(shapes):
    first = shapes[0]
    assert first.rules.max_num_batched_tokens == 512
    assert [request.num_tokens for request in waves(first)[0]] == [1024] * 4
    assert max(sum(r.num_tokens for r in wave) for shape in shapes for wave in waves(shape)) == 4096


def test_the_second_wave_asks_about_the_same_documents(shapes):
    for shape in shapes:
        first, second = ([{id(s.tokens) for s in r.spans if s.independent} for r in wave] for wave in waves(shape))
        assert first == second
        same = all(
            [id(s) for s in a.spans[:-1]] == [id(s) for s in b.spans[:-1]] for a, b in zip(*waves(shape), strict=True)
        )
        assert same or shape.arm == "pic"
    orders = [[s for s in r.spans if s.independent] for shape in shapes if shape.arm == "pic" for r in waves(shape)[1]]
    assert any(len(order) > 1 for order in orders)


def test_a_seed_makes_them(shapes):
    again = design(SETTINGS, {"none": False, "pic": True}, RULES, 100)
    for shape, repeated in zip(shapes, again, strict=True):
        assert shape.rules == repeated.rules
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(shape.requests, repeated.requests, strict=True))
    assert all(a is not b for a, b in pairwise(shapes))
