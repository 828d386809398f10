"""Changes from one arm to another: who loses reuse, to which cause, and what it costs."""

import numpy as np
import pytest

from spanlab.analyses.changes import pair_requests, summarise
from spanlab.records import LOSS_CAUSES


def columns(ids, reused, *, first, preempted=(0, 0, 0), counted=(True, True, True), **lost) -> dict:
    """Columns of three records of prompts of 100 tokens that arrive at 0."""
    causes = {f"lost_{name}": np.array(lost.get(name, (0, 0, 0))) for name in LOSS_CAUSES}
    return {
        "request_id": np.array(ids),
        "counted": np.array(counted),
        "prompt_tokens": np.array([100, 100, 100]),
        "reused_tokens": np.array(reused),
        "preemptions": np.array(preempted),
        "arrived_s": np.zeros(3),
        "first_token_s": np.array(first, float),
        **causes,
    }


def test_requests_are_paired_by_their_ids_and_loss_has_a_cause():
    before = columns([2, 0, 1], [40, 0, 60], first=(1, 2, 1), state_evicted=(60, 0, 0))
    after = columns([0, 1, 2], [0, 80, 0], first=(2, 0.5, 3), preempted=(1, 0, 0), kv_evicted=(0, 0, 70))
    entry = summarise([pair_requests(before, after, 0)])
    assert (entry["requests"], entry["lose"], entry["gain"]) == (3, 1, 1)
    assert (entry["lost_tokens"], entry["gained_tokens"]) == (40, 20)
    assert entry["hit_rate_change"] == pytest.approx(-20 / 300)
    assert {name: tokens for name, tokens in entry["causes"].items() if tokens} == {
        "kv_evicted": 70,
        "state_evicted": -60,
    }
    assert (entry["slower"], entry["faster"], entry["preemptions_change"]) == (1, 1, 1)
    assert (entry["ttft_before_s"], entry["ttft_after_s"]) == (pytest.approx(4 / 3), pytest.approx(5.5 / 3))


def test_requests_of_the_warm_up_are_left_out():
    before = columns([0, 1, 2], [0, 0, 50], first=(1, 1, 1), counted=(False, True, True))
    after = columns([0, 1, 2], [90, 0, 50], first=(1, 1, 1), counted=(False, True, True))
    pair = pair_requests(before, after, 0)
    assert pair.tokens.tolist() == [0, 0]
    assert summarise([pair])["requests"] == 2


def test_other_requests_in_one_arm_are_an_error():
    before, after = columns([0, 1, 2], [0, 0, 0], first=(1, 1, 1)), columns([0, 1, 3], [0, 0, 0], first=(1, 1, 1))
    with pytest.raises(AssertionError, match="the same requests"):
        pair_requests(before, after, 0)


def test_the_main_cause_is_the_one_that_grows_most():
    before = columns([0, 1, 2], [90, 50, 10], first=(1, 1, 1))
    lost = {"kv_evicted": (30, 20, 0), "alignment": (60, 0, 0)}
    pair = pair_requests(before, columns([0, 1, 2], [0, 30, 10], first=(1, 1, 1), **lost), 0)
    assert pair.main_causes() == ["alignment", "kv_evicted", ""]
