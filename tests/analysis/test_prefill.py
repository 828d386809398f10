"""Prefills by label: pairs, ratios, quartiles, and the goal for captures."""

import numpy as np
import pytest

from spanlab.analyses.prefill_data import ArmPrefills, capture_goal, overhead, prefill_entries

LABELS = {"kind": ("cold", "warm", "warm")}


def arm(name: str, ttft: list[float], requests: list[int], captured: int = 0, reused: int = 0) -> ArmPrefills:
    count = len(ttft)
    return ArmPrefills(
        arm=name,
        family=name,
        seed=np.zeros(count, np.int64),
        group=np.arange(count),
        request=np.array(requests),
        ttft_s=np.array(ttft),
        prompt=np.full(count, 100),
        reused=np.full(count, reused),
        computed=np.full(count, 100 - reused),
        repaired=np.zeros(count, np.int64),
        captured_states=np.full(count, captured),
        captured_bytes=np.full(count, 10 * captured),
        parts={"prefill_s": np.array(ttft) / 2},
        bound_s=np.array(ttft) / 4,
    )


def entry(entries, name: str, kind: str):
    (match,) = [item for item in entries if (item["arm"], item["kind"]) == (name, kind)]
    return match


def test_speedup_is_of_the_same_requests():
    base, fast = arm("none", [8.0, 4.0, 6.0], [0, 1, 2]), arm("fast", [2.0, 1.0, 4.0], [0, 2, 1])
    entries = prefill_entries([base, fast], LABELS, "none")
    assert entry(entries, "fast", "cold")["speedup"]["mean"] == 4.0
    # request 2 took 6 and 1 seconds, request 1 took 4 and 4
    assert entry(entries, "fast", "warm")["speedup"]["mean"] == pytest.approx(10 / 5)
    assert entry(entries, "fast", "warm")["ratio_of_bounds"] == pytest.approx(10 / 5)
    assert entry(entries, "none", "warm")["speedup"] is None


def test_requests_that_the_baseline_lacks_are_left_out():
    base, fast = arm("none", [8.0, 4.0], [0, 1]), arm("fast", [2.0, 2.0, 1.0], [0, 1, 2])
    warm = entry(prefill_entries([base, fast], LABELS, "none"), "fast", "warm")
    assert warm["requests"] == 2
    assert warm["speedup"]["mean"] == 2.0


def test_plain_transformers_are_compared_on_the_same_requests():
    plain, fast = arm("none", [3.0, 9.0, 5.0], [0, 1, 2]), arm("fast", [2.0, 1.0, 4.0], [0, 2, 1])
    entries = prefill_entries([fast], LABELS, "none", plain)
    assert (entry(entries, "fast", "cold")["plain_s"], entry(entries, "fast", "warm")["plain_s"]) == (3.0, 7.0)
    assert entry(entries, "fast", "warm")["over_plain"]["mean"] == pytest.approx(14 / 5)
    lacking = prefill_entries([fast], LABELS, "none", arm("none", [3.0], [0]))
    assert (entry(lacking, "fast", "warm")["plain_s"], entry(lacking, "fast", "warm")["over_plain"]) == (None, None)


def test_without_a_baseline_there_are_no_ratios():
    (cold, _) = prefill_entries([arm("fast", [2.0, 1.0, 1.0], [0, 1, 2])], LABELS, "none")
    assert cold["speedup"] is None
    assert cold["ttft_s"] == {"p25": 2.0, "p50": 2.0, "p75": 2.0, "least": 2.0}
    assert cold["of_bound"] == 0.25


def test_overhead_is_the_inverse_of_the_speedup():
    ends = overhead({"speedup": {"mean": 0.8, "low": 0.5, "high": None}})
    assert ends == (None, pytest.approx(0.25), pytest.approx(1.0))


def test_capture_goal_names_the_dearest_arm():
    base = arm("none", [1.0, 1.0, 1.0], [0, 1, 2])
    cheap, dear = arm("cheap", [1.02] * 3, [0, 1, 2], captured=3), arm("dear", [1.2] * 3, [0, 1, 2], captured=8)
    many = arm("many", [2.0] * 3, [0, 1, 2], captured=30)
    goal = capture_goal(prefill_entries([base, cheap, dear, many], LABELS, "none"))
    assert (goal["arm"], goal["met"]) == ("dear", False)
    assert goal["overhead"] == pytest.approx(0.2)
    assert capture_goal(prefill_entries([base, many], LABELS, "none")) is None
