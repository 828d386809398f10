"""Synthetic prompts share exactly the drawn overlap."""

import numpy as np
import pytest

from spanlab.workloads import Synthetic
from spanlab.workloads.workload import shared_length

from .factories import load_workload, token_lists


def make(**options):
    return load_workload("synthetic", synthetic=Synthetic(**options))


def test_fixed_overlap_is_a_promised_boundary_of_exactly_that_length():
    workload = make(groups=3, requests_per_group=4, prompt_tokens=50, kind="fixed", value=0.4)
    requests = workload.requests
    assert [r.num_tokens for r in requests] == [50] * 12
    assert [r.boundaries for r in requests] == [(20,)] * 12
    for first in requests:
        for second in requests[first.id + 1 :]:
            expected = 20 if first.group_id == second.group_id else 0
            assert shared_length(first.tokens, second.tokens) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "uniform", "low": 0.0, "high": 1.0},
        {"kind": "normal", "mean": 0.5, "sd": 0.6},
        {"kind": "uniform", "unit": "tokens", "low": 3, "high": 90},
    ],
)
def test_drawn_overlaps_are_exact_and_promise_nothing(options: dict):
    workload = make(groups=2, requests_per_group=8, prompt_tokens=80, seed=5, **options)
    assert {r.boundaries for r in workload.requests} == {()}
    # Ids below the group's first fresh id are its base: that count is the overlap that was drawn.
    for group in range(2):
        members = [r.tokens for r in workload.requests if r.group_id == group]
        start = int(min(tokens.min() for tokens in members))
        base = np.arange(start, start + 80)
        overlaps = [shared_length(tokens, base) for tokens in members]
        for i, first in enumerate(members):
            for j, second in enumerate(members[:i]):
                assert shared_length(first, second) == min(overlaps[i], overlaps[j])


def test_a_full_overlap_repeats_the_prompt_and_none_shares_nothing():
    same = make(groups=1, requests_per_group=2, prompt_tokens=10, kind="fixed", value=1.0).requests
    assert same[0].tokens.tolist() == same[1].tokens.tolist() == list(range(10))
    apart = make(groups=1, requests_per_group=2, prompt_tokens=10, kind="fixed", value=0.0).requests
    assert not set(apart[0].tokens.tolist()) & set(apart[1].tokens.tolist())


def test_the_seed_decides_everything():
    def drawn(seed: int) -> list[list[int]]:
        return token_lists(make(groups=2, requests_per_group=3, prompt_tokens=40, seed=seed))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_provenance_states_the_model():
    line = make(groups=2, requests_per_group=3, prompt_tokens=40, kind="fixed", value=0.5, seed=9).provenance.line()
    assert line == "modelled: 2 groups, 6 prompts of 40 tokens, fixed overlap of 20 to 20 tokens, seed 9"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "zipf"}, "workload.synthetic.kind=zipf: expected one of fixed, uniform, normal"),
        ({"unit": "words"}, "workload.synthetic.unit=words: expected one of fraction, tokens"),
        ({"groups": 0}, "workload.synthetic.groups=0: expected a number above zero"),
        ({"value": 1.5}, "workload.synthetic.value=1.5: expected a share from 0 to 1"),
        ({"low": 0.9, "high": 0.1}, "workload.synthetic.low=0.9; expected at most workload.synthetic.high=0.1"),
        ({"sd": -1.0}, "workload.synthetic.sd=-1.0: expected zero or more"),
    ],
)
def test_a_senseless_model_is_refused(options: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        make(**options)
