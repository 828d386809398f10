"""Numbers of made-up rows, reckoned by hand."""

from __future__ import annotations

import pytest

from spanlab.checkpoint_bench.summary import summarise
from spanlab.checkpoint_bench.table import goal_line, last_visits


@pytest.fixture
def toy(settings):
    return settings("only=[none,block_64,branch]", "models=[tiny-hybrid]", "lengths=[1024]")


@pytest.fixture
def cold(row):
    """One round: the baseline takes 1.0 s and, later, 2.0 s; block_64 stands beside the first, branch the second."""

    def make(number: int = 0, block: float = 1.04, branch: float = 2.0, states: int = 8):
        return [
            row(round=number, turn=0, arm="none", kind="bare", ttft_s=1.0),
            row(round=number, turn=1, arm="block_64", kind="cold", ttft_s=block, captured_states=states),
            row(round=number, turn=2, arm="branch", kind="cold", ttft_s=branch),
            row(round=number, turn=3, arm="none", kind="bare", ttft_s=2.0),
        ]

    return make


def test_an_overhead_is_against_the_neighbour(toy, cold):
    block, branch = summarise(toy, cold())["captures"]
    assert block["overhead"]["p50"] == pytest.approx(0.04)
    assert block["per_state_s"] == pytest.approx(0.04 / 8)
    assert branch["overhead"]["p50"] == 0
    assert branch["per_state_s"] is None
    assert (block["family"], branch["family"]) == ("block", "branch")


def test_an_overhead_is_the_median_of_the_rounds_with_its_quartiles(toy, cold):
    rows = [row for number, time in enumerate((1.01, 1.02, 1.06)) for row in cold(number, time)]
    overhead = summarise(toy, rows)["captures"][0]["overhead"]
    assert [overhead[point] for point in ("p25", "p50", "p75")] == pytest.approx([0.015, 0.02, 0.04])
    assert overhead["count"] == 3


def test_noise_is_what_one_cold_prefill_differs_from_the_next(toy, cold):
    (noise,) = summarise(toy, cold())["noise"]
    assert noise["apart"]["p50"] == 1.0
    assert noise["bare_s"]["p50"] == 1.5


@pytest.mark.parametrize(("block", "met"), [(1.04, True), (1.06, False)])
def test_the_goal_is_judged_by_the_dearest_arm_of_few_states(toy, cold, block: float, met: bool):
    (goal,) = summarise(toy, cold(block=block))["goal"]
    assert (goal["arm"], goal["length"], goal["met"]) == ("block_64", 1024, met)
    assert goal["overhead"] == pytest.approx(block - 1)
    assert goal_line(goal).endswith(": met" if met else ": not met")


def test_arms_of_many_states_or_none_are_not_what_the_goal_is_about(toy, cold):
    (goal,) = summarise(toy, cold(states=9))["goal"]
    assert goal["met"] is None
    assert goal_line(goal).endswith("no arm has so few")


def test_speedups_are_against_the_neighbour_and_its_bound(toy, cold, row):
    again = row(turn=2, arm="branch", kind="again", shared=512, ttft_s=0.5, bound_s=0.25, reused_tokens=448)
    (entry,) = summarise(toy, [*cold(), again])["again"]
    assert entry["speedup"]["p50"] == 4.0
    assert entry["bound_speedup"] == 4.0
    assert entry["of_bound"] == 0.5
    assert entry["resume"] == 448


def test_entries_stand_in_the_order_of_the_settings_whatever_ran_first(toy, cold):
    rows = sorted(cold(), key=lambda row: -row.turn)
    assert [entry["arm"] for entry in summarise(toy, rows)["captures"]] == ["block_64", "branch"]


def test_models_stand_in_the_order_of_the_settings(settings, row):
    two = settings("models=[tiny-qwen3-next,tiny-hybrid]")
    rows = [row(model=name, arm="none", kind="bare", ttft_s=1.0) for name in reversed(two.models)]
    assert [entry["model"] for entry in summarise(two, rows)["noise"]] == two.models
    assert [entry["model"] for entry in summarise(two, rows)["goal"]] == two.models


def test_an_earlier_visit_is_told_only_where_it_started_elsewhere(toy, cold, row):
    def visit(number: int, shared: int, resume: int):
        told = {"visit": number, "shared": shared, "reused_tokens": resume}
        return row(turn=2, arm="branch", kind="again", ttft_s=0.5, **told)

    rows = [*cold(), visit(0, 512, 0), visit(1, 512, 512), visit(0, 900, 512), visit(1, 900, 512)]
    kept = [(entry["shared"], entry["visit"]) for entry in last_visits(summarise(toy, rows)["again"])]
    assert kept == [(512, 0), (512, 1), (900, 1)]
