"""Ranks, regret and verdicts on made-up means."""

from typing import Any

import pytest

from spanlab.analyses.fidelity import GOALS, Verdict, decide, judge, kendall


def test_tau_counts_pairs_that_are_ordered_alike():
    assert kendall([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert kendall([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall([1, 1, 1], [1, 2, 3]) is None


def test_regret_is_what_the_simulators_choice_costs_on_the_engine():
    decision = decide({"a": [1.0, 1.2], "b": [1.0, 1.0], "c": [3.0, 3.0]}, {"a": 0.9, "b": 1.0, "c": 2.0})
    assert (decision["best"], decision["choice"]) == ("b", "a")
    assert decision["regret"] == pytest.approx(0.1)
    assert decision["regret_s"] == pytest.approx(0.1)
    assert decision["tau"] == pytest.approx(1 / 3)
    assert decision["measured_s"] == pytest.approx({"a": 1.1, "b": 1.0, "c": 3.0})


def test_repeats_are_ranked_against_each_other_too():
    assert decide({"a": [1, 2], "b": [2, 1]}, {"a": 1, "b": 2})["aa_tau"] == pytest.approx(-1.0)
    assert decide({"a": [1], "b": [2]}, {"a": 1, "b": 2})["aa_tau"] is None


def test_the_arm_that_is_chosen_rightly_is_not_regretted():
    decision = decide({"a": [1.0], "b": [2.0]}, {"a": 5.0, "b": 6.0})
    assert (decision["tau"], decision["regret"]) == (pytest.approx(1.0), 0.0)


@pytest.mark.parametrize(
    ("error", "spread", "within", "met"),
    [
        (0.05, 0.0, True, True),
        (-0.05, 0.1, True, True),
        (0.06, 0.04, False, False),
        (-0.06, 0.04, False, False),
        (0.06, 0.11, False, None),
        (0.01, 0.11, True, None),
        (0.01, None, True, None),
    ],
)
def test_a_noisy_engine_gives_no_verdict(error, spread, within, met):
    assert Verdict.of(error, spread, 0.05) == (error, spread, within, met)


def test_within_the_limit_is_not_yet_shown():
    assert Verdict.of(0.04, 0.03, 0.05, shown=False).met is False


def cell(arm: str, error: float, spread: float | None, reach: float = 0.0) -> dict[str, Any]:
    keys = {"bias": error, "request_p50": 0.01, "request_p95": 0.02}
    keys |= {"bias_interval": (error - reach, error + reach)}
    repeats_spread = None if spread is None else {"mean": spread, "request_p50": 0.0, "request_p95": 0.0}
    return {
        "arm": arm,
        "load": 0.6,
        "rate_rps": 3.0,
        "errors": {metric: {**keys, "spread": repeats_spread} for metric in ("ttft_s", "e2e_s")},
    }


def ranked(tau: float | None, again: float | None = 1.0) -> dict[str, Any]:
    return {"load": 0.6, "rate_rps": 3.0, "tau": tau, "aa_tau": again}


def test_plain_counts_are_printed_beside_tests():
    cells = [cell("a", 0.01, 0.0), cell("b", -0.30, 0.1), cell("c", 0.02, 0.09, 0.04), cell("d", 0.0, 0.3)]
    goals = judge(cells, [ranked(1.0)])
    assert [goal_entry["goal"] for goal_entry in goals[:-1]] == [goal.label for goal in GOALS]
    mean = goals[0]
    assert (mean["cells_within_goal"], mean["cells_met"], mean["cells_noisy"], mean["cells"]) == (3, 1, 1, 4)
    assert (mean["met"], mean["worst"], mean["worst_error"]) == (False, "b at load 0.6", -0.30)
    assert goals[1]["met"]


def test_without_a_failure_noise_leaves_no_verdict():
    assert judge([cell("a", 0.0, 0.0), cell("b", 0.0, 0.2)], [ranked(1.0)])[0]["met"] is None


def test_rank_goal_is_tau_090_where_repeats_agree():
    def ranks_met(*decisions):
        return judge([cell("a", 0.0, 0.0)], decisions)[-1]["met"]

    assert ranks_met(ranked(0.9))
    assert ranks_met(ranked(0.89), ranked(1.0)) is False
    assert ranks_met(ranked(0.75, 0.8)) is False
    assert ranks_met(ranked(0.95, 0.79)) is None
    assert ranks_met(ranked(None)) is None


def test_loads_without_shares_are_named_by_their_rate():
    cells = [cell("a", 0.2, 0.0) | {"load": None}]
    assert judge(cells, [])[0]["worst"] == "a at 3 requests/s"
    assert judge([cells[0] | {"rate_rps": None}], [])[0]["worst"] == "a at the given arrivals"
