"""Which family suffices: prefix caching, cached order, or position-independent caching with or without repair."""

import numpy as np
import pytest

from spanlab.analyses.base import MeasuredArm
from spanlab.analyses.families import break_even

FAMILIES = {"prefix": ["radix"], "cached_order": ["ordered"], "repaired": ["lego", "blend"], "plain": ["pic"]}
SECONDS = 1.0 + np.random.default_rng(0).random((2, 30))


def arm(name: str, factor: float, verdict: str = "steady") -> MeasuredArm:
    """An arm whose requests all take `factor` times as long as those of the prefix cache."""
    summary = {
        "stationarity": {"verdict": verdict},
        "ttft_s": {"mean": factor * float(SECONDS.mean())},
        "token_hit_rate": 0.5,
    }
    return MeasuredArm(name, summary, factor * SECONDS)


def compare(ordered: float, lego: float, blend: float, pic: float):
    factors = {"ordered": ordered, "lego": lego, "blend": blend, "pic": pic}
    return break_even([arm("radix", 1.0), *(arm(name, factor) for name, factor in factors.items())], FAMILIES)


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.0, 0.5, 0.6, 0.4), "repaired"),
        ((1.0, 1.2, 0.5, 0.4), "repaired"),
        ((1.0, 1.2, 1.3, 0.4), "plain"),
        ((0.5, 0.49, 0.6, 0.4), "plain"),
        ((0.5, 0.6, 0.6, 0.49), "cached_order"),
        ((1.0, 1.0, 1.1, 0.99), "prefix"),
        ((2.0, 1.0, 1.1, 0.97), "prefix"),
    ],
)
def test_the_verdict_is_the_least_change_of_answers(factors, verdict):
    assert compare(*factors).verdict == verdict


def test_gains_are_over_the_best_exact_arm():
    steps = {step.family: step for step in compare(0.5, 0.4, 0.3, 0.2).steps}
    assert steps["prefix"].gain is None
    assert steps["cached_order"].gain is not None
    assert steps["cached_order"].gain.mean == pytest.approx(2.0)
    assert (steps["repaired"].arm, steps["repaired"].gain.mean) == ("blend", pytest.approx(0.5 / 0.3))
    assert steps["plain"].gain.mean == pytest.approx(0.5 / 0.2)


def test_gains_are_over_the_best_exact_order():
    steps = {step.family: step for step in compare(2.0, 0.5, 0.5, 0.5).steps}
    assert steps["plain"].gain.mean == pytest.approx(2.0)


def test_a_growing_queue_has_no_gain_and_does_not_pay():
    arms = [arm("radix", 1.0), arm("ordered", 1.0), arm("lego", 1.1), arm("blend", 1.2), arm("pic", 0.1, "saturated")]
    result = break_even(arms, FAMILIES)
    assert (result.steps[-1].gain, result.verdict) == (None, "prefix")


def test_a_gain_that_noise_could_make_does_not_pay():
    noise = np.random.default_rng(1).random(SECONDS.shape) * 3
    arms = [arm(name, 1.0) for name in ("radix", "ordered", "lego", "blend")]
    noisy = MeasuredArm("pic", arm("pic", 0.9).summary, 0.6 * SECONDS * noise)
    assert break_even([*arms, noisy], FAMILIES).verdict == "prefix"
