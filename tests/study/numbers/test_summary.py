"""The summary follows from the record and runs files, recomputed here with plain Python."""

import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from ..conftest import NO_LOAD

SEEDS = (0, 1, 2)
STUDY = (
    "workload.documents=4",
    "workload.questions_per_document=8",
    "seeds=[2,0,1]",
    "store.total_gib=0.5",
    "warmup_fraction=0.2",
    "workers=2",
)
ALONE = ("executor.kind=here", *NO_LOAD)
COUNTED = 32 - 6
CAUSES = (
    "never_seen",
    "out_of_reach",
    "never_stored",
    "kv_evicted",
    "state_evicted",
    "state_never_placed",
    "alignment",
    "last_token",
    "locked",
    "repair",
)


@pytest.fixture(scope="module", params=["count_hit_as=reused", "count_hit_as=matched", "workload.output_tokens=1"])
def study(request, tmp_path_factory) -> dict:
    """A toy study's folder, and how hits are counted in it."""
    from spanlab.cli import compose
    from spanlab.study.run import run_study

    quiet = ("output.figures=false", "tracking.kind=none")
    settings = compose("smoke", [*quiet, *STUDY, request.param])
    folder = run_study(settings, "smoke", tmp_path_factory.mktemp("study"))
    return {
        "folder": folder,
        "count_hit_as": settings.runs.count_hit_as,
        "one_token": settings.workload.output_tokens == 1,
    }


