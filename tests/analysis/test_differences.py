"""Differences of two runs: exact values, verdicts, and what cannot be paired."""

import numpy as np
import pytest

from spanlab.settings.arms import differing
from spanlab.study.compare import UnpairedError, differences, paired


def run(reused=0.5, ttft_s=0.1, seeds=(0, 1), groups=6, requests=4, noise=0.0):
    """Records of `requests` requests in each group; every request reuses the same share and waits equally long."""
    group = np.repeat(np.arange(groups), requests)
    count = len(group) * len(seeds)
    rng = np.random.default_rng(5)
    arrived = np.tile(np.arange(len(group)), len(seeds)) + 0.25
    jitter = 1 + noise * rng.standard_normal(count)
    return {
        "seed": np.repeat(seeds, len(group)),
        "request_id": np.tile(np.arange(len(group)), len(seeds)),
        "group_id": np.tile(group, len(seeds)),
        "counted": np.ones(count, bool),
        "prompt_tokens": np.full(count, 1000),
        "output_tokens": np.full(count, 5),
        "reused_tokens": np.round(1000 * reused * jitter).astype(np.int64),
        "arrived_s": arrived,
        "first_token_s": arrived + ttft_s * jitter,
        "finished_s": arrived + 3 * ttft_s * jitter,
    }


def reversed_rows(columns):
    return {name: values[::-1] for name, values in columns.items()}


def test_equal_runs_are_the_same_in_any_order():
    result = differences(paired(run(noise=0.1), reversed_rows(run(noise=0.1))), saturated=False)
    assert {result.token_hit_rate.verdict, result.ttft.verdict, result.e2e.verdict} == {"same"}
    assert (result.requests, result.seeds, result.groups) == (48, 2, 6)


def test_constant_differences_are_exact():
    result = differences(paired(run(0.5, 0.1), run(0.6, 0.05)), saturated=False)
    assert result.token_hit_rate.verdict == "differs"
    assert result.token_hit_rate.interval == pytest.approx((0.1, 0.1, 0.1))
    assert result.ttft.interval == pytest.approx((0.5, 0.5, 0.5))
    assert (result.hit_rates, result.ttft_means_s) == (pytest.approx((0.5, 0.6)), pytest.approx((0.1, 0.05)))
    assert result.e2e.interval == pytest.approx((0.5, 0.5, 0.5))


def test_common_noise_divides_out_of_pairs():
    """Both runs vary by 30 % in the same way: only the pairs show that one is 2 % slower."""
    result = differences(paired(run(noise=0.3), run(noise=0.3, ttft_s=0.102)), saturated=False)
    assert result.ttft.verdict == "differs"
    assert result.ttft.interval == pytest.approx((1.02, 1.02, 1.02))


def test_a_difference_within_noise_is_not_shown():
    other = run(noise=0.3)
    other["first_token_s"] = other["arrived_s"] + 0.1 * (1 + 0.3 * np.random.default_rng(9).standard_normal(48))
    result = differences(paired(run(noise=0.3), other), saturated=False).ttft
    assert result.verdict == "not shown"
    assert result.interval.low < 1 < result.interval.high


def test_one_seed_of_one_group_gives_no_interval():
    result = differences(paired(run(seeds=[3], groups=1), run(0.6, seeds=[3], groups=1)), saturated=False)
    assert result.token_hit_rate.verdict == "no interval"
    assert result.token_hit_rate.interval.mean == pytest.approx(0.1)


def test_saturated_arms_have_no_ratio_of_delays():
    result = differences(paired(run(), run(0.6)), saturated=True)
    assert (result.ttft, result.e2e) == (None, None)
    assert result.token_hit_rate.verdict == "differs"


def test_common_seeds_are_paired_and_warm_up_is_left_out():
    first, other = run(seeds=[0, 1, 2]), run(seeds=[1, 2, 3])
    first["counted"][:30] = False  # all of seed 0, six of seed 1
    pairs = paired(first, other)
    assert np.unique(pairs.first["seed"]).tolist() == [1, 2]
    assert len(pairs.first["seed"]) == 48 - 6
    for name in ("seed", "request_id", "arrived_s"):
        assert np.array_equal(pairs.first[name], pairs.other[name])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arrived_s": 1.0}, "arrivals differ"),
        ({"prompt_tokens": 1}, "requests differ"),
        ({"output_tokens": 1}, "requests differ"),
        ({"request_id": 1}, "requests differ"),
        ({"group_id": 1}, "requests differ"),
        ({"seed": 10}, "no common seed"),
        ({"counted": -1}, "no request is counted in both"),
    ],
)
def test_what_cannot_be_paired_says_why(change, reason):
    other = run()
    for name, shift in change.items():
        other[name] = other[name] + shift
    with pytest.raises(UnpairedError, match=f"^{reason}$"):
        paired(run(), other)


def test_settings_that_differ_have_their_whole_key():
    configs = [
        {"store": {"total_gib": 2, "unit": 1}, "arms": {"a": {"count": 1}, "b": {}}, "seeds": [0]},
        {"store": {"total_gib": 4, "unit": 1}, "arms": {"a": {"count": 2}}, "seeds": [0], "extra": None},
    ]
    assert differing(configs) == {
        "store.total_gib": ("2", "4"),
        "arms.a.count": ("1", "2"),
        "extra": ("–", "None"),
        "arms.b": ("present", "–"),
    }
    assert differing([configs[0], configs[0]]) == {}