@pytest.fixture(scope="module")
def summary(study) -> dict:
    """The summary; a NaN in it would be no JSON."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no number")

    return json.loads((study["folder"] / "summary.json").read_bytes(), parse_constant=refuse)


def rows_of_study(study: dict, arm: str, kind: str = "records") -> list[dict]:
    """The lines of one arm at the study's own load, without the warm-up."""
    lines = (study["folder"] / kind / f"{arm}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["rate_rps"] == 8.0 and row["seed"] in SEEDS and row.get("counted", True)]


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


DELAYS = {
    "ttft_s": lambda row: row["first_token_s"] - row["arrived_s"],
    "queue_s": lambda row: row["admitted_s"] - row["arrived_s"],
    "e2e_s": lambda row: row["finished_s"] - row["arrived_s"],
    "tpot_s": lambda row: (row["finished_s"] - row["first_token_s"]) / (row["output_tokens"] - 1),
}
ARMS = ("none", "kv_only", "radix_branch_last", "block_512", "balanced_3", "dp_3", "boundary")


def test_every_arm_is_summarised_in_order(summary):
    assert tuple(summary["arms"]) == ARMS
    assert summary["seeds"] == [2, 0, 1]
    assert summary["workload"]["requests"] == 32


@pytest.mark.parametrize("arm", ARMS)
def test_totals(arm: str, study, summary):
    arm_summary, rows = summary["arms"][arm], rows_of_study(study, arm)
    assert arm_summary["requests"] == len(rows) == len(SEEDS) * COUNTED
    assert arm_summary["hits"] == sum(row[f"{study['count_hit_as']}_tokens"] > 0 for row in rows)
    for name in ("prompt", "seen", "matched", "resumable", "reused", "computed"):
        assert arm_summary["tokens"][name] == sum(row[f"{name}_tokens"] for row in rows)
    assert arm_summary["token_hit_rate"] == pytest.approx(
        arm_summary["tokens"]["reused"] / arm_summary["tokens"]["prompt"], rel=1e-12
    )
    assert arm_summary["request_hit_rate"] == pytest.approx(arm_summary["hits"] / arm_summary["requests"], rel=1e-12)
    assert arm_summary["captured_states"] == sum(row["captured_states"] for row in rows)
    assert arm_summary["recomputed_tokens"] == sum(row["recomputed_tokens"] for row in rows)
    assert arm_summary["preemptions"] == sum(row["preemptions"] for row in rows)


@pytest.mark.parametrize("arm", ARMS)
def test_causes_and_reused_make_the_prompt_exactly(arm: str, study, summary):
    for row in rows_of_study(study, arm):
        assert row["reused_tokens"] + sum(row[f"lost_{cause}"] for cause in CAUSES) == row["prompt_tokens"]
        assert row["reused_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
    tokens = summary["arms"][arm]["tokens"]
    assert tuple(tokens["lost_by_cause"]) == CAUSES
    for cause in CAUSES:
        assert tokens["lost_by_cause"][cause] == sum(row[f"lost_{cause}"] for row in rows_of_study(study, arm))
    assert tokens["reused"] + sum(tokens["lost_by_cause"].values()) == tokens["prompt"]


def is_saturated(summary: dict, arm: str) -> bool:
    return summary["arms"][arm]["stationarity"]["verdict"] == "saturated"


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("delay", DELAYS)
def test_delays_are_those_of_all_seeds_together(arm: str, delay: str, study, summary):
    points, between = summary["arms"][arm][delay], summary["arms"][arm][f"{delay}_interval"]
    if delay == "tpot_s" and study["one_token"]:
        assert set(points.values()) | set(between.values()) == {None}
        return
    if is_saturated(summary, arm) and delay != "tpot_s":
        assert set(points.values()) | set(between.values()) == {None}
        return
    values = [DELAYS[delay](row) for row in rows_of_study(study, arm)]
    assert points["mean"] == pytest.approx(fmean(values), rel=1e-9, abs=1e-15)
    assert points["p50"] == pytest.approx(percentile(values, 50), rel=1e-9, abs=1e-15)
    # 78 requests: ten lie beyond neither of these
    assert points["p95"] is points["p99"] is None
    if points["mean"]:
        assert 0 < between["mean"][0] <= points["mean"] <= between["mean"][1]


@pytest.mark.parametrize("arm", ARMS)
def test_bytes_are_means_over_seeds(arm: str, study, summary):
    runs = rows_of_study(study, arm, "runs")
    assert sorted(run["seed"] for run in runs) == list(SEEDS)
    arm_summary = summary["arms"][arm]
    for name in ("kv_resident_mean", "state_resident_mean", "kv_resident_peak", "state_resident_peak"):
        assert arm_summary["bytes"][name] == pytest.approx(fmean(run[f"{name}_bytes"] for run in runs), rel=1e-12)
    assert arm_summary["evicted_bytes"] == sum(run["evicted_bytes"] for run in runs)
    assert arm_summary["busy_fraction"] == pytest.approx(
        fmean(run["busy_s"] / run["makespan_s"] for run in runs), rel=1e-12
    )


@pytest.mark.parametrize("arm", ARMS)
def test_utilisation_is_demand_over_the_time_of_arrivals(arm: str, study, summary):
    lines = (study["folder"] / "records" / f"{arm}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    runs, offered = rows_of_study(study, arm, "runs"), 0.0
    for seed in SEEDS:
        times = [row["arrived_s"] for row in rows if row["seed"] == seed and row["rate_rps"] == 8.0]
        offered += (max(times) - min(times)) * len(times) / (len(times) - 1)
    demand = sum(run["demand_s"] for run in runs)
    assert summary["arms"][arm]["utilisation"] == pytest.approx(demand / offered, rel=1e-9)


def test_the_bound_is_what_an_infinite_cache_would_have_saved(study, summary):
    bounds = {
        sum(min(row["seen_tokens"], row["prompt_tokens"] - 1) for row in rows_of_study(study, arm)) for arm in ARMS
    }
    for arm in summary["arms"].values():
        assert arm["bound_tokens"] == max(bounds)
        assert arm["share_of_bound"] == pytest.approx(arm["tokens"]["reused"] / max(bounds), rel=1e-12)
        assert arm["tokens"]["reused"] <= arm["bound_tokens"]


@pytest.mark.parametrize("arm", ARMS)
def test_speedup_is_the_ratio_of_mean_delays(arm: str, study, summary):
    speedup = summary["arms"][arm]["speedup"]
    if is_saturated(summary, arm) or is_saturated(summary, "none"):
        assert speedup is None
        return
    slow, fast = (fmean(DELAYS["ttft_s"](row) for row in rows_of_study(study, name)) for name in ("none", arm))
    assert speedup["mean"] == pytest.approx(slow / fast, rel=1e-9)
    assert 0 < speedup["low"] <= speedup["mean"] <= speedup["high"]


def test_the_promised_keys_are_there(summary):
    for arm in summary["arms"].values():
        assert {"requests", "hits", "tokens", "bytes", "ttft_s", "ttft_s_interval", "seeds"} <= set(arm)
        assert {"prompt", "matched", "resumable", "reused", "computed", "lost_by_cause"} <= set(arm["tokens"])
        assert {"kv_resident_mean", "state_resident_mean"} <= set(arm["bytes"])
        assert set(arm["ttft_s"]) == {"mean", "p50", "p95", "p99"}
        assert set(arm["ttft_s_interval"]) == {"mean"}
        assert set(arm["stationarity"]) == {"verdict", "drift_p", "drift_rps", "warmup_requests"}
        assert sorted(arm["seeds"]) == list(SEEDS)
    assert summary["workload"]["provenance"] == "measured shape"
    assert summary["commit"]
    assert {"python", "spanlab", "numpy"} <= set(summary["versions"])
    assert summary["wall_s"] > 0


def test_loads_are_reported_for_the_arms_that_ran_them(study, summary):
    assert [(point["arm"], point["rate_rps"]) for point in summary["load"]] == [
        (arm, rate) for arm in ("none", "dp_3") for rate in (4.0, 8.0, 16.0)
    ]
    rows = [json.loads(line) for line in (study["folder"] / "records" / "none.jsonl").read_text().splitlines()]
    for point in (point for point in summary["load"] if point["arm"] == "none"):
        at_rate = [row for row in rows if row["rate_rps"] == point["rate_rps"] and row["counted"]]
        mean = fmean(DELAYS["ttft_s"](row) for row in at_rate)
        saturated = point["state"]["verdict"] == "saturated"
        assert point["ttft_s"]["unstable" if saturated else "mean"] == pytest.approx(mean, rel=1e-9)
        assert point["ttft_s"]["mean" if saturated else "unstable"] is None
        assert point["ttft_s"]["low"] is None, "a band of fewer than 5 seeds"


def test_one_seed_and_one_document_have_no_intervals(run_here, summary_of, tmp_path: Path):
    overrides = ("workload.documents=1", "workload.questions_per_document=6", "seeds=[5]", "arrivals.rate_rps=1")
    summary = summary_of(run_here(tmp_path, "smoke", *overrides, *ALONE))
    for arm in summary["arms"].values():
        assert set(arm["ttft_s_interval"].values()) == {None}
        assert (arm["speedup"]["low"], arm["speedup"]["high"]) == (None, None)


def test_one_seed_has_intervals_over_documents(run_here, summary_of, tmp_path: Path):
    overrides = ("workload.documents=3", "workload.questions_per_document=3", "seeds=[5]", "arrivals.rate_rps=1")
    summary = summary_of(run_here(tmp_path, "smoke", *overrides, *ALONE))
    low, high = summary["arms"]["none"]["ttft_s_interval"]["mean"]
    assert 0 < low < summary["arms"]["none"]["ttft_s"]["mean"] < high


def test_an_overloaded_arm_has_no_mean_and_no_speedup(run_here, summary_of, tmp_path: Path):
    """The longer the run, the greater the ratio: 153 times, 323 times and 460 times were once printed."""
    fast = ("workload.documents=12", "workload.questions_per_document=18", "seeds=[0]", "only=[none,boundary]")
    slow = ("model=qwen3.5-27b", "store.total_gib=64", "arrivals.rate_rps=3")
    summary = summary_of(run_here(tmp_path, "quality_sim", *fast, *slow, *ALONE))
    none, boundary = summary["arms"]["none"], summary["arms"]["boundary"]
    assert none["stationarity"]["verdict"] == "saturated"
    assert none["utilisation"] > 1
    assert none["ttft_s"]["mean"] is None
    assert boundary["stationarity"]["verdict"] == "steady"
    assert boundary["ttft_s"]["mean"] < 1
    assert boundary["speedup"] is None
    assert any(line.startswith("saturated at 3/s: none:") for line in summary["caveats"])


def test_arrivals_that_nothing_draws_run_one_seed(run_here, summary_of, tmp_path: Path):
    """Equal runs once made three seeds and intervals of no width."""
    arrivals = ("arrivals=deterministic", "arrivals.rate_rps=2", "arrivals.order=as_given", "seeds=[0,1,2]")
    workload = ("workload.documents=2", "workload.questions_per_document=3", "only=[none,boundary]")
    summary = summary_of(run_here(tmp_path, "smoke", *arrivals, *workload, *ALONE))
    assert summary["seeds"] == [0]
    assert summary["arms"]["none"]["requests"] == 6
    assert any("nothing is drawn" in line for line in summary["caveats"])


def test_without_the_baseline_there_is_no_speedup(run_here, summary_of, tmp_path: Path):
    overrides = ("workload.documents=2", "workload.questions_per_document=3", "only=[boundary]")
    summary = summary_of(run_here(tmp_path, "smoke", *overrides, *ALONE))
    assert summary["arms"]["boundary"]["speedup"] is None
    assert summary["arms"]["boundary"]["share_of_bound"] > 0


@pytest.mark.parametrize("arm", ARMS)
def test_no_arm_reuses_more_than_its_offline_bound(arm: str, study, summary):
    tokens, bounds = summary["arms"][arm]["tokens"], summary["arms"][arm]["bounds"]
    infinite = bounds["infinite_prefix_tokens"]
    assert tokens["reused"] <= bounds["offline_tokens"] <= infinite
    assert infinite <= bounds["infinite_any_position_tokens"] <= tokens["prompt"]
    missed = bounds["offline_tokens"] - tokens["reused"]
    assert bounds["regret_points"] == pytest.approx(100 * missed / tokens["prompt"], rel=1e-12)
    seen = sum(min(row["seen_tokens"], row["prompt_tokens"] - 1) for row in rows_of_study(study, arm))
    assert infinite >= seen  # an earlier request can still have to compute its admitted tokens
